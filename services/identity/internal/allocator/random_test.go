// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

// TestRandomLivesEndWithWhatIsHeld runs random operations on three nodes and compares the result with a map from holder
// to label set.
func TestRandomLivesEndWithWhatIsHeld(t *testing.T) {
	for seed := range uint64(12) {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { randomLife(t, rand.New(rand.NewPCG(seed, 1))) })
	}
}

func randomLife(t *testing.T, r *rand.Rand) {
	const nodes, holders, sets, steps = 3, 4, 5, 80
	f := storetest.NewFake()
	cfg := quick()
	cfg.Grace = 0 // whatever may be collected is
	var all [nodes]*node
	var want [nodes]map[string]string // holder → set
	for i := range nodes {
		all[i] = start(t, f.Node(fmt.Sprint(i)), &memory{}, cfg)
		all[i].connected()
		want[i] = map[string]string{}
	}
	down := false
	for range steps {
		i := r.IntN(nodes)
		n, holder, set := all[i], fmt.Sprint("c", r.IntN(holders)), fmt.Sprint("app", r.IntN(sets))
		switch what := r.IntN(20); {
		case what < 9:
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			if !down {
				cancel()
				ctx, cancel = context.WithTimeout(t.Context(), servicetest.Patience)
			}
			id, err := n.Hold(ctx, allocator.EndpointHolder(holder, "eth0"), storetest.Labels(t, set), true)
			cancel()
			switch {
			case err == nil:
				want[i][holder] = set
				if id.Labels.Text() != storetest.Labels(t, set).Text() {
					t.Fatalf("node %d holds %s and is answered %s", i, set, id)
				}
			case !down || !errors.Is(err, allocator.ErrUnavailable) && !errors.Is(err, context.DeadlineExceeded):
				t.Fatalf("node %d holds %s (store down: %t): %v", i, set, down, err)
			}
		case what < 14:
			number := n.release(holder)
			if _, held := want[i][holder]; held != (number != 0) {
				t.Fatalf("node %d releases %s: %d, held %t", i, holder, number, held)
			}
			delete(want[i], holder)
		case what < 15:
			f.Expire(fmt.Sprint(i))
		case what < 16:
			f.Compact()
		case what < 18:
			if down = !down; down {
				f.Down()
			} else {
				f.Up()
			}
		default: // a new process with the same state
			n.stop()
			all[i] = start(t, f.Node(fmt.Sprint(i)), n.records, cfg)
		}
	}
	f.Up()
	numbers := map[string]identity.Numeric{}
	for i, n := range all {
		n.settled()
		held := map[identity.Numeric]bool{}
		for holder, set := range want[i] {
			number := n.hold(holder, set)
			held[number] = true
			if other, ok := numbers[set]; ok && other != number {
				t.Errorf("%s is %d and %d", set, other, number)
			}
			numbers[set] = number
		}
		n.refersTo(slices.Collect(maps.Keys(held))...)
		if got := n.records.holders(); len(got) != len(want[i]) {
			t.Errorf("node %d: records %v, want holders %v", i, got, want[i])
		}
	}
	unique := map[identity.Numeric]bool{}
	for _, n := range numbers {
		unique[n] = true
	}
	if len(unique) != len(numbers) {
		t.Errorf("numbers %v are not unique", numbers)
	}
	// No held identity was collected, and in the end no other identities remain.
	servicetest.Eventually(t, "only what is held is left", func() bool {
		for _, n := range all {
			if n.Summary().Known != len(numbers) {
				return false
			}
		}
		return true
	})
}
