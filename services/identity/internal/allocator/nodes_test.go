// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// memory is the Records of a node that outlives its processes.
type memory struct {
	mu     sync.Mutex
	holds  allocator.Holds
	known  map[identity.Numeric]identity.Identity
	heard  time.Time
	cached bool
	saves  int
	fail   error
	noted  func() // by NoteKnown, if set
}

func (m *memory) setFail(err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fail = err
}

func (m *memory) SaveHolds(c allocator.HoldsChange) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fail != nil {
		return m.fail
	}
	m.saves++
	m.holds.NextNodeLocal, m.holds.Session = c.NextNodeLocal, c.Session
	m.holds.Holders = slices.DeleteFunc(slices.Clone(m.holds.Holders), func(r allocator.HolderRecord) bool {
		return slices.Contains(c.Drop, r.Holder) || slices.ContainsFunc(c.Put, func(p allocator.HolderRecord) bool { return p.Holder == r.Holder })
	})
	m.holds.Holders = append(m.holds.Holders, c.Put...)
	return nil
}

// NoteKnown and SaveKnown keep the same: this memory survives everything.
func (m *memory) NoteKnown(c allocator.KnownChange) error {
	if m.noted != nil {
		m.noted()
	}
	return m.change(c)
}

func (m *memory) change(c allocator.KnownChange) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.known == nil {
		m.known = map[identity.Numeric]identity.Identity{}
	}
	for _, n := range c.Drop {
		delete(m.known, n)
	}
	for _, id := range c.Put {
		m.known[id.Number] = id
	}
	return nil
}

func (m *memory) SaveKnown(take func() allocator.KnownChange) error {
	c := take()
	if err := m.change(c); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.heard, m.cached = c.Heard, true
	return nil
}

func (m *memory) holders() map[string]identity.Numeric {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[string]identity.Numeric{}
	for _, h := range m.holds.Holders {
		out[h.Holder.String()] = h.Identity.Number
	}
	return out
}

// readers is a Publisher that remembers.
type readers struct {
	mu     sync.Mutex
	have   map[identity.Numeric]string
	loaded bool
}

func (r *readers) Upsert(n identity.Numeric, id identity.Identity) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.have[n] = id.Labels.Text()
	return 0
}

func (r *readers) Delete(n identity.Numeric) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.have, n)
	return true
}

func (r *readers) Reach(uint64, int64) {}

func (r *readers) Loaded() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.loaded = true
}

func (r *readers) see(n identity.Numeric) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.have[n]
}

// cluster is the part of a store's backend that the tests use.
type cluster interface {
	Node(name string) allocator.Store
}

// node is one process of a node.
type node struct {
	*allocator.Allocator
	t       testing.TB
	store   allocator.Store
	records *memory
	readers *readers
	stop    func()

	endpoints *watch.Hub[allocator.Holder, allocator.Endpoint]
}

func quick() allocator.Config {
	return allocator.Config{
		Quota: 1000, StoreTimeout: 2 * time.Second, Heartbeat: 20 * time.Millisecond, Reconcile: 20 * time.Millisecond,
		Grace: time.Hour, Quarantine: time.Hour, KnownDelay: time.Millisecond, RetryMin: 5 * time.Millisecond, RetryMax: 20 * time.Millisecond,
		Log: slog.New(slog.DiscardHandler),
	}
}

// start runs a process of a node. records has the state that earlier processes saved.
func start(t testing.TB, store allocator.Store, records *memory, cfg allocator.Config) *node {
	t.Helper()
	if cfg.Log == nil {
		cfg.Log = log.Discard()
	}
	n := &node{t: t, store: store, records: records, readers: &readers{have: map[identity.Numeric]string{}}}
	records.mu.Lock()
	known := allocator.Known{Identities: slices.Collect(maps.Values(records.known)), Heard: records.heard}
	n.endpoints = watch.NewHub[allocator.Holder](watch.Options[allocator.Endpoint]{Equal: allocator.Endpoint.Equal})
	a, err := allocator.New(cfg, store, records, n.readers, n.endpoints, records.holds, known, records.cached)
	records.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	n.Allocator = a
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := a.Run(ctx); err != nil {
			t.Errorf("run: %v", err)
		}
	}()
	n.stop = sync.OnceFunc(func() { cancel(); <-done })
	t.Cleanup(n.stop)
	return n
}

func startFake(t testing.TB, c cluster, name string, records *memory) *node {
	n := start(t, c.Node(name), records, quick())
	n.connected()
	return n
}

func (n *node) connected() {
	n.t.Helper()
	servicetest.Eventually(n.t, "the session", func() bool { s := n.Summary(); return s.Connected && s.Ready })
}

func (n *node) disconnected() {
	n.t.Helper()
	servicetest.Eventually(n.t, "the loss of the session", func() bool { return !n.Summary().Connected })
}

func (n *node) settled() {
	n.t.Helper()
	servicetest.Eventually(n.t, "that nothing waits for the store", func() bool { s := n.Summary(); return s.Connected && s.PendingWrites == 0 })
}

func (n *node) hold(holder, app string) identity.Numeric {
	n.t.Helper()
	id, err := n.Hold(n.t.Context(), allocator.EndpointHolder(holder, "eth0"), storetest.Labels(n.t, app), true)
	if err != nil {
		n.t.Fatalf("hold %s for %s: %v", app, holder, err)
	}
	if want := storetest.Labels(n.t, app); id.Labels.Text() != want.Text() {
		n.t.Fatalf("hold %s for %s: got the labels %s", app, holder, id.Labels)
	}
	return id.Number
}

func (n *node) release(holder string) identity.Numeric {
	n.t.Helper()
	number, err := n.Release(n.t.Context(), allocator.EndpointHolder(holder, "eth0"))
	if err != nil {
		n.t.Fatalf("release %s: %v", holder, err)
	}
	return number
}

// references of the node as the store has them.
func (n *node) references() []identity.Numeric {
	n.t.Helper()
	refs, err := n.store.References(n.t.Context())
	if err != nil {
		n.t.Fatal(err)
	}
	var out []identity.Numeric
	for _, r := range refs {
		out = append(out, r.Number)
	}
	slices.Sort(out)
	return out
}

func (n *node) refersTo(want ...identity.Numeric) {
	n.t.Helper()
	slices.Sort(want)
	servicetest.Eventually(n.t, "the references become what is held", func() bool { return slices.Equal(n.references(), want) })
}

