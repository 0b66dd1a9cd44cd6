// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/datapath/internal/policytable"
)

// Config is what the applier has to know.
type Config struct {
	// Name of this subscriber, for the service's status.
	Name    string
	Kernel  Kernel
	Service Service
	// Wait is whether a new endpoint waits for its tables. Without, it begins
	// with the table that lets in the own node alone.
	Wait bool
	// Timeout is how long it waits at most. 0: 10 s.
	Timeout time.Duration
	// Audit lets pass what the policies of this node's endpoints would deny.
	Audit bool
	// Linger is how long the tables of a subject stay after its last endpoint.
	// 0: one minute.
	Linger time.Duration
	// Retry is the pause before what had no room is tried again. 0: 5 s.
	Retry time.Duration
	// Memory keeps what was enforced; nil: a service that lost its state is
	// believed.
	Memory Memory
	// Changed is called, without any lock held, after the policy of slots has
	// changed.
	Changed func(slots []uint16)
	Log     *slog.Logger // nothing is logged if nil
	Now     func() time.Time
}

// The places between the writes of one message, named after what is done.
var (
	faultDefine = fault.Register("datapath/policy/define")
	faultGrow   = fault.Register("datapath/policy/grow")
	faultRows   = fault.Register("datapath/policy/rows")
	faultBlocks = fault.Register("datapath/policy/blocks")
	faultWords  = fault.Register("datapath/policy/words")
	faultFlip   = fault.Register("datapath/policy/flip")
	faultBump   = fault.Register("datapath/policy/bump")
	faultRetire = fault.Register("datapath/policy/retire")
	faultAck    = fault.Register("datapath/policy/ack")
)

// Applier keeps the kernel's tables as the service says.
type Applier struct {
	cfg Config
	log *slog.Logger

	mu sync.Mutex
	// What the kernel holds, as this process wrote or found it.
	tables  map[policytable.ID]*kernelTable                    // guarded by mu
	numbers map[policytable.ClassKey]policytable.IdentityClass // guarded by mu
	words   map[uint32]policytable.Identity                    // guarded by mu
	members map[policytable.IdentityClass]int                  // guarded by mu; identities with a word of the class
	slots   map[uint16]*slot                                   // guarded by mu

	// What the service has said; nil before its first snapshot, and after an
	// error that makes it worthless.
	model       *model // guarded by mu
	incarnation string // guarded by mu; of the last message that was carried out
	seq         uint64 // guarded by mu
	next        *model // guarded by mu; a snapshot that is not complete
	nextSteps   int    // guarded by mu
	// A complete snapshot stays in next while the service is behind what was
	// enforced: held is why.
	nextComplete bool     // guarded by mu
	held         string   // guarded by mu
	enforced     Enforced // guarded by mu
	unknown      error    // guarded by mu; why it is not known what was enforced
	// refused is why nothing of the stream is carried out any more: it has a step
	// that this process does not know.
	refused string // guarded by mu

	subjects map[uint32]*subject // guarded by mu
	changed  chan struct{}       // guarded by mu; closed and replaced when subjects change
	synced   chan struct{}       // closed after the first snapshot
	bumpAll  bool                // guarded by mu; the process is new: what it would have bumped is not known
	highest  uint64              // guarded by mu; policy revision that was carried out
	lost     bool                // guarded by mu; the service is behind it
	waiting  int                 // guarded by mu; identities that are kept unknown
	scarce   bool                // guarded by mu; there may be some

	wake    chan struct{} // the subscription may have changed
	drain   chan struct{} // something waits for a grace period
	save    chan struct{} // enforced has changed
	session health

	view view
}

// kernelTable is a table in the kernel.
type kernelTable struct {
	id       policytable.ID
	content  policytable.Content // as it is there
	owner    *serviceTable
	meanings map[policytable.Meaning]uint16 // of classes; nil until it is asked for
}

// slot is an endpoint.
type slot struct {
	policytable.Binding
}

// subject is an identity of endpoints.
type subject struct {
	users int       // endpoints, and creations of some
	until time.Time // when it is let go, if it has no users
	// ready: both tables are in the kernel, and were heard of in this
	// subscription, or found by a process that began.
	ready           bool
	egress, ingress policytable.ID
	revision        uint64
	rules           [2][][]policytable.Source
	refusal         string
	dirty           bool // bindings have changed
}

