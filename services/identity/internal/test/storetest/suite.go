// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
)

// Cluster is the cluster under test.
type Cluster interface {
	Node(name string) allocator.Store // a new process of that node
	Expire(node string)               // ends the node's session
	Compact()                         // discards the history up to now
	Down()                            // answers nobody
	Up()                              // makes the cluster answer again, with all its data
}

// Labels creates a label set with the label app.
func Labels(t testing.TB, app string) label.Canonical {
	t.Helper()
	l, err := label.Canonicalize(label.Label{Source: "cni", Key: "app", Value: app})
	if err != nil {
		t.Fatal(err)
	}
	return l
}

type suite struct {
	t   *testing.T
	ctx context.Context
	Cluster
}

func (s suite) join(node string) allocator.Store {
	s.t.Helper()
	st := s.Node(node)
	if fresh, err := st.Join(s.ctx); err != nil || !fresh {
		s.t.Fatalf("%s joins: fresh %t, error %v", node, fresh, err)
	}
	return st
}

func (s suite) claim(st allocator.Store, l label.Canonical, known, candidate identity.Numeric) allocator.Claim {
	s.t.Helper()
	c, err := st.Claim(s.ctx, l, known, candidate)
	if err != nil {
		s.t.Fatalf("claim of %s with candidate %d: %v", l, candidate, err)
	}
	return c
}

func (s suite) unused(st allocator.Store) []allocator.Candidate {
	s.t.Helper()
	c, err := Unused(s.ctx, st)
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// Unused lists the identities that no node refers to, like a collector that has just started.
func Unused(ctx context.Context, st allocator.Store) ([]allocator.Candidate, error) {
	once := func(f func(context.Context, context.CancelFunc) error) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		err := f(ctx, cancel)
		if errors.Is(err, context.Canceled) {
			return nil
		}
		return err
	}
	var ids []identity.Identity
	var refs allocator.References
	if err := errors.Join(
		once(func(ctx context.Context, done context.CancelFunc) error {
			return st.Follow(ctx, func(u allocator.Update) {
				if u.Complete {
					ids = nil
					for _, e := range u.Upserts {
						ids = append(ids, e.Identity)
					}
				}
				done()
			})
		}),
		once(func(ctx context.Context, done context.CancelFunc) error {
			return st.FollowReferences(ctx, func(r allocator.References) {
				if r.Complete {
					refs = r
				}
				done()
			})
		}),
	); err != nil {
		return nil, err
	}
	if !refs.Complete {
		return nil, allocator.ErrUnavailable
	}
	ids = slices.DeleteFunc(ids, func(id identity.Identity) bool { return refs.Numbers[id.Number] > 0 })
	c, err := st.Candidates(ctx, ids)
	return slices.DeleteFunc(c, func(c allocator.Candidate) bool { return c.Fence > refs.Revision }), err
}

func (s suite) references(st allocator.Store) map[identity.Numeric]int64 {
	s.t.Helper()
	refs, err := st.References(s.ctx)
	if err != nil {
		s.t.Fatal(err)
	}
	out := map[identity.Numeric]int64{}
	for _, r := range refs {
		out[r.Number] = r.Revision
	}
	return out
}

// Run runs the suite; newCluster is called for every test of it.
func Run(t *testing.T, newCluster func(t *testing.T) Cluster) {
	for _, c := range []struct {
		name string
		test func(suite)
	}{
		{"ClaimCreatesOnceAndThenRefers", claimCreatesOnce},
		{"ClaimOfATakenCandidateIsOccupied", claimOccupied},
		{"ClaimsAtOnceAgree", claimsAtOnceAgree},
		{"NothingIsClaimedWithoutASession", noSession},
		{"ExpiryTakesReferences", expiry},
		{"ReleaseDropsOnlyWhatWasMeant", releaseRevision},
		{"RestoreBringsBackWhatWasCollected", restoreGone},
		{"RestoreNamesWhoHasTheNumberNow", restoreConflicts},
		{"CollectSparesWhatWasTouched", collectFence},
		{"CollectedNumbersRest", collectedRest},
		{"OneNodeLeads", oneLeads},
		{"TheCollectorPublishesNumbers", publishes},
		{"FollowBringsEverythingThenChanges", followChanges},
		{"FollowListsAgainAfterAGap", followGap},
		{"ADownStoreIsUnavailableWithinTheDeadline", unavailable},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 2*servicetest.Patience)
			defer cancel()
			c.test(suite{t: t, ctx: ctx, Cluster: newCluster(t)})
		})
	}
}

