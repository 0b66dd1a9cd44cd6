// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

func openTableMaps(pm *pin.Maps) tableMaps {
	return tableMaps{
		tableKeys: pm.Map(bpf.MapsMapSlTableKey),
		classKeys: pm.Map(bpf.MapsMapSlClassKey),
		ports:     pm.Map(bpf.MapsMapSlPorts),
		rules:     pm.Map(bpf.MapsMapSlRule),
		peers:     pm.Map(bpf.MapsMapSlPeer),
		cidr4:     pm.Map(bpf.MapsMapSlCidr4),
		cidr6:     pm.Map(bpf.MapsMapSlCidr6),
		tableMem:  pm.Memory(bpf.MapsMapSlTable),
		classMem:  pm.Memory(bpf.MapsMapSlClass),
		idMem:     pm.Memory(bpf.MapsMapSlId),
	}
}

// contents are the contents of the maps of tables, except for memory-mapped ones and sl_rule, which
// is large and read only where tables have their rules.
type contents struct {
	tableKeys []bpf.MapsSlTableKey
	classKeys []bpf.MapsSlClassKey
	ports     []bpf.MapsSlPortNode
	peers     map[uint32]map[uint32]uint32 // set, identity class, class
	prefixes  map[uint32]map[netip.Prefix]bpf.MapsSlCidr
	rows      int
}

func (m *tableMaps) read() (*contents, error) {
	c := &contents{
		peers:    map[uint32]map[uint32]uint32{},
		prefixes: map[uint32]map[netip.Prefix]bpf.MapsSlCidr{},
	}
	var errs [5]error
	c.tableKeys, errs[0] = pin.AllElements[bpf.MapsSlTableKey](m.tableKeys)
	c.classKeys, errs[1] = pin.AllElements[bpf.MapsSlClassKey](m.classKeys)
	c.ports, errs[2] = pin.AllElements[bpf.MapsSlPortNode](m.ports)
	errs[3] = m.eachPeer(func(set, nc, class uint32) {
		if c.peers[set] == nil {
			c.peers[set] = map[uint32]uint32{}
		}
		c.peers[set][nc] = class
		c.rows++
	})
	errs[4] = m.eachPrefix(func(set uint32, p netip.Prefix, v bpf.MapsSlCidr) {
		if c.prefixes[set] == nil {
			c.prefixes[set] = map[netip.Prefix]bpf.MapsSlCidr{}
		}
		c.prefixes[set][p] = v
	})
	if err := errors.Join(errs[:]...); err != nil {
		return nil, fmt.Errorf("read the maps of tables: %w", err)
	}
	return c, nil
}

// adopt rebuilds the store from the maps alone. It adopts tables that are complete or that an
// endpoint refers to. It writes nothing; RemoveLeftovers removes the rest.
func (m *Maps) adopt() error {
	s := m.store
	c, err := s.read()
	if err != nil {
		return err
	}
	m.left = c
	named := m.endpoints.Named()
	for i := firstTable; i < len(c.tableKeys); i++ {
		t := nodetable.ID(i)
		if c.tableKeys[i].Hash == [32]byte{} && !named[t] {
			continue
		}
		if lt, err := s.adopt(t, c); err != nil {
			m.log.Warn("table is corrupt and not adopted", "table", t, "named", named[t], "error", err)
			if named[t] {
				// The table will deny everything. Its ID stays reserved until the next start.
				s.ids.takeAt(i)
			}
		} else {
			s.tables[t] = lt
			s.ids.takeAt(i)
		}
	}
	for i, key := range c.classKeys {
		if key.Key != [16]byte{} && i > 0 {
			s.identityClass[key.Key], s.classKey[nodetable.IdentityClass(i)] = nodetable.IdentityClass(i), key.Key
			s.identityNumber.takeAt(i)
		}
	}
	// A class number without a key stays reserved if an identity or a row refers to it.
	for i := range s.identities {
		if s.identities[i] = s.identity(i); s.identities[i] != 0 {
			s.identityNumber.takeAt(int(unpacked(s.identities[i]).Class))
		}
	}
	for _, lt := range s.tables {
		for nc := range lt.peers {
			s.identityNumber.takeAt(int(nc))
		}
	}
	return nil
}

