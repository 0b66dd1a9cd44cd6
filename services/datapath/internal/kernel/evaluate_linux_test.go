// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// actions of rules
const (
	actDeny     = uint8(bpf.MapsSlActionSL_ACTION_DENY)
	actRedirect = uint8(bpf.MapsSlActionSL_ACTION_REDIRECT)
	actAllow    = uint8(bpf.MapsSlActionSL_ACTION_ALLOW)
	actPass     = uint8(bpf.MapsSlActionSL_ACTION_PASS)
)

// rawTable is a table written entry by entry into the maps; it may be one that no compiler would produce.
type rawTable struct {
	id      nodetable.ID
	header  bpf.MapsSlTable
	rules   []uint8             // actions, number 1 first
	classes []map[uint32]uint32 // last point of an interval -> its value
}

func rules(admin, rest uint32) uint32 { return admin<<16 | rest }

const (
	noAdmin = 0x7fff
	noRest  = 0xffff
	lastHi  = 0xffffffff
)

// put writes raw entries; each table has its own index ranges, by its number.
func (r rawTable) put(t testing.TB, k *Kernel) {
	t.Helper()
	base := uint32(r.id) * 16
	r.header.ClassBase, r.header.RuleBase = base, base
	r.header.N_class, r.header.N_rule = uint16(len(r.classes)), uint16(len(r.rules))
	for i, action := range r.rules {
		update(t, k, bpf.MapsMapSlRule, base+uint32(i), bpf.MapsSlRule{Action: action})
	}
	for i, intervals := range r.classes {
		var node bpf.MapsSlPortNode
		var n int
		for _, hi := range slices.Sorted(maps.Keys(intervals)) {
			node.Hi[n], node.Val[n] = hi, intervals[hi]
			n++
		}
		for ; n < len(node.Hi); n++ {
			node.Hi[n], node.Val[n] = node.Hi[n-1], node.Val[n-1]
		}
		at := base + uint32(i)
		update(t, k, bpf.MapsMapSlPorts, at, node)
		update(t, k, bpf.MapsMapSlClass, at, at)
	}
	update(t, k, bpf.MapsMapSlTable, uint32(r.id), r.header)
}

func update(t testing.TB, k *Kernel, name string, key, value any) {
	t.Helper()
	must(t, "write "+name, k.Pins.Map(name).Update(key, value, ebpf.UpdateAny))
}

func identityIndex(id identity.Numeric) uint32 {
	if id >= 0xff0000 {
		return uint32(id) - 0xff0000 + 65536
	}
	return uint32(id)
}

func knownWord(class uint16, kind, scope uint32) uint32 {
	return 1<<31 | uint32(class) | kind<<16 | scope<<24
}

// everyRule returns a table with all kinds of rules: identity class 0 has none, class 1 has all of them by port, class
// 2 is for addresses in a prefix.
func everyRule(id nodetable.ID, flags uint16) rawTable {
	const tcp = 6 << 16
	return rawTable{
		id:     id,
		header: bpf.MapsSlTable{PeerSet: uint32(id), CidrSet: uint32(id), Flags: flags},
		rules:  []uint8{actDeny, actPass, actAllow, actRedirect, actDeny, actAllow, actPass},
		classes: []map[uint32]uint32{
			{lastHi: rules(noAdmin, noRest)},
			{
				tcp | 9:  rules(noAdmin, noRest),
				tcp | 10: rules(1, 3),
				tcp | 11: rules(2, 3),
				tcp | 12: rules(2, 4),
				tcp | 13: rules(noAdmin, 5),
				tcp | 14: rules(2, noRest),
				tcp | 15: rules(noAdmin, 7),
				tcp | 16: rules(3, 5),
				lastHi:   rules(noAdmin, noRest),
			},
			{
				tcp | 19: rules(noAdmin, noRest),
				tcp | 20: rules(noAdmin, 6),
				tcp | 21: rules(noAdmin, 1),
				lastHi:   rules(noAdmin, noRest),
			},
		},
	}
}

