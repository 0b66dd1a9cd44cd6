// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipmap"
	"github.com/sluice-net/sluice/services/datapath/internal/policytable"
)

// Tables lists the tables that were made from policies, by number, those of an
// earlier process too. Retired ones are left out.
func (m *Maps) Tables() ([]policytable.Info, error) {
	if err := m.gate.RLock(); err != nil {
		return nil, err
	}
	defer m.gate.RUnlock()
	s := m.store
	var infos []policytable.Info
	for _, t := range slices.Sorted(maps.Keys(s.tables)) {
		lt := s.tables[t]
		info := policytable.Info{
			ID: t, Hash: lt.hash,
			Rules: len(lt.rules), Classes: len(lt.classes), Nodes: len(lt.nodes), Peers: len(lt.peers),
		}
		if lt.addresses != nil {
			info.Prefixes = len(lt.addresses.blocks)
		}
		infos = append(infos, info)
	}
	return infos, nil
}

// TableContent reads a table back from the maps. Rows and blocks are looked up
// by the keys that were written; Audit finds others.
func (m *Maps) TableContent(t policytable.ID) (policytable.Content, error) {
	if err := m.gate.RLock(); err != nil {
		return policytable.Content{}, err
	}
	defer m.gate.RUnlock()
	s := m.store
	lt, err := s.live(t)
	if err != nil {
		return policytable.Content{}, err
	}
	c, err := s.readBack(lt)
	if err != nil {
		return policytable.Content{}, fmt.Errorf("table %d: %w", t, err)
	}
	return c, nil
}

