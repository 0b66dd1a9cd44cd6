// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package confirmed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

const rest = 16 * time.Minute

// store is a Store in memory that all nodes of a test share. Followers receive every change at once.
type store struct {
	mu       sync.Mutex
	revision int64
	summary  Summary
	alive    map[string]string
	reports  map[string]Report
	writes   []time.Time
	tracker  *Tracker
	readers  []func(Summary, bool)
	denies   bool
}

func newStore() *store {
	return &store{revision: 1000, alive: map[string]string{}, reports: map[string]Report{}}
}

// state returns the moments of all reports and the summary that was published last.
func (s *store) state() ([]time.Time, Summary) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.writes), s.summary
}

// of is the store as a node has it.
type of struct {
	*store
	node string
}

func (s of) Report(_ context.Context, r Report) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.denies {
		return fmt.Errorf("%w: report", ErrDenied)
	}
	s.revision++
	s.writes = append(s.writes, time.Now())
	s.reports[s.node] = r
	if s.tracker != nil {
		s.tracker.Report(s.node, r, s.revision)
		s.tracker.ReachReports(cluster.Point{Cluster: 1, Revision: s.revision})
		s.tracker.ReachNodes(cluster.Point{Cluster: 1, Revision: s.revision})
	}
	return nil
}

func (s of) Publish(_ context.Context, sum Summary) error {
	s.mu.Lock()
	s.revision++
	s.summary = sum
	readers := s.readers
	s.mu.Unlock()
	for _, r := range readers {
		r(sum, false)
	}
	return nil
}

func (s of) FollowSummary(ctx context.Context, sink func(Summary, bool)) error {
	s.mu.Lock()
	sum := s.summary
	s.readers = append(s.readers, sink)
	s.mu.Unlock()
	sink(sum, true)
	<-ctx.Done()
	return ctx.Err()
}

func (s of) FollowNodes(ctx context.Context, t *Tracker) error {
	s.mu.Lock()
	s.tracker = t
	t.BeginNodes()
	for node, incarnation := range s.alive {
		t.Node(node, incarnation)
	}
	t.ReachNodes(cluster.Point{Cluster: 1, Revision: s.revision})
	s.mu.Unlock()
	<-ctx.Done()
	return ctx.Err()
}

func (s of) FollowReports(ctx context.Context, t *Tracker) error {
	s.mu.Lock()
	t.BeginReports()
	for node, r := range s.reports {
		t.Report(node, r, s.revision)
	}
	t.ReachReports(cluster.Point{Cluster: 1, Revision: s.revision})
	s.mu.Unlock()
	<-ctx.Done()
	return ctx.Err()
}

// join gives a node a lease.
func (s *store) join(node string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	s.alive[node] = "i-" + node
	if s.tracker != nil {
		s.tracker.Node(node, "i-"+node)
		s.tracker.ReachNodes(cluster.Point{Cluster: 1, Revision: s.revision})
	}
}

// leave ends it.
func (s *store) leave(node string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.revision++
	delete(s.alive, node)
	if s.tracker != nil {
		s.tracker.NodeGone(node)
		s.tracker.ReachNodes(cluster.Point{Cluster: 1, Revision: s.revision})
	}
}

// member is a Node whose state a test sets.
type member struct {
	mu        sync.Mutex
	at        int64
	wants     int64
	confirmed Summary
	size      int
}

func (m *member) Applied() cluster.Point {
	m.mu.Lock()
	defer m.mu.Unlock()
	return cluster.Point{Cluster: 1, Revision: m.at}
}

func (m *member) Wants() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.confirmed.Revision >= m.wants {
		return 0
	}
	return m.wants
}

func (m *member) Nodes() int { return m.size }

func (m *member) SetConfirmed(s Summary) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.confirmed = s
}

func (m *member) set(at, wants int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.at, m.wants = at, wants
}

func (m *member) has() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.confirmed.Revision
}

