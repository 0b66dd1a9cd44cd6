// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package table

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/port"
)

// list generates n intervals with random borders and different values.
func list(r *rand.Rand, n int) []Interval {
	out := make([]Interval, n)
	step := uint64(1<<32) / uint64(n)
	for i := range out {
		out[i] = Interval{Hi: port.Point(uint64(i+1)*step - 1 - r.Uint64N(step)), Value: MakeValue(uint16(1+i%9), uint16(i+1))}
	}
	out[n-1].Hi = port.Last
	return out
}

func TestSearchFindsTheIntervalAtEveryDepth(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, n := range []int{1, 2, 15, 16, 17, 255, 256, 257, 4095, 4096} {
		l := list(r, n)
		tbl := &Table{}
		b := NewBuilder()
		c, err := b.Class(tbl, l)
		if err != nil {
			t.Fatal(err)
		}
		lo := port.Point(0)
		for i, x := range l {
			for _, q := range []port.Point{lo, x.Hi} {
				if got := tbl.search(c, q); got != x.Value {
					t.Fatalf("%d intervals: at %x %x, want %x (interval %d)", n, q, got, x.Value, i)
				}
			}
			lo = x.Hi + 1
		}
		if got := tbl.Intervals(c); len(got) != n {
			t.Fatalf("%d intervals come back as %d", n, len(got))
		}
		again, err := b.Class(tbl, l)
		if err != nil || again != c {
			t.Fatalf("the same list is class %d, then %d (%v)", c, again, err)
		}
	}
}

func TestTooManyIntervalsAreRefused(t *testing.T) {
	_, err := NewBuilder().Class(&Table{}, list(rand.New(rand.NewPCG(1, 1)), MaxIntervals+1))
	var e *ErrTooLarge
	if !errors.As(err, &e) || e.Got != MaxIntervals+1 || e.Limit != MaxIntervals {
		t.Fatalf("error %v", err)
	}
}

func TestBetterTakesTheLowerNumberOfEachSlot(t *testing.T) {
	a, b := MakeValue(3, NoRest), MakeValue(5, 7)
	if got := a.Better(b); got != MakeValue(3, 7) || got != b.Better(a) || got.Better(Nothing) != got {
		t.Errorf("%x", got)
	}
}

func TestTheLongestPrefixCounts(t *testing.T) {
	var b Prefixes
	set := func(s string, c policytable.Class) {
		b.Set(netip.MustParsePrefix(s), policytable.PrefixClasses{c, c + 1, c + 2})
	}
	set("10.0.0.0/8", 1)
	set("10.1.0.0/16", 4)
	set("10.1.2.3/32", 7)
	set("fd00::/8", 10)
	set("::/0", 13)
	for a, want := range map[string]int{"10.2.0.1": 1, "10.1.0.1": 4, "10.1.2.3": 7, "11.0.0.1": -1, "fd00::1": 10, "2001::1": 13} {
		got, ok := b.Lookup(netip.MustParseAddr(a))
		if ok != (want >= 0) || ok && got != (policytable.PrefixClasses{policytable.Class(want), policytable.Class(want + 1), policytable.Class(want + 2)}) {
			t.Errorf("%s: %v %t, want %d", a, got, ok, want)
		}
	}
	n := 0
	b.All(func(netip.Prefix, policytable.PrefixClasses) { n++ })
	if n != 5 || b.Len() != 5 {
		t.Errorf("%d prefixes, Len %d", n, b.Len())
	}
}

