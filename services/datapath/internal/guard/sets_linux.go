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
	"golang.org/x/sys/unix"
)

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