// New returns an applier that knows nothing yet: call Adopt.
func New(cfg Config) *Applier {
	if cfg.Log == nil {
		cfg.Log = log.Discard()
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	cfg.Timeout = cmp.Or(cfg.Timeout, 10*time.Second)
	cfg.Linger = cmp.Or(cfg.Linger, time.Minute)
	cfg.Retry = cmp.Or(cfg.Retry, 5*time.Second)
	a := &Applier{
		cfg: cfg, log: cfg.Log,
		tables: map[policytable.ID]*kernelTable{}, numbers: map[policytable.ClassKey]policytable.IdentityClass{}, words: map[uint32]policytable.Identity{}, members: map[policytable.IdentityClass]int{},
		slots: map[uint16]*slot{}, subjects: map[uint32]*subject{}, changed: make(chan struct{}), synced: make(chan struct{}),
		bumpAll: true, wake: make(chan struct{}, 1), drain: make(chan struct{}, 1), save: make(chan struct{}, 1),
	}
	a.view.init()
	return a
}

// Adopt reads what the kernel holds: tables, classes, identities, endpoints and
// their words, all of which stay in force until the service speaks. trusted
// says whether an endpoint's tables came from a policy service, so that a new
// endpoint of the same identity may have them too.
func (a *Applier) Adopt(trusted func(slot uint16) bool) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.recall()
	infos, err := a.cfg.Kernel.Tables()
	if err != nil {
		return fmt.Errorf("list tables: %w", err)
	}
	for _, info := range infos {
		id := info.ID
		c, err := a.cfg.Kernel.TableContent(id)
		if err == nil {
			err = c.Validate()
		}
		if err != nil {
			// It stays for those that use it, and nobody else will.
			a.log.Error("table is not adopted", "table", id, log.Err(err))
			c = policytable.Content{Classes: []policytable.Ranges{nil}}
		}
		a.tables[id] = &kernelTable{id: id, content: c.Clone()}
	}
	maps.Copy(a.numbers, a.cfg.Kernel.IdentityClasses())
	words, err := a.cfg.Kernel.Identities()
	if err != nil {
		return fmt.Errorf("list identities: %w", err)
	}
	for id, w := range words {
		a.setWord(id, w)
	}
	endpoints, err := a.cfg.Kernel.Bindings()
	if err != nil {
		return fmt.Errorf("list endpoints: %w", err)
	}
	for _, e := range endpoints {
		if e.Blocked() {
			continue // whoever publishes it again attaches it
		}
		a.slots[e.Slot] = &slot{e}
		s := a.subject(e.Identity)
		s.users++
		if a.judged(e.Egress) && a.judged(e.Ingress) && trusted(e.Slot) {
			s.ready, s.egress, s.ingress = true, e.Egress, e.Ingress
		}
		a.view.set(e.Slot, e.Generation, a.policyOf(e.Slot), a.cfg.Now())
		if err := a.cfg.Kernel.SetAudit(e.Slot, a.cfg.Audit); err != nil {
			return fmt.Errorf("audit mode of slot %d: %w", e.Slot, err)
		}
	}
	a.left()
	return nil
}

// judged says whether a table is one that a policy service gave.
func (a *Applier) judged(t policytable.ID) bool {
	_, ok := a.tables[t]
	return ok || t == policytable.Allow
}

func (a *Applier) setWord(id uint32, w policytable.Identity) {
	if old, ok := a.words[id]; ok {
		if a.members[old.Class]--; a.members[old.Class] == 0 {
			delete(a.members, old.Class)
		}
		delete(a.words, id)
	}
	if w != (policytable.Identity{}) {
		a.words[id] = w
		a.members[w.Class]++
	}
}

// number is the kernel's number of an identity class, 0 if there is no room for one.
func (a *Applier) number(key policytable.ClassKey) (policytable.IdentityClass, error) {
	if nc, ok := a.numbers[key]; ok {
		return nc, nil
	}
	nc, err := a.cfg.Kernel.DefineIdentityClass(key)
	if errors.Is(err, policytable.ErrNoCapacity) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("number of an identity class: %w", err)
	}
	a.numbers[key] = nc
	return nc, nil
}