func TestHolderAskingAgainGetsTheSame(t *testing.T) {
	f := storetest.NewFake()
	a := startFake(t, f, "a", &memory{})
	first := a.hold("c1", "web")
	if first.Scope() != identity.ScopeCluster {
		t.Errorf("%d is not a cluster identity", first)
	}
	if again := a.hold("c1", "web"); again != first {
		t.Errorf("asking again gives %d, want %d", again, first)
	}
	if other := a.hold("c2", "web"); other != first {
		t.Errorf("another holder of the set gets %d, want %d", other, first)
	}
	if other := a.hold("c3", "db"); other == first {
		t.Errorf("another set gets the same number %d", other)
	}
	_, err := a.Hold(t.Context(), allocator.EndpointHolder("c1", "eth0"), storetest.Labels(t, "db"), false)
	if !errors.Is(err, allocator.ErrHeldOther) {
		t.Errorf("another set without moving: %v, want ErrHeldOther", err)
	}
	id, holders, err := a.Get(first)
	want := []allocator.Holder{allocator.EndpointHolder("c1", "eth0"), allocator.EndpointHolder("c2", "eth0")}
	if err != nil || id.Number != first || !slices.Equal(holders, want) {
		t.Errorf("get: %s %v %v", id, holders, err)
	}
}

func TestMovingReleasesTheOldNumber(t *testing.T) {
	a := startFake(t, storetest.NewFake(), "a", &memory{})
	web := a.hold("c1", "web")
	a.refersTo(web)
	db := a.hold("c1", "db")
	a.refersTo(db)
	if got := a.records.holders(); !maps.Equal(got, map[string]identity.Numeric{"endpoint:c1/eth0": db}) {
		t.Errorf("records %v, want only %d", got, db)
	}
}

// TestReleaseKeepsIdentityWhileReferenced proves INV-14.
func TestReleaseKeepsIdentityWhileReferenced(t *testing.T) {
	a := startFake(t, storetest.NewFake(), "a", &memory{})
	web := a.hold("c1", "web")
	a.hold("c2", "web")
	if got := a.release("c1"); got != web {
		t.Errorf("released %d, want %d", got, web)
	}
	a.settled()
	a.refersTo(web)
	a.release("c2")
	a.refersTo()
	if got := a.release("c2"); got != 0 {
		t.Errorf("released %d the second time, want 0", got)
	}
	if len(a.records.holders()) != 0 {
		t.Errorf("records %v, want none", a.records.holders())
	}
}

func TestNodesShareNumbers(t *testing.T) {
	f := storetest.NewFake()
	a, b := startFake(t, f, "a", &memory{}), startFake(t, f, "b", &memory{})
	web := a.hold("c1", "web")
	servicetest.Eventually(t, "the other node sees it", func() bool { return b.readers.see(web) == "cni:app=web;" })
	if got := b.hold("c1", "web"); got != web {
		t.Errorf("b has %d, want %d", got, web)
	}
}

