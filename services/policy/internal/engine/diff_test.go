// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/test/scenario"
)

// TestDiffNamesExactlyWhatChanges: Diff returns exactly the connections whose verdict changes.
func TestDiffNamesExactlyWhatChanges(t *testing.T) {
	t.Parallel()
	w := seeded(t, 61)
	same, different := 0, 0
	for range runs(t, 400) {
		s := w.Draw()
		for n, id := range s.Identities { // the identity "world" may have any address
			if id.Scope == identity.PeerScopeOutside {
				for _, a := range w.Addrs[n] {
					delete(s.Located, a)
				}
			}
		}
		next := s.Clone()
		var upsert []policy.Object
		var remove []policy.Key
		if keys := scenario.SortedObjects(s.Objects); len(keys) > 0 && w.Chance(50) {
			remove = append(remove, scenario.Pick(w, keys...))
			delete(next.Objects, remove[0])
		}
		if w.Chance(70) {
			o := w.Policy("new")
			upsert = append(upsert, o)
			next.Objects[o.Key] = o
		}
		e, after := fresh(t, configs[0], s), fresh(t, configs[0], next)
		list, err := differences(e, upsert, remove)
		if err != nil {
			t.Fatal(err)
		}
		type where struct {
			subject   identity.Numeric
			direction policytable.Direction
			place     Place
		}
		changes := make(map[where][]Changed)
		for _, d := range list {
			for _, p := range d.Places {
				changes[where{d.Subject, d.Direction, p}] = d.Changes
			}
		}
		for range 200 {
			q, ok := w.Question(s)
			if !ok {
				break
			}
			id, known := s.Identities[q.Peer]
			if !known {
				continue
			}
			place := Place{Peer: q.Peer}
			if id.Scope == identity.PeerScopeOutside {
				if id.Kind == identity.KindWorld4 && !q.Addr.Is4() || id.Kind == identity.KindWorld6 && q.Addr.Is4() {
					continue
				}
				place.Prefix = narrowest(q, e, after)
			} else {
				q.Addr = scenario.Pick(w, w.Addrs[q.Peer]...)
				place.Prefix = netip.PrefixFrom(q.Addr, q.Addr.BitLen())
			}
			x, _ := e.Lookup(q.Subject, q.Direction, q.Peer, q.Addr, q.Point)
			y, _ := after.Lookup(q.Subject, q.Direction, q.Peer, q.Addr, q.Point)
			want := x.Action != y.Action || x.Proxy != y.Proxy
			got := slices.ContainsFunc(changes[where{q.Subject, q.Direction, place}], func(c Changed) bool {
				return c.Ports.Contains(q.Point) && c.Before == x && c.After == y
			})
			if got != want {
				t.Fatalf("%+v at %+v: %+v and %+v, in the difference: %t\n%v", q, place, x, y, got, changes[where{q.Subject, q.Direction, place}])
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
		t.Fatalf("%d queries with the same answer, %d with another, want >= 100 of each", same, different)
	}
}

// narrowest returns the narrowest prefix that contains the address in either engine.
func narrowest(q scenario.Question, engines ...*Engine) (best netip.Prefix) {
	for _, e := range engines {
		b, _ := e.Bound(q.Subject, q.Direction)
		if b.Table == nil {
			continue
		}
		b.Table.Prefixes.All(func(p netip.Prefix, _ [identity.PeerScopes]policytable.Class) {
			if p.Contains(q.Addr) && (!best.IsValid() || p.Bits() > best.Bits()) {
				best = p
			}
		})
	}
	return best
}

func differences(e *Engine, upsert []policy.Object, remove []policy.Key) (out []Difference, err error) {
	c, err := e.Draft().Diff(upsert, remove)
	if err != nil {
		return nil, err
	}
	err = c.Each(func(d Difference) error { out = append(out, d); return nil })
	return out, err
}
