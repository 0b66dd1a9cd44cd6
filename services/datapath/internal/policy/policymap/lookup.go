// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// Tables lists the tables that were made from policies, including tables of an earlier process,
// sorted by ID. Retired tables are left out.
func (m *Maps) Tables() ([]nodetable.Info, error) {
	if err := m.gate.RLock(); err != nil {
		return nil, err
	}
	defer m.gate.RUnlock()
	s := m.store
	var infos []nodetable.Info
	for _, t := range slices.Sorted(maps.Keys(s.tables)) {
		lt := s.tables[t]
		info := nodetable.Info{
			ID: t, Hash: lt.hash,
			Rules: len(lt.rules), Classes: len(lt.classes), Nodes: len(lt.nodes), Peers: len(lt.peers),
		}
		if lt.addresses != nil {
			info.Prefixes = len(lt.addresses.prefixes)
		}
		infos = append(infos, info)
	}
	return infos, nil
}

// TableSize returns the space that a table takes in the maps, including its spare capacity. A
// shared set of prefixes is divided among its tables.
func (m *Maps) TableSize(t nodetable.ID) nodetable.Size {
	var size nodetable.Size
	if m.gate.RLock() != nil {
		return size
	}
	defer m.gate.RUnlock()
	lt := m.store.tables[t]
	if lt == nil {
		return size
	}
	size[nodetable.LimitTables] = 1
	size[nodetable.LimitRules] = lt.ruleSpan.n
	size[nodetable.LimitPortNodes] = lt.nodeSpan.n
	size[nodetable.LimitPeerClasses] = lt.classSpan.n
	size[nodetable.LimitPeerRows] = len(lt.peers)
	if a := lt.addresses; a != nil {
		share := func(n int) int { return (n + a.refs - 1) / max(1, a.refs) }
		size[nodetable.LimitPrefixes4], size[nodetable.LimitPrefixes6] = share(a.count[0]), share(a.count[1])
	}
	return size
}

// SizeOf returns the largest space that a new table could take in the maps.
func (m *Maps) SizeOf(c nodetable.Content) nodetable.Size {
	trees := newTreeBuilder(nil)
	trees.addAll(c.Classes)
	nodes, classes := len(trees.nodes), len(c.Classes)
	size := nodetable.Size{
		nodetable.LimitTables:      1,
		nodetable.LimitRules:       len(c.Rules),
		nodetable.LimitPortNodes:   nodes + headroom(nodes, 1),
		nodetable.LimitPeerClasses: classHead + classes + headroom(classes, 2),
		nodetable.LimitPeerRows:    len(c.Peers),
	}
	for p := range c.Prefixes {
		size[nodetable.LimitPrefixes4+nodetable.MapLimit(family(p))]++
	}
	return size
}

// MapSizes returns the size of the maps for all tables.
func (m *Maps) MapSizes() nodetable.Size {
	s := m.store
	return nodetable.Size{
		nodetable.LimitTables:      len(s.ids.used) - firstTable,
		nodetable.LimitRules:       s.ruleRanges.size,
		nodetable.LimitPortNodes:   s.nodeRanges.size,
		nodetable.LimitPeerClasses: s.classRanges.size,
		nodetable.LimitPeerRows:    s.rowLimit,
		nodetable.LimitPrefixes4:   s.prefixLimit,
		nodetable.LimitPrefixes6:   s.prefixLimit,
	}
}

// TableContent reads a table back from the maps. It looks up rows and prefixes by the keys that
// were written; Audit finds additional ones.
func (m *Maps) TableContent(t nodetable.ID) (nodetable.Content, error) {
	if err := m.gate.RLock(); err != nil {
		return nodetable.Content{}, err
	}
	defer m.gate.RUnlock()
	s := m.store
	lt, err := s.live(t)
	if err != nil {
		return nodetable.Content{}, err
	}
	c, err := s.readBack(lt)
	if err != nil {
		return nodetable.Content{}, fmt.Errorf("table %d: %w", t, err)
	}
	return c, nil
}

func (s *tableStore) readBack(lt *liveTable) (nodetable.Content, error) {
	h := s.header(lt.id)
	var key bpf.MapsSlTableKey
	if err := s.tableKeys.Lookup(uint32(lt.id), &key); err != nil {
		return nodetable.Content{}, fmt.Errorf("key: %w", err)
	}
	c := nodetable.NewContent(policytable.Table{
		Hash:           key.Hash,
		DefaultAllow:   h.Flags&flagDefaultAllow != 0,
		HostAllow:      h.Flags&flagHostAllow != 0,
		HasAddresses:   h.Flags&flagAddresses != 0,
		DefaultClasses: h.DefClass,
		AddressClasses: h.AddrDef,
	}, len(lt.peers))
	for i := range int(h.N_rule) {
		r, err := element[bpf.MapsSlRule](s.tableMaps.rules, bpf.MapsMapSlRule, h.RuleBase+uint32(i))
		if err != nil {
			return c, err
		}
		c.Rules = append(c.Rules, ruleOf(r))
	}
	nodes, roots := make([]portNode, len(lt.nodes)), make([]uint32, len(lt.classes))
	for i := range lt.nodes {
		n, err := element[bpf.MapsSlPortNode](s.ports, bpf.MapsMapSlPorts, uint32(lt.nodeSpan.base+i))
		if err != nil {
			return c, err
		}
		nodes[i] = nodeOf(n, lt.nodeSpan.base)
	}
	for i := range lt.classes {
		at := int(h.ClassBase) + i
		if at >= s.classRanges.size {
			return c, fmt.Errorf("class base %d is out of range", h.ClassBase)
		}
		roots[i] = s.class(at) - uint32(lt.nodeSpan.base)
	}
	if err := checkTrees(roots, nodes, len(c.Rules)); err != nil {
		return c, err
	}
	c.Classes = make([]policytable.Ranges, len(roots))
	for i, root := range roots {
		c.Classes[i] = rangesOf(nodes, root)
	}
	for nc := range lt.peers {
		class, ok, err := s.peer(h.PeerSet, nc)
		if err != nil {
			return c, err
		}
		if ok {
			c.Peers[nc] = uint16(class)
		}
	}
	if lt.addresses == nil {
		return c, nil
	}
	for p := range lt.addresses.prefixes {
		v, ok, err := s.prefix(h.CidrSet, p)
		if err != nil {
			return c, err
		}
		if ok {
			c.Prefixes[p] = v.Class
		}
	}
	return c, nil
}

