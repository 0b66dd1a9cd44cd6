// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package registry

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"net/netip"
	"slices"
)

// wider yields the prefixes that contain p, from the longest to /0, without p itself.
func wider(p netip.Prefix) iter.Seq[netip.Prefix] {
	return func(yield func(netip.Prefix) bool) {
		for bits := p.Bits() - 1; bits >= 0; bits-- {
			if around, err := p.Addr().Prefix(bits); err != nil || !yield(around) {
				return
			}
		}
	}
}

// accept records that a range is the node's.
func (v *view) accept(p netip.Prefix, node string) {
	v.ranges[p] = node
	for around := range wider(p) {
		v.around[around]++
	}
	v.lengths[p.Addr().Is6()][p.Bits()]++
}

// withdraw reverts accept.
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

// free reports whether no accepted range overlaps p.
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

// heldByOther returns an accepted or pinned range that overlaps p and belongs to another node than the given one, and
// that node; "" if there is no such range.
func (v *view) heldByOther(p netip.Prefix, node string) (holder string, held netip.Prefix) {
	for _, ranges := range []map[netip.Prefix]string{v.ranges, v.pins} {
		for around := range wider(p) {
			if name, ok := ranges[around]; ok && name != node {
				return name, around
			}
		}
		if name, ok := ranges[p]; ok && name != node {
			return name, p
		}
	}
	if v.around[p] == 0 && len(v.pins) == 0 {
		return "", netip.Prefix{}
	}
	for _, ranges := range []map[netip.Prefix]string{v.ranges, v.pins} {
		for q, name := range ranges {
			if name != node && p.Overlaps(q) {
				return name, q
			}
		}
	}
	return "", netip.Prefix{}
}

// claim is one range that a node claims.
type claim struct {
	node   *nodeView
	prefix netip.Prefix
	// age is the revision of the store at which the node claimed the range.
	age    int64
	former *Former
	// slot is the number of the slot; for a claim without one, the position in the record among the ranges of its
	// family.
	slot int
}

// compare orders claims of different nodes: the older one first.
func (c claim) compare(d claim) int {
	return cmp.Or(cmp.Compare(c.age, d.age), cmp.Compare(c.node.created, d.node.created),
		cmp.Compare(c.node.name, d.node.name), cmp.Compare(c.slot, d.slot), c.prefix.Compare(d.prefix))
}

// beats reports whether a claim precedes a claim that is older in this store, because its node had the range in the
// former store. If a node claims a range that it did not have in the former store, it did not know the former node's
// claim.
func (c claim) beats(d claim, former uint64) bool {
	switch {
	case former == 0 || c.former == nil || c.former.Cluster != former:
		return false
	case d.former == nil || d.former.Cluster != former:
		return true
	}
	return c.former.Revision < d.former.Revision
}

// formerOf returns the store from which this one was rebuilt: the store that the claims of more than half of the nodes
// name as their former one. So a single node cannot make its claims older by naming another store.
func formerOf(all []claim) uint64 {
	nodes, named := map[*nodeView]struct{}{}, map[uint64]map[*nodeView]struct{}{}
	for _, c := range all {
		nodes[c.node] = struct{}{}
		if c.former == nil {
			continue
		}
		if named[c.former.Cluster] == nil {
			named[c.former.Cluster] = map[*nodeView]struct{}{}
		}
		named[c.former.Cluster][c.node] = struct{}{}
	}
	for cluster, by := range named {
		if 2*len(by) > len(nodes) {
			return cluster
		}
	}
	return 0
}

// claims returns the ranges that a node claims, oldest first.
//
// The age of a claim is the revision at which its slot was written; the node cannot change it later. If a node deletes
// its record and writes another, its slots are as old as the new record. A node of an earlier version writes no slots;
// its ranges are as old as the record in which this process first saw them.
func (v *view) claims(n *nodeView) (all []claim) {
	if !n.registered {
		return nil
	}
	for _, k := range n.slots {
		all = append(all, claim{
			node: n, prefix: k.Claim.Range, age: max(k.Revision, n.created), former: k.Claim.Former, slot: k.Slot.Number,
		})
	}
	inSlot := make(map[netip.Prefix]struct{}, len(all))
	for _, c := range all {
		inSlot[c.prefix] = struct{}{}
	}
	place := map[bool]int{}
	for _, p := range n.record.Ranges {
		ipv6 := p.Addr().Is6()
		if _, ok := inSlot[p]; !ok {
			age := n.revision
			if since, ok := n.since[p]; ok {
				age = min(age, since)
			}
			all = append(all, claim{node: n, prefix: p, age: age, slot: place[ipv6]})
		}
		place[ipv6]++
	}
	slices.SortFunc(all, claim.compare)
	seen := make(map[netip.Prefix]struct{}, len(all))
	return slices.DeleteFunc(all, func(c claim) bool { // the node has one range in two slots
		_, again := seen[c.prefix]
		seen[c.prefix] = struct{}{}
		return again
	})
}