func TestKernelVerdictsAreThoseOfTheTable(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	j := kerneltest.NewEvaluator(t, k.Pins)
	const (
		plain     = nodetable.ID(16)
		open      = nodetable.ID(17)
		host      = nodetable.ID(18)
		addresses = nodetable.ID(19)
		strict    = nodetable.ID(20) // denies unknown peers by a rule
		unused    = nodetable.ID(21)
	)
	everyRule(plain, 0).put(t, k)
	everyRule(open, 1).put(t, k)
	everyRule(host, 2).put(t, k)
	everyRule(addresses, 4).put(t, k)
	s := everyRule(strict, 4)
	s.header.DefClass[6] = 1
	s.put(t, k)

	const web, local, lost = identity.Numeric(300), identity.Numeric(0xff0007), identity.Numeric(301)
	for id, word := range map[identity.Numeric]uint32{
		web:           knownWord(7, 0, 0),
		local:         knownWord(7, 0, 2),
		identity.Host: knownWord(8, 3, 1),
	} {
		update(t, k, bpf.MapsMapSlId, identityIndex(id), word)
	}
	for _, table := range []nodetable.ID{plain, open, host, addresses, strict} {
		update(t, k, bpf.MapsMapSlPeer, bpf.MapsSlPeerKey{PeerSet: uint32(table), NodeClass: 7}, uint32(1))
	}
	in4, in6 := netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:f::/48")
	block := bpf.MapsSlCidr{Class: [3]uint16{0, 0, 2}}
	for _, table := range []nodetable.ID{addresses, strict} {
		set := [4]byte(binary.BigEndian.AppendUint32(nil, uint32(table)))
		key4 := bpf.MapsSlCidrKey4{Bits: 32 + 24, Set: binary.NativeEndian.Uint32(set[:]), Addr: in4.Addr().As4()}
		key6 := bpf.MapsSlCidrKey6{Bits: 32 + 48, Set: binary.NativeEndian.Uint32(set[:]), Addr: in6.Addr().As16()}
		update(t, k, bpf.MapsMapSlCidr4, key4, block)
		update(t, k, bpf.MapsMapSlCidr6, key6, block)
	}
	inside4, inside6 := netip.MustParseAddr("198.51.100.9"), netip.MustParseAddr("2001:db8:f::9")
	const byRule, byDefault, byHost, byUnknown, byTable = 1, 2, 3, 4, 5

	for _, c := range []struct {
		name   string
		table  nodetable.ID
		peer   identity.Numeric
		addr   netip.Addr
		port   uint16
		egress bool
		audit  bool
		reason event.Reason
		side   bpf.MapsSlSide
	}{
		{name: "table 0 denies", table: nodetable.Deny, peer: web, reason: event.PolicyDenied, side: bpf.MapsSlSide{By: byTable}},
		{name: "table 0, which cuts off, denies in audit mode", table: nodetable.Deny, peer: web, audit: true, reason: event.PolicyDenied, side: bpf.MapsSlSide{By: byTable}},
		{name: "table 1 allows", table: nodetable.Allow, peer: lost, side: bpf.MapsSlSide{By: byTable, Action: actAllow}},
		{name: "pending lets the host in", table: nodetable.Pending, peer: identity.Host, side: bpf.MapsSlSide{By: byTable, Action: actAllow}},
		{name: "pending admits no other peer", table: nodetable.Pending, peer: web, reason: event.PolicyPending, side: bpf.MapsSlSide{By: byTable}},
		{name: "pending lets nothing out", table: nodetable.Pending, peer: identity.Host, egress: true, reason: event.PolicyPending, side: bpf.MapsSlSide{By: byTable}},
		{name: "pending passes in audit mode", table: nodetable.Pending, peer: web, audit: true, side: bpf.MapsSlSide{By: byTable, Audited: 1}},
		{name: "a number between the fixed ones and the others", table: 15, peer: web, reason: event.PolicyTableUnknown, side: bpf.MapsSlSide{By: byTable}},
		{name: "an unused table", table: unused, peer: web, reason: event.PolicyTableUnknown, side: bpf.MapsSlSide{By: byTable}},
		{name: "an unused table, in audit mode", table: unused, peer: web, audit: true, reason: event.PolicyTableUnknown, side: bpf.MapsSlSide{By: byTable}},
		{name: "a table beyond the map", table: 65535, peer: web, reason: event.PolicyTableUnknown, side: bpf.MapsSlSide{By: byTable}},

		{name: "no rule", table: plain, peer: web, port: 9, reason: event.PolicyDenied, side: bpf.MapsSlSide{By: byDefault}},
		{name: "no rule in audit mode", table: plain, peer: web, port: 9, audit: true, side: bpf.MapsSlSide{By: byDefault, Audited: 1}},
		{name: "no rule where the default allows", table: open, peer: web, port: 9, side: bpf.MapsSlSide{By: byDefault, Action: actAllow}},
		{name: "an Admin deny beats the rest", table: open, peer: web, port: 10, reason: event.PolicyDenied, side: bpf.MapsSlSide{By: byRule, Rule: 1}},
		{name: "an Admin pass leaves it to the rest", table: plain, peer: web, port: 11, side: bpf.MapsSlSide{By: byRule, Rule: 3, Action: actAllow}},
		{name: "a redirect needs a proxy", table: plain, peer: web, port: 12, reason: event.NoProxy, side: bpf.MapsSlSide{By: byRule, Rule: 4, Action: actRedirect}},
		{
			name: "a redirect in audit mode passes and names its rule", table: plain, peer: web, port: 12, audit: true,
			side: bpf.MapsSlSide{By: byRule, Rule: 4, Action: actRedirect, Audited: 1},
		},
		{name: "a deny of the rest", table: open, peer: web, port: 13, reason: event.PolicyDenied, side: bpf.MapsSlSide{By: byRule, Rule: 5}},
		{name: "a deny in audit mode names its rule", table: open, peer: web, port: 13, audit: true, side: bpf.MapsSlSide{By: byRule, Rule: 5, Audited: 1}},
		{name: "an Admin pass without a rest is the default", table: plain, peer: web, port: 14, reason: event.PolicyDenied, side: bpf.MapsSlSide{By: byDefault}},
		{name: "a pass of the rest is the default", table: open, peer: web, port: 15, side: bpf.MapsSlSide{By: byDefault, Action: actAllow}},
		{name: "an Admin allow beats a deny of the rest", table: plain, peer: web, port: 16, side: bpf.MapsSlSide{By: byRule, Rule: 3, Action: actAllow}},

		{name: "the host where it is allowed", table: host, peer: identity.Host, port: 10, side: bpf.MapsSlSide{By: byHost, Action: actAllow}},
		{name: "the host where it is not", table: plain, peer: identity.Host, port: 10, reason: event.PolicyDenied, side: bpf.MapsSlSide{By: byDefault}},
		{name: "another peer where the host is allowed", table: host, peer: web, port: 9, reason: event.PolicyDenied, side: bpf.MapsSlSide{By: byDefault}},

		{name: "an unknown peer", table: plain, peer: lost, port: 10, reason: event.IdentityUnknown, side: bpf.MapsSlSide{By: byUnknown}},
		{name: "an unknown peer where the default allows", table: open, peer: lost, port: 10, side: bpf.MapsSlSide{By: byDefault, Action: actAllow}},
		{name: "an unknown peer in audit mode", table: plain, peer: lost, port: 10, audit: true, side: bpf.MapsSlSide{By: byUnknown, Audited: 1}},
		{name: "an unknown peer denied by a rule", table: strict, peer: lost, port: 13, addr: world4, reason: event.IdentityUnknown, side: bpf.MapsSlSide{By: byUnknown, Rule: 5}},
		{name: "an unknown peer allowed by a wildcard", table: strict, peer: lost, port: 16, addr: world4, side: bpf.MapsSlSide{By: byRule, Rule: 3, Action: actAllow}},
		{name: "a number of another cluster", table: plain, peer: 0x10000 + 300, port: 16, reason: event.IdentityUnknown, side: bpf.MapsSlSide{By: byUnknown}},
		{name: "a node-local number beyond the array", table: plain, peer: 0xff1000, port: 16, reason: event.IdentityUnknown, side: bpf.MapsSlSide{By: byUnknown}},

		{name: "an address in a prefix", table: addresses, peer: local, addr: inside4, port: 20, side: bpf.MapsSlSide{By: byRule, Rule: 6, Action: actAllow}},
		{name: "an IPv6 address in a prefix", table: addresses, peer: local, addr: inside6, port: 20, side: bpf.MapsSlSide{By: byRule, Rule: 6, Action: actAllow}},
		{name: "an address in no prefix", table: addresses, peer: local, addr: host4, port: 20, reason: event.PolicyDenied, side: bpf.MapsSlSide{By: byDefault}},
		{name: "another scope in the prefix", table: addresses, peer: web, addr: inside4, port: 20, reason: event.PolicyDenied, side: bpf.MapsSlSide{By: byDefault}},
		{name: "an address where the table does not ask", table: plain, peer: local, addr: inside4, port: 20, reason: event.PolicyDenied, side: bpf.MapsSlSide{By: byDefault}},
		{name: "the identity's rule has the lower number", table: addresses, peer: local, addr: inside4, port: 16, side: bpf.MapsSlSide{By: byRule, Rule: 3, Action: actAllow}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if !c.addr.IsValid() {
				c.addr = b.IPv4
			}
			q := kerneltest.Question(c.table, c.peer, c.addr, 6, c.port)
			if c.egress {
				q.Direction = uint8(event.Egress)
			}
			if c.audit {
				q.Flags = 1
			}
			c.side.Table = uint16(c.table)
			if reason, side := j.Ask(t, q); reason != c.reason || side != c.side {
				t.Errorf("got %v, %+v\nwant %v, %+v", reason, side, c.reason, c.side)
			}
		})
	}
}

