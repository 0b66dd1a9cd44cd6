// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"fmt"
	"net/netip"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/service/idalloc"
	"github.com/sluice-net/sluice/services/datapath/internal/service/rendezvous"
)

// adopt rebuilds the store from the maps alone. Incomplete changes of a killed process count as removed;
// RemoveLeftovers completes them. A backend in no list may be draining: the first complete transaction tells. adopt
// does not write to the maps.
func (s *store) adopt() error {
	var keys []rawKey
	var values []bpf.MapsSlFe
	err := s.eachKey(func(k rawKey, v bpf.MapsSlFe) {
		keys, values = append(keys, k), append(values, v)
	})
	if err != nil {
		return err
	}
	ad := &adoption{s: s, lists: map[adoptedSpan]*list{}}
	for fam := range families {
		ad.adoptBackends(fam)
	}
	for i, k := range keys {
		if k.isAddress() {
			s.addresses.Adopt(k.frontend().Addr)
		} else {
			ad.adoptKey(k, values[i])
		}
		s.nKeys[k.family]++
	}
	for _, e := range s.entries {
		e.each(ad.adoptList)
		e.refused = true // until the frontend is set again: see entry.refused
		e.each(func(f *front) { e.refused = e.refused && f.list == s.empty })
	}
	if err := s.adoptSources(); err != nil {
		return err
	}
	for n := 1; n < s.nFronts; n++ {
		if w := s.front(uint32(n)); s.fronts[n] == nil && w != (frontWords{}) {
			ad.adoptRemoved(uint32(n), w)
		}
	}
	for fam := range families {
		for _, b := range ad.backends[fam] {
			switch {
			case b == nil || b.lists > 0:
			case b.gone:
				b.left = s.left
				s.removed[backendKind+fam].add(b.tenant, 1)
				s.left.backends = append(s.left.backends, b)
			case s.backends[fam][b.addr] == b:
				s.adopted = append(s.adopted, b)
			default: // another ID already has the same address
				s.lose(b)
			}
		}
	}
	return nil
}

// adoption is the state of adopt.
type adoption struct {
	s        *store
	backends [families][]*backend // by ID
	lists    map[adoptedSpan]*list
}

type adoptedSpan struct {
	family, base, members, tableBits int
}

func (ad *adoption) adoptBackends(fam int) {
	s := ad.s
	ad.backends[fam] = make([]*backend, s.nBackends)
	for n := 1; n < s.nBackends; n++ {
		r := s.backend(fam, uint32(n))
		s.gens[fam][n] = r.gen
		if r.state == backendFree {
			continue
		}
		b := &backend{
			family: fam, number: uint32(n), addr: netip.AddrPortFrom(r.addr, r.port), gen: r.gen,
			gone: r.state != backendActive,
		}
		b.salt = Salt(b.addr)
		s.backendNumbers[fam].TakeAt(b.number)
		ad.backends[fam][n] = b
		if other := s.backends[fam][b.addr]; other == nil || other.gone {
			s.backends[fam][b.addr] = b
		}
	}
}

// adoptKey adopts a key if its fronts exist and belong to no other key. Otherwise the key is ignored, and deleted
// later.
func (ad *adoption) adoptKey(k rawKey, v bpf.MapsSlFe) {
	s := ad.s
	key := k.frontend()
	if key.Validate() != nil || rawKeyOf(key) != k || v.Outside == 0 {
		return
	}
	if !s.frontNumbers.TakeAt(v.Outside) {
		return
	}
	if v.Inside != 0 && v.Inside != v.Outside && !s.frontNumbers.TakeAt(v.Inside) {
		s.frontNumbers.Give(v.Outside)
		return
	}
	e := &entry{key: key}
	adoptFront := func(number uint32) *front {
		w := s.front(number)
		f := &front{
			number: number, key: key, flags: uint16(w[listWord] >> flagsShift),
			timeout: uint32(w[groupWord]), group: uint16(w[groupWord] >> 32),
		}
		if f.timeout == 0 {
			f.group = 0
		}
		s.fronts[number] = f
		return f
	}
	e.outside = adoptFront(v.Outside)
	switch v.Inside {
	case 0:
	case v.Outside:
		e.inside = e.outside
	default:
		e.inside = adoptFront(v.Inside)
	}
	// a process may have been killed between writing the two fronts
	e.timeout, e.group = e.outside.timeout, e.outside.group
	if e.inside != nil {
		e.inside.timeout, e.inside.group = e.timeout, e.group
	}
	if e.group != 0 {
		s.groupNumbers.TakeAt(uint32(e.group))
		s.groupUses[e.group]++
	}
	s.entries[key] = e
}

