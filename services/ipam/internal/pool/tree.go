// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pool

import (
	"math/bits"
	"net/netip"
)

// fanout is the number of children of a node: one for each bit of a word.
const (
	fanoutBits = 6
	allTaken   = ^uint64(0)
)

// tree is the set of taken addresses of one range. It is a bitmap with 64-way summaries, which stores only the parts
// that are neither empty nor full.
//
// The tree has one level for each six bits of the range: 3 for an IPv4 /16, 11 for an IPv6 /64. Every operation follows
// at most two paths from the root to a leaf. So its time depends only on the size of the range, and the memory depends
// only on the taken addresses.
type tree struct {
	levels int
	root   node
}

// node covers 64 children: addresses at level 0, nodes above it.
type node struct {
	full    uint64  // bits of the children whose addresses are all taken
	present uint64  // bits of the children that have a node, because only some of their addresses are taken
	kids    []*node // the nodes of the children in present, in order
}

// newTree returns the empty set over 2^hostBits addresses, 0 < hostBits <= 128.
func newTree(hostBits int) *tree {
	t := &tree{levels: (hostBits + fanoutBits - 1) / fanoutBits}
	if top := hostBits - fanoutBits*(t.levels-1); top < fanoutBits {
		t.root.full = allTaken << (1 << top) // mark the children beyond the range as full
	}
	return t
}

// has reports whether an address is taken.
func (t *tree) has(off u128) bool {
	n := &t.root
	for level := t.levels - 1; ; level-- {
		d := off.digit(level)
		if n.full>>d&1 == 1 {
			return true
		}
		if n = n.kid(d); n == nil || level == 0 {
			return false
		}
	}
}

// take adds an address. It returns false if the address was already taken.
func (t *tree) take(off u128) bool { return t.root.take(t.levels-1, off) }

// put removes an address. It returns false if the address was not taken.
func (t *tree) put(off u128) bool { return t.root.put(t.levels-1, off) }

// takeBlock adds the 2^size addresses from off, which is a multiple of 2^size.
func (t *tree) takeBlock(off u128, size int) { t.root.takeBlock(t.levels-1, off, size) }

// next returns the lowest free address that is not below from.
func (t *tree) next(from u128) (u128, bool) { return t.root.next(t.levels-1, from, true) }

// exhausted reports whether every address is taken.
func (t *tree) exhausted() bool { return t.root.full == allTaken }

func (n *node) index(d uint) int { return bits.OnesCount64(n.present & (1<<d - 1)) }

func (n *node) kid(d uint) *node {
	if n.present>>d&1 == 0 {
		return nil
	}
	return n.kids[n.index(d)]
}

// grow returns the child at d. If it is missing, grow creates it, with its addresses all taken (full is allTaken) or
// all free (0).
func (n *node) grow(d uint, full uint64) *node {
	if kid := n.kid(d); kid != nil {
		return kid
	}
	kid := &node{full: full}
	i := n.index(d)
	n.kids = append(n.kids, nil)
	copy(n.kids[i+1:], n.kids[i:])
	n.kids[i] = kid
	n.present |= 1 << d
	return kid
}

// prune removes the child at d.
func (n *node) prune(d uint) {
	if n.present>>d&1 == 0 {
		return
	}
	i := n.index(d)
	copy(n.kids[i:], n.kids[i+1:])
	n.kids[len(n.kids)-1] = nil
	n.kids = n.kids[:len(n.kids)-1]
	n.present &^= 1 << d
}

func (n *node) take(level int, off u128) bool {
	d := off.digit(level)
	if n.full>>d&1 == 1 {
		return false
	}
	if level == 0 {
		n.full |= 1 << d
		return true
	}
	kid := n.grow(d, 0)
	if !kid.take(level-1, off) {
		return false
	}
	if kid.full == allTaken {
		n.prune(d)
		n.full |= 1 << d
	}
	return true
}

func (n *node) put(level int, off u128) bool {
	d := off.digit(level)
	if level == 0 {
		was := n.full>>d&1 == 1
		n.full &^= 1 << d
		return was
	}
	var kid *node
	if n.full>>d&1 == 1 {
		n.full &^= 1 << d
		kid = n.grow(d, allTaken)
	} else if kid = n.kid(d); kid == nil {
		return false
	}
	was := kid.put(level-1, off)
	if kid.full == 0 && kid.present == 0 {
		n.prune(d)
	}
	return was
}

