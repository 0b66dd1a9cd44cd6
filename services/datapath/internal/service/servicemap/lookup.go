// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/service/rendezvous"
)

// Frontend is a frontend as the kernel has it.
type Frontend struct {
	Key frontend.Key
	// Service names the port of a service; empty: the frontend is that of an
	// earlier process and was not confirmed yet.
	Service string
	// Kind is 0 like Service is empty, but where the key is that of a node port: a host
	// port is named before anything asks for it.
	Kind frontend.Kind
	// Inside is nil if the node's own pods and sockets pass it by.
	Inside, Outside *Front
	Affinity        time.Duration
	// Group is what affinity remembers it by; 0: none.
	Group uint16
}

// Front is one list of a frontend.
type Front struct {
	Number   uint32
	Base     int // of the members
	Slots    int // of the table behind them; 0: there is none
	Drop     bool
	Sources  bool // only from its source ranges
	Backends []Backend
	// Draining are the backends that keep what the front has led to them.
	Draining []Backend
}

// Backend is an address that a front leads to, or drains.
type Backend struct {
	netip.AddrPort
	Number     uint32
	Generation uint8
}

// List lists the frontends by address, port and protocol.
func (m *Maps) List() ([]Frontend, error) {
	if err := m.gate.RLock(); err != nil {
		return nil, err
	}
	defer m.gate.RUnlock()
	fs := make([]Frontend, 0, len(m.store.entries))
	for _, e := range m.store.entries {
		fs = append(fs, Frontend{
			Key: e.key, Service: e.service, Kind: e.kindKnown(),
			Inside: e.inside.describe(), Outside: e.outside.describe(),
			Affinity: time.Duration(e.timeout) * time.Second, Group: e.group,
		})
	}
	slices.SortFunc(fs, func(a, b Frontend) int { return a.Key.Compare(b.Key) })
	return fs, nil
}

// kindKnown is the kind of the frontend, 0 if it is not known.
func (e *entry) kindKnown() frontend.Kind {
	if e.kind == 0 && e.key.Node {
		return frontend.NodePort
	}
	return e.kind
}

func (f *front) describe() *Front {
	if f == nil {
		return nil
	}
	d := &Front{
		Number: f.number, Base: f.list.span.Base, Drop: f.flags&flagDrop != 0, Sources: f.flags&flagSources != 0,
		Slots: rendezvous.Slots(f.list.table.Bits()), Backends: make([]Backend, len(f.list.backends)),
	}
	for i, b := range f.list.backends {
		d.Backends[i] = b.describe()
	}
	for _, b := range f.draining {
		d.Draining = append(d.Draining, b.describe())
	}
	return d
}

func (b *backend) describe() Backend {
	return Backend{AddrPort: b.addr, Number: b.number, Generation: b.gen}
}

// NameOf is what a frontend was named; "": it is that of an earlier process and was not
// confirmed yet. false: there is none with the key.
func (m *Maps) NameOf(k frontend.Key) (service string, ok bool, err error) {
	if err := m.gate.RLock(); err != nil {
		return "", false, err
	}
	defer m.gate.RUnlock()
	e, ok := m.store.entries[k]
	if !ok {
		return "", false, nil
	}
	return e.service, true, nil
}

// Has says whether there is a frontend with the key.
func (m *Maps) Has(k frontend.Key) (bool, error) {
	if err := m.gate.RLock(); err != nil {
		return false, err
	}
	defer m.gate.RUnlock()
	_, ok := m.store.entries[k]
	return ok, nil
}

// Keys are the keys of all frontends, in no order, with those that had no room and whose
// connections are refused.
func (m *Maps) Keys() ([]frontend.Key, error) {
	if err := m.gate.RLock(); err != nil {
		return nil, err
	}
	defer m.gate.RUnlock()
	keys := make([]frontend.Key, 0, len(m.store.entries))
	for k := range m.store.entries {
		keys = append(keys, k)
	}
	for k := range m.store.closed {
		keys = append(keys, k)
	}
	return keys, nil
}

// Asked is the address that a front stands for, also while it rests; false: the
// number is not in use.
func (m *Maps) Asked(number uint32) (frontend.Key, bool) {
	if m.gate.RLock() != nil {
		return frontend.Key{}, false
	}
	defer m.gate.RUnlock()
	s := m.store
	if int64(number) >= int64(len(s.fronts)) || s.fronts[number] == nil {
		return frontend.Key{}, false
	}
	return s.fronts[number].key, s.fronts[number].key.Addr.IsValid()
}