func (s *tableStore) readBack(lt *liveTable) (policytable.Content, error) {
	h := s.header(lt.id)
	var key bpf.MapsSlTableKey
	if err := s.tableKeys.Lookup(uint32(lt.id), &key); err != nil {
		return policytable.Content{}, fmt.Errorf("key: %w", err)
	}
	c := policytable.Content{
		Hash:           key.Hash,
		DefaultAllow:   h.Flags&flagDefaultAllow != 0,
		HostAllow:      h.Flags&flagHostAllow != 0,
		HasAddresses:   h.Flags&flagAddresses != 0,
		DefaultClasses: h.DefClass,
		AddressClasses: h.AddrDef,
		Peers:          make(map[policytable.IdentityClass]policytable.Class, len(lt.peers)),
		Prefixes:       map[netip.Prefix]policytable.PrefixClasses{},
	}
	for i := range int(h.N_rule) {
		r, err := element[bpf.MapsSlRule](s.tableMaps.rules, bpf.MapsMapSlRule, h.RuleBase+uint32(i))
		if err != nil {
			return c, err
		}
		c.Rules = append(c.Rules, policytable.Rule{Action: policytable.Action(r.Action), Tier: r.Tier, Proxy: r.Redirect})
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
		if at >= s.classRoom.size {
			return c, fmt.Errorf("class base %d leads nowhere", h.ClassBase)
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
	for p := range lt.addresses.blocks {
		v, ok, err := s.block(h.CidrSet, p)
		if err != nil {
			return c, err
		}
		if ok {
			c.Prefixes[p] = v.Class
		}
	}
	return c, nil
}

// element reads one element of an array.
func element[V any](m *ebpf.Map, mapName string, i uint32) (v V, err error) {
	if err := m.Lookup(i, &v); err != nil {
		return v, fmt.Errorf("map %s: element %d: %w", mapName, i, err)
	}
	return v, nil
}

// What a table says, as enum sl_action and enum sl_by have it.
const (
	actionDeny  = uint8(bpf.MapsSlActionSL_ACTION_DENY)
	actionAllow = uint8(bpf.MapsSlActionSL_ACTION_ALLOW)
	actionPass  = uint8(bpf.MapsSlActionSL_ACTION_PASS)

	byRule            = uint8(bpf.MapsSlBySL_BY_RULE)
	byDefault         = uint8(bpf.MapsSlBySL_BY_DEFAULT)
	byHostAllow       = uint8(bpf.MapsSlBySL_BY_HOST_ALLOW)
	byUnknownIdentity = uint8(bpf.MapsSlBySL_BY_UNKNOWN_IDENTITY)
	byTable           = uint8(bpf.MapsSlBySL_BY_TABLE)
)

// Verdict is what a table says, and by which entries.
type Verdict struct {
	Action uint8  // enum sl_action, never pass
	Proxy  uint16 // kind of proxy of a redirect
	Rule   uint16 // number of the deciding rule, 0 if none decided
	By     uint8  // enum sl_by
	// IdentityClass is the class of the identity side; IdentityRow says whether
	// a row of the table gave it, and not a default.
	IdentityClass uint16
	IdentityRow   bool
	// AddressClass is the class of the address side if the table asks it, and
	// AddressBlock the block that gave it; not valid: a default did.
	AddressClass uint16
	AddressBlock netip.Prefix
}

// ErrCorrupt says that a table leads nowhere: the programs drop.
var ErrCorrupt = errors.New("table is damaged")

// Lookup judges a connection with a peer by the live maps, in the steps
// that the programs take: id and addr are the peer's, point is
// protocol << 16 | destination port, or type << 8 | code of ICMP. It changes
// nothing. The table of a policy that is not known denies here; that the own
// host may come in nevertheless is for the caller to add.
//
// policytable.ErrNoTable says that the table is not there, ErrCorrupt that it is damaged;
// the programs drop in both cases.
func (m *Maps) Lookup(t policytable.ID, id identity.Numeric, addr netip.Addr, point uint32) (Verdict, error) {
	if err := m.gate.RLock(); err != nil {
		return Verdict{}, err
	}
	defer m.gate.RUnlock()
	return m.lookup(t, id, addr, point)
}

func (m *Maps) lookup(t policytable.ID, id identity.Numeric, addr netip.Addr, point uint32) (Verdict, error) {
	switch {
	case t == policytable.Allow:
		return Verdict{Action: actionAllow, By: byTable}, nil
	case t == policytable.Deny, t == policytable.Pending:
		return Verdict{Action: actionDeny, By: byTable}, nil
	case t < firstTable, int(t) >= len(m.store.ids.used):
		return Verdict{}, fmt.Errorf("table %d: %w", t, policytable.ErrNoTable)
	}
	h := m.store.header(t)
	if h.N_class == 0 {
		return Verdict{}, fmt.Errorf("table %d: %w", t, policytable.ErrNoTable)
	}
	v, err := m.store.lookup(&h, id, addr.Unmap(), point)
	if err != nil {
		return Verdict{}, fmt.Errorf("table %d: %w", t, err)
	}
	return v, nil
}

func (s *tableStore) lookup(h *bpf.MapsSlTable, id identity.Numeric, addr netip.Addr, point uint32) (v Verdict, err error) {
	w := policytable.Identity{}
	if i, ok := identityPlace(id); ok {
		w = unpacked(s.identity(i))
	}
	if !w.Known {
		w.Kind, w.Scope = policytable.KindUnknown, 0
	}
	v.IdentityClass = h.DefClass[w.Kind]
	if w.Known {
		class, ok, err := s.peer(h.PeerSet, w.Class)
		if err != nil {
			return v, err
		}
		if ok {
			v.IdentityClass, v.IdentityRow = uint16(class), true
		}
	}
	byIdentity, err := s.search(h, v.IdentityClass, point)
	if err != nil {
		return v, err
	}
	best := byIdentity
	if h.Flags&flagAddresses != 0 {
		if w.Scope >= policytable.Scopes {
			return v, fmt.Errorf("%w: identity %d has scope %d", ErrCorrupt, id, w.Scope)
		}
		v.AddressClass = h.AddrDef[w.Scope]
		if addr.IsValid() {
			b, p, found, err := s.longest(h.CidrSet, addr)
			if err != nil {
				return v, err
			}
			if found {
				v.AddressClass, v.AddressBlock = b.Class[w.Scope], p
			}
		}
		byAddress, err := s.search(h, v.AddressClass, point)
		if err != nil {
			return v, err
		}
		best = slotPair{min(best.admin, byAddress.admin), min(best.rest, byAddress.rest)}
	}
	unknown := w.Kind == policytable.KindUnknown
	for _, slot := range []struct {
		number, none uint16
		byIdentity   bool
	}{
		{best.admin, noAdminRule, best.admin == byIdentity.admin},
		{best.rest, noOtherRule, best.rest == byIdentity.rest},
	} {
		if slot.number == slot.none {
			continue
		}
		if slot.number == 0 || slot.number > h.N_rule {
			return v, fmt.Errorf("%w: rule %d of %d", ErrCorrupt, slot.number, h.N_rule)
		}
		r, err := element[bpf.MapsSlRule](s.tableMaps.rules, bpf.MapsMapSlRule, h.RuleBase+uint32(slot.number)-1)
		if err != nil {
			return v, err
		}
		if r.Action == actionPass {
			continue
		}
		v.Action, v.Proxy, v.Rule, v.By = r.Action, r.Redirect, slot.number, byRule
		if r.Action == actionDeny && unknown && slot.byIdentity {
			v.By = byUnknownIdentity
		}
		return v, nil
	}
	v.Action, v.By = actionDeny, byDefault
	switch {
	case h.Flags&flagDefaultAllow != 0:
		v.Action = actionAllow
	case h.Flags&flagHostAllow != 0 && w.Kind == policytable.KindHost:
		v.Action, v.By = actionAllow, byHostAllow
	case unknown:
		v.By = byUnknownIdentity
	}
	return v, nil
}

// slotPair is what an interval says.
type slotPair struct{ admin, rest uint16 }

// search walks the tree of a class.
func (s *tableStore) search(h *bpf.MapsSlTable, class uint16, point uint32) (slotPair, error) {
	at := int(h.ClassBase) + int(class)
	if class >= h.N_class || at >= s.classRoom.size {
		return slotPair{}, fmt.Errorf("%w: class %d of %d", ErrCorrupt, class, h.N_class)
	}
	next := s.class(at)
	for range treeDepth {
		if int64(next) >= int64(s.nodeRoom.size) {
			return slotPair{}, fmt.Errorf("%w: node %d", ErrCorrupt, next)
		}
		n, err := element[bpf.MapsSlPortNode](s.ports, bpf.MapsMapSlPorts, next)
		if err != nil {
			return slotPair{}, err
		}
		i := 0
		for i < fanout-1 && point > n.Hi[i] {
			i++
		}
		if point > n.Hi[i] {
			return slotPair{}, fmt.Errorf("%w: node %d ends before %#x", ErrCorrupt, next, point)
		}
		v := n.Val[i]
		if v&childBit == 0 {
			return slotPair{uint16(v >> 16), uint16(v)}, nil
		}
		next = v &^ childBit
	}
	return slotPair{}, fmt.Errorf("%w: class %d is deeper than %d nodes", ErrCorrupt, class, treeDepth)
}

// longest finds the block of a set that counts for an address. The map says
// its value; which prefix it was is known from what was written.
func (s *tableStore) longest(set uint32, addr netip.Addr) (v bpf.MapsSlBlock, p netip.Prefix, found bool, err error) {
	v, found, err = s.block(set, ipmap.HostPrefix(addr))
	if err != nil || !found {
		return v, p, false, err
	}
	if a := s.sets[set]; a != nil {
		for bits := addr.BitLen(); bits >= 0; bits-- {
			if p, err := addr.Prefix(bits); err == nil {
				if _, ok := a.blocks[p]; ok {
					return v, p, true, nil
				}
			}
		}
	}
	return v, p, true, nil
}

// Usage is how many entries of each map of tables are in use. Maps that hold a
// value for every index count those that mean something.
func (m *Maps) Usage() (map[string]int, error) {
	if err := m.gate.RLock(); err != nil {
		return nil, err
	}
	defer m.gate.RUnlock()
	return m.store.usage(), nil
}

// usage counts what the maps of tables hold.
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
		bpf.MapsMapSlClass:    s.classRoom.size - s.classRoom.available(),
		bpf.MapsMapSlPorts:    s.nodeRoom.size - s.nodeRoom.available(),
		bpf.MapsMapSlRule:     s.ruleRoom.size - s.ruleRoom.available(),
		bpf.MapsMapSlPeer:     s.rows,
		bpf.MapsMapSlCidr4:    s.blocks[0],
		bpf.MapsMapSlCidr6:    s.blocks[1],
		bpf.MapsMapSlClassKey: s.identityNumber.n,
		bpf.MapsMapSlId:       known,
	}
}
