// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"errors"
	"fmt"
	"hash/maphash"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// firstTable is the smallest ID of a table made from a policy.
const firstTable = 16

// noRoot fills the spare elements of a table's classes. It is never a valid node, so that an
// invalid class is reported as corrupt instead of using another table's verdict.
const noRoot = ^uint32(0)

// childBit marks a node's value as the index of another node.
const childBit = 1 << 31

// tableStore tracks used and free space in the maps of tables. The gate of Maps guards it.
//
// Free elements of the maps are zero, except in sl_rule after a start. Anything else in free elements was written by
// another program, or left by a killed process.
type tableStore struct {
	tableMaps

	tables map[nodetable.ID]*liveTable
	ids    numbers

	classRanges, nodeRanges, ruleRanges rangeAllocator

	sets    map[uint32]*addressSet
	bySum   map[uint64][]*addressSet
	setIDs  numbers
	sumSeed maphash.Seed

	rows           int // rows in sl_peer
	rowLimit       int
	prefixes       [2]int // entries in sl_cidr4, sl_cidr6
	prefixLimit    int
	identities     []uint32 // entries of sl_id as they were written
	identityClass  map[policytable.ClassKey]nodetable.IdentityClass
	classKey       map[nodetable.IdentityClass]policytable.ClassKey
	identityNumber numbers // of identity classes

	// draining is freed by the next grace period, underWay by the grace period in progress.
	draining, underWay []*retired
}

// retired is something that a running program may still use.
type retired struct {
	what string
	free func() error
	lt   *liveTable // the table, or its former range; nil: neither
}

// liveTable is the expected content of a table in the maps.
type liveTable struct {
	id     nodetable.ID
	hash   [32]byte
	header bpf.MapsSlTable

	rules     []policytable.Rule
	classes   []uint32   // indices into nodes
	nodes     []portNode // indices of children into nodes
	peers     map[nodetable.IdentityClass]uint16
	addresses *addressSet // nil: none

	ruleSpan  span
	classSpan span // includes the head
	nodeSpan  span
}

// classHead is the number of elements before class 0 of a table. They hold the range of its nodes
// and its capacity, so that one store of class_base moves everything that can grow.
const classHead = 2

// classCap and nodeCap are the capacities of the table's ranges.
func (t *liveTable) classCap() int { return t.classSpan.n - classHead }
func (t *liveTable) nodeCap() int  { return t.nodeSpan.n }

// addressSet is a set of prefixes, shared by all tables with equal prefixes.
type addressSet struct {
	id       uint32
	prefixes map[netip.Prefix]policytable.PrefixClasses
	count    [2]int // by address family
	sum      uint64 // hash of the prefixes, independent of their order
	refs     int
}

func family(p netip.Prefix) int {
	if p.Addr().Is4() {
		return 0
	}
	return 1
}

var familyMap = [2]string{bpf.MapsMapSlCidr4, bpf.MapsMapSlCidr6}

func newTableStore(tm tableMaps) *tableStore {
	return &tableStore{
		tableMaps:      tm,
		tables:         map[nodetable.ID]*liveTable{},
		ids:            newNumbers(firstTable, len(tm.tableMem)/tableSize-1),
		classRanges:    newRangeAllocator(len(tm.classMem) / wordStride),
		nodeRanges:     newRangeAllocator(int(tm.ports.MaxEntries())),
		ruleRanges:     newRangeAllocator(int(tm.rules.MaxEntries())),
		sets:           map[uint32]*addressSet{},
		bySum:          map[uint64][]*addressSet{},
		setIDs:         newNumbers(1, 1<<16-1),
		sumSeed:        maphash.MakeSeed(),
		rowLimit:       int(tm.peers.MaxEntries()),
		prefixLimit:    int(tm.cidr4.MaxEntries()),
		identities:     make([]uint32, nodetable.ClusterWide+identity.NodeLocalSize),
		identityClass:  map[policytable.ClassKey]nodetable.IdentityClass{},
		classKey:       map[nodetable.IdentityClass]policytable.ClassKey{},
		identityNumber: newNumbers(1, int(nodetable.MaxIdentityClass)),
	}
}

// quarter returns the largest part of a map that one table may use.
func quarter(size int) int { return size / 4 }

// reserve returns the part of a map that is kept free for changes of tables in use.
func reserve(size int) int { return (size + 9) / 10 }

