// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package confirmed

import (
	"sync"
	"time"

	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// machine identifies a node with a particular state directory.
type machine struct{ node, incarnation string }

// Tracker tracks which nodes had a lease recently, and the revisions that they have confirmed. Only the collector uses
// it.
type Tracker struct {
	// rest is how long the confirmation of a node is still required after its lease has ended. The tracker must
	// also watch the leases for this time before it publishes a revision.
	rest time.Duration

	mu sync.Mutex
	// guarded by mu; time since which leases are watched without a gap; zero: they are not watched
	since    time.Time
	nodesAt  cluster.Point         // guarded by mu; point up to which the leases are known
	alive    map[string]string     // guarded by mu; node → incarnation
	listing  map[string]string     // guarded by mu; the leases of a listing that is not complete
	gone     map[machine]time.Time // guarded by mu; time at which the lease ended
	reported cluster.Point         // guarded by mu; point up to which the reports are known; zero: unknown
	reports  map[string]Report     // guarded by mu; by node
	// guarded by mu; the highest revision that a machine has confirmed in the cluster of nodesAt
	has map[machine]int64
}

// NewTracker returns a tracker that publishes no revision before it has watched for rest.
func NewTracker(rest time.Duration) *Tracker {
	return &Tracker{
		rest: rest, alive: map[string]string{}, gone: map[machine]time.Time{}, reports: map[string]Report{},
		has: map[machine]int64{},
	}
}

// BeginNodes begins a listing of the leases and discards the earlier ones.
func (t *Tracker) BeginNodes() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.since, t.nodesAt, t.listing = time.Time{}, cluster.Point{}, map[string]string{}
}

// Node records the lease of a node.
func (t *Tracker) Node(node, incarnation string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.listing != nil {
		t.listing[node] = incarnation
		return
	}
	if was, ok := t.alive[node]; ok && was != incarnation {
		t.gone[machine{node, was}] = time.Now()
	}
	t.alive[node] = incarnation
	delete(t.gone, machine{node, incarnation})
}

// NodeGone records the end of a lease.
func (t *Tracker) NodeGone(node string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if was, ok := t.alive[node]; ok {
		t.gone[machine{node, was}] = time.Now()
		delete(t.alive, node)
	}
}

// ReachNodes sets the point up to which leases are known. It completes a listing.
func (t *Tracker) ReachNodes(at cluster.Point) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.listing != nil {
		t.alive, t.listing = t.listing, nil
		clear(t.gone) // none of these ended less than rest ago when the tracker publishes a revision
		clear(t.has)
		t.since = time.Now()
		t.nodesAt = at
		for node, r := range t.reports {
			t.confirm(node, r)
		}
	}
	t.nodesAt = at
}

// BeginReports begins a listing of the reports.
func (t *Tracker) BeginReports() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reported = cluster.Point{}
	clear(t.reports)
}

// Report records the report of a node, which was written at a revision of the store.
func (t *Tracker) Report(node string, r Report, revision int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r.Revision > revision || r.Revision < 0 || r.Wants > revision || r.Wants < 0 {
		delete(t.reports, node) // the report refers to another history of the store
		return
	}
	t.reports[node] = r
	t.confirm(node, r)
}

// confirm records the confirmation of a machine. Called with mu held.
func (t *Tracker) confirm(node string, r Report) {
	if m := (machine{node, r.Incarnation}); r.Cluster == t.nodesAt.Cluster {
		t.has[m] = max(t.has[m], r.Revision)
	}
}

// ReportGone records the removal of a report. Earlier confirmations of the node remain valid.
func (t *Tracker) ReportGone(node string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.reports, node)
}

// ReachReports sets the point up to which reports are known.
func (t *Tracker) ReachReports(at cluster.Point) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reported = at
}

// Summary returns the summary to publish. It has no revision while the recent leases are unknown, or if one of their
// nodes has not confirmed any revision.
func (t *Tracker) Summary() Summary {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := Summary{Cluster: t.nodesAt.Cluster}
	if t.nodesAt.Revision == 0 || t.reported.Revision == 0 || t.reported.Cluster != t.nodesAt.Cluster {
		return s
	}
	for node := range t.alive {
		if r := t.reports[node]; r.Cluster == s.Cluster {
			s.Wanted = max(s.Wanted, r.Wants)
		}
	}
	now := time.Now()
	if t.since.IsZero() || now.Sub(t.since) < t.rest {
		return s
	}
	// A node that gets its lease later also lists the store later, so it never sees mappings that were removed before.
	s.Revision = min(t.nodesAt.Revision, t.reported.Revision)
	for node, incarnation := range t.alive {
		s.Revision = min(s.Revision, t.has[machine{node, incarnation}])
	}
	for m, at := range t.gone {
		if now.Sub(at) >= t.rest {
			delete(t.gone, m)
			delete(t.has, m)
			continue
		}
		s.Revision = min(s.Revision, t.has[m])
	}
	for m := range t.has {
		_, gone := t.gone[m]
		if !gone && t.alive[m.node] != m.incarnation && t.reports[m.node].Incarnation != m.incarnation {
			delete(t.has, m)
		}
	}
	return s
}