func claimCreatesOnce(s suite) {
	a, b := s.join("a"), s.join("b")
	l := Labels(s.t, "web")
	first := s.claim(a, l, 0, 300)
	if first.Number != 300 || !first.Created || first.Revision == 0 {
		s.t.Errorf("first claim: %+v, want 300 created", first)
	}
	for _, known := range []identity.Numeric{0, 300, 301} {
		again := s.claim(b, l, known, 301)
		if again.Number != 300 || again.Created || again.Revision <= first.Revision {
			s.t.Errorf("claim with known %d: %+v, want 300 not created, later than %d", known, again, first.Revision)
		}
	}
	if c := s.claim(b, l, 0, 0); c.Number != 300 {
		s.t.Errorf("claim without candidate: %+v, want 300", c)
	}
}

func claimOccupied(s suite) {
	a := s.join("a")
	s.claim(a, Labels(s.t, "web"), 0, 300)
	for _, candidate := range []identity.Numeric{300, 0} {
		if c, err := a.Claim(s.ctx, Labels(s.t, "db"), 0, candidate); !errors.Is(err, allocator.ErrOccupied) {
			s.t.Errorf("claim with candidate %d: %+v, %v, want ErrOccupied", candidate, c, err)
		}
	}
	if refs := s.references(a); len(refs) != 1 {
		s.t.Errorf("references %v, want only 300", refs)
	}
}

func claimsAtOnceAgree(s suite) {
	const nodes, sets = 4, 8
	got := [nodes][sets]allocator.Claim{}
	var wg sync.WaitGroup
	for n := range nodes {
		st := s.join(fmt.Sprint("node", n))
		wg.Go(func() {
			for i := range sets {
				l := Labels(s.t, fmt.Sprint(i))
				for candidate := identity.Numeric(300 + n); ; candidate += nodes {
					c, err := st.Claim(s.ctx, l, 0, candidate)
					if errors.Is(err, allocator.ErrOccupied) {
						continue
					}
					if err != nil {
						s.t.Errorf("claim: %v", err)
						return
					}
					got[n][i] = c
					break
				}
			}
		})
	}
	wg.Wait()
	created := 0
	numbers := map[identity.Numeric]int{}
	for n := range nodes {
		for i := range sets {
			if got[n][i].Number != got[0][i].Number {
				s.t.Errorf("set %d is %d on node 0 and %d on node %d", i, got[0][i].Number, got[n][i].Number, n)
			}
			if got[n][i].Created {
				created++
			}
			numbers[got[n][i].Number] = i
		}
	}
	if created != sets || len(numbers) != sets {
		s.t.Errorf("%d identities created, %d numbers, want %d of each", created, len(numbers), sets)
	}
}

func noSession(s suite) {
	a := s.Node("a")
	l := Labels(s.t, "web")
	if _, err := a.Claim(s.ctx, l, 0, 300); !errors.Is(err, allocator.ErrSessionLost) {
		s.t.Errorf("claim: %v, want ErrSessionLost", err)
	}
	if _, err := a.Restore(s.ctx, identity.Identity{Number: 300, Labels: l}); !errors.Is(err, allocator.ErrSessionLost) {
		s.t.Errorf("restore: %v, want ErrSessionLost", err)
	}
	if err := a.Ping(s.ctx); !errors.Is(err, allocator.ErrSessionLost) {
		s.t.Errorf("ping: %v, want ErrSessionLost", err)
	}
	if _, err := a.Join(s.ctx); err != nil {
		s.t.Fatal(err)
	}
	if fresh, err := a.Join(s.ctx); err != nil || fresh {
		s.t.Errorf("joining twice: fresh %t, error %v", fresh, err)
	}
}

