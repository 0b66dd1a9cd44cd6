// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"cmp"
	"slices"
)

// span is a run of members.
type span struct{ base, n int }

func (s span) end() int { return s.base + s.n }

// places gives out runs of sl_member. It looks for the next one behind the last:
// a place rests for as long as possible, and the search is short.
type places struct {
	size, free int
	spans      []span // that are free, by base; no two touch
	next       int    // base from where on a run is looked for
}

func newPlaces(size int) places {
	return places{size: size, free: size, spans: []span{{0, size}}}
}

// from is the index of the first free run that ends behind base.
func (p *places) from(base int) int {
	i, _ := slices.BinarySearchFunc(p.spans, base, func(s span, base int) int { return cmp.Compare(s.end(), base+1) })
	return i
}

// take returns a run of n elements, n above 0; false: there is none.
func (p *places) take(n int) (span, bool) {
	start := p.from(p.next)
	for i := range len(p.spans) {
		at := (start + i) % len(p.spans)
		if f := p.spans[at]; f.n >= n {
			s := span{f.base, n}
			p.cut(at, s)
			p.next = s.end()
			return s, true
		}
	}
	return span{}, false
}

// takeAt takes one certain run; false: some of it is taken, or lies outside.
func (p *places) takeAt(s span) bool {
	i := p.from(s.base)
	if i == len(p.spans) || s.base < p.spans[i].base || s.end() > p.spans[i].end() {
		return false
	}
	p.cut(i, s)
	return true
}

// cut removes s, which lies within the i-th free run.
func (p *places) cut(i int, s span) {
	f := p.spans[i]
	p.free -= s.n
	switch {
	case f == s:
		p.spans = slices.Delete(p.spans, i, i+1)
	case f.base == s.base:
		p.spans[i] = span{s.end(), f.n - s.n}
	case f.end() == s.end():
		p.spans[i].n -= s.n
	default:
		p.spans[i].n = s.base - f.base
		p.spans = slices.Insert(p.spans, i+1, span{s.end(), f.end() - s.end()})
	}
}

// give returns a run that was taken.
func (p *places) give(s span) {
	p.free += s.n
	i := p.from(s.base)
	before := i > 0 && p.spans[i-1].end() == s.base
	after := i < len(p.spans) && p.spans[i].base == s.end()
	switch {
	case before && after:
		p.spans[i-1].n += s.n + p.spans[i].n
		p.spans = slices.Delete(p.spans, i, i+1)
	case before:
		p.spans[i-1].n += s.n
	case after:
		p.spans[i] = span{s.base, s.n + p.spans[i].n}
	default:
		p.spans = slices.Insert(p.spans, i, s)
	}
}

// numbers gives out the numbers from 1 to last in a circle, so that one rests for
// as long as possible before it is used again.
type numbers struct {
	last, next int
	used       []bool
	n          int // in use
}

func newNumbers(last int) numbers {
	return numbers{last: last, next: 1, used: make([]bool, last+1)}
}

// take returns an unused number; false: there is none.
func (u *numbers) take() (uint32, bool) {
	for range u.last {
		i := u.next
		if u.next++; u.next > u.last {
			u.next = 1
		}
		if !u.used[i] {
			u.used[i] = true
			u.n++
			return uint32(i), true
		}
	}
	return 0, false
}

// takeAt marks a number as used; false: it is used already, or cannot be.
func (u *numbers) takeAt(i uint32) bool {
	if i == 0 || int64(i) > int64(u.last) || u.used[i] {
		return false
	}
	u.used[i] = true
	u.n++
	return true
}

// give returns a number that was taken.
func (u *numbers) give(i uint32) {
	u.used[i] = false
	u.n--
}

func (u *numbers) free() int { return u.last - u.n }
