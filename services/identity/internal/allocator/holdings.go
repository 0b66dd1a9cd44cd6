// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"maps"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
)

// holdings maps numbers to their holders on this node and back, and lists the changes that are not saved in the records
// yet. Every number in byNumber has at least one holder, and byHolder maps exactly its holders to the number. workloads
// only has keys that are holders. The caller must hold the lock.
type holdings struct {
	byNumber  map[identity.Numeric]*hold
	byHolder  map[Holder]identity.Numeric
	workloads map[Holder]Workload // of holders with a known workload
	unsaved   map[Holder]struct{} // holders that have changed since take
}

// hold is a number that this node holds.
type hold struct {
	labels  label.Canonical
	holders map[Holder]struct{}
	ref     int64 // revision of this node's reference; 0: not in the store
}

func newHoldings() holdings {
	return holdings{
		byNumber: map[identity.Numeric]*hold{}, byHolder: map[Holder]identity.Numeric{},
		workloads: map[Holder]Workload{}, unsaved: map[Holder]struct{}{},
	}
}

// has reports whether a number is held.
func (s *holdings) has(n identity.Numeric) bool { return s.byNumber[n] != nil }

// as returns the hold of a number if it is held for the label set, else nil.
func (s *holdings) as(n identity.Numeric, labels label.Canonical) *hold {
	if h := s.byNumber[n]; h != nil && h.labels.Text() == labels.Text() {
		return h
	}
	return nil
}

// other returns the hold of a number if it is held for another label set, else nil.
func (s *holdings) other(n identity.Numeric, labels label.Canonical) *hold {
	if h := s.byNumber[n]; h != nil && h.labels.Text() != labels.Text() {
		return h
	}
	return nil
}

// add adds a holder to an identity, and reports whether it is the first holder. The holder must have the same identity
// or none. ref is the revision of this node's reference, if it is in the store.
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

// drop removes a holder, and returns its number (0: none). If it was the last holder of the number, drop also returns
// the hold.
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

// reassign moves all holders of a number to an identity. It returns the holders, sorted, and reports whether the
// identity had no holder before. ref is the revision of this node's reference.
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

// touch marks a holder as changed, so that it is saved again and then published to the readers.
func (s *holdings) touch(holder Holder) { s.unsaved[holder] = struct{}{} }

// take returns the holders to save and the holders to remove from the records, in any order. If they could not be
// written, putBack restores them.
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