func expiry(s suite) {
	a := s.join("a")
	l := Labels(s.t, "web")
	s.claim(a, l, 0, 300)
	s.Expire("a")
	if _, err := a.Claim(s.ctx, l, 300, 301); !errors.Is(err, allocator.ErrSessionLost) {
		s.t.Errorf("claim: %v, want ErrSessionLost", err)
	}
	if fresh, err := a.Join(s.ctx); err != nil || !fresh {
		s.t.Fatalf("joining again: fresh %t, error %v", fresh, err)
	}
	if refs := s.references(a); len(refs) != 0 {
		s.t.Errorf("references %v after expiry, want none", refs)
	}
	if c := s.claim(a, l, 0, 301); c.Number != 300 || c.Created {
		s.t.Errorf("claim after expiry: %+v, want 300 as before", c)
	}
}

func releaseRevision(s suite) {
	a, b := s.join("a"), s.join("b")
	l := Labels(s.t, "web")
	old := s.claim(a, l, 0, 300)
	s.claim(b, l, 0, 300)
	again := s.claim(a, l, 0, 300)
	for _, c := range []struct {
		revision int64
		left     int
	}{{old.Revision, 1}, {again.Revision, 0}, {again.Revision, 0}} {
		if err := a.Release(s.ctx, allocator.Reference{Number: 300, Revision: c.revision}); err != nil {
			s.t.Fatal(err)
		}
		if refs := s.references(a); len(refs) != c.left {
			s.t.Errorf("after release of revision %d: %v, want %d left", c.revision, refs, c.left)
		}
	}
	if refs := s.references(b); len(refs) != 1 {
		s.t.Errorf("references of the other node: %v", refs)
	}
}

// collectAll collects all unreferenced identities.
func (s suite) collectAll(st allocator.Store, rest time.Duration) []identity.Numeric {
	s.t.Helper()
	gone, err := st.Collect(s.ctx, s.unused(st), rest)
	if err != nil {
		s.t.Fatal(err)
	}
	slices.Sort(gone)
	return gone
}

func restoreGone(s suite) {
	a, b := s.join("a"), s.join("b")
	id := identity.Identity{Number: 300, Labels: Labels(s.t, "web")}
	s.claim(a, id.Labels, 0, 300)
	s.Expire("a")
	if gone := s.collectAll(b, time.Hour); !slices.Equal(gone, []identity.Numeric{300}) {
		s.t.Fatalf("collected %v, want 300", gone)
	}
	if _, err := a.Join(s.ctx); err != nil {
		s.t.Fatal(err)
	}
	c, err := a.Restore(s.ctx, id)
	if err != nil || c.Number != 300 || !c.Created {
		s.t.Fatalf("restore: %+v, %v, want 300 created", c, err)
	}
	again, err := a.Restore(s.ctx, id)
	if err != nil || again.Created || again.Revision <= c.Revision {
		s.t.Errorf("restoring twice: %+v, %v", again, err)
	}
	if c := s.claim(b, id.Labels, 0, 301); c.Number != 300 {
		s.t.Errorf("the other node gets %d, want 300", c.Number)
	}
	if unused := s.unused(b); len(unused) != 0 {
		s.t.Errorf("unreferenced %v", unused)
	}
}

