// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetable

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
)

// points is the number of points of random tables.
const points = 6

// drawTable returns a small random table. Rules are in the order of their tiers.
func drawTable(r *rand.Rand) Content {
	c := NewContent(policytable.Table{DefaultAllow: r.IntN(4) == 0, HostAllow: r.IntN(2) == 0, HasAddresses: r.IntN(2) == 0}, 0)
	admin := r.IntN(4)
	for i := range admin + r.IntN(6) {
		rule := policytable.Rule{Action: policytable.Action(r.IntN(4)), Tier: 1}
		if i < admin {
			rule.Tier = 0
		}
		c.Rules = append(c.Rules, rule)
	}
	if r.IntN(2) == 0 {
		c.Rules = append(c.Rules, policytable.Rule{Tier: policytable.Isolation})
	}
	rest := len(c.Rules) - admin
	for range 6 {
		var list policytable.Ranges
		for p := range uint32(points) {
			x := policytable.PortRange{First: p, Last: p}
			if admin > 0 && r.IntN(2) == 0 {
				x.Admin = uint16(1 + r.IntN(admin)) //nolint:gosec // small
			}
			if rest > 0 && r.IntN(3) > 0 {
				x.Rest = uint16(admin + 1 + r.IntN(rest)) //nolint:gosec // small
			}
			if x.Admin != 0 || x.Rest != 0 {
				list = append(list, x)
			}
		}
		c.Classes = append(c.Classes, list)
	}
	for kind := range c.DefaultClasses {
		c.DefaultClasses[kind] = policytable.Class(r.IntN(4)) //nolint:gosec // small
	}
	c.AddressClasses = policytable.PrefixClasses{4, 4, 4}
	c.Prefixes = map[netip.Prefix]policytable.PrefixClasses{netip.MustParsePrefix("10.0.0.0/8"): {5, 5, 5}}
	return c
}

// verdict is the result of a table for a point: the permission, and the rule of a redirect.
type verdict struct {
	permits  int // 0: nothing, 1: through a proxy, 2: everything
	redirect uint16
}

// evaluate evaluates a point as the programs do.
func (c *Content) evaluate(id, address policytable.PortRange, host bool) (v verdict, rule uint16) {
	if !c.HasAddresses {
		address = policytable.PortRange{}
	}
	rule = c.decide(id, address)
	switch {
	case rule == 0 && (c.DefaultAllow || c.HostAllow && host):
		return verdict{permits: 2}, 0
	case rule == 0 || c.Rules[rule-1].Action == policytable.Deny:
		return verdict{}, rule
	case c.Rules[rule-1].Action == policytable.Redirect:
		return verdict{1, rule}, rule
	}
	return verdict{permits: 2}, rule
}

// TestPartOfATableAllowsNoMore compares partial tables, which have only the first n rules in order of admission, with
// the full table. A partial table never allows more. If it has the rule that decides in the full table, the verdict is
// the same.
func TestPartOfATableAllowsNoMore(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	allowed, lost := 0, 0
	for range 6000 {
		c := drawTable(r)
		hosts := c.HostClasses(func(IdentityClass) uint8 { return 0 })
		if r.IntN(4) == 0 {
			hosts = nil // an entry of the host was added later
		}
		for _, together := range []bool{true, false} {
			list, whole := c.Order(together, func(rule int) string { return fmt.Sprint(rule % 2) })
			for n := whole; n <= len(list); n++ {
				p := c.Part(list[:n], hosts)
				part := p.Header(&c)
				admitted := make(map[uint16]bool)
				for _, number := range list[:n] {
					admitted[number] = true
				}
				for class, ranges := range c.Classes {
					part.Classes = append(part.Classes, p.Ranges(policytable.Class(class), ranges)) //nolint:gosec // small
				}
				for id := range c.Classes {
					for _, address := range []policytable.Class{4, 5} {
						for point := range uint32(points + 1) {
							for _, host := range []bool{false, true} {
								want, by := c.evaluate(c.Classes[id].At(point), c.Classes[address].At(point), host)
								got, rule := part.evaluate(part.Classes[id].At(point), part.Classes[address].At(point), host)
								if got.redirect != 0 {
									got.redirect = p.Former[rule-1]
								}
								if got.permits > want.permits || got.permits == want.permits && got.redirect != want.redirect {
									t.Fatalf("%+v with rules %v: class %d, address class %d, point %d, host %v: %+v exceeds %+v",
										c, list[:n], id, address, point, host, got, want)
								}
								if by != 0 && admitted[by] && !together && got != want {
									t.Fatalf("%+v with rules %v: class %d, address class %d, point %d, host %v: %+v, want %+v by rule %d",
										c, list[:n], id, address, point, host, got, want, by)
								}
								if n == len(list) && got != want {
									t.Fatalf("%+v with all rules differs", c)
								}
								if n < len(list) && want.permits > 0 {
									if got.permits > 0 {
										allowed++
									} else {
										lost++
									}
								}
							}
						}
					}
				}
			}
		}
	}
	if allowed < 1000 || lost < 1000 {
		t.Errorf("%d verdicts are kept, %d are lost", allowed, lost)
	}
}

// TestPartOfATableIsSmaller: omitted rules leave no ranges behind.
func TestPartOfATableIsSmaller(t *testing.T) {
	everything := policytable.PortRange{Last: policytable.LastPoint, Rest: 4}
	c := NewContent(policytable.Table{
		HostAllow: true,
		Rules:     []policytable.Rule{{Action: policytable.Allow, Tier: 1}, {Action: policytable.Allow, Tier: 1}, {Action: policytable.Allow, Tier: 1}, {Tier: policytable.Isolation}},
		Classes: []policytable.Ranges{
			{everything},
			nil,
			{{Last: 79, Rest: 4}, {First: 80, Last: 80, Rest: 2}, {First: 81, Last: policytable.LastPoint, Rest: 4}},
		},
	}, 0)
	c.DefaultClasses[identity.KindHost] = 1
	for _, together := range []bool{true, false} {
		list, _ := c.Order(together, func(int) string { return "" })
		p := c.Part(list[:1], c.HostClasses(nil))
		if a, b := p.Ranges(0, c.Classes[0]).Meaning(), p.Ranges(2, c.Classes[2]).Meaning(); a != b {
			t.Errorf("together %v: %v, want the surrounding ranges", together, p.Ranges(2, c.Classes[2]))
		}
		if got := p.Ranges(1, c.Classes[1]); len(got) != 0 {
			t.Errorf("together %v: the host gets %v", together, got)
		}
	}
}
