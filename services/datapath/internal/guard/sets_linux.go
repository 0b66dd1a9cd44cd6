// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package guard

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Names of sets, to which the suffix of a family belongs.
const (
	ownSet    = "own"    // ranges of this node's pods
	othersSet = "others" // ranges of other nodes
	exceptSet = "except" // destinations that see the address of a pod
)

// A family is where its packets have the source; the destination follows.
type family struct {
	suffix        string // of the names of sets
	number        byte
	offset, bytes uint32
}

var (
	ipv4 = family{suffix: "4", number: unix.NFPROTO_IPV4, offset: 12, bytes: 4}
	ipv6 = family{suffix: "6", number: unix.NFPROTO_IPV6, offset: 8, bytes: 16}
)

// source is `meta nfproto F` and has the source of the packet in register 1.
func (f family) source() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{f.number}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: f.offset, Len: f.bytes},
	}
}

// sets are those that rules of the table ask.
func (s settings) sets() (sets []set) {
	if s.masquerade == nil && s.fabric == nil {
		return nil
	}
	own, others, except := s.own(), s.ranges(), s.except()
	for _, f := range []family{ipv4, ipv6} {
		bits := int(f.bytes) * 8
		sets = append(sets, set{ownSet + f.suffix, bits, spans(own, bits)})
		if s.masquerade != nil {
			sets = append(sets, set{exceptSet + f.suffix, bits, spans(except, bits)})
		}
		if s.fabric != nil {
			sets = append(sets, set{othersSet + f.suffix, bits, spans(others, bits)})
		}
	}
	return sets
}

// own are the ranges of this node's pods.
func (s settings) own() []netip.Prefix {
	if s.fabric != nil {
		return s.fabric.Own()
	}
	return s.masquerade.Own()
}

// ranges are those of other nodes.
func (s settings) ranges() (ranges []netip.Prefix) {
	if s.others != nil {
		return *s.others
	}
	if s.masquerade != nil {
		ranges = append(ranges, s.masquerade.Others...)
	}
	if s.fabric != nil {
		ranges = append(ranges, s.fabric.Others...)
	}
	return ranges
}

// except are the exceptions of the masquerade that no other set has.
func (s settings) except() (except []netip.Prefix) {
	if s.masquerade == nil {
		return nil
	}
	except = append(except, s.masquerade.Except...)
	switch {
	case s.fabric == nil:
		except = append(except, s.ranges()...)
	case s.fabric.Native:
		for _, a := range s.fabric.Nodes {
			a = a.Unmap().WithZone("")
			except = append(except, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	return except
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
	for some := range slices.Chunk(elements(s.ranges), perMessage) {
		err = errors.Join(err, c.SetAddElements(named, some))
	}
	return err
}

func elements(ranges []span) (all []nftables.SetElement) {
	for _, r := range ranges {
		all = append(all, nftables.SetElement{Key: r.first.AsSlice()})
		if r.end.IsValid() {
			all = append(all, nftables.SetElement{Key: r.end.AsSlice(), IntervalEnd: true})
		}
	}
	return all
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

// checkSets says how the sets of the table differ from what they are to be; "":
// they do not.
func (t *Table) checkSets(c *nftables.Conn, s settings, table *nftables.Table) (string, error) {
	have, err := c.GetSets(table)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return "", fmt.Errorf("list firewall sets: %w", err)
	}
	ours := map[string]*nftables.Set{}
	for _, h := range have {
		ours[h.Name] = h
	}
	for _, want := range s.sets() {
		h := ours[want.name]
		delete(ours, want.name)
		if h == nil {
			return "no set " + want.name, nil
		}
		have, err := c.GetSetElements(h)
		if err != nil {
			return "", fmt.Errorf("list the elements of firewall set %s: %w", want.name, err)
		}
		if !sameElements(have, elements(want.ranges)) {
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
