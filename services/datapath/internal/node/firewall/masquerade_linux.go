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

const masqueradeName = "masquerade"

// Ports that masqueraded connections get: what Linux gives to connections of the
// node itself, and above the ports of services.
const (
	masqueradePortMin = 32768
	masqueradePortMax = 60999
)

// Masquerade says which connections leave the node under its own address.
type Masquerade struct {
	// Mark of what pods send, within the mask of Marks.
	Mark uint32
	// Own are the ranges of this node's pods as they are now.
	Own func() []netip.Prefix
	// Except are destinations that see the address of the pod.
	Except []netip.Prefix
	// Others are the ranges of other nodes until SetOthers says them.
	Others []netip.Prefix
}

// SetMasquerade makes the table one with a masquerade from the next Repair on.
func (t *Table) SetMasquerade(m Masquerade) {
	m.Except, m.Others = slices.Clone(m.Except), slices.Clone(m.Others)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.set.masquerade = &m
}

// masqueradeWall is `type nat hook postrouting priority srcnat; policy accept;`. Only
// what begins a connection gets there, and what it decides holds as long as that.
// What goes to another pod of the node has lost the mark of pods in the chain of
// what is forwarded. A TCP segment that begins nothing is of a connection that is
// older than the masquerade.
func (t *Table) masqueradeWall(s settings, table *nftables.Table) wall {
	policy := nftables.ChainPolicyAccept
	w := wall{chain: &nftables.Chain{
		Name: masqueradeName, Table: table, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting,
		Priority: nftables.ChainPriorityNATSource, Policy: &policy,
	}}
	leave := &expr.Verdict{Kind: expr.VerdictReturn}
	w.rules = append(w.rules, []expr.Any{ // meta mark & M != F return
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native(t.marks.Mask), Xor: native(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: native(s.masquerade.Mark)},
		leave,
	})
	w.rules = append(w.rules, []expr.Any{ // tcp flags & (fin | syn | rst | ack) != syn return
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{0x17}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{0x02}},
		leave,
	})
	w.rules = append(w.rules,
		masqueradeRule(ipv4, s.exceptions()), masqueradeRule(ipv6, s.exceptions()))
	return w
}

// exceptions are the names, without the family, of the sets of destinations that see
// the address of the pod. With a fabric, the ranges of other nodes are in a set that
// its walls ask, too.
func (s settings) exceptions() []string {
	if s.fabric != nil {
		return []string{exceptSet, othersSet}
	}
	return []string{exceptSet}
}

// masqueradeRule is `ip saddr @own4 ip daddr != @except4 counter masquerade to
// :32768-60999`, or that of IPv6. A port in the range stays if it is free; else the
// kernel takes one at random. The library (0.3.0) cannot write fully-random beside
// ports.
func masqueradeRule(f family, exceptions []string) []expr.Any {
	exprs := append(f.source(),
		&expr.Lookup{SourceRegister: 1, SetName: ownSet + f.suffix},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: f.offset + f.bytes, Len: f.bytes})
	for _, name := range exceptions {
		exprs = append(exprs, &expr.Lookup{SourceRegister: 1, SetName: name + f.suffix, Invert: true})
	}
	return append(exprs,
		&expr.Counter{},
		&expr.Immediate{Register: 1, Data: binary.BigEndian.AppendUint16(nil, masqueradePortMin)},
		&expr.Immediate{Register: 2, Data: binary.BigEndian.AppendUint16(nil, masqueradePortMax)},
		&expr.Masq{ToPorts: true, RegProtoMin: 1, RegProtoMax: 2},
	)
}

// Closed names the chains of others that drop what they forward unless a rule of
// theirs accepts it, as Docker and firewalld have them: no rule of another table
// lets it through. Chains of iptables-legacy cannot be read this way.
func (t *Table) Closed() (found []string, err error) {
	err = t.conn(func(c *nftables.Conn) error {
		chains, err := c.ListChains()
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("list firewall chains: %w", err)
		}
		for _, ch := range chains {
			forward := ch.Hooknum != nil && *ch.Hooknum == *nftables.ChainHookForward
			if !forward || !routed(ch.Table.Family) || ch.Table.Name == t.name {
				continue
			}
			how := "its policy is drop"
			if ch.Policy == nil || *ch.Policy != nftables.ChainPolicyDrop {
				if how, err = closing(c, ch); err != nil {
					return err
				}
			}
			if how != "" {
				found = append(found, fmt.Sprintf("chain %s of table %s %s stops what the node forwards for pods unless a rule in it accepts that: %s",
					ch.Name, familyName(ch.Table.Family), ch.Table.Name, how))
			}
		}
		return nil
	})
	return found, err
}

// closing finds a rule without a condition that drops or rejects.
func closing(c *nftables.Conn, ch *nftables.Chain) (string, error) {
	rules, err := c.GetRules(ch.Table, ch)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return "", fmt.Errorf("list the rules of chain %s of table %s: %w", ch.Name, ch.Table.Name, err)
	}
	for _, r := range rules {
		stops, conditions := false, false
		for _, e := range r.Exprs {
			switch e := e.(type) {
			case *expr.Counter, *expr.Log:
			case *expr.Reject:
				stops = true
			case *expr.Verdict:
				stops = stops || e.Kind == expr.VerdictDrop
			default:
				conditions = true
			}
		}
		if stops && !conditions {
			return fmt.Sprintf("rule %d of it has no condition", r.Handle), nil
		}
	}
	return "", nil
}