// TestKnownSetsAreAnsweredWithoutTheStore proves INV-15.
func TestKnownSetsAreAnsweredWithoutTheStore(t *testing.T) {
	f := storetest.NewFake()
	records := &memory{}
	a, b := startFake(t, f, "a", records), startFake(t, f, "b", &memory{})
	web, db := a.hold("c1", "web"), b.hold("c1", "db")
	servicetest.Eventually(t, "a knows b's", func() bool { return a.readers.see(db) != "" })
	f.Down()
	a.disconnected()
	check := func(a *node, holder string) {
		t.Helper()
		if got := a.hold(holder, "web"); got != web {
			t.Errorf("held set: %d, want %d", got, web)
		}
		if got := a.hold(holder, "db"); got != db {
			t.Errorf("known set: %d, want %d", got, db)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		_, err := a.Hold(ctx, allocator.EndpointHolder("c9", "eth0"), storetest.Labels(t, "new"), true)
		var unavailable *allocator.StoreError
		if !errors.As(err, &unavailable) || !slices.Equal(unavailable.Endpoints, f.Node("x").Endpoints()) {
			t.Errorf("new set: %v, want a StoreError that names the endpoints", err)
		}
	}
	check(a, "c2")
	servicetest.Eventually(t, "the cache is written", func() bool {
		records.mu.Lock()
		defer records.mu.Unlock()
		return len(records.known) == 2
	})
	a.stop()
	again := start(t, f.Node("a"), records, quick())
	if ready, _ := again.Ready(); !ready {
		t.Error("not ready although there is a cache")
	}
	check(again, "c3")
	if s := again.Summary(); s.Connected || s.StoreError == "" || s.PendingWrites != 2 {
		t.Errorf("status %+v, want not connected, 2 references waiting", s)
	}
	f.Up()
	again.connected()
	again.refersTo(web, db)
}

func TestWithoutCacheAndStoreItIsNotReady(t *testing.T) {
	f := storetest.NewFake()
	f.Down()
	a := start(t, f.Node("a"), &memory{}, quick())
	servicetest.Eventually(t, "a failed attempt", func() bool { return a.Summary().StoreError == allocator.ErrUnavailable.Error() })
	ready, changed := a.Ready()
	if ready {
		t.Fatal("ready without knowing anything")
	}
	f.Up()
	servicetest.Eventually(t, "readiness", func() bool {
		<-changed
		ready, changed = a.Ready()
		return ready
	})
}

func TestReleaseNeedsNoStore(t *testing.T) {
	f := storetest.NewFake()
	records := &memory{}
	a := startFake(t, f, "a", records)
	web, db := a.hold("c1", "web"), a.hold("c2", "db")
	f.Down()
	a.disconnected()
	if got := a.release("c1"); got != web {
		t.Errorf("released %d, want %d", got, web)
	}
	a.stop() // and a restart forgets nothing
	again := start(t, f.Node("a"), records, quick())
	if got := again.release("c2"); got != db {
		t.Errorf("released %d, want %d", got, db)
	}
	f.Up()
	again.connected()
	again.refersTo()
}

func TestExpiredSessionIsRestored(t *testing.T) {
	f := storetest.NewFake()
	a := startFake(t, f, "a", &memory{})
	web, db := a.hold("c1", "web"), a.hold("c2", "db")
	f.Expire("a")
	a.refersTo(web, db)
}

func TestHeldNumberThatWasCollectedComesBack(t *testing.T) {
	f := storetest.NewFake()
	a, b := startFake(t, f, "a", &memory{}), f.Node("b")
	if _, err := b.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	web := a.hold("c1", "web")
	a.stop()
	f.Expire("a")
	collectAll(t, b)
	again := startFake(t, f, "a", a.records)
	again.refersTo(web)
	if c, err := b.Claim(t.Context(), storetest.Labels(t, "web"), 0, 400); err != nil || c.Number != web {
		t.Errorf("b gets %+v, %v, want %d", c, err, web)
	}
}

func collectAll(t testing.TB, st allocator.Store) {
	t.Helper()
	unused, err := storetest.Unused(t.Context(), st)
	if err == nil {
		_, err = st.Collect(t.Context(), unused, time.Nanosecond) // no rest: the worst case
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestNumberTakenMeanwhileMovesItsHolders(t *testing.T) {
	for _, elsewhere := range []bool{false, true} { // is our set known under another number?
		f := storetest.NewFake()
		a, b := startFake(t, f, "a", &memory{}), f.Node("b")
		if _, err := b.Join(t.Context()); err != nil {
			t.Fatal(err)
		}
		old := a.hold("c1", "web")
		a.hold("c2", "web")
		a.stop()
		f.Expire("a")
		collectAll(t, b)
		if _, err := b.Claim(t.Context(), storetest.Labels(t, "thief"), 0, old); err != nil {
			t.Fatal(err)
		}
		moved := identity.Numeric(0)
		if elsewhere {
			moved = 40_000
			if _, err := b.Claim(t.Context(), storetest.Labels(t, "web"), 0, moved); err != nil {
				t.Fatal(err)
			}
		}
		a = start(t, f.Node("a"), a.records, quick())
		servicetest.Eventually(t, "the conflict is settled", func() bool { return a.Counters().Conflicts == 1 })
		now := a.hold("c1", "web")
		if now == old || elsewhere && now != moved || a.hold("c2", "web") != now {
			t.Errorf("web has %d, want not %d, and %d if that is not 0", now, old, moved)
		}
		a.refersTo(now)
		if got := a.hold("c3", "thief"); got != old {
			t.Errorf("thief has %d, want %d", got, old)
		}
		servicetest.Eventually(t, "readers see both", func() bool {
			return a.readers.see(now) == "cni:app=web;" && a.readers.see(old) == "cni:app=thief;"
		})
		want := map[string]identity.Numeric{"endpoint:c1/eth0": now, "endpoint:c2/eth0": now, "endpoint:c3/eth0": old}
		if got := a.records.holders(); !maps.Equal(got, want) {
			t.Errorf("records %v, want %v", got, want)
		}
		a.stop()
	}
}

// restored refuses new numbers as after a restore of sluice-store, until over.
type restored struct {
	allocator.Store
	over atomic.Bool
}

func (r *restored) Claim(
	ctx context.Context, l label.Canonical, known, candidate identity.Numeric,
) (allocator.Claim, error) {
	if !r.over.Load() && candidate != known {
		return allocator.Claim{}, allocator.ErrRestored
	}
	return r.Store.Claim(ctx, l, known, candidate)
}

// TestNodeClaimsWhatItHoldsWhileOneOfItsNumbersIsTaken: the label set whose number is taken waits, and the others do
// not wait for it.
func TestNodeClaimsWhatItHoldsWhileOneOfItsNumbersIsTaken(t *testing.T) {
	f := storetest.NewFake()
	a, b := startFake(t, f, "a", &memory{}), f.Node("b")
	if _, err := b.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	old, db := a.hold("c1", "web"), a.hold("c2", "db")
	a.stop()
	f.Expire("a")
	collectAll(t, b)
	if _, err := b.Claim(t.Context(), storetest.Labels(t, "thief"), 0, old); err != nil {
		t.Fatal(err)
	}
	st := &restored{Store: f.Node("a")}
	a = start(t, st, a.records, quick())
	a.connected()
	servicetest.Eventually(t, "db has its number again", func() bool {
		refs, err := st.References(t.Context())
		return err == nil && len(refs) == 1 && refs[0].Number == db
	})
	_, err := a.Hold(t.Context(), allocator.EndpointHolder("c3", "eth0"), storetest.Labels(t, "cache"), true)
	if !errors.Is(err, allocator.ErrRestored) {
		t.Errorf("a new label set: %v", err)
	}
	a.connected()
	st.over.Store(true)
	servicetest.Eventually(t, "web has another number", func() bool { return a.Counters().Conflicts == 1 })
	a.refersTo(a.hold("c1", "web"), db)
}

// paused stops at the first conflict that Restore finds.
type paused struct {
	allocator.Store
	once        sync.Once
	found, goOn chan struct{}
}

func (p *paused) Restore(ctx context.Context, id identity.Identity) (allocator.Claim, error) {
	c, err := p.Store.Restore(ctx, id)
	if errors.Is(err, allocator.ErrConflict) {
		p.once.Do(func() {
			close(p.found)
			<-p.goOn
		})
	}
	return c, err
}

func TestConflictThatChangesMeanwhileLeavesTheNewestLabelSet(t *testing.T) {
	for name, c := range map[string]struct {
		next      string // the label set that gets the number after the conflict was found; "": none
		conflicts uint64
	}{
		"it belongs to the held set again": {"web", 0},
		"it belongs to another set":        {"second", 1},
		"it is free":                       {"", 1},
	} {
		t.Run(name, func(t *testing.T) {
			f := storetest.NewFake()
			a, b := startFake(t, f, "a", &memory{}), f.Node("b")
			if _, err := b.Join(t.Context()); err != nil {
				t.Fatal(err)
			}
			old := a.hold("c1", "web")
			a.stop()
			f.Expire("a")
			collectAll(t, b)
			thief, err := b.Claim(t.Context(), storetest.Labels(t, "thief"), 0, old)
			if err != nil {
				t.Fatal(err)
			}
			st := &paused{Store: f.Node("a"), found: make(chan struct{}), goOn: make(chan struct{})}
			a = start(t, st, a.records, quick())
			<-st.found
			if err := b.Release(t.Context(), allocator.Reference{Number: old, Revision: thief.Revision}); err != nil {
				t.Fatal(err)
			}
			collectAll(t, b)
			if c.next != "" {
				if _, err := b.Claim(t.Context(), storetest.Labels(t, c.next), 0, old); err != nil {
					t.Fatal(err)
				}
			}
			const last = identity.Numeric(50_000)
			if _, err := b.Claim(t.Context(), storetest.Labels(t, "last"), 0, last); err != nil {
				t.Fatal(err)
			}
			servicetest.Eventually(t, "node a knows the last change", func() bool { return a.readers.see(last) != "" })
			close(st.goOn)
			a.settled()
			want := ""
			if c.next != "" {
				want = "cni:app=" + c.next + ";"
			}
			if got := a.readers.see(old); got != want {
				t.Errorf("readers see %q for %d, want %q", got, old, want)
			}
			if now := a.hold("c1", "web"); (now == old) != (c.next == "web") {
				t.Errorf("web has %d, before %d", now, old)
			}
			if got := a.Counters().Conflicts; got != c.conflicts {
				t.Errorf("%d conflicts, want %d", got, c.conflicts)
			}
		})
	}
}

// lossy loses the answer of one Claim that happened.
type lossy struct {
	allocator.Store
	mu   sync.Mutex
	lose int
}

func (l *lossy) Claim(ctx context.Context, labels label.Canonical, known, candidate identity.Numeric) (allocator.Claim, error) {
	c, err := l.Store.Claim(ctx, labels, known, candidate)
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil && l.lose > 0 {
		l.lose--
		return allocator.Claim{}, allocator.ErrUnavailable
	}
	return c, err
}

func TestReferenceOfALostAnswerIsDropped(t *testing.T) {
	f := storetest.NewFake()
	st := &lossy{Store: f.Node("a"), lose: 1}
	a := start(t, st, &memory{}, quick())
	a.connected()
	if _, err := a.Hold(t.Context(), allocator.EndpointHolder("c1", "eth0"), storetest.Labels(t, "web"), true); !errors.Is(err, allocator.ErrUnavailable) {
		t.Fatalf("hold: %v, want ErrUnavailable", err)
	}
	a.connected()
	kept := a.hold("c2", "db")
	a.refersTo(kept)
}

// hanging never answers a Claim.
type hanging struct{ allocator.Store }

func (h hanging) Claim(ctx context.Context, _ label.Canonical, _, _ identity.Numeric) (allocator.Claim, error) {
	<-ctx.Done()
	return allocator.Claim{}, allocator.ErrUnavailable
}

func TestHangingStoreLeavesTimeForTheAnswerFromMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := storetest.NewFake()
		b := startFake(t, f, "b", &memory{})
		web := b.hold("c1", "web")
		cfg := quick()
		cfg.StoreTimeout = time.Hour
		a := start(t, hanging{f.Node("a")}, &memory{}, cfg)
		a.connected()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		id, err := a.Hold(ctx, allocator.EndpointHolder("c1", "eth0"), storetest.Labels(t, "web"), true)
		if err != nil || id.Number != web {
			t.Errorf("hold: %s, %v, want %d", id, err, web)
		}
		a.refersTo(web) // by Restore, which does not hang
	})
}

