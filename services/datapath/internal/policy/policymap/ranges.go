// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"cmp"
	"slices"
)

// span is a range of array elements.
type span struct{ base, n int }

func (s span) end() int { return s.base + s.n }

// rangeAllocator allocates ranges of the elements of a map.
type rangeAllocator struct {
	size int
	free []span // sorted by base; adjacent ranges are merged
}

func newRangeAllocator(size int) rangeAllocator {
	return rangeAllocator{size: size, free: []span{{0, size}}}
}

// available returns the number of free elements.
func (r *rangeAllocator) available() int {
	n := 0
	for _, f := range r.free {
		n += f.n
	}
	return n
}

// largest returns the length of the longest free range.
func (r *rangeAllocator) largest() int {
	n := 0
	for _, f := range r.free {
		n = max(n, f.n)
	}
	return n
}

// take allocates n elements from the smallest free range that is large enough. An empty range is
// always available.
func (r *rangeAllocator) take(n int) (span, bool) {
	if n == 0 {
		return span{}, true
	}
	best := -1
	for i, f := range r.free {
		if f.n >= n && (best < 0 || f.n < r.free[best].n) {
			best = i
		}
	}
	if best < 0 {
		return span{}, false
	}
	s := span{r.free[best].base, n}
	r.cut(best, s)
	return s, true
}

// takeAt allocates a given range. It returns false if part of it is allocated already or out of
// bounds.
func (r *rangeAllocator) takeAt(s span) bool {
	if s.n == 0 {
		return true
	}
	for i, f := range r.free {
		if f.base <= s.base && s.end() <= f.end() && s.n > 0 {
			r.cut(i, s)
			return true
		}
	}
	return false
}

// cut removes s, which lies within the i-th free range.
func (r *rangeAllocator) cut(i int, s span) {
	f := r.free[i]
	var left []span
	if f.base < s.base {
		left = append(left, span{f.base, s.base - f.base})
	}
	if s.end() < f.end() {
		left = append(left, span{s.end(), f.end() - s.end()})
	}
	r.free = slices.Replace(r.free, i, i+1, left...)
}

// give frees an allocated range.
func (r *rangeAllocator) give(s span) {
	if s.n == 0 {
		return
	}
	i, _ := slices.BinarySearchFunc(r.free, s.base, func(f span, base int) int { return cmp.Compare(f.base, base) })
	r.free = slices.Insert(r.free, i, s)
	if i+1 < len(r.free) && s.end() == r.free[i+1].base {
		r.free[i].n += r.free[i+1].n
		r.free = slices.Delete(r.free, i+1, i+2)
	}
	if i > 0 && r.free[i-1].end() == r.free[i].base {
		r.free[i-1].n += r.free[i].n
		r.free = slices.Delete(r.free, i, i+1)
	}
}

// numbers allocates the numbers first to last round robin, so that a number is unused as long as
// possible before it is reused.
type numbers struct {
	first, last, next int
	used              []bool
	n                 int // in use
}

func newNumbers(first, last int) numbers {
	return numbers{first: first, last: last, next: first, used: make([]bool, last+1)}
}

func (u *numbers) take() (int, bool) {
	for range u.last - u.first + 1 {
		i := u.next
		if u.next++; u.next > u.last {
			u.next = u.first
		}
		if !u.used[i] {
			u.used[i] = true
			u.n++
			return i, true
		}
	}
	return 0, false
}

// takeAt marks a number as used, even if it already is.
func (u *numbers) takeAt(i int) {
	if i >= u.first && i <= u.last && !u.used[i] {
		u.used[i] = true
		u.n++
	}
}

func (u *numbers) give(i int) {
	if i >= u.first && i <= u.last && u.used[i] {
		u.used[i] = false
		u.n--
	}
}

func (u *numbers) free() int { return u.last - u.first + 1 - u.n }