// TestKernelDamagedTablesNeverAllow evaluates corrupt tables: they drop, also in audit mode.
func TestKernelDamagedTablesNeverAllow(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	j := kerneltest.NewEvaluator(t, k.Pins)
	const id, peer = nodetable.ID(16), identity.Numeric(300)
	update(t, k, bpf.MapsMapSlId, uint32(peer), knownWord(7, 0, 0))
	base := uint32(id) * 16
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, r *bpf.MapsSlTable)
	}{
		{"a class beyond the table's", func(_ *testing.T, r *bpf.MapsSlTable) { r.DefClass[0] = 3 }},
		{"classes beyond the map", func(_ *testing.T, r *bpf.MapsSlTable) { r.ClassBase = 0xfffffff0 }},
		{"rules beyond the map", func(_ *testing.T, r *bpf.MapsSlTable) { r.RuleBase = 0xfffffff0 }},
		{"fewer rules than named", func(_ *testing.T, r *bpf.MapsSlTable) { r.N_rule = 2 }},
		{"a root beyond the map", func(t *testing.T, _ *bpf.MapsSlTable) {
			update(t, k, bpf.MapsMapSlClass, base+1, uint32(1<<30))
		}},
		{"a root that nobody wrote", func(t *testing.T, _ *bpf.MapsSlTable) {
			update(t, k, bpf.MapsMapSlClass, base+1, uint32(0))
		}},
		{"a node that leads to itself", func(t *testing.T, _ *bpf.MapsSlTable) {
			var n bpf.MapsSlPortNode
			for i := range n.Hi {
				n.Hi[i], n.Val[i] = lastHi, 1<<31|(base+1)
			}
			update(t, k, bpf.MapsMapSlPorts, base+1, n)
		}},
		{"a node that ends too soon", func(t *testing.T, _ *bpf.MapsSlTable) {
			var n bpf.MapsSlPortNode
			for i := range n.Hi {
				n.Hi[i], n.Val[i] = 1, rules(noAdmin, 3)
			}
			update(t, k, bpf.MapsMapSlPorts, base+1, n)
		}},
		{"a rule 0", func(t *testing.T, _ *bpf.MapsSlTable) {
			var n bpf.MapsSlPortNode
			for i := range n.Hi {
				n.Hi[i], n.Val[i] = lastHi, rules(noAdmin, 0)
			}
			update(t, k, bpf.MapsMapSlPorts, base+1, n)
		}},
		{"an unknown action", func(t *testing.T, _ *bpf.MapsSlTable) {
			update(t, k, bpf.MapsMapSlRule, base+2, bpf.MapsSlRule{Action: 4})
		}},
		{"an address class beyond the table's", func(_ *testing.T, r *bpf.MapsSlTable) {
			r.Flags, r.AddrDef[0] = 4, 3
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := everyRule(id, 0)
			r.header.DefClass[0] = 1
			r.put(t, k)
			if reason, _ := j.Ask(t, kerneltest.Question(id, peer, b.IPv4, 6, 16)); reason != 0 {
				t.Fatalf("the intact table returns %v", reason)
			}
			h := r.header
			h.ClassBase, h.RuleBase, h.N_class, h.N_rule = base, base, uint16(len(r.classes)), uint16(len(r.rules))
			c.damage(t, &h)
			update(t, k, bpf.MapsMapSlTable, uint32(id), h)
			q := kerneltest.Question(id, peer, b.IPv4, 6, 16)
			q.Flags = 1
			if reason, side := j.Ask(t, q); reason != event.PolicyTableCorrupt {
				t.Errorf("%v, %+v, want %v", reason, side, event.PolicyTableCorrupt)
			}
		})
	}
}