// work is what one message changes beyond its writes.
type work struct {
	ctx    context.Context
	bump   map[uint16]struct{} // slots whose connections have to be judged again
	flips  []uint16            // slots whose policy has changed
	nacks  []Nack
	words  []uint32 // identities whose words may change
	checks bool     // tables or identity classes may have become unused
}

func newWork(ctx context.Context) *work { return &work{ctx: ctx, bump: map[uint16]struct{}{}} }

// apply carries out a message. After an error that is not the service's fault
// the kernel may have part of it; the next snapshot puts that right.
func (a *Applier) apply(ctx context.Context, m policytable.Message) (nacks []Nack, err error) {
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
	for i, st := range m.Steps {
		if a.next != nil {
			err = a.collect(w, st, m.Seq)
		} else {
			err = a.carryOut(w, st, m.Seq)
		}
		if err != nil {
			return nil, fmt.Errorf("message %d, steps[%d]: %w", m.Seq, i, err)
		}
	}
	if a.nextComplete && a.held == "" { // of a service that sends no barrier
		if err := a.decide(w, policytable.Barrier{}); err != nil {
			return nil, fmt.Errorf("message %d: %w", m.Seq, err)
		}
	}
	if a.next == nil {
		if err := a.settle(w); err != nil {
			return nil, fmt.Errorf("message %d: %w", m.Seq, err)
		}
		a.incarnation, a.seq = m.Incarnation, m.Seq
	}
	return w.nacks, nil
}

// forgetStream has the next stream begin with everything.
func (a *Applier) forgetStream() {
	a.model, a.incarnation, a.seq = nil, "", 0
	a.dropNext()
}

// dropNext forgets a snapshot that was not taken over.
func (a *Applier) dropNext() { a.next, a.nextSteps, a.nextComplete, a.held = nil, 0, false, "" }

// maxSnapshot bounds the steps of a snapshot.
const maxSnapshot = 1 << 20

// collect remembers a step of a snapshot. Nothing is written before the
// snapshot is complete, because a service that began anew may have changed
// everything at once. What follows belongs to it for as long as it is held.
func (a *Applier) collect(w *work, st policytable.Step, seq uint64) error {
	if a.nextSteps++; a.nextSteps > maxSnapshot && !a.nextComplete {
		return policytable.Invalid("more than %d steps before snapshot_complete", maxSnapshot)
	}
	if err := a.next.take(st, seq, a.number); err != nil {
		return err
	}
	switch st := st.(type) {
	case policytable.SnapshotComplete:
		if a.nextComplete {
			return policytable.Invalid("snapshot_complete in the middle of a stream")
		}
		a.nextComplete = true
	case policytable.Barrier:
		if a.nextComplete {
			return a.decide(w, st)
		}
	case policytable.SetIdentity:
		if a.held != "" && st.IdentityClass == 0 {
			return a.makeUnknown(w, []uint32{st.Identity})
		}
	}
	return nil
}