// fitsRange checks a range that a new table needs.
func fitsRange(mapName string, r *rangeAllocator, need int) error {
	free := min(r.available()-reserve(r.size), r.largest())
	return fits(mapName, need, need, max(free, 0), r.size)
}

// fits compares the entries needed now with the free ones, and the table's total with the limit of
// one table.
func fits(mapName string, need, total, free, size int) error {
	if need > free || total > quarter(size) {
		return &nodetable.NoCapacityError{Map: mapName, Need: need, Free: free, Limit: quarter(size)}
	}
	return nil
}

// live returns a table that may be changed.
func (s *tableStore) live(t nodetable.ID) (*liveTable, error) {
	if lt := s.tables[t]; lt != nil {
		return lt, nil
	}
	return nil, fmt.Errorf("table %d: %w", t, nodetable.ErrNoTable)
}

// leaving returns everything that is retired and not freed yet.
func (s *tableStore) leaving() []*retired { return slices.Concat(s.draining, s.underWay) }

// beginDrain returns what a grace period starting now will free.
func (s *tableStore) beginDrain() []*retired {
	rs := s.draining
	s.draining, s.underWay = nil, append(s.underWay, rs...)
	return rs
}

// endDrain frees retired objects if the grace period passed. If it failed, or an object cannot be
// freed, the object waits for the next one.
func (s *tableStore) endDrain(rs []*retired, passed bool) error {
	var errs []error
	for _, r := range rs {
		s.underWay = slices.DeleteFunc(s.underWay, func(u *retired) bool { return u == r })
		if !passed {
			s.draining = append(s.draining, r)
		} else if err := r.free(); err != nil {
			s.draining = append(s.draining, r)
			errs = append(errs, fmt.Errorf("free %s: %w", r.what, err))
		}
	}
	return errors.Join(errs...)
}

// ruleValues, nodeValues and classValues encode contents for the maps.

func ruleValues(rules []policytable.Rule) []bpf.MapsSlRule {
	vs := make([]bpf.MapsSlRule, len(rules))
	for i, r := range rules {
		vs[i] = bpf.MapsSlRule{
			Action: uint8(r.Action), Tier: uint8(r.Tier), Redirect: uint16(r.Proxy), Flags: uint32(r.RuleSet),
		}
		if r.PassesWithoutProxy {
			vs[i].Flags |= passesAway
		}
	}
	return vs
}

// passesAway is SL_RULE_PASSES_AWAY of sl_rule.flags; the lower 16 bits are the number of the rule set.
const passesAway = 1 << 16

// ruleOf decodes an element of sl_rule.
func ruleOf(r bpf.MapsSlRule) policytable.Rule {
	return policytable.Rule{
		Action: policytable.Action(r.Action), Tier: policytable.Tier(r.Tier), Proxy: policytable.Proxy(r.Redirect),
		RuleSet: policytable.RuleSet(r.Flags), PassesWithoutProxy: r.Flags&passesAway != 0,
	}
}

func nodeValues(nodes []portNode, base int) []bpf.MapsSlPortNode {
	vs := make([]bpf.MapsSlPortNode, len(nodes))
	for i, n := range nodes {
		vs[i] = bpf.MapsSlPortNode{Hi: n.high, Val: n.value}
		for j, v := range n.value {
			if v&childBit != 0 {
				vs[i].Val[j] = v + uint32(base)
			}
		}
	}
	return vs
}

// classValues encodes the whole range of sl_class: the head, the roots, and noRoot for spare
// elements.
func (t *liveTable) classValues() []uint32 {
	vs := make([]uint32, t.classSpan.n)
	vs[0], vs[1] = uint32(t.nodeSpan.base)<<16|uint32(t.nodeCap()), uint32(t.classCap())
	for i := range vs[classHead:] {
		if i < len(t.classes) {
			vs[classHead+i] = t.classes[i] + uint32(t.nodeSpan.base)
		} else {
			vs[classHead+i] = noRoot
		}
	}
	return vs
}

// fillHeader fills the header with the ranges and the address set.
func (t *liveTable) fillHeader() {
	t.header.PeerSet = uint32(t.id)
	t.header.CidrSet = 0
	if t.addresses != nil {
		t.header.CidrSet = t.addresses.id
	}
	t.header.ClassBase = uint32(t.classSpan.base + classHead)
	t.header.RuleBase = uint32(t.ruleSpan.base)
	t.header.N_class = uint16(t.classCap())
	t.header.N_rule = uint16(len(t.rules))
}

