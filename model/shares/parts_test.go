// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package shares

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestPartsAreDividedAsSingleUnits: an object of n units gets as much as n objects of one unit.
func TestPartsAreDividedAsSingleUnits(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	for range 500 {
		tenants := []Tenant{System, Labelled("a"), Labelled("b"), Namespace("c"), Namespace("d"), Namespace("e")}
		s := Settings{Guarantees: map[string]int{"a": 1 + r.IntN(60)}}
		limit := r.IntN(100)
		var whole, single []Ask
		var of []int
		for i := range r.IntN(12) {
			a := Ask{
				Tenant: tenants[r.IntN(len(tenants))], Units: r.IntN(30),
				Order: Order{Created: time.Unix(int64(r.IntN(5)), 0), Name: fmt.Sprint(i)},
			}
			whole = append(whole, a)
			for n := range a.Units {
				one := a
				one.Units, one.Order.Index = 1, n
				single, of = append(single, one), append(of, i)
			}
		}
		used := map[Tenant]int{Namespace("c"): r.IntN(10)}
		d, parts := DivideParts(limit, whole, s, used)
		e := Divide(limit, single, s, used)
		want := make([]int, len(whole))
		for n, ok := range e.Admitted {
			if ok {
				want[of[n]]++
			}
		}
		if !slices.Equal(parts, want) || d.Levels != e.Levels {
			t.Fatalf("limit %d, used %v, settings %+v:\n%+v\ngot  %v %v\nwant %v %v", limit, used, s, whole, parts, d.Levels,
				want, e.Levels)
		}
	}
}

func order(created int, name string) Order {
	return Order{Created: time.Unix(int64(created), 0), Name: name}
}

// TestPartsKeepWhatTheyHaveUntilTheNextLevel floods a limit with one tenant.
func TestPartsKeepWhatTheyHaveUntilTheNextLevel(t *testing.T) {
	p := NewParts[string](Settings{}, Limit{Name: "frontends", Size: 100})
	flood, shop := Namespace("flood"), Namespace("shop")
	now := time.Unix(1000, 0)
	level := func() {
		t.Helper()
		now = now.Add(LevelInterval)
		if !p.Due(now) {
			t.Fatal("no level is due")
		}
		p.Enforce(p.Plan(now))
		if !p.Next().IsZero() {
			t.Error("a level is due right after a level")
		}
	}
	is := func(k string, want int) {
		t.Helper()
		if got := p.Got(k); got != want {
			t.Errorf("%s has %d units, want %d", k, got, want)
		}
	}
	if got := p.Put("f", Part{Tenant: flood, Order: order(1, "f"), Units: 500}); got != 90/8 {
		t.Errorf("before the first level a tenant gets %d, want an eighth of 90", got)
	}
	p.Put("s", Part{Tenant: shop, Order: order(2, "s"), Units: 5})
	p.Put("dns", Part{Tenant: System, Order: order(3, "dns"), Units: 20})
	is("dns", 20)
	level()
	is("f", 75) // 100 - 20 - 5
	is("s", 5)
	if got := p.Put("s", Part{Tenant: shop, Order: order(2, "s"), Units: 10}); got != 5 {
		t.Errorf("shop gets %d, want its former 5: no units are free", got)
	}
	level()
	is("f", 70)
	is("s", 10)
	p.Put("s", Part{Tenant: shop, Order: order(2, "s"), Units: 4})
	is("s", 4)
	p.Delete("f")
	p.Put("g", Part{Tenant: shop, Order: order(4, "g"), Units: 40})
	is("g", 40)
	p.Try([]string{"g", "h"}, func() {
		p.Delete("g")
		if got := p.Put("h", Part{Tenant: shop, Order: order(4, "h"), Units: 90}); got != 66 { // 70 - 4
			t.Errorf("an object would get %d", got)
		}
	})
	is("g", 40)
	is("h", 0)
	if u := p.Usage(); u.Used != 64 || u.Asked != 64 || p.Refused() != 0 {
		t.Errorf("usage %+v", u)
	}
}

