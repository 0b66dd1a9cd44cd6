// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// maxDifferences is the maximum number of reported differences; a repair fixes all.
const maxDifferences = 1000

// parts returns the comparisons of an audit, in the order in which the elements of a list are written. Each is
// independent of the others.
func (a *mapAudit) parts() []func() {
	return []func(){
		func() { a.backends(ip4) }, func() { a.backends(ip6) }, a.members, a.sources, a.fronts, a.keys,
	}
}

// result returns the differences that the audit found.
func (a *mapAudit) result() (differences []string, err error) {
	if a.more > 0 {
		a.differences = append(a.differences, fmt.Sprintf("%d more", a.more))
	}
	return a.differences, errors.Join(a.errs...)
}

// audit compares the maps with the store, and with repair fixes differences.
func (s *store) audit(repair bool) (differences []string, err error) {
	a := &mapAudit{s: s, repair: repair}
	for _, part := range a.parts() {
		part()
	}
	return a.result()
}

type mapAudit struct {
	s           *store
	repair      bool
	differences []string
	more        int
	errs        []error
}

func (a *mapAudit) differs(fix func() error, format string, args ...any) {
	if len(a.differences) < maxDifferences {
		a.differences = append(a.differences, fmt.Sprintf(format, args...))
	} else {
		a.more++
	}
	if a.repair && len(a.errs) < maxDifferences {
		if err := fix(); err != nil {
			a.errs = append(a.errs, err)
		}
	}
}

// keys compares sl_fe4 and sl_fe6.
func (a *mapAudit) keys() {
	s := a.s
	got := map[rawKey]bpf.MapsSlFe{}
	if err := s.eachKey(func(k rawKey, v bpf.MapsSlFe) { got[k] = v }); err != nil {
		a.errs = append(a.errs, err)
		return
	}
	compare := func(key frontend.Key, want bpf.MapsSlFe) {
		k := rawKeyOf(key)
		v, ok := got[k]
		delete(got, k)
		switch {
		case !ok:
			a.differs(func() error { return s.insertKey(numbered{key, want}) }, "frontend %v is missing", key)
		case v != want:
			a.differs(func() error {
				// the value of a key is never replaced
				if err := s.deleteKey(k); err != nil {
					return err
				}
				return s.insertKey(numbered{key, want})
			}, "frontend %v has fronts %d and %d, should have %d and %d",
				key, v.Inside, v.Outside, want.Inside, want.Outside)
		}
	}
	for key, e := range s.entries {
		compare(key, e.fe())
	}
	s.addresses.Each(func(addr netip.Addr) { compare(keyOfAddress(addr), bpf.MapsSlFe{}) })
	for k := range got {
		a.differs(func() error { return s.deleteKey(k) }, "frontend %v should not be there", k.frontend())
	}
	if a.repair {
		s.nKeys = [families]int{}
		for key := range s.entries {
			s.nKeys[familyOf(key.Addr)]++
		}
		s.addresses.Each(func(addr netip.Addr) {
			s.addresses.Written(addr)
			s.nKeys[familyOf(addr)]++
		})
	}
}

// fronts compares sl_front. For a removed front, only the list is compared.
func (a *mapAudit) fronts() {
	s := a.s
	for n := range s.nFronts {
		got, want := s.front(uint32(n)), frontWords{}
		f := s.fronts[n]
		switch {
		case f != nil && f.list == nil:
			want = got
			want[listWord] = f.listWord()
		case f != nil:
			want = f.packed()
		}
		for w := range got {
			if got[w] != want[w] {
				a.differs(func() error { s.storeFrontWord(uint32(n), w, want[w]); return nil },
					"front %d: word %d is %#x, should be %#x", n, w, got[w], want[w])
			}
		}
	}
}

// members compares sl_member, except for runs that were removed.
func (a *mapAudit) members() {
	s := a.s
	want := make([]uint64, s.nMembers)
	for _, ls := range s.lists {
		for _, l := range ls {
			for i := range l.span.N {
				want[l.span.Base+i] = l.element(i)
			}
		}
	}
	left := make([]bool, s.nMembers)
	for _, d := range append(slices.Clone(s.leaving), s.left) {
		for _, sp := range d.spans {
			for i := range sp.N {
				left[sp.Base+i] = true
			}
		}
	}
	for i, w := range want {
		if got := s.member(i); got != w && !left[i] {
			a.differs(func() error { s.storeMember(i, w); return nil },
				"map %s: element %d is %#x, should be %#x", bpf.MapsMapSlMember, i, got, w)
		}
	}
}

// backends compares sl_be4 or sl_be6.
func (a *mapAudit) backends(fam int) {
	s := a.s
	known := make([]*backend, s.nBackends)
	for _, b := range s.backends[fam] {
		known[b.number] = b
	}
	// also backends whose address has a second ID
	for _, b := range s.removedBackends(fam) {
		known[b.number] = b
	}
	for n, b := range known {
		want := freeBackend(s.gens[fam][n])
		if b != nil {
			want = b.raw()
		}
		wantWord := want.packed(fam)
		if got := s.backendWord(fam, uint32(n)); got != wantWord {
			a.differs(func() error { s.storeBackend(fam, uint32(n), want); return nil },
				"map %s: element %d is %#x, should be %#x", backendMap[fam], n, got, wantWord)
			continue
		}
		if fam == ip4 {
			continue
		}
		var wantAddr [2]uint64
		if b != nil {
			wantAddr = words16(b.addr.Addr().As16())
		}
		if got := s.backendAddr(uint32(n)); got != wantAddr {
			a.differs(func() error { s.storeBackendAddr(uint32(n), wantAddr); return nil },
				"map %s: the address of element %d is %x, should be %x", backendMap[fam], n, got, wantAddr)
		}
	}
}

// removedBackends returns the backends of a family that were removed and whose IDs are not free yet.
func (s *store) removedBackends(fam int) (bs []*backend) {
	for _, d := range append(slices.Clone(s.leaving), s.left) {
		for _, b := range d.backends {
			if b.family == fam && b.left == d {
				bs = append(bs, b)
			}
		}
	}
	for _, r := range s.resting {
		if r.backend != nil && r.backend.family == fam && r.backend.left == r.left {
			bs = append(bs, r.backend)
		}
	}
	return bs
}

// Audit compares the maps of services with the store and returns the differences, at most 1,000. With repair, all are
// fixed. It locks the store for one map at a time, so that a change waits for at most one comparison.
func (m *Maps) Audit(repair bool) (differences []string, err error) {
	a := &mapAudit{s: m.store, repair: repair}
	for _, part := range a.parts() {
		if err := m.auditPart(part, repair); err != nil {
			return nil, err
		}
	}
	return a.result()
}

func (m *Maps) auditPart(part func(), repair bool) error {
	if !repair {
		if err := m.gate.RLock(); err != nil {
			return err
		}
		defer m.gate.RUnlock()
		part()
		return nil
	}
	if err := m.gate.Lock(); err != nil {
		return err
	}
	defer m.gate.Unlock()
	part()
	return nil
}
