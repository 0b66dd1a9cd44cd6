// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/service/rendezvous"
)

// Lookup reads a frontend as the programs do: from the maps, whose content may differ from the store. Only Service and
// Kind come from the store. Backends that the programs would not select are omitted. ok is false if the maps do not
// have the key.
func (m *Maps) Lookup(k frontend.Key) (Frontend, bool, error) {
	if err := m.gate.RLock(); err != nil {
		return Frontend{}, false, err
	}
	defer m.gate.RUnlock()
	s := m.store
	v, err := s.lookupKey(k)
	switch {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return Frontend{}, false, nil
	case err != nil:
		return Frontend{}, false, err
	}
	f := Frontend{Key: k}
	known := s.entries[k]
	if known == nil {
		known = &entry{key: k}
	}
	f.Service, f.Kind = known.service, known.kindKnown()
	for _, side := range []struct {
		number uint32
		into   **Front
	}{{v.Inside, &f.Inside}, {v.Outside, &f.Outside}} {
		if side.number == 0 {
			continue
		}
		if int64(side.number) >= int64(s.nFronts) {
			return f, true, fmt.Errorf("frontend %v: front %d is beyond the %d of map %s", k, side.number, s.nFronts,
				bpf.MapsMapSlFront)
		}
		w := s.front(side.number)
		*side.into = s.readFront(familyOf(k.Addr), side.number, w[listWord])
		f.Affinity, f.Group = time.Duration(uint32(w[groupWord]))*time.Second, uint16(w[groupWord]>>32)
	}
	return f, true, nil
}

// lookupKey reads the fronts of a key. It returns ebpf.ErrKeyNotExist if the key is missing.
func (m *rawMaps) lookupKey(k frontend.Key) (v bpf.MapsSlFe, err error) {
	fam := familyOf(k.Addr)
	if fam == ip4 {
		key := key4(k)
		err = m.keys[fam].Lookup(&key, &v)
	} else {
		key := key6(k)
		err = m.keys[fam].Lookup(&key, &v)
	}
	if err != nil {
		return v, fmt.Errorf("map %s: %w", keyMap[fam], err)
	}
	return v, nil
}

// readFront reads a front, whose list is in the packed entry list.
func (m *rawMaps) readFront(fam int, number uint32, list uint64) *Front {
	flags := uint16(list >> flagsShift)
	base, members, bits := run(list)
	f := &Front{
		Number: number, Base: base, Drop: flags&flagDrop != 0, Sources: flags&flagSources != 0,
		Slots: rendezvous.Slots(min(bits, rendezvous.MaxBits+1)), Backends: []Backend{},
	}
	for i := base; i < min(base+members, m.nMembers); i++ {
		n := uint32(m.member(i))
		if int64(n) >= int64(m.nBackends) {
			continue
		}
		b := m.backend(fam, n)
		if b.state == backendActive {
			f.Backends = append(f.Backends, Backend{
				AddrPort: netip.AddrPortFrom(b.addr, b.port), Number: n, Generation: b.gen,
			})
		}
	}
	return f
}

// ServiceAt returns the service whose frontend has an address and port, or the NodePort of the family, as
// "shop/web:http"; empty if no service has it, or if it is a host port.
func (m *Maps) ServiceAt(at netip.AddrPort, protocol uint8) string {
	if m.gate.RLock() != nil {
		return ""
	}
	defer m.gate.RUnlock()
	k := frontend.Key{Addr: at.Addr(), Port: at.Port(), Protocol: frontend.Protocol(protocol)}
	e := m.store.entries[k]
	if e == nil {
		e = m.store.entries[k.NodePort()]
	}
	if e == nil || e.kind == frontend.HostPort {
		return ""
	}
	return e.service
}
