// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"sync/atomic"
	"unsafe"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// Identities that have a word: cluster-wide numbers, then those that mean
// something on this node only.
const (
	clusterWide         = 1 << 16
	firstNodeLocal      = 0xff0000
	nodeLocal           = 4096
	knownBit            = 1 << 31
	kindShift           = 16
	scopeShift          = 24
	kinds, scopes       = 8, 3
	kindMask, scopeMask = kinds - 1, 3
	kindHost            = 3
	kindUnknown         = 6
)

// index is the place of an identity's word, false if it can have none.
func (id Identity) index() (int, bool) {
	switch {
	case id > 0 && id < clusterWide:
		return int(id), true
	case id >= firstNodeLocal && id < firstNodeLocal+nodeLocal:
		return int(id-firstNodeLocal) + clusterWide, true
	}
	return 0, false
}

func identityOfIndex(index int) Identity {
	if index < clusterWide {
		return Identity(index)
	}
	return Identity(index-clusterWide) + firstNodeLocal
}

func (w IdentityWord) word() uint32 {
	if !w.Known {
		return 0
	}
	return uint32(w.Class) | uint32(w.Kind)<<kindShift | uint32(w.Scope)<<scopeShift | knownBit
}

func identityWordOf(v uint32) IdentityWord {
	if v&knownBit == 0 {
		return IdentityWord{}
	}
	return IdentityWord{
		Class: NodeClass(v), Kind: Kind(v >> kindShift & kindMask), Scope: Scope(v >> scopeShift & scopeMask), Known: true,
	}
}

func (w IdentityWord) validate(id Identity) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("identity %d: %w: "+format, append([]any{id, ErrInvalid}, args...)...)
	}
	if _, ok := id.index(); !ok {
		return bad("it is neither cluster-wide, below %d, nor of this node", clusterWide)
	}
	if !w.Known {
		return nil
	}
	if w.Class == 0 || w.Class > MaxNodeClass {
		return bad("Class: %d is not between 1 and %d", w.Class, MaxNodeClass)
	}
	if w.Kind >= kinds || w.Scope >= scopes {
		return bad("Kind %d, Scope %d: at most %d and %d", w.Kind, w.Scope, kinds-1, scopes-1)
	}
	return nil
}

// SetIdentityWord says what an identity is, for all tables at once, by one
// store. The zero word makes it unknown.
func (k *Kernel) SetIdentityWord(id Identity, w IdentityWord) error {
	return k.SetIdentityWords(map[Identity]IdentityWord{id: w})
}

// SetIdentityWords says what identities are, by one store each, in no
// particular order. All words are checked before the first store.
func (k *Kernel) SetIdentityWords(ws map[Identity]IdentityWord) error {
	for id, w := range ws {
		if err := w.validate(id); err != nil {
			return err
		}
	}
	if err := k.lock(); err != nil {
		return err
	}
	defer k.mu.Unlock()
	s := k.tables
	for id, w := range ws {
		i, _ := id.index()
		if s.identities[i] == w.word() && s.identity(i) == w.word() {
			continue
		}
		if err := s.storeWord(bpf.MapsMapSlId, s.idMem, i, w.word()); err != nil {
			return fmt.Errorf("identity %d: %w", id, err)
		}
		s.identities[i] = w.word()
	}
	return nil
}

func (m *tableMaps) identity(i int) uint32 { return atomic.LoadUint32(element32(m.idMem, i)) }

// IdentityWords reads the words of all known identities from the map.
func (k *Kernel) IdentityWords() (map[Identity]IdentityWord, error) {
	if err := k.rlock(); err != nil {
		return nil, err
	}
	defer k.mu.RUnlock()
	ws := map[Identity]IdentityWord{}
	for i := range k.tables.identities {
		if v := k.tables.identity(i); v&knownBit != 0 {
			ws[identityOfIndex(i)] = identityWordOf(v)
		}
	}
	return ws, nil
}

// NodeClass finds the number of a node class, or gives it one. A NoRoomError
// says that all numbers are taken.
func (k *Kernel) NodeClass(key ClassKey) (NodeClass, error) {
	if key == (ClassKey{}) {
		return 0, fmt.Errorf("%w: the key of a node class is zero", ErrInvalid)
	}
	if err := k.lock(); err != nil {
		return 0, err
	}
	defer k.mu.Unlock()
	s := k.tables
	if nc, ok := s.identityClass[key]; ok {
		return nc, nil
	}
	n, ok := s.identityNumber.take()
	if !ok && len(s.draining) > 0 {
		if err := k.drain(); err != nil {
			return 0, err
		}
		n, ok = s.identityNumber.take()
	}
	if !ok {
		return 0, &NoRoomError{Map: bpf.MapsMapSlClassKey, Need: 1, Limit: int(MaxNodeClass)}
	}
	if err := s.storeClassKey(NodeClass(n), key); err != nil {
		s.identityNumber.give(n)
		return 0, err
	}
	s.identityClass[key], s.classKey[NodeClass(n)] = NodeClass(n), key
	return NodeClass(n), nil
}

