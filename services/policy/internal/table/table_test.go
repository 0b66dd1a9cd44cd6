// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package table

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// list makes n intervals of random borders with values that differ.
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
	set := func(s string, c Class) { b.Set(netip.MustParsePrefix(s), [identity.PeerScopes]Class{c, c + 1, c + 2}) }
	set("10.0.0.0/8", 1)
	set("10.1.0.0/16", 4)
	set("10.1.2.3/32", 7)
	set("fd00::/8", 10)
	set("::/0", 13)
	for a, want := range map[string]int{"10.2.0.1": 1, "10.1.0.1": 4, "10.1.2.3": 7, "11.0.0.1": -1, "fd00::1": 10, "2001::1": 13} {
		got, ok := b.Lookup(netip.MustParseAddr(a))
		if ok != (want >= 0) || ok && got != [identity.PeerScopes]Class{Class(want), Class(want + 1), Class(want + 2)} {
			t.Errorf("%s: %v %t, want %d", a, got, ok, want)
		}
	}
	n := 0
	b.All(func(netip.Prefix, [identity.PeerScopes]Class) { n++ })
	if n != 5 || b.Len() != 5 {
		t.Errorf("%d prefixes, Len %d", n, b.Len())
	}
}

// A pass of one side hides lower Admin rules of the other, and only those.
func TestPassOnOneSideDecidesForBoth(t *testing.T) {
	tbl := &Table{Rules: []Rule{
		{Action: rule.Pass, Tier: rule.Admin},
		{Action: rule.Allow, Tier: rule.Admin},
		{Action: rule.Deny, Tier: rule.Normal},
		{Action: rule.Pass, Tier: rule.Baseline},
		{Action: rule.Deny, Tier: rule.Baseline},
	}, Peers: map[IdentityClass]Class{}}
	b := NewBuilder()
	class := func(v Value) Class {
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
		{MakeValue(1, NoRest), MakeValue(2, NoRest), 0, Verdict{Action: rule.Deny, Reason: ByDefault}},
		{MakeValue(1, NoRest), MakeValue(2, NoRest), DefaultAllow, Verdict{Action: rule.Allow, Reason: ByDefault}},
		{MakeValue(1, 3), MakeValue(2, NoRest), DefaultAllow, Verdict{Action: rule.Deny, Rule: 3}},
		{MakeValue(2, 3), MakeValue(NoAdmin, NoRest), 0, Verdict{Action: rule.Allow, Rule: 2}},
		{MakeValue(NoAdmin, 5), MakeValue(NoAdmin, 4), DefaultAllow, Verdict{Action: rule.Allow, Reason: ByDefault}},
		{MakeValue(NoAdmin, 5), Nothing, DefaultAllow, Verdict{Action: rule.Deny, Rule: 5}},
	} {
		for _, swap := range []bool{false, true} {
			who, where := tc.who, tc.where
			if swap {
				who, where = where, who
			}
			tbl.Flags = HasAddresses | tc.flags
			tbl.Peers[1] = class(who)
			c := class(where)
			tbl.Address = [identity.PeerScopes]Class{c, c, c}
			if got := tbl.Lookup(w, a, 0); got != tc.want {
				t.Errorf("%x and %x (%d): %+v, want %+v", who, where, tc.flags, got, tc.want)
			}
		}
	}
}

func TestAnUnknownPeerTakesItsOwnDefault(t *testing.T) {
	tbl := &Table{Rules: []Rule{{Action: rule.Deny, Tier: rule.Normal}, {Action: rule.Allow, Tier: rule.Normal}}, Peers: map[IdentityClass]Class{0: 9}}
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
	if v := tbl.Lookup(Entry{}, a, 0); v != (Verdict{Action: rule.Deny, Rule: 1, Reason: ByUnknownIdentity}) {
		t.Errorf("unknown: %+v", v)
	}
	if v := tbl.Lookup(Entry{IdentityClass: 5, Known: true}, a, 0); v.Action != rule.Allow {
		t.Errorf("known without a row: %+v", v)
	}
}
