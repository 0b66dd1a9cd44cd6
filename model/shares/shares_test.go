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

func at(second int) Order {
	return Order{Created: time.Unix(int64(second), 0), Name: fmt.Sprint(second)}
}

func some(t Tenant, n, units, from int) []Ask {
	var out []Ask
	for i := range n {
		out = append(out, Ask{Tenant: t, Order: at(from + i), Units: units})
	}
	return out
}

func TestDivide(t *testing.T) {
	a, b, c := Labelled("a"), Labelled("b"), Namespace("c")
	for _, tt := range []struct {
		name     string
		asks     []Ask
		settings Settings
		used     map[Tenant]int
		want     map[Tenant]int
	}{
		{
			name: "everything fits",
			asks: slices.Concat(some(a, 40, 1, 0), some(c, 50, 1, 0)),
			want: map[Tenant]int{a: 40, c: 50},
		},
		{name: "a tenth is kept for system", asks: some(c, 100, 1, 0), want: map[Tenant]int{c: 90}},
		{
			name: "system has up to half",
			asks: slices.Concat(some(System, 80, 1, 0), some(a, 100, 1, 0)),
			want: map[Tenant]int{System: 75, a: 25},
		},
		{
			name: "system beyond half competes as a labelled tenant",
			asks: slices.Concat(some(System, 100, 1, 0), some(a, 100, 1, 0), some(c, 100, 1, 0)),
			want: map[Tenant]int{System: 62, a: 13, c: 25},
		},
		{
			name: "a tenant that asks for little gets it",
			asks: slices.Concat(some(a, 1000, 1, 0), some(b, 10, 1, 9000)),
			want: map[Tenant]int{a: 80, b: 10},
		},
		{
			name: "each group gets half",
			asks: slices.Concat(some(a, 1000, 1, 0), some(c, 1000, 1, 0)),
			want: map[Tenant]int{a: 45, c: 45},
		},
		{
			name: "a group leaves unused units to the other",
			asks: slices.Concat(some(a, 10, 1, 0), some(c, 1000, 1, 0)),
			want: map[Tenant]int{a: 10, c: 80},
		},
		{
			name: "an object that is too large is skipped",
			asks: append(some(a, 45, 1, 10), Ask{a, at(0), 60}, Ask{c, at(0), 90}),
			want: map[Tenant]int{a: 45},
		},
		{
			name: "objects larger than the level use the remaining units",
			asks: []Ask{{a, at(1), 50}, {b, at(2), 40}, {Labelled("d"), at(0), 95}, {Labelled("d"), at(3), 41}},
			want: map[Tenant]int{a: 50, b: 40},
		},
		{
			name: "a tenant whose oldest object fits nowhere gets the next one",
			asks: []Ask{{a, at(0), 95}, {a, at(1), 60}, {b, at(2), 80}},
			want: map[Tenant]int{a: 60},
		},
		{
			name: "guarantees come first", settings: Settings{Guarantees: map[string]int{"a": 50}},
			asks: slices.Concat(some(a, 100, 1, 0), some(b, 100, 1, 0)),
			want: map[Tenant]int{a: 67, b: 23},
		},
		{
			name: "a namespace has no guarantee by its name", settings: Settings{Guarantees: map[string]int{"c": 80}},
			asks: slices.Concat(some(a, 100, 1, 0), some(c, 100, 1, 0)),
			want: map[Tenant]int{a: 45, c: 45},
		},
		{
			name: "units that earlier divisions left",
			asks: some(a, 100, 1, 0),
			used: map[Tenant]int{System: 20, c: 50},
			want: map[Tenant]int{a: 30},
		},
		{
			name: "the reserve of system is not left over",
			asks: some(a, 100, 1, 0),
			used: map[Tenant]int{c: 90},
			want: map[Tenant]int{},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d := Divide(100, tt.asks, tt.settings, tt.used)
			got := make(map[Tenant]int)
			for i, a := range tt.asks {
				if d.Admitted[i] {
					got[a.Tenant] += a.Units
				}
			}
			for _, who := range []Tenant{System, a, b, c} {
				if got[who] != tt.want[who] || d.Shares[who].Admitted != got[who] {
					t.Errorf("%s has %d (counted as %d), want %d", who, got[who], d.Shares[who].Admitted, tt.want[who])
				}
			}
		})
	}
}

