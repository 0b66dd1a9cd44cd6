// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

// hashes is a set of 64-bit hashes. There may be a hundred thousand. A Go map takes 9 bytes for
// each of up to two and a half times as many slots; this set takes 8 bytes for at most twice as
// many right after it has grown. The zero value is empty.
type hashes struct {
	places []uint64 // length is a power of two, with free slots; 0: free
	n      int
}

// hashesFull reports whether n hashes are too many for a number of slots, so that searches become
// long.
func hashesFull(n, places int) bool { return n > places/5*4 }

// someHash maps a hash to the set's values: 0 means free, so hash 0 counts as 1.
func someHash(h uint64) uint64 { return max(h, 1) }

// find returns the index of a hash, or the free slot where it would be.
func (s *hashes) find(h uint64) int {
	mask := len(s.places) - 1
	i := int(h) & mask
	for s.places[i] != 0 && s.places[i] != h {
		i = (i + 1) & mask
	}
	return i
}

// has reports whether a hash is in the set.
func (s *hashes) has(h uint64) bool {
	return s.n > 0 && s.places[s.find(someHash(h))] != 0
}

func (s *hashes) add(h uint64) {
	if s.has(h) {
		return
	}
	if hashesFull(s.n+1, len(s.places)) {
		s.resize(max(2*len(s.places), 64))
	}
	h = someHash(h)
	s.places[s.find(h)] = h
	s.n++
}

// resize moves the hashes to another number of slots.
func (s *hashes) resize(places int) {
	old := s.places
	s.places = make([]uint64, places)
	for _, h := range old {
		if h != 0 {
			s.places[s.find(h)] = h
		}
	}
}

// remove removes a hash and moves later ones forward, so that a search for them does not end at a
// free slot.
func (s *hashes) remove(h uint64) {
	if !s.has(h) {
		return
	}
	mask := len(s.places) - 1
	free := s.find(someHash(h))
	s.places[free] = 0
	for i := (free + 1) & mask; s.places[i] != 0; i = (i + 1) & mask {
		// The hash at i may move to free if its search begins no later than there.
		if start := int(s.places[i]) & mask; (i-start)&mask >= (i-free)&mask {
			s.places[free], s.places[i] = s.places[i], 0
			free = i
		}
	}
	s.n--
	if len(s.places) > 64 && s.n < len(s.places)/8 {
		s.resize(len(s.places) / 4)
	}
}
