// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

// hashes is a set of hashes of 64 bits. There may be a hundred thousand, and a map of
// them takes 9 bytes for each of up to two and a half times as many places; here it is 8
// bytes, and at most twice as many right after it has grown. The zero value is empty.
type hashes struct {
	places []uint64 // a power of two, with free ones; 0: free
	n      int
}

// hashesFull says whether n hashes are too many for a number of places: searches become
// long.
func hashesFull(n, places int) bool { return n > places/5*4 }

// someHash is the form of a hash in the set, in which none is 0: that one counts as 1.
func someHash(h uint64) uint64 { return max(h, 1) }

// find returns where a hash is, or the free place where it would be.
func (s *hashes) find(h uint64) int {
	mask := len(s.places) - 1
	i := int(h) & mask
	for s.places[i] != 0 && s.places[i] != h {
		i = (i + 1) & mask
	}
	return i
}

// has says whether a hash is in the set.
func (s *hashes) has(h uint64) bool {
	return s.n > 0 && s.places[s.find(someHash(h))] != 0
}

// add adds a hash.
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

// resize moves the hashes to another number of places.
func (s *hashes) resize(places int) {
	old := s.places
	s.places = make([]uint64, places)
	for _, h := range old {
		if h != 0 {
			s.places[s.find(h)] = h
		}
	}
}

// remove removes a hash. Those behind it move up, so that a search for them ends at no
// free place.
func (s *hashes) remove(h uint64) {
	if !s.has(h) {
		return
	}
	mask := len(s.places) - 1
	free := s.find(someHash(h))
	s.places[free] = 0
	for i := (free + 1) & mask; s.places[i] != 0; i = (i + 1) & mask {
		// The one at i may be found from free on, if its search begins no later.
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