// TestMoreTenantsThanUnits: no tenant has a unit by the level, which is 0. The oldest objects use all units, and a user
// who makes many namespaces takes nothing from those that are older.
func TestMoreTenantsThanUnits(t *testing.T) {
	var asks []Ask
	for i := range 500 {
		asks = append(asks, Ask{Namespace(fmt.Sprint("n", i)), at(i), 1})
	}
	d := Divide(100, asks, Settings{}, nil)
	for i := range asks {
		if d.Admitted[i] != (i < 90) {
			t.Fatalf("object %d is admitted: %t", i, d.Admitted[i])
		}
	}
}

// TestDivideAdmitsTheOldest: a tenant's oldest objects are admitted, whatever the order of the asks.
func TestDivideAdmitsTheOldest(t *testing.T) {
	asks := some(Labelled("a"), 200, 1, 0)
	rand.New(rand.NewPCG(1, 1)).Shuffle(len(asks), func(i, j int) { asks[i], asks[j] = asks[j], asks[i] })
	d := Divide(100, asks, Settings{}, nil)
	for i, a := range asks {
		if want := a.Order.Compare(at(90)) < 0; d.Admitted[i] != want {
			t.Errorf("the object of second %s: admitted %t", a.Order.Name, d.Admitted[i])
		}
	}
}

// TestDivideGuaranteesAFairPart: a tenant gets its demand up to the fair part of its group, whatever other tenants
// ask for and however many namespaces they use.
func TestDivideGuaranteesAFairPart(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	for round := range 200 {
		limit := 1 + r.IntN(5000)
		s := Settings{}
		if r.IntN(3) == 0 {
			s.Guarantees = map[string]int{"t0": 1 + r.IntN(40), "t1": 1 + r.IntN(40)}
		}
		var asks []Ask
		asked := make(map[Tenant]int)
		add := func(who Tenant, n, units int) {
			for range n {
				u := 1 + r.IntN(units)
				asks = append(asks, Ask{who, at(r.IntN(1e6)), u})
				asked[who] += u
			}
		}
		labelled, others, each := r.IntN(5), r.IntN(5), 200
		if r.IntN(8) == 0 {
			others, each = 500, 20
		}
		for i := range labelled {
			add(Labelled(fmt.Sprint("t", i)), r.IntN(200), 1+r.IntN(20))
		}
		for i := range others {
			add(Namespace(fmt.Sprint("n", i)), r.IntN(each), 1+r.IntN(20))
		}
		add(System, r.IntN(200), 1+r.IntN(20))
		d := Divide(limit, asks, s, nil)

		admitted := make(map[Tenant]int)
		sum := 0
		for i, a := range asks {
			if d.Admitted[i] {
				admitted[a.Tenant] += a.Units
				sum += a.Units
			}
		}
		if sum > limit {
			t.Fatalf("round %d: %d units of %d are admitted", round, sum, limit)
		}
		system := min(asked[System], limit/2)
		whole := limit - max(limit/10, system)
		if n := sum - admitted[System]; n > whole {
			t.Fatalf("round %d: tenants have %d of their shared %d", round, n, whole)
		}
		if asked[System] <= limit/2 && admitted[System] != asked[System] {
			t.Fatalf("round %d: system has %d of %d, and the limit is %d", round, admitted[System], asked[System], limit)
		}
		left, groups := whole, [2]int{}
		for who := range asked {
			groups[who.group()]++
			if who.kind == KindLabelled {
				left -= whole * s.Guarantees[who.name] / 100
			}
		}
		for who, n := range asked {
			if who == System {
				continue
			}
			least := left / 2 / groups[who.group()]
			if who.kind == KindLabelled {
				least += whole * s.Guarantees[who.name] / 100
			}
			if n <= least && admitted[who] != n {
				t.Fatalf("round %d: %s has %d of %d, but its fair part of %d is at least %d",
					round, who, admitted[who], n, limit, least)
			}
		}
		slices.Reverse(asks)
		again := Divide(limit, asks, s, nil).Admitted
		slices.Reverse(again)
		if distinct(asks) && !slices.Equal(d.Admitted, again) {
			t.Fatalf("round %d: the result depends on the order of the asks", round)
		}
	}
}

// distinct reports whether all objects have different orders, as real objects do.
func distinct(asks []Ask) bool {
	seen := make(map[Order]bool)
	for _, a := range asks {
		if seen[a.Order] {
			return false
		}
		seen[a.Order] = true
	}
	return true
}