// NodeClasses lists the node classes.
func (k *Kernel) NodeClasses() map[ClassKey]NodeClass {
	k.mu.RLock()
	defer k.mu.RUnlock()
	return maps.Clone(k.tables.identityClass)
}

// RetireNodeClasses ends node classes that no identity has and no table has a
// row for; the caller vouches for that. A number that is not in use is not an
// error. The numbers are free after the next Barrier.
func (k *Kernel) RetireNodeClasses(ncs ...NodeClass) error {
	if err := k.lock(); err != nil {
		return err
	}
	defer k.mu.Unlock()
	s := k.tables
	for _, nc := range ncs {
		key, ok := s.classKey[nc]
		if !ok {
			continue
		}
		if err := s.storeClassKey(nc, ClassKey{}); err != nil {
			return fmt.Errorf("node class %d: %w", nc, err)
		}
		delete(s.classKey, nc)
		delete(s.identityClass, key)
		s.draining = append(s.draining, &retired{what: fmt.Sprintf("node class %d", nc), free: func() error {
			s.identityNumber.give(int(nc))
			return nil
		}})
	}
	return nil
}

// BumpGens gives endpoints a new gen and leaves their tables, by one store
// each, so that their connections are judged again; without slots, every
// endpoint and the host.
func (k *Kernel) BumpGens(slots ...Slot) error {
	if err := k.lock(); err != nil {
		return err
	}
	defer k.mu.Unlock()
	if len(slots) == 0 {
		used, err := k.usedSlots()
		if err != nil {
			return err
		}
		slots = append(used, HostSlot)
	}
	for _, s := range slots {
		if s != HostSlot {
			if err := k.mustLead(s); err != nil {
				return err
			}
		}
		k.bumpGen(s)
	}
	return nil
}

func (k *Kernel) bumpGen(s Slot) {
	p := k.policyAt(s)
	p.Gen = k.nextGen()
	atomic.StoreUint64(k.word(s), p.word())
}

// policyAt reads a slot's word.
func (k *Kernel) policyAt(s Slot) Policy { return policyOf(atomic.LoadUint64(k.word(s))) }

// auditBit is SL_EP_AUDIT, in the byte behind mtu and deliver.
const auditBit = 1

// SetAudit switches audit mode for an endpoint: what its policy denies passes
// and is reported. What has begun meanwhile is judged again.
func (k *Kernel) SetAudit(s Slot, on bool) error {
	if err := k.lock(); err != nil {
		return err
	}
	defer k.mu.Unlock()
	if err := k.mustLead(s); err != nil {
		return err
	}
	const offset = int(unsafe.Offsetof(bpf.MapsSlEndpoint{}.Mtu)) // of the word that the byte is the last of
	w := word32(k.maps.slotMem, int(s)*slotSize+offset)
	was := atomic.LoadUint32(w)
	now := was &^ (auditBit << 24)
	if on {
		now |= auditBit << 24
	}
	if now == was {
		return nil
	}
	atomic.StoreUint32(w, now)
	k.bumpGen(s)
	return nil
}

// addressBucket is the place of an address in sl_pgen, as address_gen_bucket of
// the programs computes it.
func addressBucket(a netip.Addr) int {
	b := a.AsSlice()
	h := uint32(0)
	for i := 0; i < len(b); i += 4 {
		h = (h ^ binary.BigEndian.Uint32(b[i:])) * 0x9e3779b1
	}
	return int(h >> 20)
}

// BumpAddress makes every connection with an address, and with those that
// share its bucket, be judged again.
func (k *Kernel) BumpAddress(a netip.Addr) error {
	if !a.IsValid() || a.Is4In6() {
		return fmt.Errorf("%w: %v is not an address", ErrInvalid, a)
	}
	if err := k.lock(); err != nil {
		return err
	}
	defer k.mu.Unlock()
	return k.bumpAddress(a)
}

func (k *Kernel) bumpAddress(a netip.Addr) error {
	if err := k.tables.ask(bpf.MapsMapSlPgen); err != nil {
		return err
	}
	atomic.AddUint64(word(k.tables.pgenMem, addressBucket(a)*8), 1)
	return nil
}