// startAll starts an exchange for each node; the first one collects.
func startAll(t *testing.T, s *store, names ...string) map[string]*member {
	t.Helper()
	all := map[string]*member{}
	for i, name := range names {
		m := &member{size: len(names)}
		all[name] = m
		s.join(name)
		e := New(Options{Store: of{s, name}, Node: m, Incarnation: "i-" + name, Rest: rest, Log: log.Discard()})
		go e.Run(t.Context()) //nolint:errcheck // nil
		e.Lead(i == 0)
	}
	synctest.Wait()
	return all
}

// TestRemovalThatAllNodesConfirmIsKnownSoon: nodes report only on request. After a request, every node reports once, at
// a random time, and the requesting node knows the result in less than a minute.
func TestRemovalThatAllNodesConfirmIsKnownSoon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		var names []string
		for i := range 40 {
			names = append(names, fmt.Sprint("n", i))
		}
		all := startAll(t, s, names...)
		time.Sleep(time.Hour)
		if writes, summary := s.state(); len(writes) > 0 || summary != (Summary{}) {
			t.Fatalf("%d reports and %+v while no node asks", len(writes), summary)
		}
		for _, m := range all {
			m.set(30, 0)
		}
		all["n7"].set(30, 30)
		began := time.Now()
		for all["n7"].has() < 30 && time.Since(began) < time.Hour {
			time.Sleep(time.Second)
		}
		if took := time.Since(began); took > time.Minute {
			t.Errorf("known after %s", took)
		}
		moments := map[time.Time]int{}
		synctest.Wait()
		writes, _ := s.state()
		for _, w := range writes {
			moments[w]++
		}
		// The requesting node may have withdrawn its request already.
		if n := len(writes); n != len(names) && n != len(names)+1 || len(moments) < 5 {
			t.Errorf("%d reports of %d nodes at %d moments", len(writes), len(names), len(moments))
		}
		time.Sleep(time.Hour)
		if writes, summary := s.state(); len(writes) != len(names)+1 || summary.Wanted != 0 {
			t.Errorf("%d reports after the node has asked no more, %+v", len(writes), summary)
		}
	})
}

// TestReportsOfManyNodesAreSpread: each node reports once, within nodes/50 seconds.
func TestReportsOfManyNodesAreSpread(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		all := startAll(t, s, "a", "b")
		for _, m := range all {
			m.size = 5000
		}
		latest := time.Duration(0)
		for round := range int64(40) {
			time.Sleep(rest)
			for _, m := range all {
				m.set(100+round, 0)
			}
			all["b"].set(100+round, 100+round)
			began := time.Now()
			for all["b"].has() < 100+round && time.Since(began) < time.Hour {
				time.Sleep(time.Second)
			}
			latest = max(latest, time.Since(began))
		}
		if latest < 60*time.Second || latest > 130*time.Second {
			t.Errorf("the last report came after %s, want up to 100 s and two summaries", latest)
		}
	})
}

// TestNodeThatMayHaveMappingsHoldsConfirmationsUp: a node that lags delays confirmations for ever. A node that has just
// lost its lease delays them until it trusts no mapping any more.
func TestNodeThatMayHaveMappingsHoldsConfirmationsUp(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(s *store, all map[string]*member)
		// until is the time for which the removal is not confirmed; 0: for ever.
		until time.Duration
	}{
		{"lags", func(*store, map[string]*member) {}, 0},
		{"is cut off", func(s *store, _ map[string]*member) { s.leave("c") }, rest},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newStore()
				all := startAll(t, s, "a", "b", "c")
				time.Sleep(time.Hour)
				all["a"].set(50, 50)
				all["b"].set(50, 0)
				all["c"].set(49, 0)
				c.do(s, all)
				began := time.Now()
				for all["a"].has() < 50 && time.Since(began) < 24*time.Hour {
					time.Sleep(time.Second)
				}
				took := time.Since(began)
				switch {
				case c.until == 0 && all["a"].has() >= 50:
					t.Errorf("confirmed after %s", took)
				case c.until != 0 && (took < c.until || took > c.until+time.Minute):
					t.Errorf("confirmed after %s, want %s", took, c.until)
				}
			})
		})
	}
}

