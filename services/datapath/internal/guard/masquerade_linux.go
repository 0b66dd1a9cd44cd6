// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package guard

import (
	"bytes"
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
	// Mark of what pods send, within the mask of New.
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
	t.mu.Lock()
	defer t.mu.Unlock()
	t.masquerade, t.others = &m, slices.Clone(m.Others)
}

// SetOthers says which ranges other nodes have: they see the address of the pod,
// too. If the table differs from what it is to be then, it is repaired.
func (t *Table) SetOthers(ranges []netip.Prefix) error {
	if t.masquerade == nil {
		return nil
	}
	t.mu.Lock()
	t.others = slices.Clone(ranges)
	t.mu.Unlock()
	diffs, err := t.Check()
	if err == nil && len(diffs) > 0 {
		err = t.Repair()
	}
	return err
}

// A set is a named set of addresses of one family.
type set struct {
	name   string
	bits   int
	ranges []span
}

// span is the addresses from first up to the one before end; an invalid end is
// the one behind the last address of the family.
type span struct{ first, end netip.Addr }

// perMessage is how many elements go into one message: a list of them has at most
// 64 KiB.
const perMessage = 512

// add puts the set into a transaction.
func (s set) add(c *nftables.Conn, table *nftables.Table) error {
	kind := nftables.TypeIPAddr
	if s.bits == 128 {
		kind = nftables.TypeIP6Addr
	}
	named := &nftables.Set{Table: table, Name: s.name, KeyType: kind, Interval: true}
	err := c.AddSet(named, nil)
	for some := range slices.Chunk(s.elements(), perMessage) {
		err = errors.Join(err, c.SetAddElements(named, some))
	}
	return err
}

func (s set) elements() (elements []nftables.SetElement) {
	for _, r := range s.ranges {
		elements = append(elements, nftables.SetElement{Key: r.first.AsSlice()})
		if r.end.IsValid() {
			elements = append(elements, nftables.SetElement{Key: r.end.AsSlice(), IntervalEnd: true})
		}
	}
	return elements
}

// sets are the own ranges and the exceptions of each family.
func (t *Table) sets() (sets []set) {
	if t.masquerade == nil {
		return nil
	}
	t.mu.Lock()
	except := slices.Concat(t.masquerade.Except, t.others)
	t.mu.Unlock()
	own := t.masquerade.Own()
	for _, bits := range []int{32, 128} {
		n := familyOf(bits)
		sets = append(sets, set{"own" + n, bits, spans(own, bits)}, set{"except" + n, bits, spans(except, bits)})
	}
	return sets
}

func familyOf(bits int) string {
	if bits == 32 {
		return "4"
	}
	return "6"
}

// spans are the prefixes of a family in order, those that touch in one.
func spans(prefixes []netip.Prefix, bits int) (all []span) {
	prefixes = slices.DeleteFunc(slices.Clone(prefixes), func(p netip.Prefix) bool { return p.Addr().BitLen() != bits })
	slices.SortFunc(prefixes, netip.Prefix.Compare)
	for _, p := range prefixes {
		s := span{p.Masked().Addr(), last(p).Next()}
		if n := len(all); n > 0 {
			before := &all[n-1]
			switch {
			case !before.end.IsValid():
				continue
			case s.first.Compare(before.end) <= 0:
				if !s.end.IsValid() || s.end.Compare(before.end) > 0 {
					before.end = s.end
				}
				continue
			}
		}
		all = append(all, s)
	}
	return all
}

// last address of a prefix.
func last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

// masqueradeWall is `type nat hook postrouting priority srcnat; policy accept;`. Only
// what begins a connection gets there, and what it decides holds as long as that.
// What goes to another pod of the node has lost the mark of pods in the chain of
// what is forwarded. A TCP segment that begins nothing is of a connection that is
// older than the masquerade.
func (t *Table) masqueradeWall(table *nftables.Table) wall {
	policy := nftables.ChainPolicyAccept
	w := wall{chain: &nftables.Chain{
		Name: masqueradeName, Table: table, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting,
		Priority: nftables.ChainPriorityNATSource, Policy: &policy,
	}}
	leave := &expr.Verdict{Kind: expr.VerdictReturn}
	w.rules = append(w.rules, []expr.Any{ // meta mark & M != F return
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: native(t.mask), Xor: native(0)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: native(t.masquerade.Mark)},
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
		masqueradeRule(unix.NFPROTO_IPV4, 12, 4, "4"), masqueradeRule(unix.NFPROTO_IPV6, 8, 16, "6"))
	return w
}

// masqueradeRule is `ip saddr @own4 ip daddr != @except4 counter masquerade to
// :32768-60999`, or that of IPv6. Addresses are of that many bytes, and the source
// begins at an offset. A port in the range stays if it is free; else the kernel
// takes one at random. The library (0.3.0) cannot write fully-random beside ports.
func masqueradeRule(family byte, source, length uint32, n string) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{family}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: source, Len: length},
		&expr.Lookup{SourceRegister: 1, SetName: "own" + n},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: source + length, Len: length},
		&expr.Lookup{SourceRegister: 1, SetName: "except" + n, Invert: true},
		&expr.Counter{},
		&expr.Immediate{Register: 1, Data: binary.BigEndian.AppendUint16(nil, masqueradePortMin)},
		&expr.Immediate{Register: 2, Data: binary.BigEndian.AppendUint16(nil, masqueradePortMax)},
		&expr.Masq{ToPorts: true, RegProtoMin: 1, RegProtoMax: 2},
	}
}

// checkSets says how the sets of the table differ from what they are to be; "":
// they do not.
func (t *Table) checkSets(c *nftables.Conn, table *nftables.Table) (string, error) {
	have, err := c.GetSets(table)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return "", fmt.Errorf("list firewall sets: %w", err)
	}
	ours := map[string]*nftables.Set{}
	for _, s := range have {
		ours[s.Name] = s
	}
	for _, want := range t.sets() {
		s := ours[want.name]
		delete(ours, want.name)
		if s == nil {
			return "no set " + want.name, nil
		}
		elements, err := c.GetSetElements(s)
		if err != nil {
			return "", fmt.Errorf("list the elements of firewall set %s: %w", want.name, err)
		}
		if !sameElements(elements, want.elements()) {
			return "other elements in set " + want.name, nil
		}
	}
	for name := range ours {
		return "another set, " + name, nil
	}
	return "", nil
}

func sameElements(have, want []nftables.SetElement) bool {
	order := func(a, b nftables.SetElement) int {
		if c := bytes.Compare(a.Key, b.Key); c != 0 || a.IntervalEnd == b.IntervalEnd {
			return c
		}
		if a.IntervalEnd {
			return -1
		}
		return 1
	}
	slices.SortFunc(have, order)
	slices.SortFunc(want, order)
	return slices.EqualFunc(have, want, func(a, b nftables.SetElement) bool { return order(a, b) == 0 })
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