func TestGuaranteesAreChecked(t *testing.T) {
	for _, g := range []map[string]int{{"a": 81}, {"a": 41, "b": 40}, {"a": 0}, {"": 10}, {"a": -5}} {
		if err := (Settings{Guarantees: g}).Validate(); err == nil {
			t.Errorf("%v is taken", g)
		}
	}
	if err := (Settings{Guarantees: map[string]int{"a": 40, "b": 40}}).Validate(); err != nil {
		t.Error(err)
	}
}

func TestTenants(t *testing.T) {
	n := NewTenants(Settings{SystemNamespaces: []string{"sluice-system"}})
	for ns, want := range map[string]Tenant{
		"": System, "kube-system": System, "sluice-system": System, "shop": Namespace("shop"),
	} {
		if got := n.Of(ns); got != want {
			t.Errorf("%q is of %s, want %s", ns, got, want)
		}
	}
	if !n.Set("shop", map[string]string{DefaultTenantLabel: "acme"}) || n.Of("shop") != Labelled("acme") {
		t.Error("the label of a Namespace does not count")
	}
	if n.Set("shop", map[string]string{DefaultTenantLabel: "acme", "x": "y"}) {
		t.Error("another label counts as a change of the tenant")
	}
	if n.Set("kube-system", map[string]string{DefaultTenantLabel: "acme"}) || n.Of("kube-system") != System {
		t.Error("a label takes kube-system away from system")
	}
	if !n.Delete("shop") || n.Of("shop") != Namespace("shop") {
		t.Error("a deleted Namespace keeps its tenant")
	}
	together := NewTenants(Settings{Together: true})
	if together.Of("a") != together.Of("b") {
		t.Error("namespaces without the label are not one tenant")
	}
}

type object struct {
	tenant Tenant
	n      int
}

func put(l *Ledger[object], who Tenant, n, second int, units ...int) bool {
	return l.Put(object{who, n}, Object{Tenant: who, Order: at(second), Units: units})
}

