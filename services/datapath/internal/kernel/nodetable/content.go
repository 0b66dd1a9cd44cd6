// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetable

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
)

// Limits of one table: what the programs can search, and what the numbers in map entries can represent.
const (
	MaxRules      = 65534
	MaxAdminRules = 32766
	MaxClasses    = 4096 + 1024
	MaxRanges     = 4096 // of one class
	MaxPeers      = 65536
	MaxPrefixes   = 2 * 16384
)

// Validate checks that the programs can safely use the table. The error names the field.
func (c *Content) Validate() error {
	switch {
	case c.Hash == [32]byte{}:
		return policytable.Invalid("structure_hash is zero")
	case len(c.Rules) > MaxRules:
		return policytable.Invalid("rules: %d, at most %d", len(c.Rules), MaxRules)
	case len(c.Prefixes) > MaxPrefixes:
		return policytable.Invalid("prefixes: %d, at most %d", len(c.Prefixes), MaxPrefixes)
	case len(c.Peers) > MaxPeers:
		return policytable.Invalid("peers: %d, at most %d", len(c.Peers), MaxPeers)
	}
	for i, r := range c.Rules {
		if r.Action > policytable.Pass || r.Tier > policytable.Baseline {
			return policytable.Invalid("rules[%d]: action %d, tier %d", i, r.Action, r.Tier)
		}
	}
	if err := c.ValidateClasses(0); err != nil {
		return err
	}
	for i, class := range c.DefaultClasses {
		if int(class) >= len(c.Classes) {
			return policytable.Invalid("default_classes[%d]: there is no class %d", i, class)
		}
	}
	for i, class := range c.AddressClasses {
		if int(class) >= len(c.Classes) {
			return policytable.Invalid("address_classes[%d]: there is no class %d", i, class)
		}
	}
	for ic, class := range c.Peers {
		if ic == 0 || ic > MaxIdentityClass {
			return policytable.Invalid("peers: identity class %d is not between 1 and %d", ic, MaxIdentityClass)
		}
		if int(class) >= len(c.Classes) {
			return policytable.Invalid("peers[identity class %d]: there is no class %d", ic, class)
		}
	}
	for p, classes := range c.Prefixes {
		if err := c.ValidatePrefix(p, classes); err != nil {
			return err
		}
	}
	return nil
}

// ValidatePrefix returns an error if the prefix is not masked or plain, or if one of the classes does not exist.
func (c *Content) ValidatePrefix(p netip.Prefix, classes policytable.PrefixClasses) error {
	if !p.IsValid() || p != p.Masked() || p.Addr().Is4In6() || p.Addr().Zone() != "" {
		return policytable.Invalid("prefix %v is not masked or not plain", p)
	}
	for i, class := range classes {
		if int(class) >= len(c.Classes) {
			return policytable.Invalid("prefix %v: classes[%d]: there is no class %d", p, i, class)
		}
	}
	return nil
}

// ValidateClasses checks the classes from the given number on.
func (c *Content) ValidateClasses(from int) error {
	switch {
	case len(c.Classes) == 0:
		return policytable.Invalid("classes: there are none")
	case len(c.Classes) > MaxClasses:
		return policytable.Invalid("classes: %d, at most %d", len(c.Classes), MaxClasses)
	}
	for class := from; class < len(c.Classes); class++ {
		if err := validateRanges(c.Classes[class], len(c.Rules)); err != nil {
			return fmt.Errorf("classes[%d].%w", class, err)
		}
	}
	return nil
}

// only reports whether the rule of class b has the given action wherever the rules of a and b differ.
func (c *Content) only(a, b policytable.Class, action policytable.Action) bool {
	is := func(rule uint16) bool { return rule != 0 && c.Rules[rule-1].Action == action }
	from, to := c.Classes[a], c.Classes[b]
	for _, list := range []policytable.Ranges{from, to} {
		for r := range list.Total() {
			x, y := from.At(r.Last), to.At(r.Last)
			if x.Admin != y.Admin && !is(y.Admin) || x.Rest != y.Rest && !is(y.Rest) {
				return false
			}
		}
	}
	return true
}

// maxAddressClasses limits how many address classes AtMost compares.
const maxAddressClasses = 256

