// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
)

// TestHoldingsAndRecordsAgreeAfterAnyChanges compares both indexes with each other and with the records that were
// written for them.
func TestHoldingsAndRecordsAgreeAfterAnyChanges(t *testing.T) {
	ids := make([]identity.Identity, 4)
	for i := range ids {
		n := identity.MinCluster + identity.Numeric(i)
		ids[i] = identity.Identity{Number: n, Labels: inNamespace(t, "a", fmt.Sprint(i))}
	}
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 1))
		s, records := newHoldings(), map[Holder]HolderRecord{}
		save := func(fails bool) {
			put, drop := s.take()
			if fails {
				s.putBack(put, drop)
				return
			}
			for _, p := range put {
				records[p.Holder] = p
			}
			for _, holder := range drop {
				delete(records, holder)
			}
		}
		for step := range 300 {
			holder := ReferenceHolder(fmt.Sprint(r.IntN(5)))
			id := ids[r.IntN(len(ids))]
			n, held := s.byHolder[holder]
			switch what := r.IntN(10); {
			case what < 4:
				if held && n != id.Number {
					continue
				}
				before := s.has(id.Number)
				if first := s.add(holder, id, int64(step)); first == before {
					t.Fatalf("first holder of %d: %t", id.Number, first)
				}
			case what < 6:
				dropped, ended := s.drop(holder)
				if dropped != n || held && (ended == nil) != s.has(n) {
					t.Fatalf("drop of %s, which holds %d: %d, ended %v", holder, n, dropped, ended)
				}
			case what < 7:
				if held {
					s.describe(holder, Workload{Network: fmt.Sprint(step)})
				}
			case what < 8:
				if held && n != id.Number {
					before := s.has(id.Number)
					holders, first := s.reassign(n, id, int64(step))
					if s.has(n) || first == before || !slices.Contains(holders, holder) {
						t.Fatalf("%d became %d: holders %v, first %t", n, id.Number, holders, first)
					}
				}
			default:
				save(r.IntN(2) == 0)
			}
			count := 0
			for n, h := range s.byNumber {
				if len(h.holders) == 0 {
					t.Fatalf("seed %d, step %d: number %d has no holder", seed, step, n)
				}
				for holder := range h.holders {
					count++
					if s.byHolder[holder] != n {
						t.Fatalf("seed %d, step %d: %s holds %d and %d", seed, step, holder, n, s.byHolder[holder])
					}
				}
			}
			if count != len(s.byHolder) {
				t.Fatalf("seed %d, step %d: %d holders by number, %d in all", seed, step, count, len(s.byHolder))
			}
			for holder := range s.workloads {
				if _, ok := s.byHolder[holder]; !ok {
					t.Fatalf("seed %d, step %d: %s holds nothing and is described", seed, step, holder)
				}
			}
		}
		save(false)
		if len(records) != len(s.byHolder) {
			t.Errorf("seed %d: %d records of %d holders", seed, len(records), len(s.byHolder))
		}
		for holder, rec := range records {
			n := s.byHolder[holder]
			if rec.Identity.Number != n || s.as(n, rec.Identity.Labels) == nil || s.other(n, rec.Identity.Labels) != nil ||
				!rec.Workload.equal(s.workloads[holder]) {
				t.Errorf("seed %d: the record of %s is %+v, and it holds %d", seed, holder, rec, n)
			}
		}
	}
}

func TestReferenceOfAHoldIsTheLatest(t *testing.T) {
	s, web := newHoldings(), identity.Identity{Number: 300, Labels: inNamespace(t, "a", "web")}
	s.add("reference:a", web, 7)
	s.add("reference:b", web, 0)
	s.add("reference:c", web, 5)
	if h := s.as(300, web.Labels); h == nil || h.ref != 7 {
		t.Errorf("hold %+v, want the reference of revision 7", h)
	}
}