// TestHangingStoreIsNamedBeforeTheCallerIsGone: if a caller's deadline is shorter than the timeout of the store, the
// error still says that the store does not answer.
func TestHangingStoreIsNamedBeforeTheCallerIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := quick()
		cfg.StoreTimeout = time.Hour
		a := start(t, hanging{storetest.NewFake().Node("a")}, &memory{}, cfg)
		a.connected()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := a.Hold(ctx, allocator.EndpointHolder("c1", "eth0"), storetest.Labels(t, "web"), true)
		if store := (*allocator.StoreError)(nil); !errors.As(err, &store) || ctx.Err() != nil {
			t.Errorf("hold: %v, the context %v, want a StoreError while the caller waits", err, ctx.Err())
		}
	})
}

// damaged cannot restore one identity.
type damaged struct {
	allocator.Store
	number identity.Numeric
}

func (d damaged) Restore(ctx context.Context, id identity.Identity) (allocator.Claim, error) {
	if id.Number == d.number {
		return allocator.Claim{}, allocator.ErrCorrupt
	}
	return d.Store.Restore(ctx, id)
}

func (d damaged) Renew(ctx context.Context, ids []identity.Identity) ([]allocator.Claim, error) {
	return d.Store.Renew(ctx, slices.DeleteFunc(slices.Clone(ids), func(id identity.Identity) bool { return id.Number == d.number }))
}

func TestOneDamagedIdentityDoesNotStopTheOthers(t *testing.T) {
	f := storetest.NewFake()
	a := startFake(t, f, "a", &memory{})
	web, db := a.hold("c1", "web"), a.hold("c2", "db")
	a.stop()
	f.Expire("a")
	again := start(t, damaged{f.Node("a"), web}, a.records, quick())
	again.connected()
	again.refersTo(db)
	if s := again.Summary(); s.PendingWrites != 1 {
		t.Errorf("%d pending writes, want 1 for %d", s.PendingWrites, web)
	}
	again.hold("c3", "new")
}

func TestReferenceOfAKilledProcessIsDroppedAtTheStart(t *testing.T) {
	f := storetest.NewFake()
	dead := f.Node("a")
	if _, err := dead.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := dead.Claim(t.Context(), storetest.Labels(t, "web"), 0, 300); err != nil {
		t.Fatal(err)
	}
	cfg := quick()
	cfg.Reconcile = time.Hour // the start alone must do
	a := start(t, f.Node("a"), &memory{}, cfg)
	a.connected()
	if refs := a.references(); len(refs) != 0 {
		t.Errorf("references %v, want none", refs)
	}
}

func TestQuotaBoundsIdentitiesAndNamesTheLabels(t *testing.T) {
	cfg := quick()
	cfg.Quota = 3
	a := start(t, storetest.NewFake().Node("a"), &memory{}, cfg)
	a.connected()
	var wg sync.WaitGroup
	var mu sync.Mutex
	refused := 0
	for i := range 10 {
		wg.Go(func() {
			_, err := a.Hold(t.Context(), allocator.EndpointHolder(fmt.Sprint("c", i), "eth0"), storetest.Labels(t, fmt.Sprint(i)), true)
			var quota *allocator.QuotaError
			if errors.As(err, &quota) && errors.Is(err, allocator.ErrQuota) && quota.Limit == 3 {
				mu.Lock()
				refused++
				mu.Unlock()
			} else if err != nil {
				t.Errorf("hold: %v", err)
			}
		})
	}
	wg.Wait()
	if s := a.Summary(); refused != 7 || s.Held != 3 {
		t.Errorf("%d refused, %d held, want 7 and 3", refused, s.Held)
	}
	holders := slices.Sorted(maps.Keys(a.records.holders()))
	var one string
	for _, h := range holders {
		one = h[len("endpoint:") : len(h)-len("/eth0")]
	}
	a.hold(one, "moved") // frees its own place
	_, err := a.Hold(t.Context(), allocator.EndpointHolder("more", "eth0"), storetest.Labels(t, "more"), true)
	var quota *allocator.QuotaError
	if !errors.As(err, &quota) || len(quota.Keys) != 1 || quota.Keys[0].Key != "cni:app" {
		t.Errorf("one more: %v, want a QuotaError that names cni:app", err)
	}
	a.release(one)
	a.hold("more", "more")
}