// AtMost reports whether identities of class x may do no more than identities of class y,
// whatever address they have. It also returns false if the table has too many address
// classes to compare.
func (c *Content) AtMost(x, y policytable.Class) bool {
	if x == y || slices.Equal(c.Classes[x], c.Classes[y]) {
		return true
	}
	addresses := []policytable.Ranges{nil}
	if c.HasAddresses {
		seen := make(map[policytable.Class]struct{})
		for _, class := range c.AddressClasses {
			seen[class] = struct{}{}
		}
		for _, classes := range c.Prefixes {
			for _, class := range classes {
				seen[class] = struct{}{}
			}
			if len(seen) > maxAddressClasses {
				return false
			}
		}
		addresses = addresses[:0]
		for class := range seen {
			addresses = append(addresses, c.Classes[class])
		}
	}
	for _, address := range addresses {
		// The applicable rules change only at the ends of ranges, so it is enough to check one point between two ends.
		for _, list := range []policytable.Ranges{c.Classes[x], c.Classes[y], address} {
			for r := range list.Total() {
				a := address.At(r.Last)
				of, than := c.decide(c.Classes[x].At(r.Last), a), c.decide(c.Classes[y].At(r.Last), a)
				if !c.narrower(of, than) {
					return false
				}
			}
		}
	}
	return true
}

// decide returns the rule that applies at a point, given the ranges of the identity's class and of the address's class
// at that point; 0: no rule.
func (c *Content) decide(id, address policytable.PortRange) uint16 {
	best := func(x, y uint16) uint16 {
		if x == 0 || y != 0 && y < x {
			return y
		}
		return x
	}
	for _, rule := range []uint16{best(id.Admin, address.Admin), best(id.Rest, address.Rest)} {
		if rule != 0 && c.Rules[rule-1].Action != policytable.Pass {
			return rule
		}
	}
	return 0
}

// narrower reports whether rule x allows no more than rule y. A redirected connection may do less than an
// allowed one.
func (c *Content) narrower(x, y uint16) bool {
	action := func(rule uint16) policytable.Action {
		switch {
		case rule != 0:
			return c.Rules[rule-1].Action
		case c.DefaultAllow || c.HostAllow: // both classes may contain the host
			return policytable.Allow
		}
		return policytable.Deny
	}
	if x == y {
		return true
	}
	if action(x) == policytable.Deny {
		return true
	}
	// Without DefaultAllow, rule 0 only allows the host, so an allow rule may allow more than rule 0.
	return action(y) == policytable.Allow && (y != 0 || c.DefaultAllow)
}

// Grants reports whether adding a prefix only allows more. The entry that applied to its addresses before is the one of
// the next shorter prefix.
func (c *Content) Grants(p netip.Prefix, classes policytable.PrefixClasses) bool {
	before, ok := c.Prefixes[p]
	if !ok {
		before = c.AddressClasses
		for bits := p.Bits() - 1; bits >= 0; bits-- {
			if around, err := p.Addr().Prefix(bits); err == nil {
				if v, ok := c.Prefixes[around]; ok {
					before = v
					break
				}
			}
		}
	}
	for s := range identity.PeerScopes {
		if !c.only(before[s], classes[s], policytable.Allow) {
			return false
		}
	}
	return true
}

// ClassOf returns the class of an identity, by identity only.
func (c *Content) ClassOf(w Identity) uint16 {
	if !w.Known {
		return c.DefaultClasses[identity.KindUnknown]
	}
	if class, ok := c.Peers[w.Class]; ok {
		return class
	}
	return c.DefaultClasses[w.Kind]
}

// EvaluatesAlike reports whether the table treats two identities alike.
func (c *Content) EvaluatesAlike(a, b Identity) bool {
	x, y := c.ClassOf(a), c.ClassOf(b)
	if x != y && !slices.Equal(c.Classes[x], c.Classes[y]) {
		return false
	}
	return (!c.HasAddresses || a.Scope == b.Scope) &&
		(!c.HostAllow || (a.Known && a.Kind == identity.KindHost) == (b.Known && b.Kind == identity.KindHost))
}

// NewContent returns the table without peers, with capacity for rows of them. Parts that are changed in place
// are copied, the rest is shared.
func NewContent(t policytable.Table, rows int) Content {
	t.Classes, t.Prefixes = slices.Clip(t.Classes), maps.Clone(t.Prefixes)
	if t.Prefixes == nil {
		t.Prefixes = map[netip.Prefix]policytable.PrefixClasses{}
	}
	return Content{Table: t, Peers: make(map[IdentityClass]policytable.Class, rows)}
}

// Clone copies the parts that are changed in place and shares the rest.
func (c *Content) Clone() Content {
	d := NewContent(c.Table, len(c.Peers))
	maps.Copy(d.Peers, c.Peers)
	return d
}