// MostRanges is the number of slots of a node and family.
const MostRanges = 64

// permitted returns the claims of a node that are valid if no other node has the range, and the refused claims with the
// reason.
func (v *view) permitted(n *nodeView) (all []claim, refused []Refusal) {
	for _, c := range v.claims(n) {
		if why := v.excess(c); why != nil {
			refused = append(refused, Refusal{
				Range: c.prefix, Reason: why.Error(), Waits: errors.Is(why, errNotPublished),
			})
			continue
		}
		all = append(all, c)
	}
	return all, refused
}

// prefixesOf returns the ranges of claims, sorted.
func prefixesOf(all []claim) (out []netip.Prefix) {
	for _, c := range all {
		out = append(out, c.prefix)
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return out
}

// take sets the valid claims of a node.
func (n *nodeView) take(all []claim, refused []Refusal) {
	n.ranges, n.refused = prefixesOf(all), refused
	n.since = make(map[netip.Prefix]int64, len(all))
	for _, c := range all {
		n.since[c.prefix] = c.age
	}
}

// rangesChanged decides which ranges are valid after claims of some nodes changed. Normally no ranges of different
// nodes overlap, and the cost depends on the changed claims; otherwise all claims are resolved.
func (v *view) rangesChanged(changed []*nodeView) {
	if len(changed) == 0 {
		return
	}
	v.unpin()
	simple := !v.contested && len(v.pins) == 0 && (len(changed) == 1 || 4*len(changed) < len(v.nodes))
	var moved []netip.Prefix
	for _, n := range changed {
		v.touch(Key{Node: n.name})
		v.touchAll(n)
		if simple {
			moved = append(moved, n.ranges...)
			for _, p := range n.ranges {
				v.withdraw(p)
			}
			n.ranges, n.refused = nil, nil // the node may be in the list twice
		}
	}
	for _, n := range changed {
		wanted, refused := v.permitted(n)
		if simple && len(refused) == 0 && slices.Equal(prefixesOf(wanted), n.ranges) {
			n.take(wanted, nil)
			continue
		}
		taken := func(c claim) bool { return !v.free(c.prefix) }
		if simple = simple && !slices.ContainsFunc(wanted, taken) && !overlapping(wanted); !simple {
			v.resolve()
			return
		}
		n.take(wanted, refused)
		moved = append(moved, n.ranges...)
		for _, p := range n.ranges {
			v.accept(p, n.name)
		}
	}
	// An address of a node is not valid inside another node's range.
	within := func(a netip.Addr) bool {
		return slices.ContainsFunc(moved, func(p netip.Prefix) bool { return p.Contains(a) })
	}
	for a := range v.claimed {
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

// overlapping reports whether two claims of one node overlap each other.
func overlapping(all []claim) bool {
	for i, c := range all {
		if slices.ContainsFunc(all[:i], func(d claim) bool { return c.prefix.Overlaps(d.prefix) }) {
			return true
		}
	}
	return false
}

// resolve decides which ranges are valid. If claims of different nodes overlap, the earliest claim is valid, even if
// its node registered later. After the store was rebuilt, each range stays with the node that had it before.
func (v *view) resolve() {
	before := map[*nodeView]*nodeView{}
	var all []claim
	for _, n := range v.nodes {
		before[n] = &nodeView{ranges: n.ranges, refused: n.refused}
		claims, refused := v.permitted(n)
		n.ranges, n.refused = nil, refused
		all = append(all, claims...)
	}
	slices.SortFunc(all, claim.compare)
	r := resolution{
		view: v, former: formerOf(all), accepted: map[netip.Prefix]claim{},
		around: map[netip.Prefix]map[netip.Prefix]struct{}{},
	}
	for _, c := range all {
		r.decide(c)
	}
	v.ranges, v.around, v.lengths = map[netip.Prefix]string{}, map[netip.Prefix]int{},
		map[bool]map[int]int{false: {}, true: {}}
	v.contested = r.contested
	counted := map[*nodeView][]claim{}
	for p, c := range r.accepted {
		v.accept(p, c.node.name)
		counted[c.node] = append(counted[c.node], c)
	}
	for n, was := range before {
		slices.SortFunc(n.refused, func(a, b Refusal) int { return a.Range.Compare(b.Range) })
		n.take(counted[n], n.refused)
		if !slices.Equal(was.ranges, n.ranges) || !slices.Equal(was.refused, n.refused) {
			v.touch(Key{Node: n.name})
			v.touchAll(n)
		}
	}
	// An address of a node is not valid inside another node's range.
	for a := range v.claimed {
		v.touch(mappingKey(a))
	}
	for a := range v.apiServers {
		v.touch(mappingKey(a))
	}
}

// resolution is one pass of resolve.
type resolution struct {
	view      *view
	former    uint64 // the store that this one was rebuilt from; 0: it was not
	accepted  map[netip.Prefix]claim
	around    map[netip.Prefix]map[netip.Prefix]struct{} // prefix → accepted ranges inside it
	contested bool
}

// decide accepts a claim, or refuses it because of earlier ones.
func (r *resolution) decide(c claim) {
	if holder, held := r.view.pinned(c); holder != "" {
		r.refuse(c, Refusal{
			Range: c.prefix, Holder: holder, Differs: true,
			Reason: fmt.Sprintf("node %s had %s before the store was rebuilt and has not given it up", holder, held),
		})
		return
	}
	rivals := r.rivals(c)
	isPinned := r.view.pins[c.prefix] == c.node.name && c.node.name != ""
	for _, d := range rivals {
		if d.node == c.node || isPinned || c.beats(d, r.former) {
			continue
		}
		r.refuse(c, Refusal{
			Range: c.prefix, Holder: d.node.name, Reason: fmt.Sprintf("node %s claimed %s before", d.node.name, d.prefix),
		})
		return
	}
	for _, d := range rivals {
		if d.node == c.node {
			continue // a node may have a range inside another range of its own
		}
		r.remove(d)
		r.refuse(d, Refusal{
			Range: d.prefix, Holder: c.node.name, Differs: isPinned,
			Reason: fmt.Sprintf("node %s claimed %s before the store was rebuilt", c.node.name, c.prefix),
		})
	}
	r.accepted[c.prefix] = c
	for around := range wider(c.prefix) {
		if r.around[around] == nil {
			r.around[around] = map[netip.Prefix]struct{}{}
		}
		r.around[around][c.prefix] = struct{}{}
	}
}

// rivals returns the accepted claims that overlap a claim.
func (r *resolution) rivals(c claim) (all []claim) {
	if d, ok := r.accepted[c.prefix]; ok {
		all = append(all, d)
	}
	for around := range wider(c.prefix) {
		if d, ok := r.accepted[around]; ok {
			all = append(all, d)
		}
	}
	for p := range r.around[c.prefix] {
		all = append(all, r.accepted[p])
	}
	slices.SortFunc(all, claim.compare)
	return all
}

func (r *resolution) remove(c claim) {
	delete(r.accepted, c.prefix)
	for around := range wider(c.prefix) {
		delete(r.around[around], c.prefix)
	}
}

func (r *resolution) refuse(c claim, why Refusal) {
	c.node.refused = append(c.node.refused, why)
	r.contested = true
}

// pinned returns another node whose pinned range overlaps a claim, and that range.
func (v *view) pinned(c claim) (holder string, held netip.Prefix) {
	if len(v.pins) == 0 || v.pins[c.prefix] == c.node.name {
		return "", netip.Prefix{}
	}
	for p, name := range v.pins {
		if name != c.node.name && p.Overlaps(c.prefix) && (holder == "" || p.Compare(held) < 0) {
			holder, held = name, p
		}
	}
	return holder, held
}

// pin reserves all accepted ranges for their current nodes, because the store was rebuilt: all revisions are new and do
// not show which node had a range first.
func (v *view) pin(cluster uint64) {
	if v.pins == nil {
		v.pins = map[netip.Prefix]string{}
	}
	for _, p := range v.wrote {
		if node, _ := v.heldByOther(p, v.own); node == "" {
			v.pins[p] = v.own
		}
	}
	for p, node := range v.ranges {
		v.pins[p] = node
		if node == v.own && cluster != 0 {
			v.former[p] = Former{Cluster: cluster, Revision: v.nodes[node].since[p]}
		}
	}
	for _, n := range v.nodes {
		n.since = nil
	}
}

// unpin removes the pins of ranges that their nodes have returned, because they registered in the rebuilt store without
// them, and of ranges that are now assigned to other nodes.
func (v *view) unpin() {
	for p, node := range v.pins {
		if v.pinEnds(p, node) {
			delete(v.pins, p)
			continue
		}
		n := v.nodes[node]
		if n == nil || !n.registered {
			continue
		}
		if !slices.ContainsFunc(v.claims(n), func(c claim) bool { return c.prefix == p }) {
			delete(v.pins, p)
		}
	}
}

// forgotten removes all pins of a node.
func (v *view) forgotten(node string) (had bool) {
	for p, name := range v.pins {
		if name == node {
			delete(v.pins, p)
			had = true
		}
	}
	return had
}

// missing returns the pinned ranges that their nodes have not claimed again, sorted.
func (v *view) missing() (out []netip.Prefix) {
	for p, node := range v.pins {
		if v.ranges[p] != node {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return out
}