// TestPassOnOneSideDecidesForBoth: the identity side and the address side are evaluated together. A pass rule on one
// side hides Admin rules with higher numbers on the other side, and no other rules.
func TestPassOnOneSideDecidesForBoth(t *testing.T) {
	tbl := &Table{Rules: []policytable.Rule{
		{Action: policytable.Pass, Tier: policytable.Admin},
		{Action: policytable.Allow, Tier: policytable.Admin},
		{Action: policytable.Deny, Tier: policytable.Normal},
		{Action: policytable.Pass, Tier: policytable.Baseline},
		{Action: policytable.Deny, Tier: policytable.Baseline},
	}, Peers: map[policytable.IdentityClass]policytable.Class{}}
	b := NewBuilder()
	class := func(v Value) policytable.Class {
		c, err := b.Class(tbl, []Interval{{port.Last, v}})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	tbl.Flags = HasAddresses
	a := netip.MustParseAddr("192.0.2.1")
	w := Entry{IdentityClass: 1, Known: true, Scope: identity.PeerScopeOutside}
	for _, tc := range []struct {
		who, where Value
		flags      Flags
		want       Verdict
	}{
		{MakeValue(1, NoRest), MakeValue(2, NoRest), 0, Verdict{Action: policytable.Deny, Reason: ByDefault}},
		{MakeValue(1, NoRest), MakeValue(2, NoRest), DefaultAllow, Verdict{Action: policytable.Allow, Reason: ByDefault}},
		{MakeValue(1, 3), MakeValue(2, NoRest), DefaultAllow, Verdict{Action: policytable.Deny, Rule: 3}},
		{MakeValue(2, 3), MakeValue(NoAdmin, NoRest), 0, Verdict{Action: policytable.Allow, Rule: 2}},
		{MakeValue(NoAdmin, 5), MakeValue(NoAdmin, 4), DefaultAllow, Verdict{Action: policytable.Allow, Reason: ByDefault}},
		{MakeValue(NoAdmin, 5), Nothing, DefaultAllow, Verdict{Action: policytable.Deny, Rule: 5}},
	} {
		for _, swap := range []bool{false, true} {
			who, where := tc.who, tc.where
			if swap {
				who, where = where, who
			}
			tbl.Flags = HasAddresses | tc.flags
			tbl.Peers[1] = class(who)
			c := class(where)
			tbl.Address = policytable.PrefixClasses{c, c, c}
			if got := tbl.Lookup(w, a, 0); got != tc.want {
				t.Errorf("%x and %x (%d): %+v, want %+v", who, where, tc.flags, got, tc.want)
			}
		}
	}
}

func TestAnUnknownPeerTakesItsOwnDefault(t *testing.T) {
	tbl := &Table{Rules: []policytable.Rule{{Action: policytable.Deny, Tier: policytable.Normal}, {Action: policytable.Allow, Tier: policytable.Normal}}, Peers: map[policytable.IdentityClass]policytable.Class{0: 9}}
	b := NewBuilder()
	denied, err := b.Class(tbl, []Interval{{port.Last, MakeValue(NoAdmin, 1)}})
	if err != nil {
		t.Fatal(err)
	}
	allowed, err := b.Class(tbl, []Interval{{port.Last, MakeValue(NoAdmin, 2)}})
	if err != nil {
		t.Fatal(err)
	}
	tbl.Default[identity.KindInCluster], tbl.Default[identity.KindUnknown] = allowed, denied
	a := netip.MustParseAddr("192.0.2.1")
	if v := tbl.Lookup(Entry{}, a, 0); v != (Verdict{Action: policytable.Deny, Rule: 1, Reason: ByUnknownIdentity}) {
		t.Errorf("unknown: %+v", v)
	}
	if v := tbl.Lookup(Entry{IdentityClass: 5, Known: true}, a, 0); v.Action != policytable.Allow {
		t.Errorf("known without a row: %+v", v)
	}
}

func TestDefinitionHasEverythingInOrder(t *testing.T) {
	content := &Table{
		Header: Header{
			Flags:   DefaultAllow | HasAddresses,
			Default: [identity.Kinds]policytable.Class{0, 1, 0, 1, 0, 1, 0, 1}, Address: policytable.PrefixClasses{1, 0, 1},
		},
		Rules: []policytable.Rule{{Action: policytable.Pass}, {Action: policytable.Redirect, Tier: policytable.Normal, Proxy: policytable.ProxyHTTP}},
		Peers: map[policytable.IdentityClass]policytable.Class{9: 1, 3: 0, 5: 1},
	}
	b := NewBuilder()
	for _, list := range [][]Interval{
		{{Hi: port.Last, Value: MakeValue(1, 2)}},
		{{Hi: 79, Value: Nothing}, {Hi: 80, Value: MakeValue(NoAdmin, 2)}, {Hi: 90, Value: MakeValue(1, NoRest)}, {Hi: port.Last, Value: Nothing}},
	} {
		if _, err := b.Class(content, list); err != nil {
			t.Fatal(err)
		}
	}
	prefix, hash := netip.MustParsePrefix("fd00::/8"), [32]byte{3, 31: 4}
	content.Prefixes.Set(prefix, policytable.PrefixClasses{0, 1, 0})
	want := policytable.DefineTable{Table: 6, Content: policytable.Table{
		Hash: hash, DefaultAllow: true, HasAddresses: true,
		DefaultClasses: content.Default, AddressClasses: content.Address, Rules: content.Rules,
		Classes:  []policytable.Ranges{{{Last: port.Last, Admin: 1, Rest: 2}}, {{First: 80, Last: 80, Rest: 2}, {First: 81, Last: 90, Admin: 1}}},
		Prefixes: map[netip.Prefix]policytable.PrefixClasses{prefix: {0, 1, 0}},
	}, Peers: []policytable.Row{{IdentityClass: 3}, {IdentityClass: 5, Class: 1}, {IdentityClass: 9, Class: 1}}}
	if got := content.Definition(6, hash); !reflect.DeepEqual(got, want) {
		t.Errorf("the table is\n%+v, want\n%+v", got, want)
	}
	if got := content.Ranges(1); !reflect.DeepEqual(got, want.Content.Classes[1:]) {
		t.Errorf("from class 1 on: %v", got)
	}
}