func restoreConflicts(s suite) {
	a := s.join("a")
	web, db, gone := Labels(s.t, "web"), Labels(s.t, "db"), Labels(s.t, "gone")
	first := s.claim(a, web, 0, 300)
	s.claim(a, db, 0, 301)
	last := s.claim(a, gone, 0, 302)
	s.claim(a, web, 300, 0) // a later reference does not assign the number to another label set
	if err := a.Release(s.ctx, allocator.Reference{Number: 302, Revision: last.Revision}); err != nil {
		s.t.Fatal(err)
	}
	s.collectAll(a, time.Hour)
	for _, c := range []struct {
		held     identity.Identity
		occupant identity.Numeric
		moved    identity.Numeric
	}{
		{identity.Identity{Number: 300, Labels: Labels(s.t, "new")}, 300, 0},
		{identity.Identity{Number: 303, Labels: web}, 0, 300},
		{identity.Identity{Number: 300, Labels: db}, 300, 301},
		{identity.Identity{Number: 302, Labels: Labels(s.t, "new")}, 0, 0}, // in quarantine
	} {
		_, err := a.Restore(s.ctx, c.held)
		var conflict *allocator.ConflictError
		if !errors.As(err, &conflict) || !errors.Is(err, allocator.ErrConflict) {
			s.t.Errorf("restore %s: %v, want a conflict", c.held, err)
			continue
		}
		if conflict.Occupant.Number != c.occupant || conflict.Moved != c.moved || !conflict.Held.Equal(c.held) {
			s.t.Errorf("restore %s: %+v, want occupant %d, moved %d", c.held, conflict, c.occupant, c.moved)
		}
		if c.occupant != 0 && conflict.Revision != first.Revision {
			s.t.Errorf("restore %s: the occupant is of revision %d, want %d", c.held, conflict.Revision, first.Revision)
		}
	}
	if refs := s.references(a); len(refs) != 2 {
		s.t.Errorf("references %v, want 300 and 301", refs)
	}
}

func collectFence(s suite) {
	a, b := s.join("a"), s.join("b")
	touched, quiet, used := Labels(s.t, "touched"), Labels(s.t, "quiet"), Labels(s.t, "used")
	for i, l := range []label.Canonical{touched, quiet, used} {
		s.claim(a, l, 0, identity.Numeric(300+i))
	}
	s.claim(b, used, 0, 302)
	s.Expire("a")
	unused := s.unused(b)
	if len(unused) != 2 {
		s.t.Fatalf("unreferenced %v, want 300 and 301", unused)
	}
	// The candidate was referenced and released again, so it is stale.
	c := s.claim(b, touched, 0, 400)
	if err := b.Release(s.ctx, allocator.Reference{Number: c.Number, Revision: c.Revision}); err != nil {
		s.t.Fatal(err)
	}
	gone, err := b.Collect(s.ctx, unused, time.Hour)
	if err != nil || !slices.Equal(gone, []identity.Numeric{301}) {
		s.t.Errorf("collected %v, %v, want 301", gone, err)
	}
	if again, err := b.Collect(s.ctx, unused, time.Hour); err != nil || len(again) != 0 {
		s.t.Errorf("collected %v, %v the second time", again, err)
	}
	if c := s.claim(b, touched, 0, 400); c.Number != 300 {
		s.t.Errorf("the touched set has %d, want 300", c.Number)
	}
	if c := s.claim(b, used, 0, 400); c.Number != 302 {
		s.t.Errorf("the used set has %d, want 302", c.Number)
	}
}

func collectedRest(s suite) {
	a := s.join("a")
	drop := func(c allocator.Claim) {
		if err := a.Release(s.ctx, allocator.Reference{Number: c.Number, Revision: c.Revision}); err != nil {
			s.t.Fatal(err)
		}
	}
	web, db := Labels(s.t, "web"), Labels(s.t, "db")
	drop(s.claim(a, web, 0, 300))
	s.collectAll(a, time.Hour)
	if resting, err := a.Resting(s.ctx); err != nil || !slices.Equal(resting, []identity.Numeric{300}) {
		s.t.Errorf("%v rest, %v", resting, err)
	}
	if _, err := a.Claim(s.ctx, db, 0, 300); !errors.Is(err, allocator.ErrOccupied) {
		s.t.Errorf("another set on a quarantined number: %v, want ErrOccupied", err)
	}
	if c := s.claim(a, web, 0, 300); c.Number != 300 || !c.Created {
		s.t.Errorf("the same set on its quarantined number: %+v, want 300", c)
	} else {
		drop(c)
	}
	s.collectAll(a, time.Second)
	servicetest.Eventually(s.t, "the end of the rest", func() bool {
		c, err := a.Claim(s.ctx, db, 0, 300)
		return err == nil && c.Number == 300
	})
}

