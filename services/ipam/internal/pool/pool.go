// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package pool represents ranges of addresses. For each range, it stores which addresses are taken and which may never
// be allocated, and selects the next free address.
//
// It only does arithmetic on addresses: it has no owners, times or files. A Pool is not safe for concurrent use.
package pool

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Limits of a configuration.
const (
	MaxPools      = 64
	MaxExclusions = 1024
)

// Pool is one range and its taken addresses.
type Pool struct {
	prefix    netip.Prefix
	gateway   netip.Addr
	hostBits  int
	nReserved u128
	nTaken    u128  // not counting reserved addresses
	reserved  *tree // never allocated
	taken     *tree // allocated, quarantined or reserved
	cursor    u128  // where the search for a free address begins
}

// refused lists ranges that pods cannot use, with the reasons.
var refused = []struct {
	prefix netip.Prefix
	what   string
}{
	{netip.MustParsePrefix("0.0.0.0/8"), "\"this network\" (0.0.0.0/8)"},
	{netip.MustParsePrefix("127.0.0.0/8"), "the loopback range 127.0.0.0/8"},
	{netip.MustParsePrefix("169.254.0.0/16"), "the link-local range 169.254.0.0/16"},
	{netip.MustParsePrefix("224.0.0.0/4"), "the multicast range 224.0.0.0/4"},
	{netip.MustParsePrefix("::ffff:0:0/96"), "IPv4-mapped IPv6 (::ffff:0:0/96); write the IPv4 range instead"},
	{netip.MustParsePrefix("::/96"), "the unspecified and loopback addresses (::/96)"},
	{netip.MustParsePrefix("fe80::/10"), "the link-local range fe80::/10"},
	{netip.MustParsePrefix("ff00::/8"), "the multicast range ff00::/8"},
}

// ParseRanges reads and checks CIDRs of the configuration field of that name. The error contains all problems, each
// with the field and the index.
func ParseRanges(field string, cidrs []string) ([]netip.Prefix, error) {
	var errs []error
	if len(cidrs) > MaxPools {
		return nil, fmt.Errorf("%s: %d ranges, the limit is %d", field, len(cidrs), MaxPools)
	}
	out := make([]netip.Prefix, 0, len(cidrs))
	for i, s := range cidrs {
		p, err := netip.ParsePrefix(strings.TrimSpace(s))
		if err != nil {
			errs = append(errs, fmt.Errorf("%s[%d]: %q is not a CIDR such as 10.244.0.0/24 or fd00:244::/64", field, i, s))
		}
		out = append(out, p)
	}
	if err := errors.Join(append(errs, checkRanges(field, out)...)...); err != nil {
		return nil, err
	}
	return out, nil
}

