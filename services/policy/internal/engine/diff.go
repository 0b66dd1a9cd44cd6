// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// Place is a set of addresses of a peer that get the same verdicts. It is one of three: the peer's own address; an
// external prefix, except for narrower prefixes inside of it that are places too; or, as the zero value, all other
// addresses.
type Place struct {
	Peer   identity.Numeric
	Prefix netip.Prefix
}

// Changed is a range of ports with its old and its new verdict.
type Changed struct {
	Ports         port.Range
	Before, After table.Verdict
}

// Difference is a change in one direction of a subject, for all peers that it affects in the same way.
type Difference struct {
	Subject   identity.Numeric
	Direction policytable.Direction
	Places    []Place
	Changes   []Changed
}

// Comparison compares two engines, one with and one without a change.
type Comparison struct {
	before, after *Engine
	subjects      []identity.Numeric // whose tables may differ
}

// Diff compares the engine with a copy in which the given policies are applied and deleted. It compiles all tables of
// the copy from scratch, and then the tables of the affected subjects once more, with the change.
func (d Draft) Diff(upsert []policy.Object, remove []policy.Key) (*Comparison, error) {
	after, err := d.Copy()
	if err != nil {
		return nil, err
	}
	changed := make(map[identity.Numeric]struct{})
	after.config.Events = func(ev policytable.Step) {
		if b, ok := ev.(policytable.BindSubject); ok {
			changed[b.Subject] = struct{}{}
		}
	}
	if err := after.Apply(Change{Refuse: true, UpsertPolicies: upsert, DeletePolicies: remove}); err != nil {
		return nil, err
	}
	numbers := slices.Sorted(maps.Keys(changed))
	before, err := d.Fork(nil, numbers...)
	if err != nil {
		return nil, fmt.Errorf("copy the engine: %w", err)
	}
	return &Comparison{before, after, numbers}, nil
}

// Each calls take with each difference until take returns an error. There can be as many differences as pairs of
// identities.
func (x *Comparison) Each(take func(Difference) error) error {
	for _, n := range x.subjects {
		for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
			before, after := x.before.subjects[n].bound[d], x.after.subjects[n].bound[d]
			if before == nil && after == nil || before != nil && after != nil && before.program.Hash == after.program.Hash {
				continue
			}
			c := comparison{before: side{x.before, before}, after: side{x.after, after}, memo: make(map[comparisonKey]int)}
			c.peers()
			for _, f := range c.found {
				f.Subject, f.Direction = n, d
				if err := take(f); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// side is a direction of a subject in one of the two compared engines.
type side struct {
	engine *Engine
	live   *live // nil: everything is allowed
}

func (s side) entry(n identity.Numeric) table.Entry { return s.engine.Entry(n) }

// classes returns the classes of the addresses in a prefix; the zero prefix means addresses in no prefix.
func (s side) classes(block netip.Prefix) [identity.PeerScopes]policytable.Class {
	if s.live == nil {
		return [identity.PeerScopes]policytable.Class{}
	}
	if block.IsValid() {
		if c, ok := s.live.table.Prefixes.Within(block); ok {
			return c
		}
	}
	return s.live.table.Address
}

// classPair contains the classes of a peer whose address is in a prefix.
type classPair struct {
	identity, address policytable.Class
}

func (s side) pair(w table.Entry, block netip.Prefix) classPair {
	if s.live == nil {
		return classPair{}
	}
	return classPair{s.live.table.ClassOf(w), s.classes(block)[w.Scope]}
}

func (s side) lookup(w table.Entry, block netip.Prefix, q port.Point) table.Verdict {
	if s.live == nil {
		return table.Verdict{Action: policytable.Allow, Reason: table.ByDefault}
	}
	return s.live.table.LookupIn(w, s.classes(block), q)
}

func (s side) cuts(p classPair, cuts []port.Point) []port.Point {
	if s.live == nil {
		return cuts
	}
	for _, c := range []policytable.Class{p.identity, p.address} {
		for _, i := range s.live.table.Intervals(c) {
			cuts = append(cuts, i.Hi)
		}
	}
	return cuts
}

type comparisonKey struct {
	before, after classPair
	kind          identity.Kind
	known         bool
}

// comparison collects the differences in one direction of a subject.
type comparison struct {
	before, after side
	memo          map[comparisonKey]int // index in found; -1: no difference
	found         []Difference
}

// peers compares every known peer at every possible place.
func (c *comparison) peers() {
	at := make(map[identity.Numeric][]netip.Prefix)
	for a, n := range c.before.engine.located {
		at[n] = append(at[n], netip.PrefixFrom(a, a.BitLen()))
	}
	var blocks []netip.Prefix
	for _, s := range []side{c.before, c.after} {
		if s.live != nil {
			s.live.table.Prefixes.All(func(p netip.Prefix, _ [identity.PeerScopes]policytable.Class) { blocks = append(blocks, p) })
		}
	}
	slices.SortFunc(blocks, netip.Prefix.Compare)
	blocks = slices.Compact(blocks)
	for _, n := range slices.Sorted(maps.Keys(c.before.engine.peers)) {
		w := c.before.entry(n)
		where := at[n]
		slices.SortFunc(where, netip.Prefix.Compare)
		if w.Scope == identity.PeerScopeOutside && len(where) == 0 {
			for _, b := range blocks {
				if w.Kind == identity.KindWorld6 && b.Addr().Is4() || w.Kind == identity.KindWorld4 && !b.Addr().Is4() {
					continue
				}
				where = append(where, b)
			}
			where = append(where, netip.Prefix{})
		}
		if len(where) == 0 {
			where = append(where, netip.Prefix{})
		}
		for _, block := range where {
			c.compare(n, block)
		}
	}
}

func (c *comparison) compare(n identity.Numeric, block netip.Prefix) {
	w, v := c.before.entry(n), c.after.entry(n)
	key := comparisonKey{c.before.pair(w, block), c.after.pair(v, block), w.Kind, w.Known}
	i, ok := c.memo[key]
	if !ok {
		i = -1
		if changes := c.changes(w, v, block, key); len(changes) > 0 {
			i = len(c.found)
			c.found = append(c.found, Difference{Changes: changes})
		}
		c.memo[key] = i
	}
	if i >= 0 {
		c.found[i].Places = append(c.found[i].Places, Place{n, block})
	}
}

// changes compares the verdicts for all ports. A verdict can change only where the port range of a rule begins or
// ends, so one port of each range between these boundaries is evaluated.
func (c *comparison) changes(w, v table.Entry, block netip.Prefix, key comparisonKey) []Changed {
	cuts := c.after.cuts(key.after, c.before.cuts(key.before, []port.Point{port.Last}))
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	var out []Changed
	lo := port.Point(0)
	for _, hi := range cuts {
		x, y := c.before.lookup(w, block, lo), c.after.lookup(v, block, lo)
		if x.Action != y.Action || x.Proxy != y.Proxy {
			last := len(out) - 1
			if last >= 0 && out[last].Ports.Hi+1 == lo && out[last].Before == x && out[last].After == y {
				out[last].Ports.Hi = hi
			} else {
				out = append(out, Changed{port.Range{Lo: lo, Hi: hi}, x, y})
			}
		}
		lo = hi + 1
	}
	return out
}
