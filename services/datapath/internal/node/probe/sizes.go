// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probe

import "time"

// MinMTU is the smallest expected MTU for which full-size probes are sent, and where the search for the path MTU
// starts: the minimum that IPv6 requires of a link.
const MinMTU = 1280

// How many probes of one size must be lost before the path counts as too small for this size. A lost probe only counts
// if a small probe is answered after it.
const (
	missesOfGood   = 3 // size was carried before, or not tried yet
	missesInSearch = 2
	missesMore     = 3 // in addition, on a path that recently lost small packets
)

// sizes finds the largest packet that a path carries. All values are bytes of IP packets. The loss of a large packet
// alone proves nothing: the caller reports it only after a small one was answered.
type sizes struct {
	least    int // always carried while small probes are answered
	expected int // 0: unknown, and no full-size probes are sent
	good     int // largest answered size; 0: none
	bad      int // smallest size that is not carried; 0: none
	misses   int // of the size that is being tried
	nextSize int // which size to try next on a limited path
	last     time.Time
}

// reset discards the results, because the path may have changed.
func (s *sizes) reset(expected int) {
	*s = sizes{least: s.least, expected: expected}
}

// searching reports whether the path MTU lies between two known sizes.
func (s *sizes) searching() bool { return s.bad != 0 && s.bad-max(s.good, s.least) > 1 }

// wants reports whether a full-size probe should be sent now: the interval has passed since the last one, or the
// path MTU is unknown.
func (s *sizes) wants(now time.Time, interval time.Duration) bool {
	if s.expected < MinMTU {
		return false
	}
	return s.urgent() || now.Sub(s.last) >= interval
}

// urgent reports whether the next full-size probe is sent without waiting for the interval.
func (s *sizes) urgent() bool {
	return s.expected >= MinMTU && (s.misses > 0 || s.searching() || s.good == 0 && s.bad == 0)
}

// next returns the size of the next probe.
func (s *sizes) next() int {
	low := max(s.good, s.least)
	switch {
	case s.bad == 0:
		return s.expected
	case s.bad-low <= 1: // the path is limited: test whether low still passes, and whether more does
		again := [...]int{s.expected, s.bad, low}
		if low == s.least { // small probes already test this size
			return again[s.nextSize%2]
		}
		return again[s.nextSize%3]
	case low < MinMTU && s.bad > MinMTU:
		return MinMTU
	}
	return low + (s.bad-low)/2
}

// carried records that a packet of this size was answered.
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

// missed records that a packet of this size was lost although small packets are carried. lossy: some small packets were
// lost, too, so more losses are needed.
func (s *sizes) missed(size int, lossy bool) {
	s.misses++
	need := missesInSearch
	switch {
	case s.bad != 0 && size >= s.bad: // still not carried
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

// mtu returns the largest size that is carried; while searching, a lower bound; 0: unknown.
func (s *sizes) mtu() int {
	if s.bad == 0 {
		return s.good
	}
	return max(s.good, s.least)
}

// limited reports whether the path carries less than expected and the search is complete.
func (s *sizes) limited() bool { return s.bad != 0 && !s.searching() }