// adopt adopts one table, if all ranges in its header are valid.
func (s *tableStore) adopt(t nodetable.ID, c *contents) (_ *liveTable, err error) {
	h := s.header(t)
	lt := &liveTable{id: t, hash: c.tableKeys[t].Hash, header: h, peers: map[nodetable.IdentityClass]uint16{}}
	if h.PeerSet != uint32(t) {
		return nil, fmt.Errorf("its header refers to the rows of table %d", h.PeerSet)
	}
	if h.ClassBase < classHead || int(h.ClassBase) >= s.classRanges.size {
		return nil, fmt.Errorf("class base %d", h.ClassBase)
	}
	head := int(h.ClassBase) - classHead
	place, capacity := s.class(head), int(s.class(head+1))
	lt.classSpan = span{head, classHead + capacity}
	lt.nodeSpan = span{int(place >> 16), int(place & 0xffff)}
	if h.N_rule > 0 {
		lt.ruleSpan = span{int(h.RuleBase), int(h.N_rule)}
	}
	if capacity == 0 || int(h.N_class) > capacity {
		return nil, fmt.Errorf("its header has %d classes, and its range has space for %d", h.N_class, capacity)
	}
	taken := []struct {
		ranges *rangeAllocator
		span   span
	}{{&s.classRanges, lt.classSpan}, {&s.nodeRanges, lt.nodeSpan}, {&s.ruleRanges, lt.ruleSpan}}
	for i, x := range taken {
		if x.ranges.takeAt(x.span) {
			continue
		}
		for _, y := range taken[:i] {
			y.ranges.give(y.span)
		}
		return nil, fmt.Errorf("its elements %d to %d belong to another table", x.span.base, x.span.end()-1)
	}
	defer func() {
		if err != nil {
			for _, x := range taken {
				x.ranges.give(x.span)
			}
		}
	}()

	rules, err := s.readRules(lt.ruleSpan)
	if err != nil {
		return nil, err
	}
	for _, r := range rules {
		lt.rules = append(lt.rules, ruleOf(r))
	}
	for _, n := range c.ports[lt.nodeSpan.base:lt.nodeSpan.end()] {
		if n == (bpf.MapsSlPortNode{}) {
			break
		}
		lt.nodes = append(lt.nodes, nodeOf(n, lt.nodeSpan.base))
	}
	for i := range capacity {
		root := s.class(lt.classSpan.base + classHead + i)
		if root == noRoot {
			break
		}
		lt.classes = append(lt.classes, root-uint32(lt.nodeSpan.base))
	}
	if err := checkTrees(lt.classes, lt.nodes, len(lt.rules)); err != nil {
		return nil, err
	}
	// drop trailing nodes without a root: a killed process was appending them
	lt.nodes = lt.nodes[:reached(lt.classes, lt.nodes)]
	for nc, class := range c.peers[h.PeerSet] {
		if nc == 0 || nc > uint32(nodetable.MaxIdentityClass) || class > 0xffff {
			return nil, fmt.Errorf("row %d to %d", nc, class)
		}
		lt.peers[nodetable.IdentityClass(nc)] = uint16(class)
	}
	if h.CidrSet != 0 {
		if lt.addresses = s.adoptSet(h.CidrSet, c); lt.addresses == nil {
			return nil, fmt.Errorf("address set %d", h.CidrSet)
		}
		lt.addresses.refs++
	}
	s.rows += len(lt.peers)
	// A process may have been killed between two stores while it moved the table.
	lt.header.N_class = uint16(capacity)
	return lt, nil
}

// readRules reads a range of sl_rule.
func (m *tableMaps) readRules(sp span) ([]bpf.MapsSlRule, error) {
	rules := make([]bpf.MapsSlRule, sp.n)
	for i := range rules {
		r, err := element[bpf.MapsSlRule](m.rules, bpf.MapsMapSlRule, uint32(sp.base+i))
		if err != nil {
			return nil, err
		}
		rules[i] = r
	}
	return rules, nil
}

// reached returns the number of nodes up to the last one that is reachable from a root.
func reached(roots []uint32, nodes []portNode) int {
	n := 0
	seen := make([]bool, len(nodes))
	var walk func(i uint32)
	walk = func(i uint32) {
		if seen[i] {
			return
		}
		seen[i] = true
		n = max(n, int(i)+1)
		for _, v := range nodes[i].value {
			if v&childBit != 0 {
				walk(v &^ childBit)
			}
		}
	}
	for _, root := range roots {
		walk(root)
	}
	return n
}

func nodeOf(n bpf.MapsSlPortNode, base int) portNode {
	pn := portNode{high: n.Hi, value: n.Val}
	for j, v := range n.Val {
		if v&childBit != 0 {
			pn.value[j] = v - uint32(base)
		}
	}
	return pn
}

// adoptSet adopts a set of prefixes; nil if its number is out of range.
func (s *tableStore) adoptSet(id uint32, c *contents) *addressSet {
	if a := s.sets[id]; a != nil {
		return a
	}
	if int(id) > s.setIDs.last {
		return nil
	}
	s.setIDs.takeAt(int(id))
	a := &addressSet{id: id, prefixes: map[netip.Prefix]policytable.PrefixClasses{}}
	for p, v := range c.prefixes[id] {
		a.prefixes[p] = v.Class
		a.count[family(p)]++
		a.sum += s.sumOf(p, v.Class)
	}
	s.keep(a)
	return a
}

// RemoveLeftovers removes entries that belong to no table: leftovers of a process that was killed
// while it defined, moved, copied or freed a table. No program run may have started before Open.
func (m *Maps) RemoveLeftovers() error {
	c := m.left
	m.left = nil
	if c == nil {
		return nil
	}
	differences, err := m.store.audit(c, true)
	for _, d := range differences {
		m.log.Info("removed a leftover of an earlier process from the policy maps", "what", d)
	}
	return err
}
