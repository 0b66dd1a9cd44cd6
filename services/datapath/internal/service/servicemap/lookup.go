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

// Frontend is a frontend in the kernel.
type Frontend struct {
	Key frontend.Key
	// Service names the port of a service; empty: the frontend comes from a previous process and is not confirmed yet.
	Service string
	// Kind is 0 if Service is empty, unless the key is a node port: then Kind is NodePort, because host ports are
	// confirmed before frontends are listed.
	Kind frontend.Kind
	// Inside is nil if packets and sockets of the node's own pods do not use the frontend.
	Inside, Outside *Front
	Affinity        time.Duration
	// Group is the ID of the affinity group; 0: none.
	Group uint16
}

// Front is one backend list of a frontend.
type Front struct {
	Number   uint32
	Base     int // of the members
	Slots    int // of the table after the members; 0: no table
	Drop     bool
	Sources  bool // only clients in its source ranges
	Backends []Backend
	// Draining are removed backends that keep the existing connections of the list.
	Draining []Backend
}

// Backend is an active or draining backend in one backend list (Front) of a frontend.
type Backend struct {
	netip.AddrPort
	Number     uint32
	Generation uint8
}

// List returns the frontends, sorted by address, port and protocol.
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

// kindKnown returns the kind of the frontend, 0 if it is unknown.
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

// NameOf returns the service of a frontend; "" if it comes from a previous process and is not confirmed yet. ok is
// false if the frontend does not exist.
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

// Has reports whether a frontend with the key exists.
func (m *Maps) Has(k frontend.Key) (bool, error) {
	if err := m.gate.RLock(); err != nil {
		return false, err
	}
	defer m.gate.RUnlock()
	_, ok := m.store.entries[k]
	return ok, nil
}

// Keys returns the keys of all frontends in any order, including frontends that did not fit and whose connections are
// refused.
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

// Asked returns the address of a front, also while its ID is in quarantine. It returns false if the ID is not in use.
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

// Keeps reports whether a backend, by ID and generation, is still active or draining in a front. If not, a socket that
// got the backend from this front has to be ended.
func (m *Maps) Keeps(front uint32, v6 bool, number uint32, generation uint8) bool {
	if m.gate.RLock() != nil {
		return true // This process is about to end; the next process decides.
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
	// Which fronts have draining backends from a previous process is unknown before the first complete transaction. Until
	// then, every front keeps them.
	adopted := func(b *backend) bool { return b.family == familyOf(f.key.Addr) && is(b) }
	return slices.ContainsFunc(f.list.backends, is) || slices.ContainsFunc(f.draining, is) ||
		slices.ContainsFunc(s.adopted, adopted)
}

// HasBackend reports whether the address is an active or draining backend.
func (m *Maps) HasBackend(a netip.AddrPort) bool {
	if m.gate.RLock() != nil {
		return false
	}
	defer m.gate.RUnlock()
	b := m.store.backends[familyOf(a.Addr())][a]
	return b != nil && !b.gone
}

// Counts are the numbers of elements in use.
type Counts struct {
	Frontends int // keys of both families
	Fronts    int // including IDs in quarantine
	Members   int
	Backends  int // of both families, including IDs in quarantine
	Resting   int // IDs that wait for a grace period or for their last references
}

// Counts returns the numbers of elements in use.
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

// Capacity returns how many elements the maps have for new frontends and lists. A tenth of each map is reserved for
// changes of existing frontends; of the members, at least the size of the largest table. ok is false if the node has no
// services.
func (m *Maps) Capacity() (_ frontend.Capacity, ok bool) {
	s := m.store
	table := rendezvous.MaxBits // of the largest possible table
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

// Usage returns the number of elements in use, by map name, for maps where this is not the number of keys.
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