// TestReservedElementsAreSetAside: elements that partly refused objects need are reserved, and not divided.
func TestReservedElementsAreSetAside(t *testing.T) {
	p := NewParts[string](Settings{}, Limit{Name: "frontends", Size: 100})
	flood, shop := Namespace("flood"), Namespace("shop")
	p.Put("f", Part{Tenant: flood, Order: order(1, "f"), Units: 120, Reserved: 12})
	p.Put("s", Part{Tenant: shop, Order: order(2, "s"), Units: 10})
	now := time.Unix(1000, 0)
	p.Enforce(p.Plan(now))
	// 12 are reserved because flood does not get all of its units. A tenth of the other 88 is kept for system.
	if got, shop := p.Got("f"), p.Got("s"); got != 70 || shop != 10 {
		t.Errorf("flood has %d units, shop %d", got, shop)
	}
}

// BenchmarkPlan computes levels for 100,000 objects of 20,000 tenants that ask for twice the limit.
func BenchmarkPlan(b *testing.B) {
	p := NewParts[int](Settings{}, Limit{Name: "backends", Size: 100_000})
	for i := range 100_000 {
		p.Put(i, Part{Tenant: Namespace(fmt.Sprint(i % 20_000)), Order: order(i, fmt.Sprint(i)), Units: 2})
	}
	for b.Loop() {
		p.Plan(time.Unix(1000, 0))
	}
}

// TestWhatSurelyFitsIsAdmitted: whenever SurelyFit returns true, Put admits each unit, in any order. SurelyFit returns
// true for demand far below the limit, because otherwise each call would be attempted twice.
func TestWhatSurelyFitsIsAdmitted(t *testing.T) {
	tenants := []Tenant{Namespace("a"), Namespace("b"), Labelled("c"), System}
	r := rand.New(rand.NewPCG(1, 2))
	sure, not := 0, 0
	for round := range 3000 {
		p := NewParts[int](Settings{}, Limit{Name: "x", Size: 1 + r.IntN(400)})
		l := NewLedger[int](Settings{}, Limit{Name: "x", Size: p.Limit().Size})
		put := func(k int, tenant Tenant, units int) (got int, admitted bool) {
			return p.Put(k, Part{Tenant: tenant, Order: order(k, fmt.Sprint(k)), Units: units}),
				l.Put(k, Object{Tenant: tenant, Order: order(k, fmt.Sprint(k)), Units: []int{units}})
		}
		for k := range r.IntN(20) {
			put(k, tenants[k%4], r.IntN(30))
		}
		if round%2 == 0 {
			p.Enforce(p.Plan(time.Unix(1e9, 0)))
			l.Level(time.Unix(1e9, 0))
		}
		type ask struct{ k, units int }
		var asks []ask
		parts, objects := map[Tenant]int{}, map[Tenant]int{}
		for k := range 40 {
			if r.IntN(8) > 0 {
				continue
			}
			a := ask{k, r.IntN(20)}
			if k < 20 {
				parts[tenants[k%4]] += p.Lacks(k, a.units)
			} else {
				parts[tenants[k%4]] += a.units
				objects[tenants[k%4]] += a.units
			}
			asks = append(asks, a)
		}
		fits, objectsFit := p.SurelyFit(parts), l.SurelyFit(0, objects)
		if fits {
			sure++
		} else {
			not++
		}
		r.Shuffle(len(asks), func(i, j int) { asks[i], asks[j] = asks[j], asks[i] })
		for _, a := range asks {
			if a.k < 20 && objectsFit && !fits {
				continue // only new objects were counted
			}
			got := p.Put(a.k, Part{Tenant: tenants[a.k%4], Order: order(a.k, fmt.Sprint(a.k)), Units: a.units})
			if fits && got < a.units {
				t.Fatalf("round %d: object %d gets %d of %d units", round, a.k, got, a.units)
			}
			if a.k < 20 {
				continue
			}
			admitted := l.Put(a.k, Object{Tenant: tenants[a.k%4], Order: order(a.k, fmt.Sprint(a.k)), Units: []int{a.units}})
			if objectsFit && !admitted {
				t.Fatalf("round %d: object %d of %d units is refused", round, a.k, a.units)
			}
		}
	}
	if sure < 300 || not < 300 {
		t.Errorf("%d cases fit surely and %d do not, want many of both", sure, not)
	}
	p := NewParts[int](Settings{}, Limit{Name: "x", Size: 1000})
	if !p.SurelyFit(map[Tenant]int{Namespace("a"): 100, Labelled("c"): 100}) {
		t.Error("a fifth of an empty limit does not surely fit")
	}
}