// flags of sl_table.flags.
const (
	flagDefaultAllow = 1
	flagHostAllow    = 2
	flagAddresses    = 4
)

func flags(c *nodetable.Content) uint16 {
	var f uint16
	for _, b := range []struct {
		on  bool
		bit uint16
	}{{c.DefaultAllow, flagDefaultAllow}, {c.HostAllow, flagHostAllow}, {c.HasAddresses, flagAddresses}} {
		if b.on {
			f |= b.bit
		}
	}
	return f
}

// sumOf returns the contribution of a prefix to the sum of a set.
func (s *tableStore) sumOf(p netip.Prefix, classes policytable.PrefixClasses) uint64 {
	return maphash.Comparable(s.sumSeed, struct {
		prefix  netip.Prefix
		classes policytable.PrefixClasses
	}{p, classes})
}

// newSet allocates the number of a set. It writes nothing.
func (s *tableStore) newSet(blocks map[netip.Prefix]policytable.PrefixClasses) (*addressSet, error) {
	id, ok := s.setIDs.take()
	if !ok {
		return nil, &nodetable.NoCapacityError{Map: familyMap[0], Need: 1, Limit: 1}
	}
	a := &addressSet{id: uint32(id), prefixes: blocks}
	for p, classes := range blocks {
		a.count[family(p)]++
		a.sum += s.sumOf(p, classes)
	}
	return a, nil
}

// keep registers a set that is in the maps, or will be written next.
func (s *tableStore) keep(a *addressSet) {
	s.sets[a.id] = a
	s.bySum[a.sum] = append(s.bySum[a.sum], a)
	for f, n := range a.count {
		s.prefixes[f] += n
	}
}

// forget is the inverse of keep.
func (s *tableStore) forget(a *addressSet) {
	delete(s.sets, a.id)
	s.unlist(a)
	for f, n := range a.count {
		s.prefixes[f] -= n
	}
	s.setIDs.give(int(a.id))
}

func (s *tableStore) unlist(a *addressSet) {
	left := slices.DeleteFunc(s.bySum[a.sum], func(b *addressSet) bool { return a == b })
	if len(left) == 0 {
		delete(s.bySum, a.sum)
	} else {
		s.bySum[a.sum] = left
	}
}

// equalSet returns an existing set of exactly these prefixes, or nil.
func (s *tableStore) equalSet(blocks map[netip.Prefix]policytable.PrefixClasses) *addressSet {
	var sum uint64
	for p, classes := range blocks {
		sum += s.sumOf(p, classes)
	}
next:
	for _, a := range s.bySum[sum] {
		if a.refs == 0 || len(a.prefixes) != len(blocks) {
			continue
		}
		for p, classes := range blocks {
			if got, ok := a.prefixes[p]; !ok || got != classes {
				continue next
			}
		}
		return a
	}
	return nil
}

// writeSet writes all prefixes of a set that no table refers to yet. After an error none of them
// remains.
func (s *tableStore) writeSet(a *addressSet) error {
	for p, classes := range a.prefixes {
		if err := s.putPrefix(a.id, p, classes); err != nil {
			return errors.Join(err, s.clearSet(a))
		}
	}
	return nil
}

func (s *tableStore) clearSet(a *addressSet) error {
	var errs []error
	for p := range a.prefixes {
		errs = append(errs, s.deletePrefix(a.id, p))
	}
	return errors.Join(errs...)
}

// release ends a table's reference to a set after the next grace period. Until then, a program may
// still use the set for that table, so the set must not be changed in place.
func (s *tableStore) release(a *addressSet) {
	s.draining = append(s.draining, &retired{
		what: fmt.Sprintf("a use of address set %d", a.id),
		free: func() error { return s.unref(a) },
	})
}

// unref drops a reference to a set. The last one removes it from the maps.
func (s *tableStore) unref(a *addressSet) error {
	if a == nil {
		return nil
	}
	if a.refs == 1 {
		if err := s.clearSet(a); err != nil {
			return err
		}
		s.forget(a)
	}
	a.refs--
	return nil
}

// fitsSet checks the capacity for prefixes of both families.
func (s *tableStore) fitsSet(count [2]int, kept int) error {
	for f, n := range count {
		if err := fits(familyMap[f], n, n, max(s.prefixLimit-kept-s.prefixes[f], 0), s.prefixLimit); err != nil {
			return err
		}
	}
	return nil
}