// fullCluster uses all numbers of the store except the free ones, and returns their listing.
func fullCluster(t *testing.T, f *storetest.Fake, free map[identity.Numeric]bool) allocator.Update {
	t.Helper()
	b := f.Node("b")
	if _, err := b.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	u := allocator.Update{Complete: true, Heard: time.Now()}
	for n := identity.MinCluster; n <= identity.MaxCluster; n++ {
		if free[n] {
			continue
		}
		id := identity.Identity{Number: n, Labels: storetest.Labels(t, fmt.Sprint(n))}
		claim, err := b.Claim(t.Context(), id.Labels, 0, n)
		if err != nil {
			t.Fatalf("claim %d: %v", n, err)
		}
		u.Revision = claim.Revision
		u.Upserts = append(u.Upserts, allocator.Entry{Identity: id, Revision: claim.Revision})
	}
	return u
}

func TestFullRangeIsExhausted(t *testing.T) {
	f := storetest.NewFake()
	fullCluster(t, f, nil)
	a := startFake(t, f, "a", &memory{})
	if s := a.Summary(); s.Known != identity.ClusterSize {
		t.Fatalf("%d known, want %d", s.Known, identity.ClusterSize)
	}
	_, err := a.Hold(t.Context(), allocator.EndpointHolder("c1", "eth0"), storetest.Labels(t, "new"), true)
	if !errors.Is(err, allocator.ErrExhausted) {
		t.Errorf("hold: %v, want ErrExhausted", err)
	}
}

// TestLastNumbersGoToABurst: concurrent calls of one node do not compete for the last free numbers, even before the
// node knows which numbers are free.
func TestLastNumbersGoToABurst(t *testing.T) {
	const calls = 100
	f := storetest.NewFake()
	free := map[identity.Numeric]bool{}
	for i := range calls {
		free[identity.MinCluster+identity.Numeric(600*i)] = true
	}
	listing := fullCluster(t, f, free)
	st := &listingStore{Store: f.Node("a"), updates: make(chan allocator.Update), taken: make(chan struct{})}
	cfg := quick()
	cfg.StoreTimeout = servicetest.Patience
	a := start(t, st, &memory{}, cfg)
	servicetest.Eventually(t, "the session", func() bool { return a.Summary().Connected })
	var wg sync.WaitGroup
	var mu sync.Mutex
	for i := range calls {
		wg.Go(func() {
			id, err := a.Hold(t.Context(), allocator.EndpointHolder(fmt.Sprint("c", i), "eth0"), storetest.Labels(t, fmt.Sprint("new", i)), true)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if !free[id.Number] {
				t.Errorf("number %d was not free", id.Number)
			}
			delete(free, id.Number)
		})
	}
	st.updates <- listing
	<-st.taken
	wg.Wait()
	if len(free) != 0 {
		t.Errorf("%d numbers were not given to any of %d calls", len(free), calls)
	}
}

func TestAnswerWaitsForStableStorage(t *testing.T) {
	broken := errors.New("disk full")
	records := &memory{fail: broken}
	a := startFake(t, storetest.NewFake(), "a", records)
	holder := allocator.EndpointHolder("c1", "eth0")
	for range 2 {
		_, err := a.Hold(t.Context(), holder, storetest.Labels(t, "web"), true)
		if !errors.Is(err, allocator.ErrRecords) || !errors.Is(err, broken) {
			t.Fatalf("hold: %v, want ErrRecords", err)
		}
	}
	records.mu.Lock()
	records.fail = nil
	records.mu.Unlock()
	web := a.hold("c1", "web")
	if got := records.holders()[holder.String()]; got != web {
		t.Errorf("stored %d, want %d", got, web)
	}
}

// TestTheSessionIsKeptForTheNextProcess: the next process adopts the session, even if the session began while the
// service ran.
func TestTheSessionIsKeptForTheNextProcess(t *testing.T) {
	f, records := storetest.NewFake(), &memory{}
	a := startFake(t, f, "a", records)
	kept := func() string {
		records.mu.Lock()
		defer records.mu.Unlock()
		return records.holds.Session
	}
	first := a.store.Session()
	if first == "" || kept() != first {
		t.Errorf("the session %q is kept as %q", first, kept())
	}
	f.Expire("a")
	servicetest.Eventually(t, "another session", func() bool {
		s := a.store.Session()
		return s != "" && s != first && kept() == s
	})
}

func TestCollectionTakesWhatNobodyRefersTo(t *testing.T) {
	f := storetest.NewFake()
	cfg := quick()
	cfg.Grace = 0
	a := start(t, f.Node("a"), &memory{}, cfg)
	a.connected()
	web, db := a.hold("c1", "web"), a.hold("c2", "db")
	a.release("c1")
	servicetest.Eventually(t, "the deletion is seen", func() bool { return a.readers.see(web) == "" })
	if a.readers.see(db) == "" {
		t.Error("a held identity was collected")
	}
	if c := a.Counters(); c.Collected != 1 {
		t.Errorf("%d collected, want 1", c.Collected)
	}
	if again := a.hold("c3", "web"); again != web {
		t.Errorf("the set comes back as %d, want its old number %d", again, web)
	}
}

func TestNodeLocalNumbersNeedNoStore(t *testing.T) {
	f := storetest.NewFake()
	f.Down()
	records := &memory{cached: true}
	a := start(t, f.Node("a"), records, quick())
	hold := func(a *node, ref, app string) identity.Numeric {
		t.Helper()
		id, err := a.HoldNodeLocal(t.Context(), allocator.ReferenceHolder(ref), storetest.Labels(t, app))
		if err != nil {
			t.Fatal(err)
		}
		return id.Number
	}
	x, y := hold(a, "x", "web"), hold(a, "y", "db")
	if x != identity.MinNodeLocal || y != identity.MinNodeLocal+1 || hold(a, "z", "web") != x || hold(a, "x", "web") != x {
		t.Errorf("numbers %#x and %#x", x, y)
	}
	if a.readers.see(x) != "cni:app=web;" {
		t.Error("readers do not see it")
	}
	if _, err := a.HoldNodeLocal(t.Context(), allocator.ReferenceHolder("x"), storetest.Labels(t, "db")); !errors.Is(err, allocator.ErrHeldOther) {
		t.Errorf("another set: %v, want ErrHeldOther", err)
	}
	if n, err := a.Release(t.Context(), allocator.ReferenceHolder("y")); err != nil || n != y {
		t.Errorf("released %d, %v", n, err)
	}
	if a.readers.see(y) != "" {
		t.Error("readers still see a freed number")
	}
	a.stop()
	again := start(t, f.Node("a"), records, quick())
	if got := hold(again, "n", "web"); got != x {
		t.Errorf("after a restart web is %#x, want %#x", got, x)
	}
	if got := hold(again, "m", "new"); got == y {
		t.Errorf("%#x is used again at once", got)
	}
}