// TestKernelSearchFindsEveryInterval compares the search over three levels with a linear search.
func TestKernelSearchFindsEveryInterval(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	j := kerneltest.NewEvaluator(t, k.Pins)
	const id, peer = nodetable.ID(16), identity.Numeric(300)
	const first = uint32(1000) // node
	r := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{1, 2, 15, 16, 17, 255, 256, 257, 4096} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			his := map[uint32]bool{lastHi: true}
			for len(his) < n {
				his[6<<16|r.Uint32N(65536)] = true
			}
			list := slices.Sorted(maps.Keys(his))
			level := make([][2]uint32, n)
			for i, hi := range list {
				level[i] = [2]uint32{hi, rules(noAdmin, uint32(i+1))}
			}
			node := first
			for leaf := true; ; leaf = false {
				var up [][2]uint32
				for len(level) > 0 {
					m := min(16, len(level))
					var pn bpf.MapsSlPortNode
					for i := range pn.Hi {
						e := level[min(i, m-1)]
						pn.Hi[i], pn.Val[i] = e[0], e[1]
						if !leaf {
							pn.Val[i] |= 1 << 31
						}
					}
					update(t, k, bpf.MapsMapSlPorts, node, pn)
					up = append(up, [2]uint32{level[m-1][0], node})
					node++
					level = level[m:]
				}
				if level = up; len(level) == 1 {
					break
				}
			}
			update(t, k, bpf.MapsMapSlClass, uint32(1), level[0][1])
			for i := range n {
				update(t, k, bpf.MapsMapSlRule, uint32(i), bpf.MapsSlRule{Action: actAllow})
			}
			update(t, k, bpf.MapsMapSlTable, uint32(id), bpf.MapsSlTable{ClassBase: 1, N_class: 1, N_rule: uint16(n)})

			points := []uint32{0, 1, lastHi}
			for _, hi := range list {
				points = append(points, hi-1, hi, hi+1)
			}
			for _, point := range points {
				var want uint16 = 1
				for list[want-1] < point {
					want++
				}
				q := kerneltest.Question(id, peer, b.IPv4, 0, 0)
				q.Point = point
				if reason, side := j.Ask(t, q); reason != 0 || side.Rule != want {
					t.Fatalf("point %#x: %v, rule %d, want rule %d", point, reason, side.Rule, want)
				}
			}
		})
	}
}
