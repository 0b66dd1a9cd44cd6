// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"maps"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
)

// holdings maps numbers to their holders on this node and back, and lists the changes that the records lack. Every
// number of byNumber has a holder, and byHolder has that number for each of its holders and for no others. Only holders
// have workloads. The caller locks.
type holdings struct {
	byNumber  map[identity.Numeric]*hold
	byHolder  map[Holder]identity.Numeric
	workloads map[Holder]Workload // of holders that were described
	unsaved   map[Holder]struct{} // changed since take
}

// hold is a number that this node holds.
type hold struct {
	labels  label.Canonical
	holders map[Holder]struct{}
	ref     int64 // revision of our reference; 0 while the store does not have it
}

func newHoldings() holdings {
	return holdings{
		byNumber: map[identity.Numeric]*hold{}, byHolder: map[Holder]identity.Numeric{},
		workloads: map[Holder]Workload{}, unsaved: map[Holder]struct{}{},
	}
}

// has reports whether a number is held.
func (s *holdings) has(n identity.Numeric) bool { return s.byNumber[n] != nil }

// as returns the hold of a number for a label set; nil if it is not held, or for another.
func (s *holdings) as(n identity.Numeric, labels label.Canonical) *hold {
	if h := s.byNumber[n]; h != nil && h.labels.Text() == labels.Text() {
		return h
	}
	return nil
}

// other returns the hold of a number for another label set, or nil.
func (s *holdings) other(n identity.Numeric, labels label.Canonical) *hold {
	if h := s.byNumber[n]; h != nil && h.labels.Text() != labels.Text() {
		return h
	}
	return nil
}

// add adds a holder to an identity and returns whether it is the first one. The holder must hold the same identity or
// none. ref is the revision of this node's reference, if the store has it.
func (s *holdings) add(holder Holder, id identity.Identity, ref int64) (first bool) {
	h := s.byNumber[id.Number]
	if h == nil {
		h, first = &hold{labels: id.Labels, holders: map[Holder]struct{}{}}, true
		s.byNumber[id.Number] = h
	}
	h.ref = max(h.ref, ref)
	h.holders[holder] = struct{}{}
	s.byHolder[holder] = id.Number
	s.touch(holder)
	return first
}

// drop removes a holder, and returns the number that it held (0: none), and the hold if that was its last holder.
func (s *holdings) drop(holder Holder) (n identity.Numeric, ended *hold) {
	n, ok := s.byHolder[holder]
	if !ok {
		return 0, nil
	}
	delete(s.byHolder, holder)
	delete(s.workloads, holder)
	s.touch(holder)
	h := s.byNumber[n]
	delete(h.holders, holder)
	if len(h.holders) > 0 {
		return n, nil
	}
	delete(s.byNumber, n)
	return n, h
}

// reassign moves all holders of a number to an identity, and returns them, sorted, and
// whether they are the first ones there. ref is the revision of our reference.
func (s *holdings) reassign(from identity.Numeric, to identity.Identity, ref int64) (holders []Holder, first bool) {
	holders = slices.Sorted(maps.Keys(s.byNumber[from].holders))
	delete(s.byNumber, from)
	for _, holder := range holders {
		first = s.add(holder, to, ref) || first
	}
	return holders, first
}

// describe records the workload of a holder, and returns whether it changed.
func (s *holdings) describe(holder Holder, w Workload) bool {
	have := s.workloads[holder]
	known := have.learn(w)
	if known.equal(have) {
		return false
	}
	s.workloads[holder] = known
	s.touch(holder)
	return true
}

// touch marks a holder, so that it is written to the records again and then published to the readers.
func (s *holdings) touch(holder Holder) { s.unsaved[holder] = struct{}{} }

// take returns the holders that the records lack, and the holders without a hold, in any order. putBack undoes it if
// the records were not written.
func (s *holdings) take() (put []HolderRecord, drop []Holder) {
	for holder := range s.unsaved {
		if n, ok := s.byHolder[holder]; ok {
			id := identity.Identity{Number: n, Labels: s.byNumber[n].labels}
			put = append(put, HolderRecord{Holder: holder, Identity: id, Workload: s.workloads[holder]})
		} else {
			drop = append(drop, holder)
		}
	}
	clear(s.unsaved)
	return put, drop
}

func (s *holdings) putBack(put []HolderRecord, drop []Holder) {
	for _, r := range put {
		s.touch(r.Holder)
	}
	for _, holder := range drop {
		s.touch(holder)
	}
}
