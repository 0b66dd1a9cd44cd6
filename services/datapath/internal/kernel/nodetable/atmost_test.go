// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetable

import (
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
)

// TestAtMostAgreesWithEveryPoint evaluates all points of small tables one by one.
func TestAtMostAgreesWithEveryPoint(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	const points = 6
	outcomes := map[bool]int{}
	for range 20_000 {
		c := NewContent(policytable.Table{DefaultAllow: r.IntN(4) == 0, HostAllow: r.IntN(4) == 0, HasAddresses: r.IntN(2) == 0}, 0)
		for range 1 + r.IntN(4) {
			c.Rules = append(c.Rules, policytable.Rule{Action: policytable.Action(r.IntN(4))})
		}
		for range 4 {
			var list policytable.Ranges
			for p := range uint32(points) {
				if r.IntN(3) > 0 {
					list = append(list, policytable.PortRange{
						First: p, Last: p,
						Admin: uint16(r.IntN(len(c.Rules) + 1)), Rest: uint16(r.IntN(len(c.Rules) + 1)), //nolint:gosec // small
					})
				}
			}
			c.Classes = append(c.Classes, list)
		}
		c.AddressClasses = policytable.PrefixClasses{2, 2, 2}
		c.Prefixes = map[netip.Prefix]policytable.PrefixClasses{netip.MustParsePrefix("10.0.0.0/8"): {3, 3, 3}}
		addresses := []policytable.Ranges{nil}
		if c.HasAddresses {
			addresses = []policytable.Ranges{c.Classes[2], c.Classes[3]}
		}
		// permits returns what may pass: 0, nothing; 1, only connections through a proxy, with the number of
		// the redirect rule; 2, everything.
		permits := func(class policytable.Ranges, address policytable.Ranges, p uint32, kind identity.Kind) (int, uint16) {
			best := func(x, y uint16) uint16 {
				if x == 0 || y != 0 && y < x {
					return y
				}
				return x
			}
			x, y := class.At(p), address.At(p)
			for _, n := range []uint16{best(x.Admin, y.Admin), best(x.Rest, y.Rest)} {
				if n == 0 || c.Rules[n-1].Action == policytable.Pass {
					continue
				}
				switch c.Rules[n-1].Action {
				case policytable.Deny:
					return 0, 0
				case policytable.Redirect:
					return 1, n
				}
				return 2, 0
			}
			if c.DefaultAllow || c.HostAllow && kind == identity.KindHost {
				return 2, 0
			}
			return 0, 0
		}
		got, want := c.AtMost(0, 1), true
		for p := range uint32(points + 1) {
			for _, address := range addresses {
				for _, kind := range []identity.Kind{identity.KindInCluster, identity.KindHost} {
					x, xRule := permits(c.Classes[0], address, p, kind)
					y, yRule := permits(c.Classes[1], address, p, kind)
					want = want && (x <= y && (x != 1 || y != 1 || xRule == yRule))
				}
			}
		}
		if got && !want {
			t.Fatalf("class 0 never permits more than class 1 in %+v", c)
		}
		if got != want && !c.HostAllow {
			t.Fatalf("AtMost returns %v for %+v", got, c)
		}
		outcomes[got]++
	}
	if outcomes[true] < 100 || outcomes[false] < 100 {
		t.Errorf("outcomes %v", outcomes)
	}
}
