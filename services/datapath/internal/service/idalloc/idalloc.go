// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package idalloc gives out the elements of a map: runs of them, and numbers that are
// used one by one. It writes no map.
package idalloc

import (
	"cmp"
	"slices"
)

// Run is a run of elements.
type Run struct{ Base, N int }

// End is the element behind the run.
func (s Run) End() int { return s.Base + s.N }

// Runs gives out runs of elements. It looks for the next one behind the last: a place
// rests for as long as possible, and the search is short. Those of Take come from the
// beginning, those of TakeLast from the end: short ones all over the map would leave no
// piece for a long one.
type Runs struct {
	size, free int
	spans      []Run // that are free, by base; no two touch
	next       int   // base from where on a run is looked for
	short      int   // where the part ends in which Take looks; it grows
}

// NewRuns has all elements of a map of a size.
func NewRuns(size int) Runs {
	return Runs{size: size, free: size, spans: []Run{{0, size}}, short: (size + 7) / 8}
}

// from is the index of the first free run that ends behind base.
func (p *Runs) from(base int) int {
	i, _ := slices.BinarySearchFunc(p.spans, base, func(s Run, base int) int { return cmp.Compare(s.End(), base+1) })
	return i
}

// Take returns a run of n elements, n above 0; false: there is none.
func (p *Runs) Take(n int) (Run, bool) {
	for {
		start := p.from(p.next)
		for i := range len(p.spans) {
			at := (start + i) % len(p.spans)
			if f := p.spans[at]; f.N >= n && f.Base+n <= p.short {
				s := Run{f.Base, n}
				p.cut(at, s)
				p.next = s.End()
				return s, true
			}
		}
		if p.short == p.size {
			return Run{}, false
		}
		p.short = min(2*p.short, p.size)
	}
}

// TakeLast returns the last free run of n elements, n above 0, whose distance from the end
// is a multiple of n; false: there is none. So two runs fit exactly where one of twice their
// length was.
func (p *Runs) TakeLast(n int) (Run, bool) {
	for i, f := range slices.Backward(p.spans) {
		behind := p.size - f.End()
		s := Run{p.size - (behind+n-1)/n*n - n, n}
		if s.Base >= f.Base {
			p.cut(i, s)
			return s, true
		}
	}
	return Run{}, false
}

// TakeAt takes one certain run; false: some of it is taken, or lies outside.
func (p *Runs) TakeAt(s Run) bool {
	i := p.from(s.Base)
	if i == len(p.spans) || s.Base < p.spans[i].Base || s.End() > p.spans[i].End() {
		return false
	}
	p.cut(i, s)
	return true
}

// cut removes s, which lies within the i-th free run.
func (p *Runs) cut(i int, s Run) {
	f := p.spans[i]
	p.free -= s.N
	switch {
	case f == s:
		p.spans = slices.Delete(p.spans, i, i+1)
	case f.Base == s.Base:
		p.spans[i] = Run{s.End(), f.N - s.N}
	case f.End() == s.End():
		p.spans[i].N -= s.N
	default:
		p.spans[i].N = s.Base - f.Base
		p.spans = slices.Insert(p.spans, i+1, Run{s.End(), f.End() - s.End()})
	}
}

// Give returns a run that was taken.
func (p *Runs) Give(s Run) {
	p.free += s.N
	i := p.from(s.Base)
	before := i > 0 && p.spans[i-1].End() == s.Base
	after := i < len(p.spans) && p.spans[i].Base == s.End()
	switch {
	case before && after:
		p.spans[i-1].N += s.N + p.spans[i].N
		p.spans = slices.Delete(p.spans, i, i+1)
	case before:
		p.spans[i-1].N += s.N
	case after:
		p.spans[i] = Run{s.Base, s.N + p.spans[i].N}
	default:
		p.spans = slices.Insert(p.spans, i, s)
	}
}

// LookFrom makes Take look for the next run behind base first.
func (p *Runs) LookFrom(base int) { p.next = base }

// Spans returns the free runs by base. The caller must not modify them.
func (p *Runs) Spans() []Run { return p.spans }

// Free is how many elements are unused, in however many pieces.
func (p *Runs) Free() int { return p.free }

// Numbers gives out the numbers from 1 to last in a circle, so that one rests for
// as long as possible before it is used again.
type Numbers struct {
	last, next int
	used       []bool
	n          int // in use
}

// NewNumbers has the numbers from 1 to last.
func NewNumbers(last int) Numbers {
	return Numbers{last: last, next: 1, used: make([]bool, last+1)}
}

// Take returns an unused number; false: there is none.
func (u *Numbers) Take() (uint32, bool) {
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

// TakeAt marks a number as used; false: it is used already, or cannot be.
func (u *Numbers) TakeAt(i uint32) bool {
	if i == 0 || int64(i) > int64(u.last) || u.used[i] {
		return false
	}
	u.used[i] = true
	u.n++
	return true
}

// Give returns a number that was taken.
func (u *Numbers) Give(i uint32) {
	u.used[i] = false
	u.n--
}

// Free is how many numbers are unused.
func (u *Numbers) Free() int { return u.last - u.n }

// Used is how many numbers are in use.
func (u *Numbers) Used() int { return u.n }
