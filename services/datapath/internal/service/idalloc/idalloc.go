// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package idalloc allocates elements of a map: runs of elements, and single IDs. It does not write maps.
package idalloc

import (
	"cmp"
	"slices"
)

// Run is a range of consecutive elements.
type Run struct{ Base, N int }

// End returns the index after the last element.
func (s Run) End() int { return s.Base + s.N }

// Runs allocates runs of elements. Each search starts after the last allocated run, which keeps it short and delays the
// reuse of elements. Take allocates from the beginning and TakeLast from the end, because short runs scattered over the
// map would leave no space for long ones.
type Runs struct {
	size, free int
	spans      []Run // free runs, by base; no two are adjacent
	next       int   // where the next search starts
	short      int   // end of the area that Take uses; it grows
}

// NewRuns returns an allocator of size elements, all free.
func NewRuns(size int) Runs {
	return Runs{size: size, free: size, spans: []Run{{0, size}}, short: (size + 7) / 8}
}

// from returns the index of the first free run that ends after base.
func (p *Runs) from(base int) int {
	i, _ := slices.BinarySearchFunc(p.spans, base, func(s Run, base int) int { return cmp.Compare(s.End(), base+1) })
	return i
}

// Take allocates a run of n elements, n > 0. It returns false if no free run is long enough.
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

// TakeLast allocates the last free run of n elements, n > 0, whose distance from the end is a multiple of n. It returns
// false if no such run is free. With this alignment, two runs fit exactly into a free run of twice their length.
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

// TakeAt allocates the given run. It returns false if some of it is allocated or out of range.
func (p *Runs) TakeAt(s Run) bool {
	i := p.from(s.Base)
	if i == len(p.spans) || s.Base < p.spans[i].Base || s.End() > p.spans[i].End() {
		return false
	}
	p.cut(i, s)
	return true
}

// cut removes s, which is inside the i-th free run.
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

// Give frees an allocated run.
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

// LookFrom makes the next Take begin its search at base.
func (p *Runs) LookFrom(base int) { p.next = base }

// Spans returns the free runs by base. The caller must not modify them.
func (p *Runs) Spans() []Run { return p.spans }

// Free returns the number of free elements, regardless of fragmentation.
func (p *Runs) Free() int { return p.free }

// Numbers allocates IDs from 1 to last in a circle, so that a released ID is reused as late as possible.
type Numbers struct {
	last, next int
	used       []bool
	n          int // allocated IDs
}

// NewNumbers returns an allocator of the IDs from 1 to last.
func NewNumbers(last int) Numbers {
	return Numbers{last: last, next: 1, used: make([]bool, last+1)}
}

// Take allocates an ID. It returns false if none is free.
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

// TakeAt allocates the given ID. It returns false if it is allocated or out of range.
func (u *Numbers) TakeAt(i uint32) bool {
	if i == 0 || int64(i) > int64(u.last) || u.used[i] {
		return false
	}
	u.used[i] = true
	u.n++
	return true
}

// Give frees an allocated ID.
func (u *Numbers) Give(i uint32) {
	u.used[i] = false
	u.n--
}

// Free returns the number of free IDs.
func (u *Numbers) Free() int { return u.last - u.n }

// Used returns the number of allocated IDs.
func (u *Numbers) Used() int { return u.n }
