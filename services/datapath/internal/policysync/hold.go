// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/datapath/internal/policystream"
	"github.com/sluice-net/sluice/services/datapath/internal/policytable"
)

// minPodIdentity is the first number that the identity service gives out. Those
// below have a meaning that never changes.
const minPodIdentity = 256

// recall loads what was enforced before this process began.
func (a *Applier) recall() {
	if a.cfg.Memory == nil {
		return
	}
	var err error
	if a.enforced, err = a.cfg.Memory.Load(); err != nil {
		a.log.Error("what was enforced before is not known: the tables stay until the policies are confirmed", log.Err(err))
		a.enforced, a.unknown = policystream.Enforced{}, err
	}
}

// before is what the service has to be no older than; nil: it may say anything.
func (a *Applier) before() *policystream.Enforced {
	if a.unknown == nil && (a.enforced.State == "" || len(a.enforced.Sources) == 0) {
		return nil
	}
	e := a.enforced
	e.Sources = slices.Clone(e.Sources)
	return &e
}

// lags says why the service's state is not taken over at a barrier; empty: it is.
// A state that lost its policies would open what they closed.
func (a *Applier) lags(b policytable.Barrier) string {
	e := a.before()
	if e == nil || b.State == "" || len(b.Incomplete) == 0 {
		return ""
	}
	what := "the policy service began another state"
	switch {
	case a.unknown != nil:
		what = fmt.Sprintf("which revision that is cannot be read (%v)", a.unknown)
	case e.State == b.State && b.PolicyRevision >= e.Revision:
		return ""
	case e.State == b.State:
		what = "the policy service went back"
	}
	revision := "what it enforced before"
	if a.unknown == nil {
		revision = fmt.Sprintf("revision %d", e.Revision)
	}
	return fmt.Sprintf("the kernel goes on enforcing %s: %s and is at revision %d; incomplete: %s. Apply the policies again, then run `sluice policy confirm`",
		revision, what, b.PolicyRevision, strings.Join(b.Incomplete, ", "))
}

// decide takes a complete snapshot over, or keeps the tables as they are.
func (a *Applier) decide(w *work, b policytable.Barrier) error {
	why := a.lags(b)
	if why == "" {
		if a.held != "" {
			a.log.Warn("policies taken over that were behind what the kernel enforced", "revision", b.PolicyRevision, "enforced", a.enforced.Revision)
		}
		a.held = ""
		a.setHeld("")
		a.remember(b)
		next := a.next
		a.next, a.nextSteps, a.nextComplete = nil, 0, false
		return a.replace(w, next)
	}
	if a.held == "" {
		a.log.Error("policies not taken over", "revision", b.PolicyRevision, "enforced", a.enforced.Revision, "incomplete", b.Incomplete)
	}
	a.held = why
	a.setHeld(why)
	select {
	case <-a.synced:
	default:
		close(a.synced) // the service has said everything; nothing better comes by itself
	}
	if slices.Contains(b.Incomplete, "identity") {
		return nil
	}
	// A number without an identity may be another one's soon.
	var gone []uint32
	for id := range a.entries {
		if _, ok := a.next.wants[id]; !ok && id >= minPodIdentity {
			gone = append(gone, id)
		}
	}
	return a.makeUnknown(w, gone)
}

func (a *Applier) setHeld(why string) {
	a.view.mu.Lock()
	defer a.view.mu.Unlock()
	a.view.held = why
}

// makeUnknown makes identities unknown while the tables stay: to them a number means
// what it meant, also if another label set gets it.
func (a *Applier) makeUnknown(w *work, gone []uint32) error {
	want := make(map[uint32]policytable.Identity, len(gone))
	for _, id := range gone {
		if _, ok := a.entries[id]; ok && id >= minPodIdentity {
			want[id] = policytable.Identity{}
		}
	}
	if len(want) == 0 {
		return nil
	}
	if err := a.storeEntries(w, want); err != nil {
		return err
	}
	return a.bumpAffected(w)
}

// holding is the revision that the kernel goes on enforcing, and why.
func (a *Applier) holding() (revision uint64, why string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.enforced.Revision, a.held
}

// remember notes the state that is enforced from here on. Another state is saved
// before its tables are written: a kill in between must not make the service
// prove again what it proved. A revision is saved beside everything else.
func (a *Applier) remember(b policytable.Barrier) {
	if a.cfg.Memory == nil || b.State == "" {
		return
	}
	e := policystream.Enforced{State: b.State, Revision: b.PolicyRevision, Sources: slices.Clone(b.Sources)}
	if a.unknown == nil && a.enforced.Equal(e) {
		return
	}
	other := a.unknown != nil || a.enforced.State != e.State
	a.enforced, a.unknown = e, nil
	if other {
		a.noteSaved(a.cfg.Memory.Save(e))
		return
	}
	select {
	case a.save <- struct{}{}:
	default:
	}
}

// saver writes what remember noted, until ctx ends; then once more.
func (a *Applier) saver(ctx context.Context) {
	for done := false; !done; {
		select {
		case <-a.save:
		case <-ctx.Done():
			select {
			case <-a.save:
				done = true
			default:
				return
			}
		}
		a.mu.Lock()
		e := a.enforced
		a.mu.Unlock()
		err := a.cfg.Memory.Save(e)
		a.mu.Lock()
		a.noteSaved(err)
		a.mu.Unlock()
	}
}

// noteSaved reports a state that was not saved; the next change tries again.
func (a *Applier) noteSaved(err error) {
	text := ""
	if err != nil {
		a.log.Error("enforced policy revision not saved", log.Err(err))
		text = fmt.Sprintf("the enforced policy revision is not on stable storage: %v", err)
	}
	a.view.mu.Lock()
	defer a.view.mu.Unlock()
	a.view.unsaved = text
}
