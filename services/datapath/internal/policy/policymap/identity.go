// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"fmt"
	"maps"
	"sync/atomic"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Layout of a packed entry.
const (
	knownBit            = 1 << 31
	kindShift           = 16
	scopeShift          = 24
	kindMask, scopeMask = uint32(identity.Kinds) - 1, 3
)

// packed encodes the entry of an identity for the map.
func packed(w nodetable.Identity) uint32 {
	if !w.Known {
		return 0
	}
	return uint32(w.Class) | uint32(w.Kind)<<kindShift | uint32(w.Scope)<<scopeShift | knownBit
}

func unpacked(v uint32) nodetable.Identity {
	if v&knownBit == 0 {
		return nodetable.Identity{}
	}
	return nodetable.Identity{
		Class: nodetable.IdentityClass(v), Kind: identity.Kind(v >> kindShift & kindMask),
		Scope: identity.PeerScope(v >> scopeShift & scopeMask), Known: true,
	}
}

func validateIdentity(id identity.Numeric, w nodetable.Identity) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("identity %d: %w: "+format, append([]any{id, pin.ErrInvalid}, args...)...)
	}
	if _, ok := nodetable.IdentityPlace(id); !ok {
		return bad("it is neither cluster-wide (below %d) nor local to this node", nodetable.ClusterWide)
	}
	if !w.Known {
		return nil
	}
	if w.Class == 0 || w.Class > nodetable.MaxIdentityClass {
		return bad("Class: %d is not between 1 and %d", w.Class, nodetable.MaxIdentityClass)
	}
	if w.Kind >= identity.Kinds || w.Scope >= identity.PeerScopes {
		return bad("Kind %d, Scope %d: at most %d and %d", w.Kind, w.Scope, identity.Kinds-1, identity.PeerScopes-1)
	}
	return nil
}

// SetIdentities writes the entries of identities, for all tables at once, by one store each, in no
// particular order. The zero value makes an identity unknown. It checks all entries before the
// first store.
func (m *Maps) SetIdentities(ws map[uint32]nodetable.Identity) error {
	for id, w := range ws {
		if err := validateIdentity(identity.Numeric(id), w); err != nil {
			return err
		}
	}
	if err := m.gate.Lock(); err != nil {
		return err
	}
	defer m.gate.Unlock()
	s := m.store
	for id, w := range ws {
		i, _ := nodetable.IdentityPlace(identity.Numeric(id))
		if s.identities[i] == packed(w) && s.identity(i) == packed(w) {
			continue
		}
		if err := s.storeWord(bpf.MapsMapSlId, s.idMem, i, packed(w)); err != nil {
			return fmt.Errorf("identity %d: %w", id, err)
		}
		s.identities[i] = packed(w)
	}
	return nil
}

func (m *tableMaps) identity(i int) uint32 { return atomic.LoadUint32(element32(m.idMem, i)) }

// Identity reads the entry of an identity; Known is false without an entry.
func (m *Maps) Identity(id identity.Numeric) nodetable.Identity {
	i, ok := nodetable.IdentityPlace(id)
	if !ok || m.gate.RLock() != nil {
		return nodetable.Identity{}
	}
	defer m.gate.RUnlock()
	return unpacked(m.store.identity(i))
}

// Identities reads the entries of all known identities from the map.
func (m *Maps) Identities() (map[uint32]nodetable.Identity, error) {
	if err := m.gate.RLock(); err != nil {
		return nil, err
	}
	defer m.gate.RUnlock()
	ws := map[uint32]nodetable.Identity{}
	for i := range m.store.identities {
		if v := m.store.identity(i); v&knownBit != 0 {
			ws[uint32(nodetable.IdentityAt(i))] = unpacked(v)
		}
	}
	return ws, nil
}

// DefineIdentityClass returns the number of an identity class, and assigns one if it has none.
// NoCapacityError if all numbers are used.
func (m *Maps) DefineIdentityClass(key policytable.ClassKey) (nodetable.IdentityClass, error) {
	if key == (policytable.ClassKey{}) {
		return 0, fmt.Errorf("%w: the key of an identity class is zero", pin.ErrInvalid)
	}
	if err := m.gate.Lock(); err != nil {
		return 0, err
	}
	defer m.gate.Unlock()
	s := m.store
	if nc, ok := s.identityClass[key]; ok {
		return nc, nil
	}
	n, ok := s.identityNumber.take()
	if !ok && len(s.draining) > 0 {
		if err := m.drain(); err != nil {
			return 0, err
		}
		n, ok = s.identityNumber.take()
	}
	if !ok {
		return 0, &nodetable.NoCapacityError{Map: bpf.MapsMapSlClassKey, Need: 1, Limit: int(nodetable.MaxIdentityClass)}
	}
	if err := s.storeClassKey(nodetable.IdentityClass(n), key); err != nil {
		s.identityNumber.give(n)
		return 0, err
	}
	s.identityClass[key], s.classKey[nodetable.IdentityClass(n)] = nodetable.IdentityClass(n), key
	return nodetable.IdentityClass(n), nil
}

// IdentityClasses lists the identity classes.
func (m *Maps) IdentityClasses() map[policytable.ClassKey]nodetable.IdentityClass {
	if err := m.gate.RLock(); err != nil {
		return nil
	}
	defer m.gate.RUnlock()
	return maps.Clone(m.store.identityClass)
}

// RetireIdentityClasses retires identity classes. The caller guarantees that no identity has them
// and no table has a row for them. An unused number is not an error. The numbers are free after the
// next Barrier.
func (m *Maps) RetireIdentityClasses(ncs ...nodetable.IdentityClass) error {
	if err := m.gate.Lock(); err != nil {
		return err
	}
	defer m.gate.Unlock()
	s := m.store
	for _, nc := range ncs {
		key, ok := s.classKey[nc]
		if !ok {
			continue
		}
		if err := s.storeClassKey(nc, policytable.ClassKey{}); err != nil {
			return fmt.Errorf("identity class %d: %w", nc, err)
		}
		delete(s.classKey, nc)
		delete(s.identityClass, key)
		s.draining = append(s.draining, &retired{what: fmt.Sprintf("identity class %d", nc), free: func() error {
			s.identityNumber.give(int(nc))
			return nil
		}})
	}
	return nil
}