func TestLedger(t *testing.T) {
	a, b := Namespace("a"), Namespace("b")
	l := NewLedger[object](Settings{}, Limit{"policies", 100}, Limit{"bytes", 1000})

	t.Run("before the first listing a tenant has an eighth", func(t *testing.T) {
		for i := range 100 {
			if got := put(l, a, i, i, 1, 1); got != (i < 90/8) {
				t.Fatalf("object %d is admitted: %t", i, got)
			}
		}
		if !put(l, System, 0, 0, 1, 1) || !put(l, b, 0, 500, 1, 1) {
			t.Error("others are refused")
		}
	})
	now := time.Unix(1000, 0)
	t.Run("then by the levels", func(t *testing.T) {
		withdrawn, admitted := l.Level(now)
		if len(withdrawn) != 0 || len(admitted) != 89-90/8 {
			t.Errorf("%d withdrawn and %d admitted, want 0 and %d", len(withdrawn), len(admitted), 89-90/8)
		}
		if !l.Next().IsZero() {
			t.Error("levels are due although nothing has changed")
		}
	})
	t.Run("the tenant that is above its level gives up its newest objects", func(t *testing.T) {
		got := 0
		for i := 1; i < 30; i++ {
			if put(l, b, i, 500+i, 1, 1) {
				got++
			}
		}
		if got != 0 {
			t.Errorf("%d objects that do not fit are admitted", got)
		}
		if want := now.Add(LevelInterval); !l.Next().Equal(want) {
			t.Errorf("levels are due at %s, want %s", l.Next(), want)
		}
		withdrawn, admitted := l.Level(now.Add(LevelInterval))
		if len(admitted) != 29 || len(withdrawn) != 29 {
			t.Errorf("%d withdrawn and %d admitted, want 29 each", len(withdrawn), len(admitted))
		}
		for _, k := range withdrawn {
			if k.tenant != a || k.n < 60 {
				t.Errorf("%v is withdrawn", k)
			}
		}
		limit, who, share, ok := l.Refused(object{a, 99})
		if !ok || limit.Name != "policies" || who != a || share != (Share{Asked: 100, Admitted: 60, Allotment: 60}) {
			t.Errorf("refused by %v of %s, %+v, %t", limit, who, share, ok)
		}
	})
	t.Run("the newest object of system is admitted at once", func(t *testing.T) {
		if !put(l, System, 1, 900, 1, 1) {
			t.Error("it is refused")
		}
	})
	t.Run("an object that another limit refuses uses no units", func(t *testing.T) {
		l := NewLedger[object](Settings{}, Limit{"policies", 100}, Limit{"bytes", 1000})
		for i := range 89 {
			put(l, a, i, i, 1, 100)
		}
		put(l, b, 0, 1000, 80, 1)
		l.Level(now)
		if !l.Admitted(object{b, 0}) {
			t.Error("an object that fits is refused because of demand that is not admitted")
		}
		u := l.Usage()
		if u[0].Used != 80+u[0].Tenants[0].Admitted || u[1].Used > 900 {
			t.Errorf("usage %+v", u)
		}
	})
	t.Run("a full limit does not refuse objects that do not need it", func(t *testing.T) {
		l := NewLedger[object](Settings{}, Limit{"services", 10}, Limit{"slices", 10})
		for i := range 30 {
			put(l, a, i, i, 1, 0)
		}
		for _, again := range []bool{false, true} {
			for i := range 5 {
				put(l, a, 100+i, 100+i, 0, 1)
			}
			if again {
				l.Level(now)
			}
			for i := range 5 {
				if limit, _, _, refused := l.Refused(object{a, 100 + i}); refused && (again || limit.Name == "services") {
					t.Errorf("levels were computed: %t; a slice is refused by the limit of %s", again, limit.Name)
				}
			}
		}
	})
	t.Run("nor does a limit that is exceeded after a restart", func(t *testing.T) {
		l := NewLedger[object](Settings{}, Limit{"services", 10}, Limit{"slices", 10})
		for i := range 20 { // the limit was larger before
			l.Restore(object{a, i}, Object{Tenant: a, Order: at(i), Units: []int{1, 0}}, true)
		}
		if !put(l, a, 100, 100, 0, 1) {
			t.Error("a slice is refused by the limit of services")
		}
	})
	t.Run("local objects get the rest", func(t *testing.T) {
		l := NewLedger[object](Settings{}, Limit{"policies", 100})
		for i := range 80 {
			l.Put(object{a, i}, Object{Tenant: a, Order: at(i), Units: []int{1}})
			l.Put(object{b, i}, Object{Tenant: b, Order: at(i), Units: []int{1}, Local: true})
		}
		l.Level(now)
		if u := l.Usage()[0]; u.Tenants[0].Admitted != 80 || u.Tenants[1].Admitted != 10 {
			t.Errorf("%+v", u.Tenants)
		}
	})
	t.Run("another tenant label counts at the next levels", func(t *testing.T) {
		l := NewLedger[object](Settings{}, Limit{"policies", 100})
		for i := range 100 {
			put(l, a, i, i, 1)
			put(l, b, i, i, 1)
		}
		l.Level(now)
		l.Reassign(func(k object) Tenant {
			if k.tenant == b {
				return Labelled("b")
			}
			return a
		})
		withdrawn, admitted := l.Level(now)
		u := l.Usage()[0]
		if len(withdrawn)+len(admitted) != 0 || u.Tenants[0].Tenant != Labelled("b") || u.Tenants[0].Admitted != 45 {
			t.Errorf("%d withdrawn, %d admitted, %+v", len(withdrawn), len(admitted), u.Tenants)
		}
	})
}

// TestLedgerKeepsItsSums compares the ledger's sums with its objects after random changes.
func TestLedgerKeepsItsSums(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 3))
	l := NewLedger[object](Settings{}, Limit{"x", 300}, Limit{"y", 500})
	tenants := []Tenant{System, Labelled("a"), Labelled("b"), Namespace("c"), Namespace("d")}
	all := make(map[object]Object)
	for step := range 3000 {
		k := object{tenants[r.IntN(len(tenants))], r.IntN(60)}
		switch r.IntN(10) {
		case 0:
			l.Level(time.Unix(int64(step), 0))
		case 1, 2, 3:
			l.Delete(k)
			delete(all, k)
		default:
			o := Object{
				Tenant: k.tenant, Order: at(r.IntN(1e6)), Units: []int{r.IntN(12), r.IntN(12)}, Local: r.IntN(4) == 0,
			}
			l.Put(k, o)
			all[k] = o
		}
		for i, u := range l.Usage() {
			asked, admitted := 0, 0
			for k, o := range all {
				asked += o.Units[i]
				if l.Admitted(k) {
					admitted += o.Units[i]
				}
			}
			if u.Asked != asked || u.Used != admitted || u.Used > u.Limit.Size {
				t.Fatalf("step %d: %s: asked %d, counted %d; used %d, counted %d",
					step, u.Limit.Name, asked, u.Asked, admitted, u.Used)
			}
		}
	}
}
