// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package confirmed

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// The rules of a cluster as a random test plays them. All nodes share one address after the other of node 0.
const (
	stale  = rest - time.Minute // time after which a node without contact to the store no longer trusts its mappings
	probed = 5 * time.Second    // time between two probes of a node
)

// reader is a node that may have old mappings.
type reader struct {
	name        string
	incarnation string
	connected   bool  // the watch of the node delivers changes
	lagging     bool  // the datapath of the node does not apply the changes
	watched     int64 // the service has received all changes up to this revision
	applied     int64 // the kernel has all changes up to this revision
	saved       int64 // the disk has all changes up to this revision; a restart returns to it
	heard       time.Time
	lease       time.Time // when the node's lease ends, unless it is renewed
	leased      bool      // etcd has the node's lease
}

// believes reports whether a node that has not received a removal still uses the mapping. The owner of the address is
// connected to etcd, and has reported that in its answers to probes.
func (n *reader) believes(removed int64, now time.Time, ownerHears bool) bool {
	return n.applied < removed && (now.Sub(n.heard) < stale || !ownerHears)
}

// TestNoNodeBelievesTheMappingOfAReusedAddress: nodes are cut off, lag, restart, lose their state to an older one on
// the disk, and are replaced by other nodes with the same name; the collecting node changes, too. Whenever node 0 may
// reuse an address, no other node trusts the former mapping of the address.
func TestNoNodeBelievesTheMappingOfAReusedAddress(t *testing.T) {
	byTime, byConfirmation := 0, 0
	for seed := range uint64(60) {
		synctest.Test(t, func(t *testing.T) {
			c, r := play(t, seed)
			byTime, byConfirmation = byTime+c, byConfirmation+r
		})
		if t.Failed() {
			return
		}
	}
	if byTime == 0 || byConfirmation == 0 {
		t.Errorf("addresses were reused %d times after their time and %d times when all had confirmed",
			byTime, byConfirmation)
	}
}

func play(t *testing.T, seed uint64) (byTime, byConfirmation int) {
	rng := rand.New(rand.NewPCG(seed, 34))
	revision := int64(1)
	tracker := NewTracker(rest)
	var published int64
	var nodes []*reader
	at := func() cluster.Point { return cluster.Point{Cluster: 1, Revision: revision} }
	listed := func() { // a collecting node begins
		tracker = NewTracker(rest)
		tracker.BeginNodes()
		for _, n := range nodes {
			if n.leased {
				tracker.Node(n.name, n.incarnation)
			}
		}
		tracker.BeginReports()
		tracker.ReachNodes(at())
		tracker.ReachReports(at())
	}
	join := func(n *reader) {
		revision++
		n.leased, n.lease = true, time.Now().Add(time.Minute)
		tracker.Node(n.name, n.incarnation)
	}
	for i := range 4 {
		n := &reader{
			name: fmt.Sprint("n", i), incarnation: "first", connected: true, watched: revision, applied: revision,
			saved: revision, heard: time.Now(),
		}
		nodes = append(nodes, n)
		join(n)
	}
	listed()
	removed, removedAt := int64(0), time.Now()
	owner := nodes[0]
	silentUntil := time.Now() // the owner has been cut off until then
	for range 4000 {
		time.Sleep(probed)
		now := time.Now()
		n := nodes[rng.IntN(len(nodes))]
		switch rng.IntN(60) {
		case 0, 1:
			n.connected = !n.connected
		case 2, 3:
			n.lagging = !n.lagging
		case 4: // its process restarts with the mappings of its disk, whose age it does not know
			n.watched = min(n.watched, n.saved)
		case 5: // the machine reboots: it is cut off until it hears from the store
			n.watched, n.applied, n.heard = n.saved, n.saved, time.Time{}
		case 6: // another machine takes the name of the node, and the former machine continues to run
			if n != owner && !n.connected && !n.leased && len(nodes) < 8 {
				other := &reader{
					name: n.name, incarnation: fmt.Sprint("later-", len(nodes)), connected: true, watched: revision,
					applied: revision, saved: revision, heard: now,
				}
				n.name, n.connected = n.name+" "+n.incarnation, false // if it comes back, by another name
				nodes = append(nodes, other)
				join(other)
			}
		case 7:
			if rng.IntN(6) == 0 {
				listed()
			}
		}
		for _, n := range nodes {
			if n.connected {
				n.watched = revision
				if n.lease = now.Add(time.Minute); !n.leased {
					join(n)
				}
				if !n.lagging { // a node whose kernel lags counts as one that has not heard
					n.applied, n.heard = n.watched, now
				}
				if rng.IntN(3) == 0 {
					n.saved = n.applied
				}
				if rng.IntN(3) == 0 { // the node reports the revision that both its kernel and its disk have
					revision++
					tracker.Report(n.name, Report{
						Incarnation: n.incarnation, Cluster: 1, Revision: min(n.applied, n.saved),
					}, revision)
				}
			} else if n.leased && now.After(n.lease) {
				revision++
				n.leased = false
				tracker.NodeGone(n.name)
			}
		}
		if rng.IntN(2) == 0 { // the watches of the collecting node may be late
			tracker.ReachNodes(at())
			tracker.ReachReports(at())
		}
		published = max(published, tracker.Summary().Revision)
		if !owner.connected {
			silentUntil = now
			continue
		}
		if now.Sub(silentUntil) < time.Minute {
			continue
		}
		timeOver, confirmedAll := now.Sub(removedAt) >= rest, published >= removed
		if removed == 0 || timeOver || confirmedAll {
			for _, n := range nodes {
				if removed != 0 && n != owner && n.believes(removed, now, true) {
					t.Fatalf("seed %d: %s trusts the mapping removed at %d, by time %t, by confirmation %t (published %d): %+v",
						seed, n.name, removed, timeOver, confirmedAll, published, *n)
				}
			}
			switch {
			case removed == 0:
			case confirmedAll && !timeOver:
				byConfirmation++
			default:
				byTime++
			}
			revision++ // the next endpoint has it, and ends at once
			removed, removedAt = revision, now
		}
	}
	return byTime, byConfirmation
}
