// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetable

import (
	"cmp"
	"crypto/sha256"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
)

// Order lists the rules of a table by priority, for the case that the maps have no capacity for all of them. A part of
// the table with only the first rules of the list denies everything that the whole table denies.
//
// If together is set, whole is the number of rules at the start of the list that must be admitted together. Allow
// rules follow: the first one of each namespace, then the second one of each, and so on. Otherwise the list is in the
// order of evaluation, and whole is 0. namespace returns the namespace of the policy of a rule.
func (c *Content) Order(together bool, namespace func(rule int) string) (list []uint16, whole int) {
	if !together {
		list = make([]uint16, len(c.Rules))
		for i := range list {
			list[i] = uint16(i + 1) //nolint:gosec // at most MaxRules
		}
		return list, 0
	}
	// Allow rules come last: without the other rules, an allow rule might allow a connection that one of those denies,
	// passes or redirects.
	var may []uint16
	turn := make(map[uint16]int)
	used := make(map[string]int)
	for i, r := range c.Rules {
		number := uint16(i + 1) //nolint:gosec // at most MaxRules
		if r.Action != policytable.Allow {
			list = append(list, number)
			continue
		}
		ns := namespace(i + 1)
		used[ns]++
		turn[number] = used[ns]
		may = append(may, number)
	}
	slices.SortStableFunc(may, func(x, y uint16) int { return cmp.Compare(turn[x], turn[y]) })
	return append(list, may...), len(list)
}

// Part is a table with some of its rules. It denies the connections that the other rules decide. If the table
// allows by default, omitted allow rules need no replacement.
type Part struct {
	// Former gives the number in the whole table for each rule of the part: Former[n-1] for rule n. It is 0 for the deny
	// rule that replaces the omitted rules.
	Former []uint16

	numbers []uint16             // by number in the table - 1: the number in the part; 0: omitted
	actions []policytable.Action // of the table's rules, by number - 1
	denies  uint16               // number of the deny rule that replaces the omitted rules; 0: none
	rest    uint16               // number of the rule that denies all peers except the local host; 0: none
	always  bool                 // the default is to allow
	spared  map[policytable.Class]struct{}
	hash    [32]byte
}

// Part returns the part of the table with the given rules, which must be the first ones of a list of Order.
// spared are classes that the local host may have: there, omitted allow rules are not replaced, so that the
// host may do whatever no rule denies.
func (c *Content) Part(rules []uint16, spared map[policytable.Class]struct{}) *Part {
	p := &Part{
		numbers: make([]uint16, len(c.Rules)), actions: make([]policytable.Action, len(c.Rules)),
		always: c.DefaultAllow, spared: spared,
	}
	admitted := make([]byte, len(c.Rules))
	for _, number := range rules {
		admitted[number-1] = 1
	}
	restricts := false // set if an omitted rule is not an allow rule
	for i, r := range c.Rules {
		p.actions[i] = r.Action
		if admitted[i] == 0 {
			restricts = restricts || r.Action != policytable.Allow
			continue
		}
		p.Former = append(p.Former, uint16(i+1)) //nolint:gosec // at most MaxRules
		p.numbers[i] = uint16(len(p.Former))     //nolint:gosec // at most MaxRules
		if r.Action == policytable.Deny && r.Tier == policytable.Isolation {
			p.rest = p.numbers[i]
		}
	}
	if restricts && (c.DefaultAllow || c.HostAllow) {
		p.Former = append(p.Former, 0)
		p.denies = uint16(len(p.Former)) //nolint:gosec // at most MaxRules, since a rule is left out
		if slices.ContainsFunc(c.Rules, func(r policytable.Rule) bool { return r.Action == policytable.Deny && r.Tier == policytable.Isolation }) {
			p.rest = p.denies // unless it is admitted; then the rules before it are, too
		}
	}
	h := sha256.New()
	h.Write(c.Hash[:])
	h.Write(admitted)
	copy(p.hash[:], h.Sum(nil))
	return p
}

// Rules returns how many rules of the table the part has.
func (p *Part) Rules() int {
	if p.denies != 0 {
		return len(p.Former) - 1
	}
	return len(p.Former)
}

// Ranges converts a class of the table to the part.
func (p *Part) Ranges(class policytable.Class, ranges policytable.Ranges) policytable.Ranges {
	_, spared := p.spared[class]
	out := make(policytable.Ranges, 0, len(ranges))
	for _, r := range ranges {
		r.Admin, r.Rest = p.number(r.Admin, spared, true), p.number(r.Rest, spared, false)
		if n := len(out); n > 0 && out[n-1].SameRules(r) && out[n-1].Last+1 == r.First {
			out[n-1].Last = r.Last
		} else if r.Admin != 0 || r.Rest != 0 {
			out = append(out, r)
		}
	}
	return out
}

// number returns the part's number for a rule of a class.
//
// An omitted allow rule may be replaced by any deny rule, because that only denies more. It may also be left out: the
// other rules then decide, and they allow nothing that it did not allow. An omitted rule with another action is
// replaced by the deny rule of the part, or by no rule if the table denies by default.
func (p *Part) number(former uint16, spared, admin bool) uint16 {
	switch {
	case former == 0:
		return 0
	case p.numbers[former-1] != 0:
		return p.numbers[former-1]
	case p.actions[former-1] != policytable.Allow:
		return p.denies
	case p.always || spared:
		return 0
	case admin:
		return p.denies
	}
	// p.rest usually applies to the neighbouring ranges, too, so Ranges can merge them.
	return p.rest
}

// Header returns the part without classes, peers and prefixes.
func (p *Part) Header(c *Content) Content {
	out := Content{Table: policytable.Table{
		Hash: p.hash, DefaultAllow: c.DefaultAllow, HostAllow: c.HostAllow, HasAddresses: c.HasAddresses,
	}}
	for _, former := range p.Former {
		if former == 0 {
			out.Rules = append(out.Rules, policytable.Rule{Action: policytable.Deny, Tier: c.Rules[len(out.Rules)].Tier})
		} else {
			out.Rules = append(out.Rules, c.Rules[former-1])
		}
	}
	return out
}

// HostClasses returns the classes of the table that the local host may have. kinds returns the kinds of the
// identities in an identity class: bit n for kind n.
func (c *Content) HostClasses(kinds func(IdentityClass) uint8) map[policytable.Class]struct{} {
	out := map[policytable.Class]struct{}{c.DefaultClasses[identity.KindHost]: {}}
	for ic, class := range c.Peers {
		if kinds(ic)>>identity.KindHost&1 != 0 {
			out[class] = struct{}{}
		}
	}
	for _, class := range c.AddressClasses {
		out[class] = struct{}{}
	}
	for _, classes := range c.Prefixes {
		for _, class := range classes {
			out[class] = struct{}{}
		}
	}
	return out
}