func TestConcurrentAnswersShareWrites(t *testing.T) {
	a := startFake(t, storetest.NewFake(), "a", &memory{})
	a.hold("first", "web")
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() { a.hold(fmt.Sprint("c", i), "web") })
	}
	wg.Wait()
	if got := len(a.records.holders()); got != 201 {
		t.Errorf("%d holders stored, want 201", got)
	}
}

func TestBadStateIsRefused(t *testing.T) {
	web := identity.Identity{Number: 300, Labels: storetest.Labels(t, "web")}
	db := identity.Identity{Number: 300, Labels: storetest.Labels(t, "db")}
	h := func(s string) allocator.Holder { return allocator.ReferenceHolder(s) }
	for name, holders := range map[string][]allocator.HolderRecord{
		"two sets": {{Holder: h("a"), Identity: web}, {Holder: h("b"), Identity: db}},
		"twice":    {{Holder: h("a"), Identity: web}, {Holder: h("a"), Identity: web}},
		"reserved": {{Holder: h("a"), Identity: identity.Reserved()[0]}},
	} {
		_, err := allocator.New(quick(), storetest.NewFake().Node("a"), &memory{},
			&readers{have: map[identity.Numeric]string{}}, watch.NewHub[allocator.Holder](watch.Options[allocator.Endpoint]{}), allocator.Holds{Holders: holders}, allocator.Known{}, true)
		if err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// slowStore lets a test hold up the claims and pings of a store and choose
// what they return.
type slowStore struct {
	allocator.Store
	mu    sync.Mutex
	claim map[string]chan error // app → what its next claim returns; nil: the store's answer
	ping  chan chan error       // a ping that waits for its answer; nil: the store's
}

func (s *slowStore) Claim(ctx context.Context, l label.Canonical, known, candidate identity.Numeric) (allocator.Claim, error) {
	s.mu.Lock()
	answer := s.claim[l.Text()]
	delete(s.claim, l.Text())
	s.mu.Unlock()
	if answer != nil {
		answer <- nil // it has begun
		if err := <-answer; err != nil {
			return allocator.Claim{}, err
		}
	}
	return s.Store.Claim(ctx, l, known, candidate)
}

func (s *slowStore) Ping(ctx context.Context) error {
	s.mu.Lock()
	held := s.ping
	s.mu.Unlock()
	if held != nil {
		answer := make(chan error)
		held <- answer
		if err := <-answer; err != nil {
			return err
		}
	}
	return s.Store.Ping(ctx)
}

// TestALateLossOfAnOldSessionDoesNotEndTheNewOne: the loss of an old session may be reported after the next session has
// begun.
func TestALateLossOfAnOldSessionDoesNotEndTheNewOne(t *testing.T) {
	f := storetest.NewFake()
	s := &slowStore{Store: f.Node("a"), claim: map[string]chan error{}}
	cfg := quick()
	cfg.Heartbeat, cfg.Reconcile, cfg.StoreTimeout = time.Hour, time.Hour, servicetest.Patience
	a := start(t, s, &memory{}, cfg)
	a.connected()

	results := map[string]chan error{}
	claims := map[string]chan error{}
	for _, app := range []string{"one", "two", "late"} {
		result, claim := make(chan error, 1), make(chan error)
		s.mu.Lock()
		s.claim[storetest.Labels(t, app).Text()] = claim
		s.mu.Unlock()
		go func() {
			_, err := a.Hold(context.Background(), allocator.EndpointHolder(app, "eth0"), storetest.Labels(t, app), true)
			result <- err
		}()
		<-claim
		results[app], claims[app] = result, claim
	}
	// The claim "one" fails, and Run pings the store. While this ping waits, the claim "two" fails. Then the answer
	// arrives, which is outdated.
	s.mu.Lock()
	s.ping = make(chan chan error)
	ping := s.ping
	s.mu.Unlock()
	claims["one"] <- allocator.ErrUnavailable
	answer := <-ping
	s.mu.Lock()
	s.ping = nil
	s.mu.Unlock()
	claims["two"] <- allocator.ErrUnavailable
	for _, app := range []string{"one", "two"} {
		if err := <-results[app]; !errors.Is(err, allocator.ErrUnavailable) {
			t.Errorf("%s: %v, want ErrUnavailable", app, err)
		}
	}
	claims["late"] <- allocator.ErrSessionLost
	a.disconnected()
	answer <- nil
	if err := <-results["late"]; err != nil {
		t.Errorf("the claim with the late news: %v", err)
	}
	a.connected()
}

// TestAClosedConnectionIsToldWithoutAHeartbeat: the closed connection is reported although neither a heartbeat nor a
// call notices it.
func TestAClosedConnectionIsToldWithoutAHeartbeat(t *testing.T) {
	f := storetest.NewFake()
	cfg := quick()
	cfg.Heartbeat, cfg.Reconcile = time.Hour, time.Hour
	a := start(t, f.Node("a"), &memory{}, cfg)
	a.connected()
	servicetest.Eventually(t, "numbers for new label sets", func() bool {
		numbers, _ := a.Numbers()
		return numbers
	})
	f.Cut()
	a.disconnected()
	if s := a.Summary(); s.StoreError == "" || !s.Ready {
		t.Errorf("%+v, want ready for known label sets, and why the store is unavailable", s)
	}
	if numbers, _ := a.Numbers(); numbers {
		t.Error("new label sets get numbers without a store")
	}
	f.Up()
	a.connected()
	servicetest.Eventually(t, "numbers for new label sets again", func() bool {
		numbers, _ := a.Numbers()
		return numbers
	})
}

// TestRecordsThatAreNotWrittenAreTold: the status reports failed writes until the disk accepts writes again. The
// allocator notices this without a call.
func TestRecordsThatAreNotWrittenAreTold(t *testing.T) {
	m := &memory{}
	a := start(t, storetest.NewFake().Node("a"), m, quick())
	a.connected()
	m.setFail(errors.New("no space left on device"))
	if _, err := a.Hold(t.Context(), allocator.EndpointHolder("c", "eth0"), storetest.Labels(t, "web"), true); !errors.Is(err,
		allocator.ErrRecords) {
		t.Errorf("on a full disk: %v, want ErrRecords", err)
	}
	if s := a.Summary(); s.Unsaved == nil || !s.Connected {
		t.Errorf("%+v, want what the disk says, and that the store is there", s)
	}
	if numbers, _ := a.Numbers(); numbers {
		t.Error("new label sets get numbers")
	}
	m.setFail(nil)
	servicetest.Eventually(t, "the records are written", func() bool { return a.Summary().Unsaved == nil })
	if numbers, _ := a.Numbers(); !numbers {
		t.Error("new label sets get no identity, and the disk has space")
	}
}

// steps records the size of each collection request.
type steps struct {
	allocator.Store
	mu   sync.Mutex
	most int
}

func (s *steps) Collect(ctx context.Context, unused []allocator.Candidate, rest time.Duration) ([]identity.Numeric, error) {
	s.mu.Lock()
	s.most = max(s.most, len(unused))
	s.mu.Unlock()
	return s.Store.Collect(ctx, unused, rest)
}

func TestManyIdentitiesAreCollectedInBoundedSteps(t *testing.T) {
	const many, step = 600, 256
	f := storetest.NewFake()
	other := startFake(t, f, "b", &memory{})
	for i := range many {
		other.hold(fmt.Sprint("c", i), fmt.Sprint("app", i))
	}
	other.settled()
	s := &steps{Store: f.Node("a")}
	cfg := quick()
	cfg.Grace = 0
	a := start(t, s, &memory{}, cfg)
	a.connected()
	other.stop()
	f.Expire("b")
	servicetest.Eventually(t, "the collection", func() bool { return a.Counters().Collected == many })
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.most > step {
		t.Errorf("one request collected %d identities; the limit is %d", s.most, step)
	}
}

// brokenCollection is a store in which the calls of the collector fail a number of times.
type brokenCollection struct {
	allocator.Store
	mu    sync.Mutex
	fails map[string]int // how many more times the call fails
}

func (b *brokenCollection) fail(what string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.fails[what]--; b.fails[what] >= 0 {
		return fmt.Errorf("%s: %w", what, allocator.ErrUnavailable)
	}
	return nil
}

func (b *brokenCollection) Lead(ctx context.Context) (bool, error) {
	if err := b.fail("lead"); err != nil {
		return false, err
	}
	return b.Store.Lead(ctx)
}

func (b *brokenCollection) FollowReferences(ctx context.Context, sink func(allocator.References)) error {
	if err := b.fail("follow"); err != nil {
		return err
	}
	return b.Store.FollowReferences(ctx, sink)
}

func (b *brokenCollection) Candidates(ctx context.Context, ids []identity.Identity) ([]allocator.Candidate, error) {
	if err := b.fail("candidates"); err != nil {
		return nil, err
	}
	return b.Store.Candidates(ctx, ids)
}

func (b *brokenCollection) Collect(ctx context.Context, c []allocator.Candidate, rest time.Duration) ([]identity.Numeric, error) {
	if err := b.fail("collect"); err != nil {
		return nil, err
	}
	return b.Store.Collect(ctx, c, rest)
}

func TestFailedCollectionIsNotALostSession(t *testing.T) {
	f := storetest.NewFake()
	st := &brokenCollection{Store: f.Node("a"), fails: map[string]int{"lead": 3, "follow": 3, "candidates": 3, "collect": 3}}
	said := &messages{}
	cfg := quick()
	cfg.Grace = 0
	cfg.Log = slog.New(said)
	a := start(t, st, &memory{}, cfg)
	a.connected()
	web := a.hold("c1", "web")
	a.release("c1")
	servicetest.Eventually(t, "the collection", func() bool { return a.readers.see(web) == "" })
	if n := said.count("store session is up"); n != 1 {
		t.Errorf("%d sessions, want 1: collection is not part of it", n)
	}
}

// messages counts what is logged.
type messages struct {
	slog.Handler
	mu sync.Mutex
	n  map[string]int
}

func (m *messages) Enabled(context.Context, slog.Level) bool { return true }

func (m *messages) Handle(_ context.Context, r slog.Record) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.n == nil {
		m.n = map[string]int{}
	}
	m.n[r.Message]++
	return nil
}

func (m *messages) count(what string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.n[what]
}

func TestHolderThatCouldNotBeReadAgainIsRefused(t *testing.T) {
	a := startFake(t, storetest.NewFake(), "a", &memory{})
	for _, h := range []allocator.Holder{
		allocator.ReferenceHolder(strings.Repeat("x", 2000)), allocator.ReferenceHolder("\xff"), allocator.Holder("else:x"),
	} {
		if _, err := a.Hold(t.Context(), h, storetest.Labels(t, "web"), true); !errors.Is(err, allocator.ErrHolder) {
			t.Errorf("hold for %.20q: %v, want ErrHolder", h, err)
		}
		if _, err := a.HoldNodeLocal(t.Context(), h, storetest.Labels(t, "web")); !errors.Is(err, allocator.ErrHolder) {
			t.Errorf("hold node-local for %.20q: %v, want ErrHolder", h, err)
		}
	}
	if len(a.records.holders()) != 0 {
		t.Error("it was written")
	}
}

// betweenStore lets a test stop a claim after it happened, and look at the
// comparisons of references meanwhile.
type betweenStore struct {
	allocator.Store
	claimed, proceed chan struct{}
	mu               sync.Mutex
	looks            int                // comparisons since the claim
	limit            chan struct{}      // closed when a second comparison may be made
	dropped          []identity.Numeric // references that were released
}

func (b *betweenStore) Claim(ctx context.Context, l label.Canonical, known, candidate identity.Numeric) (allocator.Claim, error) {
	c, err := b.Store.Claim(ctx, l, known, candidate)
	close(b.claimed)
	<-b.proceed
	return c, err
}

func (b *betweenStore) References(ctx context.Context) ([]allocator.Reference, error) {
	refs, err := b.Store.References(ctx)
	if len(refs) > 0 {
		b.mu.Lock()
		b.looks++
		second := b.looks > 1
		b.mu.Unlock()
		if second {
			<-b.limit
		}
	}
	return refs, err
}

func (b *betweenStore) Release(ctx context.Context, refs ...allocator.Reference) error {
	b.mu.Lock()
	for _, r := range refs {
		b.dropped = append(b.dropped, r.Number)
	}
	b.mu.Unlock()
	return b.Store.Release(ctx, refs...)
}

// TestStrayReferenceIsNotDroppedAtFirstSight: a comparison between a claim's transaction and its hold finds a reference
// that no holder has yet. It must not drop the reference.
func TestStrayReferenceIsNotDroppedAtFirstSight(t *testing.T) {
	f := storetest.NewFake()
	st := &betweenStore{Store: f.Node("a"), claimed: make(chan struct{}), proceed: make(chan struct{}), limit: make(chan struct{})}
	a := start(t, st, &memory{}, quick())
	a.connected()
	number := make(chan identity.Numeric)
	go func() {
		id, err := a.Hold(context.Background(), allocator.EndpointHolder("c1", "eth0"), storetest.Labels(t, "web"), true)
		if err != nil {
			t.Error(err)
		}
		number <- id.Number
	}()
	<-st.claimed
	// One comparison is over, and what it found to do is done, when the next begins.
	servicetest.Eventually(t, "a second comparison", func() bool { st.mu.Lock(); defer st.mu.Unlock(); return st.looks == 2 })
	close(st.proceed)
	web := <-number
	close(st.limit)
	a.settled()
	a.refersTo(web)
	st.mu.Lock()
	defer st.mu.Unlock()
	if len(st.dropped) != 0 {
		t.Errorf("the reference was dropped: %v", st.dropped)
	}
}

// listingStore delivers the updates that a test creates.
type listingStore struct {
	allocator.Store
	updates chan allocator.Update
	taken   chan struct{}
}

func (s *listingStore) Follow(ctx context.Context, sink func(allocator.Update)) error {
	for {
		select {
		case u := <-s.updates:
			sink(u)
			s.taken <- struct{}{}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// TestCallersAreAnsweredWhileAListingIsTakenOver: the listing of a large cluster is applied in steps. Calls between two
// steps are answered, and their changes are kept.
func TestCallersAreAnsweredWhileAListingIsTakenOver(t *testing.T) {
	const listed = 5000
	f := storetest.NewFake()
	st := &listingStore{Store: f.Node("a"), updates: make(chan allocator.Update), taken: make(chan struct{})}
	var a *node
	var steps int
	var inside bool // a call between two steps, which notes what it claims
	var held []identity.Numeric
	records := &memory{}
	records.noted = func() {
		if inside || a == nil {
			return
		}
		if steps++; steps == 1 {
			return
		}
		if s := a.Summary(); s.Known == 0 || s.Known >= listed {
			t.Errorf("step %d: %d identities are known, want a part of the %d", steps, s.Known, listed)
		}
		inside = true
		held = append(held, a.hold(fmt.Sprint("c", len(held)), fmt.Sprint("new", len(held))))
		inside = false
	}
	a = start(t, st, records, quick())
	st.updates <- allocator.Update{Complete: true, Reset: true, Revision: 1, Heard: time.Now()}
	<-st.taken
	a.connected()
	other := f.Node("b")
	if _, err := other.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	u := allocator.Update{Complete: true, Heard: time.Now()}
	for i := range listed {
		id := identity.Identity{Number: identity.MinCluster + identity.Numeric(13*i), Labels: storetest.Labels(t, fmt.Sprint("app", i))}
		claim, err := other.Claim(t.Context(), id.Labels, 0, id.Number)
		if err != nil {
			t.Fatal(err)
		}
		u.Revision = claim.Revision
		u.Upserts = append(u.Upserts, allocator.Entry{Identity: id, Revision: claim.Revision})
	}
	st.updates <- u
	<-st.taken
	inside = true // what else is noted is none of the listing's
	if steps < 4 || len(held) == 0 {
		t.Fatalf("the listing was taken over in %d steps with %d calls between them", steps, len(held))
	}
	if s := a.Summary(); !s.Ready || s.Known != listed+len(held) {
		t.Errorf("got %+v, want ready, and %d listed and %d held ones", s, listed, len(held))
	}
	// The next listing has only ten identities and is older than the held ones, so these stay known.
	u.Upserts = u.Upserts[:10]
	st.updates <- u
	<-st.taken
	if s := a.Summary(); s.Known != 10+len(held) {
		t.Errorf("%d are known after a listing of 10, want these and the %d held ones", s.Known, len(held))
	}
	for i, n := range held {
		if want := storetest.Labels(t, fmt.Sprint("new", i)).Text(); a.readers.see(n) != want {
			t.Errorf("readers see %q at %d, want %s", a.readers.see(n), n, want)
		}
	}
}

// TestWhatAHolderIsSurvivesWithTheHold: a holder's description survives saves of other changes, a restart, a move to
// another label set, and a call without a description.
func TestWhatAHolderIsSurvivesWithTheHold(t *testing.T) {
	f, records := storetest.NewFake(), &memory{}
	a := startFake(t, f, "a", records)
	holder := allocator.EndpointHolder("c1", "eth0")
	want := allocator.Workload{Manager: "cni", Network: "sluice", Pod: workload.PodReference{Namespace: "prod", Name: "web-0", UID: "u1"}, Addresses: []string{"10.0.0.2", "fd00::2"}}
	hold := func(app string, w allocator.Workload) identity.Numeric {
		t.Helper()
		id, err := a.HoldEndpoint(t.Context(), holder, storetest.Labels(t, app), w)
		if err != nil {
			t.Fatal(err)
		}
		return id.Number
	}
	is := func(when string, n identity.Numeric, want map[allocator.Holder]allocator.Workload) {
		t.Helper()
		if got := a.Endpoints(n); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: got %+v, want %+v", when, got, want)
		}
	}
	known := map[allocator.Holder]allocator.Workload{holder: want}
	// First by a datapath that sends no workload, then by a later one.
	is("held", hold("web", allocator.Workload{}), map[allocator.Holder]allocator.Workload{})
	is("described", hold("web", want), known)
	is("asked again", hold("web", allocator.Workload{}), known)
	is("moved", hold("db", allocator.Workload{}), known)
	want.Addresses = []string{"10.0.0.3"}
	known[holder] = want
	n := hold("db", allocator.Workload{Addresses: want.Addresses})
	is("another address", n, known)
	a.hold("c2", "db")
	a.stop()
	a = startFake(t, f, "a", records)
	is("after a restart", n, known)
	a.hold("c3", "db")
	a.release("c1")
	is("released", n, map[allocator.Holder]allocator.Workload{})
}