func oneLeads(s suite) {
	a, b := s.join("a"), s.join("b")
	leads := func(st allocator.Store) bool {
		s.t.Helper()
		ok, err := st.Lead(s.ctx)
		if err != nil {
			s.t.Fatal(err)
		}
		return ok
	}
	if !leads(a) || leads(b) || !leads(a) {
		s.t.Error("want node a to lead, and only node a")
	}
	if next := s.join("a"); !leads(next) || leads(b) {
		s.t.Error("want the next process of node a to lead")
	}
	s.Expire("a")
	servicetest.Eventually(s.t, "b leads", func() bool { return leads(b) })
}

func publishes(s suite) {
	a, b := s.join("a"), s.join("b")
	if ok, err := a.Lead(s.ctx); err != nil || !ok {
		s.t.Fatalf("a leads: %t, %v", ok, err)
	}
	var mu sync.Mutex
	var seen []allocator.Numbers
	ctx, cancel := context.WithCancel(s.ctx)
	done := make(chan error, 1)
	go func() {
		done <- b.FollowNumbers(ctx, func(n allocator.Numbers) {
			mu.Lock()
			defer mu.Unlock()
			seen = append(seen, n)
		})
	}()
	defer func() { cancel(); <-done }()
	last := func() allocator.Numbers {
		mu.Lock()
		defer mu.Unlock()
		if len(seen) == 0 {
			return allocator.Numbers{Used: -1}
		}
		return seen[len(seen)-1]
	}
	servicetest.Eventually(s.t, "that nothing is published", func() bool { return last().Used == 0 })
	for used := 1; used < 3; used++ {
		n := allocator.Numbers{Revision: int64(used), Used: used, Unlabelled: 1, Tenants: map[string]int{"tenant a": used}}
		if err := a.PublishNumbers(s.ctx, n); err != nil {
			s.t.Fatal(err)
		}
		servicetest.Eventually(s.t, "the publication", func() bool {
			l := last()
			return l.Revision == n.Revision && l.Used == used && l.Unlabelled == 1 && l.Tenants["tenant a"] == used
		})
	}
	// A node that is not, or no longer, the collector publishes nothing.
	if err := b.PublishNumbers(s.ctx, allocator.Numbers{Used: 9}); err != nil {
		s.t.Error(err)
	}
	if err := a.PublishNumbers(s.ctx, allocator.Numbers{Used: 4}); err != nil {
		s.t.Fatal(err)
	}
	servicetest.Eventually(s.t, "the last publication", func() bool { return last().Used == 4 })
	mu.Lock()
	defer mu.Unlock()
	if slices.ContainsFunc(seen, func(n allocator.Numbers) bool { return n.Used == 9 }) {
		s.t.Error("a node that does not collect has published")
	}
}

// follower collects the updates of Follow.
type follower struct {
	mu       sync.Mutex
	have     map[identity.Numeric]string
	cluster  uint64
	revision int64
	back     bool // the revision decreased, or the cluster changed
	complete int
	done     chan error
	stop     context.CancelFunc
}

func (s suite) follow(st allocator.Store) *follower {
	ctx, cancel := context.WithCancel(s.ctx)
	f := &follower{have: map[identity.Numeric]string{}, done: make(chan error, 1), stop: cancel}
	go func() {
		for {
			err := st.Follow(ctx, f.sink)
			if ctx.Err() != nil {
				f.done <- err
				return
			}
		}
	}()
	s.t.Cleanup(func() { cancel(); <-f.done })
	return f
}

func (f *follower) sink(u allocator.Update) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if u.Complete {
		f.complete++
		clear(f.have)
	}
	f.back = f.back || u.Cluster == 0 || f.complete > 1 && u.Cluster != f.cluster || u.Revision < f.revision
	f.cluster, f.revision = u.Cluster, u.Revision
	for _, e := range u.Upserts {
		f.have[e.Identity.Number] = e.Identity.Labels.Text()
	}
	for _, d := range u.Deletes {
		delete(f.have, d.Number)
	}
}

