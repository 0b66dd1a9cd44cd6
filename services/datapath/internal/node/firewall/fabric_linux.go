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

// loopback is the index of lo, the same in each network namespace, and no other
// device has it. A name can be changed.
const loopback = 1

// Fabric is how packets between nodes travel.
type Fabric struct {
	// Native: they travel as they are; else in a tunnel.
	Native bool
	// TunnelGroup is the device group of the tunnel's device, of an overlay alone.
	TunnelGroup uint32
	// TunnelPort is the UDP port of the tunnel, of an overlay alone.
	TunnelPort uint16
	// Own are the ranges of this node's pods as they are now.
	Own func() []netip.Prefix
	// Others are the ranges of other nodes until SetOthers says them.
	Others []netip.Prefix
	// Nodes are the addresses of other nodes until SetOthers says them.
	Nodes []netip.Addr
}

// SetFabric has the table protect traffic between nodes from the next Repair on.
func (t *Table) SetFabric(f Fabric) {
	f.Others, f.Nodes = slices.Clone(f.Others), slices.Clone(f.Nodes)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.set.fabric = &f
}

// check refuses what would cut off each device that is in no group, or no tunnel.
func (f *Fabric) check() error {
	if f != nil && !f.Native && (f.TunnelGroup == 0 || f.TunnelPort == 0) {
		return errors.New("an overlay needs the device group and the UDP port of its tunnel")
	}
	return nil
}

// wanted is what the walls of a fabric do, in words.
func (f *Fabric) wanted(tracked bool) string {
	if f.Native {
		return "drop sources in pod ranges that come by devices of others: those of this node, " +
			"and those of other nodes unless they have a mark"
	}
	words := fmt.Sprintf("drop UDP of endpoints to port %d, drop packets of device group %#x without a mark, drop "+
		"sources in pod ranges of all nodes that come by devices of others", f.TunnelPort, f.TunnelGroup)
	if tracked {
		words += fmt.Sprintf(", do not track UDP to port %d", f.TunnelPort)
	}
	return words
}

// fabricRules are those of the chain of what has no mark: walls are its rules about
// endpoints. What comes by devices of others leaves the chain first, because the packets
// of the tunnel do, as they arrive.
func (t *Table) fabricRules(f *Fabric, walls [][]expr.Any) [][]expr.Any {
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

// notOf is `meta iifgroup != G`, for each of the groups.
func notOf(groups []uint32) (exprs []expr.Any) {
	for i, g := range groups {
		if i == 0 {
			exprs = append(exprs, &expr.Meta{Key: expr.MetaKeyIIFGROUP, Register: 1})
		}
		exprs = append(exprs, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: native(g)})
	}
	return exprs
}

// bars are `meta iifgroup G udp dport P counter drop`, for each of the groups. The
// programs drop what pods send to the tunnel's port of a node by the addresses that it
// has registered. By any other one, such as that of a loopback device, a masquerade of
// this table or of others would give the packet the address of this node, and the other
// node would believe what the pod has written into it.
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

// udpTo is `udp dport P`.
func udpTo(port uint16) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binary.BigEndian.AppendUint16(nil, port)},
	}
}

// fabricWalls are the chain of what comes by devices of others, and, of an overlay on a
// node that tracks connections, `type filter hook output priority raw; policy accept;`.
func (t *Table) fabricWalls(f *Fabric, tracked bool, table *nftables.Table) []wall {
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
	// The port of a tunnel's sender says nothing: it hashes the flow within, so
	// that each would be an entry that no answer meets.
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
