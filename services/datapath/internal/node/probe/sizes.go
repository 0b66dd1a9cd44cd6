// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probe

import "time"

// MinMTU is the least expected MTU that packets of full size are sent for, and
// where the search for the path MTU begins: what IPv6 asks of every link.
const MinMTU = 1280

// Misses of one size, each followed by the answer to a small question, after
// which the path does not carry it.
const (
	missesOfGood   = 3 // that was carried before, or was not asked yet
	missesInSearch = 2
	missesMore     = 3 // on a path that has lost small packets lately
)

// sizes finds the largest packet that a path carries. All figures are bytes of IP
// packets. A lost packet of full size says nothing by itself: the caller reports
// it only if a small one was answered afterwards.
type sizes struct {
	least    int // always carried while small questions are answered
	expected int // 0: not known, and nothing is asked
	good     int // largest that was answered; 0: none
	bad      int // least that is not carried; 0: none
	misses   int // of the size that is asked now
	nextSize int // which size a limited path is asked next
	last     time.Time
}

// reset forgets what was found, for the path may be another.
func (s *sizes) reset(expected int) {
	*s = sizes{least: s.least, expected: expected}
}

// searching says whether the largest size lies between two that are known.
func (s *sizes) searching() bool { return s.bad != 0 && s.bad-max(s.good, s.least) > 1 }

// wants says whether a question of full size should be sent now: the last one was
// sent an interval ago, or what the path carries is not known.
func (s *sizes) wants(now time.Time, interval time.Duration) bool {
	if s.expected < MinMTU {
		return false
	}
	return s.urgent() || now.Sub(s.last) >= interval
}

// urgent says whether the next question of full size waits for no interval.
func (s *sizes) urgent() bool {
	return s.expected >= MinMTU && (s.misses > 0 || s.searching() || s.good == 0 && s.bad == 0)
}

// next is the size of the next question.
func (s *sizes) next() int {
	low := max(s.good, s.least)
	switch {
	case s.bad == 0:
		return s.expected
	case s.bad-low <= 1: // the path is limited: is it still, and is it limited more?
		again := [...]int{s.expected, s.bad, low}
		if low == s.least { // which every small question asks
			return again[s.nextSize%2]
		}
		return again[s.nextSize%3]
	case low < MinMTU && s.bad > MinMTU:
		return MinMTU
	}
	return low + (s.bad-low)/2
}

// carried notes that a packet of this size was answered.
func (s *sizes) carried(size int) {
	s.misses = 0
	s.nextSize++
	switch {
	case size >= s.expected:
		s.good, s.bad, s.nextSize = s.expected, 0, 0
	case size > s.good:
		s.good = size
		if s.bad != 0 && s.bad <= size { // the path carries more than before
			s.bad = s.expected
		}
	}
}

// missed notes that a packet of this size was lost on a path that carries small ones.
// lossy: it does not carry all of them.
func (s *sizes) missed(size int, lossy bool) {
	s.misses++
	need := missesInSearch
	switch {
	case s.bad != 0 && size >= s.bad: // as before
		need = 1
	case s.bad == 0 || size <= s.good:
		need = missesOfGood
	}
	if lossy && need > 1 {
		need += missesMore
	}
	if s.misses < need {
		return
	}
	s.misses = 0
	s.nextSize++
	if s.bad == 0 || size < s.bad {
		s.bad = size
	}
	if s.good >= s.bad {
		s.good = 0
	}
}

// mtu is the largest size that is carried, or while searching a lower bound;
// 0: not known.
func (s *sizes) mtu() int {
	if s.bad == 0 {
		return s.good
	}
	return max(s.good, s.least)
}

// limited says whether the path carries less than expected, and the search is over.
func (s *sizes) limited() bool { return s.bad != 0 && !s.searching() }