// ParseExclusions reads addresses and prefixes that are never allocated.
func ParseExclusions(field string, list []string) ([]netip.Prefix, error) {
	var errs []error
	if len(list) > MaxExclusions {
		return nil, fmt.Errorf("%s: %d entries, the limit is %d", field, len(list), MaxExclusions)
	}
	out := make([]netip.Prefix, 0, len(list))
	for i, s := range list {
		s = strings.TrimSpace(s)
		var p netip.Prefix
		var err error
		if strings.Contains(s, "/") {
			p, err = netip.ParsePrefix(s)
		} else {
			var a netip.Addr
			// A prefix cannot have a zone, so a zone would be lost silently.
			if a, err = netip.ParseAddr(s); err == nil && a.Zone() == "" {
				p = netip.PrefixFrom(a, a.BitLen())
			}
		}
		switch {
		case err != nil || !p.IsValid():
			errs = append(errs, fmt.Errorf("%s[%d]: %q is neither an address nor a CIDR", field, i, s))
		case p.Addr().Is4In6():
			errs = append(errs, fmt.Errorf("%s[%d]: %s is IPv4-mapped; write the IPv4 address instead", field, i, s))
		case p != p.Masked():
			errs = append(errs, fmt.Errorf("%s[%d]: %s has host bits set; the range is %s", field, i, s, p.Masked()))
		default:
			out = append(out, p)
		}
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return out, nil
}

// checkRanges returns the errors in a list of ranges. Invalid prefixes are skipped.
func checkRanges(field string, ranges []netip.Prefix) []error {
	var errs []error
	bad := func(i int, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s[%d]: %s", field, i, fmt.Sprintf(format, args...)))
	}
	if len(ranges) == 0 {
		return []error{fmt.Errorf("%s: empty; give at least one CIDR such as 10.244.0.0/24", field)}
	}
	for i, p := range ranges {
		if !p.IsValid() {
			continue
		}
		if p != p.Masked() {
			bad(i, "%s has host bits set; the range is %s", p, p.Masked())
			continue
		}
		for _, r := range refused {
			if p.Overlaps(r.prefix) {
				bad(i, "%s overlaps %s", p, r.what)
				break
			}
		}
		if hostBits := p.Addr().BitLen() - p.Bits(); hostBits < 2 {
			bad(i, "%s is too small: no address is left after network, gateway and the last one; the smallest ranges are /30 and /126", p)
		}
		for j, q := range ranges[:i] {
			if p.Overlaps(q) {
				bad(i, "%s overlaps %s[%d], %s", p, field, j, q)
			}
		}
	}
	return errs
}

// New returns the pools of the ranges, in the same order, without the
// excluded addresses. The error names the field of the configuration.
func New(field string, ranges, exclude []netip.Prefix) ([]*Pool, error) {
	var errs []error
	for i, p := range ranges {
		if !p.IsValid() {
			errs = append(errs, fmt.Errorf("%s[%d]: not a prefix", field, i))
		}
	}
	if err := errors.Join(append(errs, checkRanges(field, ranges)...)...); err != nil {
		return nil, err
	}
	pools := make([]*Pool, 0, len(ranges))
	for i, prefix := range ranges {
		p := newPool(prefix, exclude)
		if p.taken.exhausted() {
			errs = append(errs, fmt.Errorf("%s[%d]: the exclusions leave no address of %s", field, i, prefix))
		}
		pools = append(pools, p)
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	return pools, nil
}

// Former returns at most MaxPools pools of former ranges. If ranges overlap, it uses only the largest. It omits ranges
// that overlap a serving range or that cannot be a pool.
func Former(ranges, serving, exclude []netip.Prefix) []*Pool {
	var pools []*Pool
	ranges = slices.SortedFunc(slices.Values(ranges), func(a, b netip.Prefix) int {
		return cmp.Or(a.Bits()-b.Bits(), a.Compare(b))
	})
	taken := slices.Clone(serving)
	for _, p := range ranges {
		if slices.ContainsFunc(taken, p.Overlaps) || len(checkRanges("", []netip.Prefix{p})) > 0 || len(pools) == MaxPools {
			continue
		}
		taken = append(taken, p)
		pools = append(pools, newPool(p, exclude))
	}
	return pools
}

func newPool(prefix netip.Prefix, exclude []netip.Prefix) *Pool {
	hostBits := prefix.Addr().BitLen() - prefix.Bits()
	p := &Pool{
		prefix:   prefix,
		hostBits: hostBits,
		gateway:  prefix.Addr().Next(),
		reserved: newTree(hostBits),
		taken:    newTree(hostBits),
	}
	host := func(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }
	// The first address is the IPv4 network address or the IPv6 subnet-router anycast address (RFC 4291, 2.6.1).
	blocks := []netip.Prefix{host(prefix.Addr()), host(p.gateway)}
	if prefix.Addr().Is4() {
		last := fromAddr(prefix.Addr()).add(u128{0, 1}.shl(hostBits)).sub(u128{0, 1})
		blocks = append(blocks, host(last.addr(true)))
	}
	for _, x := range exclude {
		if x.Addr().Is4() != prefix.Addr().Is4() || !x.Overlaps(prefix) {
			continue
		}
		if x.Bits() < prefix.Bits() {
			x = prefix
		}
		blocks = append(blocks, x)
	}
	// Add larger blocks first. If two blocks overlap, one contains the other, so the smaller one can be skipped and
	// no address is counted twice.
	slices.SortStableFunc(blocks, func(a, b netip.Prefix) int { return a.Bits() - b.Bits() })
	for _, b := range blocks {
		off, size := p.offset(b.Addr()), b.Addr().BitLen()-b.Bits()
		if p.reserved.has(off) {
			continue
		}
		p.nReserved = p.nReserved.add(u128{0, 1}.shl(size))
		p.reserved.takeBlock(off, size)
		p.taken.takeBlock(off, size)
	}
	return p
}

func (p *Pool) offset(a netip.Addr) u128 { return fromAddr(a).low(p.hostBits) }

func (p *Pool) at(off u128) netip.Addr {
	return fromAddr(p.prefix.Addr()).or(off).addr(p.prefix.Addr().Is4())
}

// Prefix returns the range.
func (p *Pool) Prefix() netip.Prefix { return p.prefix }

// Is4 reports whether the range is an IPv4 range.
func (p *Pool) Is4() bool { return p.prefix.Addr().Is4() }

// Gateway returns the node's own address on the pod side: the second address of the range.
func (p *Pool) Gateway() netip.Addr { return p.gateway }

// Contains reports whether the range contains an address, reserved or not.
func (p *Pool) Contains(a netip.Addr) bool { return p.prefix.Contains(a) }

// Reserved reports whether an address of the range is never allocated.
func (p *Pool) Reserved(a netip.Addr) bool { return p.reserved.has(p.offset(a)) }

// Take marks an address of the range as taken. It returns false if the address is already taken or is reserved.
func (p *Pool) Take(a netip.Addr) bool {
	if !p.taken.take(p.offset(a)) {
		return false
	}
	p.nTaken = p.nTaken.add(u128{0, 1})
	return true
}

// Put makes an address free again. It returns false if the address is already free or is reserved.
func (p *Pool) Put(a netip.Addr) bool {
	off := p.offset(a)
	if p.reserved.has(off) || !p.taken.put(off) {
		return false
	}
	p.nTaken = p.nTaken.sub(u128{0, 1})
	return true
}

// Next returns a free address, which the caller passes to Take. It is the first one at or after the cursor; the search
// continues at the start of the range. So a freed address is reused as late as possible. Next returns false if all
// addresses are taken.
func (p *Pool) Next() (netip.Addr, bool) {
	off, ok := p.taken.next(p.cursor)
	if !ok {
		off, ok = p.taken.next(u128{})
	}
	if !ok {
		return netip.Addr{}, false
	}
	return p.at(off), true
}

// Cursor returns the address at which Next begins its search.
func (p *Pool) Cursor() netip.Addr { return p.at(p.cursor) }

// SetCursor sets the address at which Next begins its search.
func (p *Pool) SetCursor(a netip.Addr) { p.cursor = p.offset(a) }

// Advance moves the cursor to the address after the given one.
func (p *Pool) Advance(a netip.Addr) {
	p.cursor = p.offset(a).add(u128{0, 1}).low(p.hostBits)
}

// Size returns the number of addresses in the range. Like all counts, it is at most 2^64 - 1.
func (p *Pool) Size() uint64 { return u128{0, 1}.shl(p.hostBits).saturated() }

// NumReserved returns the number of addresses that are never allocated.
func (p *Pool) NumReserved() uint64 { return p.nReserved.saturated() }

// NumTaken returns the number of addresses that Take has marked.
func (p *Pool) NumTaken() uint64 { return p.nTaken.saturated() }

// NumFree returns the number of addresses that Next can still find.
func (p *Pool) NumFree() uint64 {
	return u128{0, 1}.shl(p.hostBits).sub(p.nReserved).sub(p.nTaken).saturated()
}
