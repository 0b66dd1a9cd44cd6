// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
)

// wider are the prefixes around a range, but for itself.
func wider(p netip.Prefix) iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		for bits := p.Bits() - 1; bits >= 0; bits-- {
			if around, err := p.Addr().Prefix(bits); err != nil || !yield(around) {
				return
			}
		}
	}
}

// accept has a range count.
func (v *view) accept(p netip.Prefix, node string) {
	v.ranges[p] = node
	for around := range wider(p) {
		v.around[around]++
	}
	v.lengths[p.Addr().Is6()][p.Bits()]++
}

// withdraw takes back accept.
func (v *view) withdraw(p netip.Prefix) {
	delete(v.ranges, p)
	for around := range wider(p) {
		if v.around[around]--; v.around[around] == 0 {
			delete(v.around, around)
		}
	}
	lengths := v.lengths[p.Addr().Is6()]
	if lengths[p.Bits()]--; lengths[p.Bits()] == 0 {
		delete(lengths, p.Bits())
	}
}

// free reports whether a range overlaps none that counts.
func (v *view) free(p netip.Prefix) bool {
	if _, ok := v.ranges[p]; ok || v.around[p] > 0 {
		return false
	}
	for around := range wider(p) {
		if _, ok := v.ranges[around]; ok {
			return false
		}
	}
	return true
}

// rangesChanged decides which ranges count after those of some nodes changed.
// Where no range of any node overlaps another node's, as it should be, that
// costs what changed; else all are resolved.
func (v *view) rangesChanged(changed []*nodeView) {
	if len(changed) == 0 {
		return
	}
	simple := !v.contested && (len(changed) == 1 || 4*len(changed) < len(v.nodes))
	var moved []netip.Prefix
	for _, n := range changed {
		v.touch(Key{Node: n.name})
		v.touchAll(n)
		if simple {
			moved = append(moved, n.ranges...)
			for _, p := range n.ranges {
				v.withdraw(p)
			}
			n.ranges, n.refused = nil, nil // it may be there twice
		}
	}
	for _, n := range changed {
		wanted := n.record.Ranges
		if simple && slices.Equal(wanted, n.ranges) {
			continue
		}
		if simple = simple && !slices.ContainsFunc(wanted, func(p netip.Prefix) bool { return !v.free(p) }); !simple {
			v.resolve()
			return
		}
		n.ranges, n.refused = slices.Clone(wanted), nil
		moved = append(moved, wanted...)
		for _, p := range wanted {
			v.accept(p, n.name)
		}
	}
	// An address of a node does not count inside another node's range.
	within := func(a netip.Addr) bool {
		return slices.ContainsFunc(moved, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	for a := range v.claims {
		if within(a) {
			v.touch(mappingKey(a))
		}
	}
	for a := range v.apiServers {
		if within(a) {
			v.touch(mappingKey(a))
		}
	}
}

// resolve decides which ranges count: those of nodes that registered earlier
// before those of nodes that registered later.
func (v *view) resolve() {
	v.ranges, v.around, v.lengths = map[netip.Prefix]string{}, map[netip.Prefix]int{},
		map[bool]map[int]int{false: {}, true: {}}
	v.contested = false
	inside := map[netip.Prefix]string{} // around a range that counts → the first node that has one
	for _, n := range slices.SortedFunc(maps.Values(v.nodes), func(a, b *nodeView) int {
		return cmp.Or(cmp.Compare(a.created, b.created), cmp.Compare(a.name, b.name))
	}) {
		before, refused := n.ranges, n.refused
		n.ranges, n.refused = nil, nil
		for _, p := range n.record.Ranges {
			if holder := holderOf(v.ranges, inside, p, n.name); holder != "" {
				n.refused = append(n.refused, Refusal{
					Range: p, Holder: holder,
					Reason: fmt.Sprintf("node %s had addresses of it before", holder),
				})
				v.contested = true
				continue
			}
			v.accept(p, n.name)
			for around := range wider(p) {
				if _, ok := inside[around]; !ok {
					inside[around] = n.name
				}
			}
			n.ranges = append(n.ranges, p)
		}
		if !slices.Equal(before, n.ranges) || !slices.Equal(refused, n.refused) {
			v.touch(Key{Node: n.name})
			v.touchAll(n)
		}
	}
	// An address of a node does not count inside another node's range.
	for a := range v.claims {
		v.touch(mappingKey(a))
	}
	for a := range v.apiServers {
		v.touch(mappingKey(a))
	}
}

// holderOf is the other node of which an accepted range overlaps p; "" if none does.
func holderOf(accepted, inside map[netip.Prefix]string, p netip.Prefix, node string) string {
	for bits := p.Bits(); bits >= 0; bits-- {
		around, _ := p.Addr().Prefix(bits)
		if holder, ok := accepted[around]; ok && holder != node {
			return holder
		}
	}
	if holder := inside[p]; holder != node {
		return holder
	}
	return ""
}
