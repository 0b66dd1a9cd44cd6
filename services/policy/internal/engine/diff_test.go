// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/services/policy/internal/identity"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// Diff names exactly the connections whose verdict differs after the change.
func TestDiffNamesExactlyWhatChanges(t *testing.T) {
	t.Parallel()
	w := seeded(t, 61)
	same, different := 0, 0
	for range 400 / thoroughness {
		s := w.draw()
		for n, id := range s.identities { // the world is anywhere
			if id.Scope == identity.ScopeOutside {
				for _, a := range w.addrs[n] {
					delete(s.located, a)
				}
			}
		}
		next := s.clone()
		var upsert []policy.Object
		var remove []policy.Key
		if keys := sortedObjects(s.objects); len(keys) > 0 && w.chance(50) {
			remove = append(remove, pickOne(w, keys...))
			delete(next.objects, remove[0])
		}
		if w.chance(70) {
			o := w.policy("new")
			upsert = append(upsert, o)
			next.objects[o.Key] = o
		}
		e, after := fresh(t, configs[0], s), fresh(t, configs[0], next)
		list, err := e.Diff(upsert, remove)
		if err != nil {
			t.Fatal(err)
		}
		type where struct {
			subject   identity.Numeric
			direction rule.Direction
			place     Place
		}
		changes := make(map[where][]Changed)
		for _, d := range list {
			for _, p := range d.Places {
				changes[where{d.Subject, d.Direction, p}] = d.Changes
			}
		}
		for range 200 {
			q, ok := w.question(s)
			if !ok {
				break
			}
			id, known := s.identities[q.peer]
			if !known {
				continue
			}
			place := Place{Peer: q.peer}
			if id.Scope == identity.ScopeOutside {
				if id.Kind == identity.KindWorld4 && !q.addr.Is4() || id.Kind == identity.KindWorld6 && q.addr.Is4() {
					continue
				}
				place.Block = narrowest(q, e, after)
			} else {
				q.addr = pickOne(w, w.addrs[q.peer]...)
				place.Block = netip.PrefixFrom(q.addr, q.addr.BitLen())
			}
			x, _ := e.Lookup(q.subject, q.direction, q.peer, q.addr, q.point)
			y, _ := after.Lookup(q.subject, q.direction, q.peer, q.addr, q.point)
			want := x.Action != y.Action || x.Proxy != y.Proxy
			got := slices.ContainsFunc(changes[where{q.subject, q.direction, place}], func(c Changed) bool {
				return c.Ports.Contains(q.point) && c.Before == x && c.After == y
			})
			if got != want {
				t.Fatalf("%+v at %+v: %+v and %+v, in the difference: %t\n%v", q, place, x, y, got, changes[where{q.subject, q.direction, place}])
			}
			if want {
				different++
			} else {
				same++
			}
		}
		sameAsFresh(t, configs[0], s, e, "after Diff")
	}
	if same < 100 || different < 100 {
		t.Fatalf("%d questions had the same answer, %d another", same, different)
	}
}

// narrowest is the narrowest block with the address in either engine.
func narrowest(q question, engines ...*Engine) (best netip.Prefix) {
	for _, e := range engines {
		b, _ := e.Bound(q.subject, q.direction)
		if b.Table == nil {
			continue
		}
		b.Table.Blocks.All(func(p netip.Prefix, _ [identity.Scopes]table.Class) {
			if p.Contains(q.addr) && (!best.IsValid() || p.Bits() > best.Bits()) {
				best = p
			}
		})
	}
	return best
}