func (f *follower) is(complete int, numbers ...identity.Numeric) func() bool {
	return func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.complete < complete || len(f.have) != len(numbers) {
			return false
		}
		for _, n := range numbers {
			if f.have[n] == "" {
				return false
			}
		}
		return true
	}
}

func followChanges(s suite) {
	a := s.join("a")
	s.claim(a, Labels(s.t, "web"), 0, 300)
	f := s.follow(s.Node("b"))
	servicetest.Eventually(s.t, "the listing", f.is(1, 300))
	c := s.claim(a, Labels(s.t, "db"), 0, 301)
	servicetest.Eventually(s.t, "the change", f.is(1, 300, 301))
	if err := a.Release(s.ctx, allocator.Reference{Number: 301, Revision: c.Revision}); err != nil {
		s.t.Fatal(err)
	}
	s.collectAll(a, time.Second)
	servicetest.Eventually(s.t, "the deletion", f.is(1, 300))
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.complete != 1 {
		s.t.Errorf("%d complete listings, want 1: changes should come as changes", f.complete)
	}
	if f.back || f.revision <= c.Revision {
		s.t.Errorf("at revision %d of %x, and it went back: %t; want one that grows, and beyond %d",
			f.revision, f.cluster, f.back, c.Revision)
	}
}

func followGap(s suite) {
	a := s.join("a")
	web := s.claim(a, Labels(s.t, "web"), 0, 300)
	f := s.follow(s.Node("b"))
	servicetest.Eventually(s.t, "the listing", f.is(1, 300))
	s.Down()
	s.Up()
	servicetest.Eventually(s.t, "the store answers", func() bool { _, err := a.Join(s.ctx); return err == nil })
	s.claim(a, Labels(s.t, "db"), 0, 301)
	refs := s.references(a)
	if err := a.Release(s.ctx, allocator.Reference{Number: 300, Revision: max(web.Revision, refs[300])}); err != nil {
		s.t.Fatal(err)
	}
	s.collectAll(a, time.Second)
	s.Compact()
	servicetest.Eventually(s.t, "what happened meanwhile", f.is(1, 301))
	s.claim(a, Labels(s.t, "cache"), 0, 302)
	servicetest.Eventually(s.t, "what happened afterwards", f.is(1, 301, 302))
}

func unavailable(s suite) {
	a := s.join("a")
	l := Labels(s.t, "web")
	s.claim(a, l, 0, 300)
	s.Down()
	for name, call := range map[string]func(context.Context) error{
		"ping":  a.Ping,
		"join":  func(ctx context.Context) error { _, err := a.Join(ctx); return err },
		"claim": func(ctx context.Context) error { _, err := a.Claim(ctx, l, 300, 301); return err },
		"restore": func(ctx context.Context) error {
			_, err := a.Restore(ctx, identity.Identity{Number: 300, Labels: l})
			return err
		},
		"release":    func(ctx context.Context) error { return a.Release(ctx, allocator.Reference{Number: 300, Revision: 1}) },
		"references": func(ctx context.Context) error { _, err := a.References(ctx); return err },
		"candidates": func(ctx context.Context) error {
			_, err := a.Candidates(ctx, []identity.Identity{{Number: 300, Labels: l}})
			return err
		},
		"tidy": func(ctx context.Context) error { return a.Tidy(ctx, allocator.References{}) },
		"lead": func(ctx context.Context) error { _, err := a.Lead(ctx); return err },
	} {
		ctx, cancel := context.WithTimeout(s.ctx, 300*time.Millisecond)
		if err := call(ctx); !errors.Is(err, allocator.ErrUnavailable) {
			s.t.Errorf("%s: %v, want ErrUnavailable", name, err)
		}
		cancel()
	}
	s.Up()
	servicetest.Eventually(s.t, "the store answers again", func() bool { _, err := a.Join(s.ctx); return err == nil })
	if c := s.claim(a, l, 0, 301); c.Number != 300 {
		s.t.Errorf("after the store came back the set has %d, want 300", c.Number)
	}
}