func element[V any](m *ebpf.Map, mapName string, i uint32) (v V, err error) {
	if err := m.Lookup(i, &v); err != nil {
		return v, fmt.Errorf("map %s: element %d: %w", mapName, i, err)
	}
	return v, nil
}

// Place is the result of looking up a peer in a table.
type Place struct {
	// IdentityClass is the peer's class by its identity. IdentityRow reports whether a row of the
	// table determines it; otherwise the default of its kind does.
	IdentityClass policytable.Class
	IdentityRow   bool
	// AddressClass is the peer's class by its address, if the table uses addresses. AddressPrefix
	// is the matching prefix; invalid if a default determines the class.
	AddressClass  policytable.Class
	AddressPrefix netip.Prefix
}

// Place looks up a peer in a table; w is the entry of its identity. The result is empty if the
// table is not made from a policy.
func (m *Maps) Place(t nodetable.ID, w nodetable.Identity, addr netip.Addr) (Place, error) {
	if err := m.gate.RLock(); err != nil {
		return Place{}, err
	}
	defer m.gate.RUnlock()
	p, err := m.store.place(t, w, addr)
	if err != nil {
		return p, fmt.Errorf("table %d: %w", t, err)
	}
	return p, nil
}

func (s *tableStore) place(t nodetable.ID, w nodetable.Identity, addr netip.Addr) (p Place, err error) {
	lt := s.tables[t]
	if lt == nil {
		return Place{}, nil
	}
	h := s.header(t)
	if !w.Known {
		w.Kind, w.Scope = identity.KindUnknown, 0
	}
	p.IdentityClass = h.DefClass[w.Kind]
	if w.Known {
		class, ok, err := s.peer(h.PeerSet, w.Class)
		if err != nil {
			return p, err
		}
		if ok {
			p.IdentityClass, p.IdentityRow = policytable.Class(class), true
		}
	}
	if h.Flags&flagAddresses == 0 || w.Scope >= identity.PeerScopes {
		return p, nil
	}
	p.AddressClass = h.AddrDef[w.Scope]
	b, block, found, err := s.longest(h.CidrSet, addr)
	if err != nil || !found {
		return p, err
	}
	p.AddressClass, p.AddressPrefix = b.Class[w.Scope], block
	return p, nil
}

// longest returns the prefix of a set that applies to an address. The map returns only its value;
// the prefix is found among those that were written.
func (s *tableStore) longest(set uint32, addr netip.Addr) (v bpf.MapsSlCidr, p netip.Prefix, found bool, err error) {
	v, found, err = s.prefix(set, ipmap.HostPrefix(addr))
	if err != nil || !found {
		return v, p, false, err
	}
	if a := s.sets[set]; a != nil {
		for bits := addr.BitLen(); bits >= 0; bits-- {
			if p, err := addr.Prefix(bits); err == nil {
				if _, ok := a.prefixes[p]; ok {
					return v, p, true, nil
				}
			}
		}
	}
	return v, p, true, nil
}

// Usage returns the number of used entries in each map of tables. In maps with a value for every
// index, it counts the meaningful ones.
func (m *Maps) Usage() (map[string]int, error) {
	if err := m.gate.RLock(); err != nil {
		return nil, err
	}
	defer m.gate.RUnlock()
	return m.store.usage(), nil
}

func (s *tableStore) usage() map[string]int {
	known := 0
	for i := range s.identities {
		if s.identity(i) != 0 {
			known++
		}
	}
	return map[string]int{
		bpf.MapsMapSlTable:    s.ids.n,
		bpf.MapsMapSlTableKey: s.ids.n,
		bpf.MapsMapSlClass:    s.classRanges.size - s.classRanges.available(),
		bpf.MapsMapSlPorts:    s.nodeRanges.size - s.nodeRanges.available(),
		bpf.MapsMapSlRule:     s.ruleRanges.size - s.ruleRanges.available(),
		bpf.MapsMapSlPeer:     s.rows,
		bpf.MapsMapSlCidr4:    s.prefixes[0],
		bpf.MapsMapSlCidr6:    s.prefixes[1],
		bpf.MapsMapSlClassKey: s.identityNumber.n,
		bpf.MapsMapSlId:       known,
	}
}
