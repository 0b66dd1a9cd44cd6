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

// Source ports of masqueraded connections: the kernel's default range for local connections, above the ports of
// services.
const (
	masqueradePortMin = 32768
	masqueradePortMax = 60999
)

// Masquerade selects the connections that leave the node with the node's address.
type Masquerade struct {
	// Mark is the mark of packets from pods, within the mask of Marks.
	Mark uint32
	// Own returns the current ranges of this node's pods.
	Own func() []netip.Prefix
	// Except are destinations that see the pod's address.
	Except []netip.Prefix
	// Others are the ranges of other nodes until the first call of SetOthers.
	Others []netip.Prefix
}

// SetMasquerade enables the masquerade, from the next Repair on.
func (t *Table) SetMasquerade(m Masquerade) {
	m.Except, m.Others = slices.Clone(m.Except), slices.Clone(m.Others)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.set.masquerade = &m
}

// masqueradeWall returns the chain `type nat hook postrouting priority srcnat; policy accept;`. The kernel passes it
// only the first packet of a connection, and applies the result to the whole connection. Packets to another pod of the
// node do not match, because the forward chain has replaced their mark. A TCP segment without SYN belongs to a
// connection that was opened before the masquerade was enabled, and is left alone.
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

// exceptions returns the names, without the family suffix, of the sets of destinations that see the pod's address. With
// routing between nodes, the set of other nodes' ranges is one of them; the rules of routing use it, too.
func (s settings) exceptions() []string {
	if s.routing != nil {
		return []string{exceptSet, othersSet}
	}
	return []string{exceptSet}
}

// masqueradeRule returns the rule `ip saddr @own4 ip daddr != @except4 counter masquerade to :32768-60999`, or the same
// for IPv6. The kernel keeps the source port if it is in the range and free, and otherwise picks a random one. The
// library (0.3.0) cannot combine fully-random with ports.
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

// Closed lists the chains of others that drop forwarded packets unless one of their own rules accepts them, as with
// Docker and firewalld. A rule of another table cannot override this. Chains of iptables-legacy cannot be read this
// way.
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
				found = append(found, fmt.Sprintf("chain %s of table %s %s drops packets that the node forwards for pods unless one of its rules accepts them: %s",
					ch.Name, familyName(ch.Table.Family), ch.Table.Name, how))
			}
		}
		return nil
	})
	return found, err
}

// closing returns a description of a rule without conditions that drops or rejects; "" if the chain has none.
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
			return fmt.Sprintf("its rule %d drops or rejects without a condition", r.Handle), nil
		}
	}
	return "", nil
}