// Keeps says whether a front still leads to a backend or drains it, of that number and
// generation. A socket that was given the backend by this front is to be ended if it
// does not.
func (m *Maps) Keeps(front uint32, v6 bool, number uint32, generation uint8) bool {
	if m.gate.RLock() != nil {
		return true // this process ends; what the next one adopts decides
	}
	defer m.gate.RUnlock()
	s := m.store
	if int64(front) >= int64(len(s.fronts)) || s.fronts[front] == nil || s.fronts[front].list == nil {
		return false
	}
	f := s.fronts[front]
	if f.key.Addr.Is4() == v6 {
		return false
	}
	is := func(b *backend) bool { return b.number == number && b.gen == generation }
	// Which front drains one of an earlier process is not known before the first whole
	// transaction: until then each keeps it.
	adopted := func(b *backend) bool { return b.family == familyOf(f.key.Addr) && is(b) }
	return slices.ContainsFunc(f.list.backends, is) || slices.ContainsFunc(f.draining, is) ||
		slices.ContainsFunc(s.adopted, adopted)
}

// HasBackend says whether a front leads to the address, or drains it.
func (m *Maps) HasBackend(a netip.AddrPort) bool {
	if m.gate.RLock() != nil {
		return false
	}
	defer m.gate.RUnlock()
	b := m.store.backends[familyOf(a.Addr())][a]
	return b != nil && !b.gone
}

// Counts say how much of the maps is in use.
type Counts struct {
	Frontends int // keys of both families
	Fronts    int // with those that rest
	Members   int
	Backends  int // of both families, with those that rest
	Resting   int // numbers that wait for their last users, or for a grace period
}

// Counts counts what is in use.
func (m *Maps) Counts() (Counts, error) {
	if err := m.gate.RLock(); err != nil {
		return Counts{}, err
	}
	defer m.gate.RUnlock()
	s := m.store
	c := Counts{
		Frontends: len(s.entries), Fronts: s.frontNumbers.Used(), Members: s.nMembers - s.members.Free(),
		Backends: s.backendNumbers[ip4].Used() + s.backendNumbers[ip6].Used(),
	}
	for _, f := range s.fronts {
		if f != nil && f.list == nil {
			c.Resting++
		}
	}
	for fam := range families {
		c.Resting += len(s.removedBackends(fam))
	}
	return c, nil
}

// Capacity returns how many elements the maps have for new frontends and lists. A tenth of
// each map is kept for changes of existing ones, and of the members as many as the largest table
// takes. ok is false if the node has no services.
func (m *Maps) Capacity() (_ frontend.Capacity, ok bool) {
	s := m.store
	table := rendezvous.MaxBits // of the largest table that there may be
	for table > 0 && runLength(0, table) > quarter(s.nMembers) {
		table--
	}
	usable := func(size int) int { return size - reserve(size) }
	c := frontend.Capacity{
		Frontends: usable(s.nFronts) - 1, Backends: usable(s.nBackends) - 1, Members: s.nMembers - s.reservedMembers(table),
		BackendsPerList: min(quarter(s.nMembers), quarter(s.nBackends), maxCount),
	}
	for fam := range families {
		if n := int(s.keys[fam].MaxEntries()); n > 1 { // else the node has no services of the family
			c.Frontends = min(c.Frontends, usable(n))
		}
	}
	return c, c.Frontends > 0 && c.Backends > 0 && c.BackendsPerList > 0
}

// Usage is how many elements of the maps are in use, by name, where that is not
// the number of their keys.
func (m *Maps) Usage() (map[string]int, error) {
	if err := m.gate.RLock(); err != nil {
		return nil, err
	}
	defer m.gate.RUnlock()
	s := m.store
	return map[string]int{
		bpf.MapsMapSlFront:  s.frontNumbers.Used(),
		bpf.MapsMapSlMember: s.nMembers - s.members.Free(),
		bpf.MapsMapSlBe4:    s.backendNumbers[ip4].Used(),
		bpf.MapsMapSlBe6:    s.backendNumbers[ip6].Used(),
	}, nil
}