// TestMachineOfTheSameNameConfirmsForItselfAlone: the report of the machine that now owns the name does not confirm
// anything for the machine that owned it before.
func TestMachineOfTheSameNameConfirmsForItselfAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := NewTracker(rest)
		at := func(revision int64) {
			tr.ReachNodes(cluster.Point{Cluster: 1, Revision: revision})
			tr.ReachReports(cluster.Point{Cluster: 1, Revision: revision})
		}
		tr.BeginNodes()
		tr.Node("c", "first")
		tr.BeginReports()
		at(10)
		time.Sleep(time.Hour)
		tr.Report("c", Report{Incarnation: "first", Cluster: 1, Revision: 20}, 21)
		tr.Node("c", "second")
		tr.Report("c", Report{Incarnation: "second", Cluster: 1, Revision: 50}, 51)
		at(60)
		if s := tr.Summary(); s.Revision != 20 {
			t.Errorf("%+v while the first machine may have mappings", s)
		}
		time.Sleep(rest)
		if s := tr.Summary(); s.Revision != 50 {
			t.Errorf("%+v later", s)
		}
	})
}

// TestNothingIsConfirmedBeforeLeasesAreKnown: a new collecting node, or one whose watch has a gap, does not know which
// nodes lost their leases recently. Reports from before a rebuild of the store are not valid.
func TestNothingIsConfirmedBeforeLeasesAreKnown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := NewTracker(rest)
		at := cluster.Point{Cluster: 1, Revision: 60}
		listing := func() {
			tr.BeginNodes()
			tr.Node("a", "i")
			tr.ReachNodes(at)
		}
		reports := func() {
			tr.BeginReports()
			tr.Report("a", Report{Incarnation: "i", Cluster: 1, Revision: 50}, 60)
			tr.ReachReports(at)
		}
		check := func(when string, want int64) {
			t.Helper()
			if s := tr.Summary(); s.Revision != want {
				t.Errorf("%s: %+v, want %d", when, s, want)
			}
		}
		check("at the start", 0)
		listing()
		check("without reports", 0)
		reports()
		check("at once", 0)
		time.Sleep(rest - time.Second)
		check("before the time", 0)
		time.Sleep(time.Second)
		check("after it", 50)
		listing()
		check("after a gap", 0)
		time.Sleep(rest)
		check("later", 50)
		tr.Report("a", Report{Incarnation: "i", Cluster: 1, Revision: 90}, 70)
		check("a report about revisions that the store does not have", 50)
		at = cluster.Point{Cluster: 2, Revision: 200}
		tr.BeginNodes()
		tr.Node("a", "i")
		tr.ReachNodes(at)
		tr.BeginReports()
		tr.Report("a", Report{Incarnation: "i", Cluster: 1, Revision: 50}, 100)
		tr.ReachReports(at)
		time.Sleep(rest)
		check("a report about the former store", 0)
	})
}

// TestDeniedReportIsNamed: Err returns the missing grant of a role of an earlier version, until the role has it.
func TestDeniedReportIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newStore()
		s.denies = true
		m := &member{at: 50, wants: 50}
		e := New(Options{Store: of{s, "a"}, Node: m, Incarnation: "i-a", Rest: rest, Log: log.Discard()})
		go e.Run(t.Context()) //nolint:errcheck // nil
		time.Sleep(time.Minute)
		if err := e.Err(); !errors.Is(err, ErrDenied) {
			t.Errorf("%v", err)
		}
		s.mu.Lock()
		s.denies = false
		s.mu.Unlock()
		time.Sleep(time.Minute)
		if err := e.Err(); err != nil {
			t.Errorf("after the grant: %v", err)
		}
	})
}
