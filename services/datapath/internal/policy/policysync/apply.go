// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"context"
	"fmt"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policystream"
)

// work collects what has to be done after the writes of one message.
type work struct {
	ctx     context.Context
	bump    map[uint16]struct{} // endpoints whose connections have to be evaluated again
	flips   []uint16            // endpoints whose policy has changed
	nacks   []policystream.Nack
	entries []uint32 // identities whose entries may change
	checks  bool     // tables or identity classes may have become unused
	leveled bool     // level was called for the message
	// keepClosed is set while identities may still have their old entries, whose rows may be missing: tables
	// continue to treat peers without a row as unknown.
	keepClosed bool
}

// maxSnapshot bounds the steps of a snapshot.
const maxSnapshot = 1 << 20

func newWork(ctx context.Context) *work { return &work{ctx: ctx, bump: map[uint16]struct{}{}} }

// apply applies a message. After an internal error the kernel may have part of it; the next
// snapshot repairs that.
func (a *Applier) apply(ctx context.Context, m policytable.Message) (nacks []policystream.Nack, err error) {
	w := newWork(ctx)
	a.mu.Lock()
	defer func() {
		if err != nil {
			a.forgetStream()
		}
		a.mu.Unlock()
		if len(w.flips) > 0 && a.cfg.Changed != nil {
			a.cfg.Changed(w.flips)
		}
	}()
	if nacks, err = a.refuse(w, m); a.refused != "" {
		return nacks, err
	}
	a.expect(m)
	for i, st := range m.Steps {
		if a.next.collecting() {
			err = a.collect(w, st, m.Seq)
		} else {
			err = a.carryOut(w, st, m.Seq)
		}
		if err != nil {
			return nil, fmt.Errorf("message %d, steps[%d]: %w", m.Seq, i, err)
		}
	}
	if a.next.undecided() { // the service is of a version that sends no barrier
		if err := a.decide(w, policytable.Barrier{}); err != nil {
			return nil, fmt.Errorf("message %d: %w", m.Seq, err)
		}
	}
	if !a.next.collecting() {
		if err := a.settle(w); err != nil {
			return nil, fmt.Errorf("message %d: %w", m.Seq, err)
		}
		a.incarnation, a.seq = m.Incarnation, m.Seq
	}
	return w.nacks, nil
}

// forgetStream makes the next stream begin with a snapshot.
func (a *Applier) forgetStream() {
	a.model, a.incarnation, a.seq = nil, "", 0
	a.next.drop()
}

// collect stores a step of a snapshot, and calls decide when the snapshot is complete.
func (a *Applier) collect(w *work, st policytable.Step, seq uint64) error {
	if err := a.next.collect(st, seq, a.identities.number); err != nil {
		return err
	}
	switch st := st.(type) {
	case policytable.Barrier:
		if a.next.complete {
			return a.decide(w, st)
		}
	case policytable.SetIdentity:
		if a.next.held != "" && st.IdentityClass == 0 {
			return a.makeUnknown(w, []uint32{uint32(st.Identity)})
		}
	}
	return nil
}

func (a *Applier) carryOut(w *work, st policytable.Step, seq uint64) error {
	m := a.model
	var retired *serviceTable
	grants := false
	if _, ok := st.(policytable.SetIdentity); !ok {
		if err := a.flushEntries(w); err != nil {
			return err
		}
	}
	switch st := st.(type) {
	case policytable.SnapshotComplete:
		return policytable.Invalid("snapshot_complete in the middle of a stream")
	case policytable.RetireTable:
		retired = m.tables[st.Table]
	case policytable.SetPrefix:
		if t := m.tables[st.Table]; t != nil && t.content.ValidatePrefix(st.Prefix, st.Classes) == nil {
			grants = t.content.Grants(st.Prefix, st.Classes)
		}
	}
	if err := m.take(st, seq, a.identities.number); err != nil {
		return err
	}
	if t := m.forgotten(st); t != nil {
		if t.kernel != nil {
			err := t.err
			a.withdraw(t)
			t.err = err
		}
		a.rooms.forget(t)
		return nil
	}
	switch st := st.(type) {
	case policytable.SetIdentity:
		w.entries = append(w.entries, uint32(st.Identity))
	case policytable.RetireIdentityClass:
		w.checks = true
	case policytable.DefineTable:
		t := m.tables[st.Table]
		if bind, ok := a.expected[st.Table]; ok {
			t.charge.payer, t.charge.subject, t.charge.direction = bind.Tenant, bind.Subject, bind.Direction
		}
		return a.place(w, t)
	case policytable.GrowTable:
		return a.grow(w, m.tables[st.Table])
	case policytable.SetPeer:
		return a.peer(w, m.tables[st.Table], m.classes[st.Row.IdentityClass].number, false)
	case policytable.DeletePeer:
		return a.peer(w, m.tables[st.Table], m.classes[st.IdentityClass].number, true)
	case policytable.SetPrefix:
		return a.prefix(w, m.tables[st.Table], st.Prefix, grants)
	case policytable.DeletePrefix:
		return a.prefix(w, m.tables[st.Table], st.Prefix, false)
	case policytable.BindSubject:
		if s := a.endpoints.subjects[uint32(st.Subject)]; s != nil { // otherwise the subject was dropped meanwhile
			s.dirty = true
		}
	case policytable.RemoveSubject:
		if err := a.flip(w); err != nil {
			return err
		}
		a.endpoints.gone(uint32(st.Subject))
	case policytable.RetireTable:
		if err := a.flip(w); err != nil {
			return err
		}
		if retired.kernel != nil {
			retired.kernel.owner = nil
		}
		w.checks = true
	case policytable.Barrier:
		a.past.Note(st)
		return a.flip(w)
	}
	return nil
}

// forgotten returns the table that a step changes, if its content was dropped.
func (m *model) forgotten(st policytable.Step) *serviceTable {
	var t *serviceTable
	switch st := st.(type) {
	case policytable.DefineTable:
		t = m.tables[st.Table]
	case policytable.GrowTable:
		t = m.tables[st.Table]
	case policytable.SetPeer:
		t = m.tables[st.Table]
	case policytable.DeletePeer:
		t = m.tables[st.Table]
	case policytable.SetPrefix:
		t = m.tables[st.Table]
	case policytable.DeletePrefix:
		t = m.tables[st.Table]
	}
	if t == nil || !t.forgotten {
		return nil
	}
	return t
}

// settle completes a message.
func (a *Applier) settle(w *work) error {
	if err := a.flushEntries(w); err != nil {
		return err
	}
	if err := a.flip(w); err != nil {
		return err
	}
	if err := a.bumpAffected(w); err != nil {
		return err
	}
	if w.checks {
		if err := a.sweep(w); err != nil {
			return err
		}
	}
	a.revise()
	close(a.changed)
	a.changed = make(chan struct{})
	return nil
}