// carryOut does one step.
func (a *Applier) carryOut(w *work, st policytable.Step, seq uint64) error {
	m := a.model
	var retired *serviceTable
	grants := false
	if _, ok := st.(policytable.SetIdentity); !ok {
		if err := a.flushWords(w); err != nil {
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
	if err := m.take(st, seq, a.number); err != nil {
		return err
	}
	switch st := st.(type) {
	case policytable.SetIdentity:
		w.words = append(w.words, st.Identity)
	case policytable.RetireIdentityClass:
		w.checks = true
	case policytable.DefineTable:
		return a.place(w, m.tables[st.Table])
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
		if s := a.subjects[st.Subject]; s != nil { // else it was let go meanwhile
			s.dirty = true
		}
	case policytable.RemoveSubject:
		if err := a.flip(w); err != nil {
			return err
		}
		a.gone(st.Subject)
	case policytable.RetireTable:
		if err := a.flip(w); err != nil {
			return err
		}
		if retired.kernel != nil {
			retired.kernel.owner = nil
		}
		w.checks = true
	case policytable.Barrier:
		a.remember(st)
		return a.flip(w)
	}
	return nil
}

// settle ends a message: what was collected is done.
func (a *Applier) settle(w *work) error {
	if err := a.flushWords(w); err != nil {
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

// used is the tables that judge somebody, with the slots that they judge.
func (a *Applier) used() map[*kernelTable][]uint16 {
	out := map[*kernelTable][]uint16{}
	add := func(t policytable.ID, slots ...uint16) {
		if k := a.tables[t]; k != nil {
			out[k] = append(out[k], slots...)
		}
	}
	for n, s := range a.slots {
		add(s.Egress, n)
		add(s.Ingress, n)
	}
	for _, s := range a.subjects {
		if s.ready {
			add(s.egress)
			add(s.ingress)
		}
	}
	return out
}

// users adds the slots that a table judges to those that have to look again.
func (a *Applier) affect(w *work, k *kernelTable) {
	for n, s := range a.slots {
		if s.Egress == k.id || s.Ingress == k.id {
			w.bump[n] = struct{}{}
		}
	}
}

func (a *Applier) bumpAffected(w *work) error {
	var err error
	switch {
	case a.bumpAll:
		err = a.cfg.Kernel.BumpGens()
	case len(w.bump) > 0:
		err = a.cfg.Kernel.BumpGens(slices.Sorted(maps.Keys(w.bump))...)
	default:
		return nil
	}
	if err != nil {
		return fmt.Errorf("have connections judged again: %w", err)
	}
	a.bumpAll = false
	clear(w.bump)
	return faultBump.Hit(w.ctx)
}

// place finds or makes the table of the service in the kernel.
func (a *Applier) place(w *work, t *serviceTable) error {
	if k, match := a.candidate(t); k != nil {
		return a.adopt(w, t, k, match)
	}
	return a.define(w, t)
}

// candidate is a table of the kernel that the service has given up, and that
// can become t by changes in place.
func (a *Applier) candidate(t *serviceTable) (*kernelTable, *match) {
	var best *kernelTable
	var bestMatch *match
	used := a.used()
	for _, id := range slices.Sorted(maps.Keys(a.tables)) {
		k := a.tables[id]
		if k.owner != nil || k.content.Hash != t.content.Hash {
			continue
		}
		m := k.matches(&t.content)
		if m == nil {
			continue
		}
		_, inUse := used[k]
		m.inUse = inUse
		if bestMatch == nil || m.better(bestMatch) {
			best, bestMatch = k, m
		}
	}
	return best, bestMatch
}

// define writes a new table. Without room the table stays with the service.
func (a *Applier) define(w *work, t *serviceTable) error {
	id, err := a.cfg.Kernel.DefineTable(t.content)
	if errors.Is(err, policytable.ErrNoCapacity) {
		t.err = err
		return nil
	}
	if err != nil {
		return fmt.Errorf("define table %d: %w", t.id, err)
	}
	k := &kernelTable{id: id, content: t.content.Clone(), owner: t}
	a.tables[id] = k
	t.kernel, t.same, t.err = k, true, nil
	t.missing, t.missingPrefixes = nil, nil
	delete(a.model.lacking, t)
	t.classes = make([]uint16, len(t.content.Classes))
	for i := range t.classes {
		t.classes[i] = uint16(i) //nolint:gosec // at most maxClasses
	}
	return faultDefine.Hit(w.ctx)
}

// grow gives the kernel the classes that it has not.
func (a *Applier) grow(w *work, t *serviceTable) error {
	k := t.kernel
	if k == nil {
		return nil
	}
	for len(t.classes) < len(t.content.Classes) {
		t.classes = append(t.classes, absent)
	}
	var added []policytable.Ranges
	where := slices.Clone(t.classes)
	if t.same {
		have := len(k.content.Classes)
		added = t.content.Classes[have:]
		for i := have; i < len(where); i++ {
			where[i] = uint16(i) //nolint:gosec // at most MaxClasses
		}
	} else {
		known := maps.Clone(k.known())
		for i, c := range where {
			if c != absent {
				continue
			}
			ranges := t.content.Classes[i]
			what := ranges.Meaning()
			at, ok := known[what]
			if !ok {
				at = uint16(len(k.content.Classes) + len(added)) //nolint:gosec // at most twice MaxClasses
				added, known[what] = append(added, ranges), at
			}
			where[i] = at
		}
	}
	if len(added) > 0 {
		err := a.cfg.Kernel.GrowTable(k.id, added)
		if errors.Is(err, policytable.ErrNoCapacity) {
			t.err = err
			return nil
		}
		if err != nil {
			return fmt.Errorf("grow table %d: %w", t.id, err)
		}
		k.content.Classes = slices.Concat(k.content.Classes, added)
		k.meanings = nil
	}
	t.classes, t.err = where, nil
	return faultGrow.Hit(w.ctx)
}

// peer brings one row of a table in line.
func (a *Applier) peer(w *work, t *serviceTable, nc policytable.IdentityClass, remove bool) error {
	k := t.kernel
	if k == nil || nc == 0 {
		return nil
	}
	if remove {
		delete(t.missing, nc)
		if len(t.missing) == 0 {
			delete(a.model.lacking, t)
		}
		return a.dropRow(w, k, nc)
	}
	class := t.classes[t.content.Peers[nc]]
	if err := a.addRow(k, nc, class); errors.Is(err, policytable.ErrNoCapacity) || class == absent {
		if t.missing == nil {
			t.missing = map[policytable.IdentityClass]struct{}{}
		}
		t.missing[nc] = struct{}{}
		a.model.lacking[t] = struct{}{}
		if err != nil {
			t.err = err
		}
		// Whoever has the class would be judged as one without a row.
		return a.forgetMembers(w, nc)
	} else if err != nil {
		return fmt.Errorf("row of table %d: %w", t.id, err)
	}
	if _, ok := t.missing[nc]; ok {
		delete(t.missing, nc)
		if len(t.missing) == 0 {
			delete(a.model.lacking, t)
		}
	}
	return faultRows.Hit(w.ctx)
}

// addRow writes a row, unless it is there.
func (a *Applier) addRow(k *kernelTable, nc policytable.IdentityClass, class uint16) error {
	if class == absent {
		return nil
	}
	if old, ok := k.content.Peers[nc]; ok {
		if old == class || slices.Equal(k.content.Classes[old], k.content.Classes[class]) {
			return nil
		}
		return fmt.Errorf("identity class %d has another row in table %d of the kernel", nc, k.id)
	}
	if err := a.cfg.Kernel.SetPeer(k.id, nc, class); err != nil {
		return err
	}
	k.content.Peers[nc] = class
	return nil
}

// dropRow deletes a row, if it is there.
func (a *Applier) dropRow(w *work, k *kernelTable, nc policytable.IdentityClass) error {
	if _, ok := k.content.Peers[nc]; !ok {
		return nil
	}
	if err := a.cfg.Kernel.DeletePeer(k.id, nc); err != nil {
		return fmt.Errorf("row of identity class %d in table %d: %w", nc, k.id, err)
	}
	delete(k.content.Peers, nc)
	if a.members[nc] > 0 {
		a.affect(w, k)
	}
	return faultRows.Hit(w.ctx)
}

// prefix brings one prefix of a table in line.
func (a *Applier) prefix(w *work, t *serviceTable, p netip.Prefix, grants bool) error {
	k := t.kernel
	if k == nil {
		return nil
	}
	delete(t.missingPrefixes, p)
	want, wanted := t.content.Prefixes[p]
	have, there := k.content.Prefixes[p]
	if !wanted {
		if !there {
			return nil
		}
		if err := a.cfg.Kernel.DeletePrefix(k.id, p); err != nil {
			return fmt.Errorf("block %v of table %d: %w", p, t.id, err)
		}
		delete(k.content.Prefixes, p)
		a.affect(w, k)
		return faultBlocks.Hit(w.ctx)
	}
	lacks := false
	for i, c := range want {
		want[i] = t.classes[c]
		lacks = lacks || want[i] == absent
	}
	if there && have == want {
		return nil
	}
	err := error(nil)
	if !lacks {
		err = a.cfg.Kernel.SetPrefix(k.id, p, want)
	}
	if lacks || errors.Is(err, policytable.ErrNoCapacity) {
		if t.missingPrefixes == nil {
			t.missingPrefixes = map[netip.Prefix]struct{}{}
		}
		t.missingPrefixes[p] = struct{}{}
		if err != nil {
			t.err = err
		}
		return nil
	}
	if err != nil {
		return fmt.Errorf("block %v of table %d: %w", p, t.id, err)
	}
	k.content.Prefixes[p] = want
	if !grants {
		a.affect(w, k)
	}
	return faultBlocks.Hit(w.ctx)
}

// forgetMembers makes identities unknown that have a class without its row.
func (a *Applier) forgetMembers(w *work, nc policytable.IdentityClass) error {
	if a.members[nc] == 0 {
		return nil
	}
	for id, word := range a.words {
		if word.Class == nc {
			w.words = append(w.words, id)
		}
	}
	return a.flushWords(w)
}

// flushWords brings the words of the collected identities in line.
func (a *Applier) flushWords(w *work) error {
	if len(w.words) == 0 {
		return nil
	}
	want := make(map[uint32]policytable.Identity, len(w.words))
	for _, id := range w.words {
		want[id], _ = a.model.word(id)
	}
	w.words = w.words[:0]
	return a.storeWords(w, want)
}

// storeWords changes words, and before that the tables that the service has
// given up, but that still judge somebody because their successors have no
// room: to them an identity stays what it was.
func (a *Applier) storeWords(w *work, want map[uint32]policytable.Identity) error {
	used := a.used()
	changes := make(map[uint32]policytable.Identity, len(want))
	type pair struct{ old, new policytable.Identity }
	seen := map[pair]policytable.Identity{}
	for _, id := range slices.Sorted(maps.Keys(want)) {
		p := pair{a.words[id], want[id]}
		if p.old == p.new || !validIdentity(id) {
			continue
		}
		to, ok := seen[p]
		if !ok {
			var err error
			if to, err = a.cover(used, p.old, p.new); err != nil {
				return err
			}
			seen[p] = to
			a.scarce = a.scarce || to != p.new
			for k, slots := range used {
				// what was unknown met every deny and no allow
				if p.old.Known && !k.content.EvaluatesAlike(p.old, to) {
					for _, s := range slots {
						w.bump[s] = struct{}{}
					}
				}
			}
		}
		if to != p.old {
			changes[id] = to
		}
	}
	if len(changes) == 0 {
		return nil
	}
	if err := a.cfg.Kernel.SetIdentities(changes); err != nil {
		return fmt.Errorf("words of %d identities: %w", len(changes), err)
	}
	for id, word := range changes {
		a.setWord(id, word)
	}
	w.checks = true
	return faultWords.Hit(w.ctx)
}

// cover adds rows to tables without an owner, so that they judge the new word
// as the old one. If that cannot be, the identity has to be unknown.
func (a *Applier) cover(used map[*kernelTable][]uint16, old, to policytable.Identity) (policytable.Identity, error) {
	if !to.Known {
		return to, nil
	}
	for k := range used {
		if k.owner != nil || k.content.EvaluatesAlike(old, to) {
			continue
		}
		if _, ok := k.content.Peers[to.Class]; ok {
			return policytable.Identity{}, nil
		}
		switch err := a.addRow(k, to.Class, k.content.ClassOf(old)); {
		case errors.Is(err, policytable.ErrNoCapacity):
			return policytable.Identity{}, nil
		case err != nil:
			return policytable.Identity{}, fmt.Errorf("row of table %d of the kernel: %w", k.id, err)
		}
	}
	return to, nil
}

// flip gives endpoints the tables that their subjects are bound to.
func (a *Applier) flip(w *work) error {
	for _, id := range slices.Sorted(maps.Keys(a.subjects)) {
		s := a.subjects[id]
		if !s.dirty {
			continue
		}
		s.dirty = false
		if err := a.flipSubject(w, id, s); err != nil {
			return err
		}
	}
	return nil
}

func (a *Applier) flipSubject(w *work, id uint32, s *subject) error {
	list := a.model.binds[id]
	if list == nil || !list[policytable.Egress].heard || !list[policytable.Ingress].heard {
		return nil
	}
	refusal := ""
	for d, b := range list {
		if b.table != nil && a.model.tables[b.id] != b.table {
			return nil // it has ended: the subject is about to be bound anew, or to go
		}
		if b.table == nil || b.table.kernel != nil {
			continue
		}
		reason := refused(policytable.Direction(d), b) //nolint:gosec // 0 or 1
		w.nacks = append(w.nacks, Nack{Seq: b.seq, Subject: id, Table: b.id, Reason: reason})
		refusal = reason
	}
	if refusal != "" {
		if s.refusal != refusal {
			a.log.Warn("policy refused, the old one stays", "subject", id, "reason", refusal)
		}
		s.refusal = refusal
		a.refreshView(w, id)
		return nil
	}
	if s.refusal != "" {
		a.log.Info("policy in force that had been refused", "subject", id)
	}
	w.checks = true
	s.refusal, s.ready = "", true
	s.egress, s.ingress = kernelID(list[policytable.Egress]), kernelID(list[policytable.Ingress])
	s.revision = max(list[policytable.Egress].revision, list[policytable.Ingress].revision)
	s.rules = [2][][]policytable.Source{list[policytable.Egress].rules, list[policytable.Ingress].rules}
	for _, n := range slices.Sorted(maps.Keys(a.slots)) {
		e := a.slots[n]
		if e.Identity != id {
			continue
		}
		if e.Egress != s.egress || e.Ingress != s.ingress {
			if err := a.setPolicy(e, s); err != nil {
				return err
			}
			delete(w.bump, n)
			if err := faultFlip.Hit(w.ctx); err != nil {
				return err
			}
		}
	}
	a.refreshView(w, id)
	return nil
}

// setPolicy flips one endpoint. Events with the new generation have to wait
// until the view knows it.
func (a *Applier) setPolicy(e *slot, s *subject) error {
	a.view.mu.Lock()
	defer a.view.mu.Unlock()
	gen, err := a.cfg.Kernel.SetPolicy(e.Slot, s.egress, s.ingress)
	if err != nil {
		return fmt.Errorf("policy of slot %d: %w", e.Slot, err)
	}
	e.Egress, e.Ingress, e.Generation = s.egress, s.ingress, gen
	a.view.setLocked(e.Slot, gen, a.policyOf(e.Slot), a.cfg.Now())
	return nil
}

func kernelID(b binding) policytable.ID {
	if b.table == nil {
		return policytable.Allow
	}
	return b.table.kernel.id
}

// refused says why a table is not in the kernel, and whose rules it is made of.
func refused(d policytable.Direction, b binding) string {
	shares := map[string]int{}
	for _, sources := range b.rules {
		for _, src := range sources {
			shares[src.Policy()]++
		}
	}
	names := slices.SortedFunc(maps.Keys(shares), func(x, y string) int {
		return cmp.Or(cmp.Compare(shares[y], shares[x]), cmp.Compare(x, y))
	})
	text := fmt.Sprintf("%s: %v", d, b.table.err)
	const shown = 3
	for i, n := range names {
		switch {
		case i == 0:
			text += fmt.Sprintf("; of its %d rules %s has the most, %d", len(b.rules), n, shares[n])
		case i < shown:
			text += fmt.Sprintf(", %s %d", n, shares[n])
		}
	}
	if len(text) > 1000 {
		text = text[:1000]
	}
	return text
}

// policyOf is what judges a slot.
func (a *Applier) policyOf(n uint16) EndpointPolicy {
	e := a.slots[n]
	p := EndpointPolicy{Egress: e.Egress, Ingress: e.Ingress, Generation: e.Generation, Audit: a.cfg.Audit}
	if s := a.subjects[e.Identity]; s != nil {
		p.Refusal = s.refusal
		if s.ready && s.egress == e.Egress && s.ingress == e.Ingress {
			p.Revision, p.rules = s.revision, s.rules
		}
	}
	return p
}

// refreshView tells the view of everything but a flip: names, revision, refusal.
func (a *Applier) refreshView(w *work, id uint32) {
	for n, e := range a.slots {
		if e.Identity == id {
			a.view.set(n, e.Generation, a.policyOf(n), a.cfg.Now())
			w.flips = append(w.flips, n)
		}
	}
}

// revise brings the summary up to date after a message.
func (a *Applier) revise() {
	if a.scarce || len(a.model.lacking) > 0 || a.model.unnumbered > 0 {
		a.left()
	}
	var refusals []string
	for _, id := range slices.Sorted(maps.Keys(a.subjects)) {
		if s := a.subjects[id]; s.refusal != "" {
			refusals = append(refusals, fmt.Sprintf("subject %d: %s", id, s.refusal))
		}
	}
	for _, t := range a.model.sortedTables() {
		if t.kernel != nil && t.err != nil {
			refusals = append(refusals, fmt.Sprintf("table %d: %v; %d rows and %d blocks are missing", t.kernel.id, t.err, len(t.missing), len(t.missingPrefixes)))
		}
	}
	lost := a.behind()
	a.view.mu.Lock()
	defer a.view.mu.Unlock()
	if len(refusals) == 0 {
		a.view.revision = a.model.revision
	}
	if lost != "" {
		refusals = append(refusals, lost)
	}
	a.view.refusals, a.view.waiting = refusals, a.waiting
}

// behind says so if the service's policies are older than those that it sent
// before. A service keeps its revision over restarts, so it has lost what it
// kept, and what it says now may be that there are no policies: that is carried
// out like any other revision, but not in silence.
func (a *Applier) behind() string {
	if a.model.named {
		a.lost, a.highest = false, a.model.revision // decide has looked at it
		return ""
	}
	lost := a.model.revision < a.highest
	if lost && !a.lost {
		a.log.Error("policy service has lost policies", "revision", a.model.revision, "enforced", a.highest)
	}
	a.lost, a.highest = lost, max(a.highest, a.model.revision)
	if !lost {
		return ""
	}
	return fmt.Sprintf("policies up to revision %d: the policy service has lost them and is at revision %d; apply them again", a.highest, a.model.revision)
}

// gone is a subject that the service has no more. Endpoints that have the
// identity all the same keep their tables.
func (a *Applier) gone(id uint32) {
	s := a.subjects[id]
	if s == nil {
		return
	}
	s.ready, s.dirty, s.refusal = false, false, ""
	if s.users == 0 && s.until.IsZero() {
		delete(a.subjects, id)
	}
}

// left counts what is kept back, after everything has changed.
func (a *Applier) left() {
	a.waiting = 0
	if a.model == nil {
		return
	}
	for id := range a.model.wants {
		if _, known := a.words[id]; !known && validIdentity(id) {
			a.waiting++
		}
	}
	a.scarce = a.waiting > 0
}

// sweep retires tables that judge nobody and that the service has given up,
// and the identity classes that nothing names.
func (a *Applier) sweep(w *work) error {
	used := a.used()
	var tables []policytable.ID
	for id, k := range a.tables {
		if _, ok := used[k]; !ok && k.owner == nil {
			tables = append(tables, id)
		}
	}
	if len(tables) > 0 {
		slices.Sort(tables)
		if err := a.cfg.Kernel.RetireTables(tables...); err != nil {
			// It costs room and nothing else; the next sweep tries again.
			a.log.Error("tables not retired", "tables", len(tables), log.Err(err))
			return nil
		}
		for _, id := range tables {
			delete(a.tables, id)
		}
		a.draining()
		if err := faultRetire.Hit(w.ctx); err != nil {
			return err
		}
	}
	named := make(map[policytable.IdentityClass]struct{}, len(a.numbers))
	if a.model != nil {
		for _, nc := range a.model.classes {
			named[nc.number] = struct{}{}
		}
	}
	var classes []policytable.IdentityClass
	for key, nc := range a.numbers {
		if _, ok := named[nc]; ok || a.members[nc] > 0 {
			continue
		}
		rows := false
		for _, k := range a.tables {
			if _, rows = k.content.Peers[nc]; rows {
				break
			}
		}
		if !rows {
			classes = append(classes, nc)
			delete(a.numbers, key)
		}
	}
	if len(classes) == 0 {
		return nil
	}
	slices.Sort(classes)
	if err := a.cfg.Kernel.RetireIdentityClasses(classes...); err != nil {
		return fmt.Errorf("retire %d identity classes: %w", len(classes), err)
	}
	a.draining()
	return faultRetire.Hit(w.ctx)
}

// draining has the grace period waited for that frees what was retired.
func (a *Applier) draining() {
	select {
	case a.drain <- struct{}{}:
	default:
	}
}