func (n *node) takeBlock(level int, off u128, size int) {
	d := off.digit(level)
	if low := fanoutBits * level; size >= low {
		width := uint(1) << (size - low) // children, at most 64
		for i := d; i < d+width; i++ {
			n.prune(i)
			n.full |= 1 << i
		}
		return
	}
	if n.full>>d&1 == 1 {
		return
	}
	kid := n.grow(d, 0)
	kid.takeBlock(level-1, off, size)
	if kid.full == allTaken {
		n.prune(d)
		n.full |= 1 << d
	}
}

// next finds the lowest free address below n; if bounded is set, the lowest one that is not below from.
func (n *node) next(level int, from u128, bounded bool) (u128, bool) {
	free := ^n.full
	first := uint(0)
	if bounded {
		first = from.digit(level)
		free &= allTaken << first
	}
	for ; free != 0; free &= free - 1 {
		d := uint(bits.TrailingZeros64(free))
		edge := bounded && d == first
		at := u128{}.withDigit(level, d)
		if level == 0 {
			return at, true
		}
		kid := n.kid(d)
		if kid == nil {
			if edge {
				at = at.or(from.below(level))
			}
			return at, true
		}
		// The search can fail only in the child that contains from. Any other child that is not full has a free
		// address, so at most two children are searched.
		if rest, ok := kid.next(level-1, from, edge); ok {
			return at.or(rest), true
		}
	}
	return u128{}, false
}

// u128 is the distance of an address from the first address of its range, or a number of addresses.
type u128 struct{ hi, lo uint64 }

func fromAddr(a netip.Addr) u128 {
	b := a.As16()
	var u u128
	for i := range 8 {
		u.hi = u.hi<<8 | uint64(b[i])
		u.lo = u.lo<<8 | uint64(b[8+i])
	}
	if a.Is4() {
		u.hi, u.lo = 0, u.lo&0xffffffff
	}
	return u
}

func (u u128) addr(is4 bool) netip.Addr {
	if is4 {
		return netip.AddrFrom4([4]byte{byte(u.lo >> 24), byte(u.lo >> 16), byte(u.lo >> 8), byte(u.lo)})
	}
	var b [16]byte
	for i := range 8 {
		b[i] = byte(u.hi >> (56 - 8*i))
		b[8+i] = byte(u.lo >> (56 - 8*i))
	}
	return netip.AddrFrom16(b)
}

func (u u128) shr(n int) u128 {
	if n >= 64 {
		return u128{0, u.hi >> (n - 64)}
	}
	return u128{u.hi >> n, u.lo>>n | u.hi<<(64-n)}
}

func (u u128) shl(n int) u128 {
	if n >= 64 {
		return u128{u.lo << (n - 64), 0}
	}
	return u128{u.hi<<n | u.lo>>(64-n), u.lo << n}
}

func (u u128) or(v u128) u128 { return u128{u.hi | v.hi, u.lo | v.lo} }

func (u u128) add(v u128) u128 {
	lo, carry := bits.Add64(u.lo, v.lo, 0)
	hi, _ := bits.Add64(u.hi, v.hi, carry)
	return u128{hi, lo}
}

func (u u128) sub(v u128) u128 {
	lo, borrow := bits.Sub64(u.lo, v.lo, 0)
	hi, _ := bits.Sub64(u.hi, v.hi, borrow)
	return u128{hi, lo}
}

// below returns the low bits of u: the position inside a child of the given level.
func (u u128) below(level int) u128 { return u.low(fanoutBits * level) }

func (u u128) low(n int) u128 {
	switch {
	case n >= 128:
		return u
	case n >= 64:
		return u128{u.hi & (1<<(n-64) - 1), u.lo}
	}
	return u128{0, u.lo & (1<<n - 1)}
}

// digit returns the index of the child that contains u, in a node at the level.
func (u u128) digit(level int) uint {
	return uint(u.shr(fanoutBits*level).lo & (1<<fanoutBits - 1))
}

func (u u128) withDigit(level int, d uint) u128 {
	return u.or(u128{0, uint64(d)}.shl(fanoutBits * level))
}

// saturated returns the number, or the largest uint64 if the number is larger.
func (u u128) saturated() uint64 {
	if u.hi != 0 {
		return ^uint64(0)
	}
	return u.lo
}
