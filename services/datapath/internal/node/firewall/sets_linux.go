// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package firewall

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

// Names of sets, without the suffix of the family.
const (
	ownSet    = "own"    // ranges of this node's pods
	othersSet = "others" // ranges of other nodes
	exceptSet = "except" // destinations that see the address of a pod
)

// A family describes where its packets have the source address; the destination follows it.
type family struct {
	suffix        string // of the names of sets
	number        byte
	offset, bytes uint32
}

var (
	ipv4 = family{suffix: "4", number: unix.NFPROTO_IPV4, offset: 12, bytes: 4}
	ipv6 = family{suffix: "6", number: unix.NFPROTO_IPV6, offset: 8, bytes: 16}
)

// source returns expressions that match `meta nfproto F` and load the packet's source address into register 1.
func (f family) source() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{f.number}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: f.offset, Len: f.bytes},
	}
}

// sets returns the sets that the table's rules use.
func (s settings) sets() (sets []set) {
	if s.masquerade == nil && s.routing == nil {
		return nil
	}
	own, ranges, except := s.own(), s.known().ranges, s.except()
	for _, f := range []family{ipv4, ipv6} {
		bits := int(f.bytes) * 8
		sets = append(sets, set{ownSet + f.suffix, bits, spans(own, bits)})
		if s.masquerade != nil {
			sets = append(sets, set{exceptSet + f.suffix, bits, spans(except, bits)})
		}
		if s.routing != nil {
			sets = append(sets, set{othersSet + f.suffix, bits, spans(ranges, bits)})
		}
	}
	return sets
}

// own returns the ranges of this node's pods.
func (s settings) own() []netip.Prefix {
	if s.routing != nil {
		return s.routing.Own()
	}
	return s.masquerade.Own()
}

// known returns the known ranges and addresses of other nodes.
func (s settings) known() (o others) {
	if s.others != nil {
		return *s.others
	}
	if s.masquerade != nil {
		o.ranges = s.masquerade.Others
	}
	if s.routing != nil {
		o = others{slices.Concat(o.ranges, s.routing.Others), s.routing.Nodes}
	}
	return o
}

// except returns the exceptions of the masquerade that are in no other set.
func (s settings) except() (except []netip.Prefix) {
	if s.masquerade == nil {
		return nil
	}
	except = append(except, s.masquerade.Except...)
	switch {
	case s.routing == nil:
		except = append(except, s.known().ranges...)
	case s.routing.Native:
		for _, a := range s.known().nodes {
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

// span is the interval from first to the address before end. An invalid end means the end of the family's address
// space.
type span struct{ first, end netip.Addr }

// perMessage is the number of elements per message: a list of elements is limited to 64 KiB.
const perMessage = 512

// named returns the set without elements.
func (s set) named(table *nftables.Table) *nftables.Set {
	kind := nftables.TypeIPAddr
	if s.bits == 128 {
		kind = nftables.TypeIP6Addr
	}
	return &nftables.Set{Table: table, Name: s.name, KeyType: kind, Interval: true}
}

// add adds the creation of the set to a transaction.
func (s set) add(c *nftables.Conn, table *nftables.Table) error {
	named := s.named(table)
	return errors.Join(c.AddSet(named, nil), addElements(c, named, s.ranges))
}

func addElements(c *nftables.Conn, named *nftables.Set, ranges []span) (err error) {
	for some := range slices.Chunk(elements(ranges), perMessage) {
		err = errors.Join(err, c.SetAddElements(named, some))
	}
	return err
}

// A change holds the elements to remove from a set in the kernel and to add to it.
type change struct {
	set          set
	remove, more []span
}

// change returns the change from s to another set.
func (s set) change(to set) change {
	return change{to, without(s.ranges, to.ranges), without(to.ranges, s.ranges)}
}

// write adds the change to a transaction. Unchanged elements are not touched: before Linux 7.0, a packet can miss an
// interval that a transaction removes and adds again, while the transaction is committed.
func (ch change) write(c *nftables.Conn, table *nftables.Table) (err error) {
	named := ch.set.named(table)
	for some := range slices.Chunk(elements(ch.remove), perMessage) {
		err = errors.Join(err, c.SetDeleteElements(named, some))
	}
	return errors.Join(err, addElements(c, named, ch.more))
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

// spans returns the prefixes of a family in order, without prefixes inside others. Adjacent prefixes are not merged, so
// that adding or removing one does not change another.
func spans(prefixes []netip.Prefix, bits int) (all []span) {
	prefixes = slices.DeleteFunc(slices.Clone(prefixes), func(p netip.Prefix) bool { return p.Addr().BitLen() != bits })
	slices.SortFunc(prefixes, netip.Prefix.Compare)
	var before netip.Prefix
	for _, p := range prefixes {
		if before.IsValid() && before.Overlaps(p) {
			continue
		}
		before = p
		all = append(all, span{p.Masked().Addr(), last(p).Next()})
	}
	return all
}

// last returns the last address of a prefix.
func last(p netip.Prefix) netip.Addr {
	b := p.Masked().Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

func (t *Table) compareSets(c *nftables.Conn, p plan) (*difference, error) {
	table := t.table()
	have, err := c.GetSets(table)
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return nil, fmt.Errorf("list firewall sets: %w", err)
	}
	ours := map[string]*nftables.Set{}
	for _, h := range have {
		ours[h.Name] = h
	}
	var d *difference
	for _, want := range p.sets {
		h := ours[want.name]
		delete(ours, want.name)
		if h == nil {
			return &difference{have: "no set " + want.name}, nil
		}
		if have, want := setText(h), setText(want.named(table)); have != want {
			return &difference{have: fmt.Sprintf("set %s %s", h.Name, have)}, nil
		}
		have, err := c.GetSetElements(h)
		if err != nil {
			return nil, fmt.Errorf("list the elements of firewall set %s: %w", want.name, err)
		}
		has, whole := spansOf(have)
		if !whole {
			return &difference{have: "other elements in set " + want.name}, nil
		}
		d = d.and(set{ranges: has}.change(want))
	}
	for name := range ours {
		return &difference{have: "another set, " + name}, nil
	}
	return d, nil
}

// setText describes the type and flags of a set.
func setText(s *nftables.Set) string {
	return fmt.Sprintf("of %s: intervals %t, map %t, with a timeout %t, constant %t, dynamic %t",
		s.KeyType.Name, s.Interval, s.IsMap, s.HasTimeout, s.Constant, s.Dynamic)
}

// spansOf converts elements of a set to intervals. whole is false if the elements are not pairs of begin and end, as
// elements creates them.
func spansOf(have []nftables.SetElement) (all []span, whole bool) {
	slices.SortFunc(have, func(a, b nftables.SetElement) int {
		if c := bytes.Compare(a.Key, b.Key); c != 0 || a.IntervalEnd == b.IntervalEnd {
			return c
		}
		if a.IntervalEnd {
			return -1
		}
		return 1
	})
	open := false
	for _, e := range have {
		a, ok := netip.AddrFromSlice(e.Key)
		switch {
		case !ok || len(e.KeyEnd) > 0 || e.IntervalEnd != open:
			return nil, false
		case open:
			all[len(all)-1].end = a
		default:
			all = append(all, span{first: a})
		}
		open = !open
	}
	return all, true
}

// without returns the intervals in all that others does not contain. Intervals are equal if both ends are equal.
func without(all, others []span) (rest []span) {
	has := make(map[span]struct{}, len(others))
	for _, s := range others {
		has[s] = struct{}{}
	}
	for _, s := range all {
		if _, ok := has[s]; !ok {
			rest = append(rest, s)
		}
	}
	return rest
}