// adoptList restores the list of a front from its packed entry. An invalid list is treated as empty.
func (ad *adoption) adoptList(f *front) {
	s := ad.s
	base, members, bits := run(s.front(f.number)[listWord])
	f.list = s.empty
	if members > 0 {
		if l := ad.list(adoptedSpan{familyOf(f.key.Addr), base, members, bits}); l != nil {
			f.list = l
		}
	}
	f.list.fronts++
}

// list adopts a run of members; nil if it is not a valid list. The table is computed from the members: differing slots,
// for example of another version, are repaired one by one. A table that this version would not create is ignored.
func (ad *adoption) list(at adoptedSpan) *list {
	s, fam := ad.s, at.family
	if l := ad.lists[at]; l != nil {
		return l
	}
	bits := at.tableBits
	if bits > rendezvous.MaxBits || at.members > rendezvous.Slots(bits)/rendezvous.LeastSlots {
		bits = 0
	}
	sp := idalloc.Run{Base: at.base, N: runLength(at.members, bits)}
	if sp.End() > s.nMembers {
		return nil
	}
	l := &list{family: fam, span: sp, backends: make([]*backend, at.members)}
	for i := range l.backends {
		w := s.member(sp.Base + i)
		if n := uint32(w); int64(n) < int64(s.nBackends) {
			l.backends[i] = ad.backends[fam][n]
		}
		b := l.backends[i]
		if b == nil || b.gone || w != memberWord(b) || i > 0 && l.backends[i-1].addr.Compare(b.addr) >= 0 {
			return nil
		}
	}
	if !s.members.TakeAt(sp) {
		return nil
	}
	l.table = rendezvous.New(bits, l.addresses())
	s.keep(l)
	ad.lists[at] = l
	return l
}

// adoptRemoved adopts a front that no key refers to: it was removed, or the process was killed before it inserted the
// key. Packets of a connection that refers to the front may still use its members.
func (ad *adoption) adoptRemoved(number uint32, w frontWords) {
	s := ad.s
	f := &front{number: number, key: frontend.Key{}, flags: flagGone}
	s.frontNumbers.TakeAt(number)
	s.fronts[number] = f
	s.removed[frontKind].add(f.tenant, 1)
	s.left.fronts = append(s.left.fronts, f)
	base, members, bits := run(w[listWord])
	if bits > rendezvous.MaxBits {
		bits = 0
	}
	if sp := (idalloc.Run{Base: base, N: runLength(members, bits)}); members > 0 && s.members.TakeAt(sp) {
		s.left.spans = append(s.left.spans, sp)
	}
}

// RemoveLeftovers completes interrupted changes of a killed process. All program runs that began before Open must have
// ended.
func (m *Maps) RemoveLeftovers() error {
	if err := m.gate.Lock(); err != nil {
		return err
	}
	defer m.gate.Unlock()
	differences, err := m.store.audit(true)
	for _, d := range differences {
		m.log.Info("leftover of a previous process repaired", "what", d)
	}
	if err != nil {
		return fmt.Errorf("repair leftovers of services: %w", err)
	}
	return nil
}
