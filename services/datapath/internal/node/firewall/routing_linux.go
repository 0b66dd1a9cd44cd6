// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package firewall

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Names of chains.
const (
	foreignName = "foreign"
	tunnelName  = "tunnel"
)

// loopback is the index of lo. It is the same in each network namespace, while the name can be changed.
const loopback = 1

// Routing describes how packets travel between nodes.
type Routing struct {
	// Native: packets travel without encapsulation; otherwise in a tunnel.
	Native bool
	// TunnelGroup is the device group of the tunnel device; only with an overlay.
	TunnelGroup uint32
	// TunnelPort is the UDP port of the tunnel; only with an overlay.
	TunnelPort uint16
	// Own returns the current ranges of this node's pods.
	Own func() []netip.Prefix
	// Others are the ranges of other nodes until the first call of SetOthers.
	Others []netip.Prefix
	// Nodes are the addresses of other nodes until the first call of SetOthers.
	Nodes []netip.Addr
}

// SetRouting makes the table protect traffic between nodes, from the next Repair on.
func (t *Table) SetRouting(f Routing) {
	f.Others, f.Nodes = slices.Clone(f.Others), slices.Clone(f.Nodes)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.set.routing = &f
}

// check rejects settings whose rules would drop the packets of every device without a group, or of the tunnel.
func (f *Routing) check() error {
	if f != nil && !f.Native && (f.TunnelGroup == 0 || f.TunnelPort == 0) {
		return errors.New("an overlay needs the device group and the UDP port of its tunnel")
	}
	return nil
}

// wanted describes the rules about routing for audits.
func (f *Routing) wanted(tracked bool) string {
	if f.Native {
		return "drop packets from foreign devices whose source is in a pod range of this node, " +
			"or, without a mark, in a pod range of another node"
	}
	words := fmt.Sprintf("drop UDP of endpoints to port %d, drop packets of device group %#x without a mark, drop "+
		"packets from foreign devices whose source is in a pod range of any node", f.TunnelPort, f.TunnelGroup)
	if tracked {
		words += fmt.Sprintf(", do not track UDP to port %d", f.TunnelPort)
	}
	return words
}

// routingRules returns the rules of the chain for unmarked packets; walls are its rules about endpoints. Packets from
// foreign devices leave the chain first, because tunnel packets arrive through these devices.
func (t *Table) routingRules(f *Routing, walls [][]expr.Any) [][]expr.Any {
	foreign := []expr.Any{ // meta iif != lo
		&expr.Meta{Key: expr.MetaKeyIIF, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: native(loopback)},
	}
	groups := t.groups
	if !f.Native {
		walls = slices.Concat(t.bars(f.TunnelPort), walls, [][]expr.Any{t.rule(f.TunnelGroup)})
		groups = append(slices.Clone(groups), f.TunnelGroup)
	}
	return slices.Insert(walls, 0, slices.Concat(foreign, notOf(groups), []expr.Any{
		&expr.Verdict{Kind: expr.VerdictGoto, Chain: foreignName},
	}))
}

// notOf returns the expressions of `meta iifgroup != G` for each group.
func notOf(groups []uint32) (exprs []expr.Any) {
	for i, g := range groups {
		if i == 0 {
			exprs = append(exprs, &expr.Meta{Key: expr.MetaKeyIIFGROUP, Register: 1})
		}
		exprs = append(exprs, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: native(g)})
	}
	return exprs
}

// bars returns the rule `meta iifgroup G udp dport P counter drop` for each group. The programs drop packets from pods
// to the tunnel port at the registered addresses of nodes. The rules also drop packets to other addresses of a node,
// such as an address on a loopback device: if this or another table masqueraded such a packet with this node's address,
// the other node would trust its content.
func (t *Table) bars(port uint16) (rules [][]expr.Any) {
	for _, g := range t.groups {
		rules = append(rules, slices.Concat([]expr.Any{
			&expr.Meta{Key: expr.MetaKeyIIFGROUP, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: native(g)},
		}, udpTo(port), []expr.Any{
			&expr.Counter{},
			&expr.Verdict{Kind: expr.VerdictDrop},
		}))
	}
	return rules
}

// udpTo returns the expressions of `udp dport P`.
func udpTo(port uint16) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binary.BigEndian.AppendUint16(nil, port)},
	}
}

// routingWalls returns the chain for packets from foreign devices and, for an overlay on a node that tracks connections,
// `type filter hook output priority raw; policy accept;`.
func (t *Table) routingWalls(f *Routing, tracked bool, table *nftables.Table) []wall {
	foreign := wall{chain: &nftables.Chain{Name: foreignName, Table: table}}
	drop := func(set string, unless []expr.Any) {
		for _, f := range []family{ipv4, ipv6} { // ip saddr @own4 counter drop
			foreign.rules = append(foreign.rules, slices.Concat(unless, f.source(), []expr.Any{
				&expr.Lookup{SourceRegister: 1, SetName: set + f.suffix},
				&expr.Counter{},
				&expr.Verdict{Kind: expr.VerdictDrop},
			}))
		}
	}
	if f.Native {
		drop(ownSet, nil)
		drop(othersSet, t.unmarked())
		return []wall{foreign}
	}
	// The source port of a tunnel packet is a hash of the inner flow. Tracking these packets would create an entry per
	// flow that no reply ever matches.
	notrack := append(udpTo(f.TunnelPort), &expr.Notrack{})
	if tracked {
		foreign.rules = append(foreign.rules, notrack)
	}
	drop(ownSet, nil)
	drop(othersSet, nil)
	if !tracked {
		return []wall{foreign}
	}
	policy := nftables.ChainPolicyAccept
	return []wall{foreign, {
		chain: &nftables.Chain{
			Name: tunnelName, Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookOutput,
			Priority: nftables.ChainPriorityRaw, Policy: &policy,
		},
		rules: [][]expr.Any{notrack},
	}}
}
