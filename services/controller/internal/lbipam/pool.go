// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lbipam

import (
	"cmp"
	"fmt"
	"math/big"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Pool is a CiliumLoadBalancerIPPool.
type Pool struct {
	Name            string
	UID             string
	ResourceVersion string
	Generation      int64
	Created         time.Time
	Disabled        bool                // no new addresses are taken from it
	Selects         func(*Service) bool // the serviceSelector; nil: every Service
	Ranges          []Range             // sorted, without overlaps
	// Faults are the parts of the object that cannot be used. The Pool gives no new addresses while it has any.
	Faults     []string
	Conditions []Condition // of its status
}

// Range is the addresses from First to Last, inclusive. Both are of one family.
type Range struct{ First, Last netip.Addr }

// Block is a block of a pool as written.
type Block struct{ CIDR, Start, Stop string }

// NewRanges converts the blocks of a pool. firstLast includes the first and the last address of a prefix; prefixes of
// one or two addresses always include both. faults describes each block that cannot be used, and how to correct it.
func NewRanges(blocks []Block, firstLast bool) (ranges []Range, faults []string) {
	for i, b := range blocks {
		r, err := newRange(b, firstLast)
		if err != nil {
			faults = append(faults, fmt.Sprintf("spec.blocks[%d]: %v", i, err))
			continue
		}
		ranges = append(ranges, r)
	}
	slices.SortFunc(ranges, func(a, b Range) int { return cmp.Or(a.First.Compare(b.First), a.Last.Compare(b.Last)) })
	var merged []Range
	for _, r := range ranges {
		if n := len(merged); n > 0 && merged[n-1].overlaps(r) {
			if r.Last.Compare(merged[n-1].Last) > 0 {
				merged[n-1].Last = r.Last
			}
			continue
		}
		merged = append(merged, r)
	}
	return merged, faults
}

func newRange(b Block, firstLast bool) (Range, error) {
	if b.CIDR != "" {
		if b.Start != "" || b.Stop != "" {
			return Range{}, fmt.Errorf("cidr cannot be used together with start and stop")
		}
		p, err := netip.ParsePrefix(b.CIDR)
		if err != nil {
			return Range{}, fmt.Errorf("cidr: %q is not a prefix such as 192.0.2.0/24 or 2001:db8::/64", b.CIDR)
		}
		if p.Addr().Is4In6() || p.Masked() != p {
			return Range{}, fmt.Errorf("cidr: %s is not the first address of a prefix; "+
				"use %s, or start and stop for a part of it", b.CIDR, p.Masked())
		}
		r := Range{p.Addr(), last(p)}
		if p.Addr().BitLen()-p.Bits() > 1 && !firstLast {
			r = Range{r.First.Next(), r.Last.Prev()}
		}
		return r, usable(r)
	}
	if b.Start == "" {
		return Range{}, fmt.Errorf("cidr or start is required")
	}
	first, err := netip.ParseAddr(b.Start)
	if err != nil || first.Zone() != "" {
		return Range{}, fmt.Errorf("start: %q is not an address", b.Start)
	}
	r := Range{first, first}
	if b.Stop != "" {
		if r.Last, err = netip.ParseAddr(b.Stop); err != nil || r.Last.Zone() != "" {
			return Range{}, fmt.Errorf("stop: %q is not an address", b.Stop)
		}
	}
	if r.First.BitLen() != r.Last.BitLen() {
		return Range{}, fmt.Errorf("start %s and stop %s are of two families", r.First, r.Last)
	}
	if r.Last.Less(r.First) {
		return Range{}, fmt.Errorf("stop %s is before start %s", r.Last, r.First)
	}
	return r, usable(r)
}

// usable returns an error if a range contains addresses that no client can connect to.
func usable(r Range) error {
	if r.First.Is4In6() {
		return fmt.Errorf("%s is an IPv4-mapped IPv6 address; write it as IPv4", r.First)
	}
	for _, unusable := range []struct{ prefix, what string }{
		{"0.0.0.0/8", "unspecified"},
		{"127.0.0.0/8", "loopback"},
		{"169.254.0.0/16", "link-local"},
		{"224.0.0.0/3", "multicast or reserved"},
		{"::/127", "unspecified or loopback"},
		{"fe80::/10", "link-local"},
		{"ff00::/8", "multicast"},
	} {
		p := netip.MustParsePrefix(unusable.prefix)
		if r.overlaps(Range{p.Addr(), last(p)}) {
			return fmt.Errorf("contains %s addresses (%s)", unusable.what, p)
		}
	}
	return nil
}

// last returns the last address of a prefix.
func last(p netip.Prefix) netip.Addr {
	b := p.Addr().AsSlice()
	for i := p.Bits(); i < len(b)*8; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	a, _ := netip.AddrFromSlice(b)
	return a
}

func (r Range) contains(a netip.Addr) bool {
	return a.BitLen() == r.First.BitLen() && !a.Less(r.First) && !r.Last.Less(a)
}

func (r Range) overlaps(s Range) bool {
	return r.First.BitLen() == s.First.BitLen() && !r.Last.Less(s.First) && !s.Last.Less(r.First)
}

// size returns the number of addresses.
func (r Range) size() *big.Int {
	n := new(big.Int).Sub(new(big.Int).SetBytes(r.Last.AsSlice()), new(big.Int).SetBytes(r.First.AsSlice()))
	return n.Add(n, big.NewInt(1))
}

func (p *Pool) contains(a netip.Addr) bool {
	return slices.ContainsFunc(p.Ranges, func(r Range) bool { return r.contains(a) })
}

// has reports whether the pool has addresses of the family of bits.
func (p *Pool) has(bits int) bool {
	return slices.ContainsFunc(p.Ranges, func(r Range) bool { return r.First.BitLen() == bits })
}

// selects reports whether the pool serves a Service.
func (p *Pool) selects(s *Service) bool {
	return p.Selects == nil || p.Selects(s)
}

// conflicts returns for each pool that overlaps an older pool a text that names it. pools is sorted by age.
func conflicts(pools []*Pool) map[string]string {
	found := make(map[string]string)
	for i, p := range pools {
		for _, older := range pools[:i] {
			if found[older.Name] != "" {
				continue // it gives no addresses itself
			}
			if r, s, ok := overlap(p, older); ok {
				found[p.Name] = fmt.Sprintf("%s overlaps %s of the older pool %s", r, s, older.Name)
				break
			}
		}
	}
	return found
}

func overlap(p, q *Pool) (of, with Range, ok bool) {
	for _, r := range p.Ranges {
		for _, s := range q.Ranges {
			if r.overlaps(s) {
				return r, s, true
			}
		}
	}
	return Range{}, Range{}, false
}

// String returns the range as "192.0.2.0-192.0.2.255", or the address if there is one only.
func (r Range) String() string {
	if r.First == r.Last {
		return r.First.String()
	}
	return r.First.String() + "-" + r.Last.String()
}

// byAge orders pools by age, the oldest first, then by name.
func byAge(a, b *Pool) int {
	return cmp.Or(a.Created.Compare(b.Created), strings.Compare(a.Name, b.Name))
}
