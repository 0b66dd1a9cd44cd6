// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

// hashes is a set of 64-bit hashes. There may be a hundred thousand hashes. A Go map has up to two and a half times
// as many slots as elements, and needs 9 bytes per slot. This set has at most twice as many slots right after it has
// grown, and needs 8 bytes per slot. The zero value is an empty set.
type hashes struct {
	places []uint64 // length is a power of two, with free slots; 0: free
	n      int
}

// hashesFull reports whether n hashes are too many for a number of slots, so that searches become
// long.
func hashesFull(n, places int) bool { return n > places/5*4 }

// someHash maps hash 0 to 1, because 0 marks a free slot.
func someHash(h uint64) uint64 { return max(h, 1) }

// find returns the slot of a hash, or the free slot in which it would be stored.
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

// remove removes a hash, and moves later hashes forward, so that searches for them do not stop at the free slot.
func (s *hashes) remove(h uint64) {
	if !s.has(h) {
		return
	}
	mask := len(s.places) - 1
	free := s.find(someHash(h))
	s.places[free] = 0
	for i := (free + 1) & mask; s.places[i] != 0; i = (i + 1) & mask {
		// The hash at i may move to the slot free if its search begins at that slot or before.
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
