// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// rawMaps are the maps of services. Every write uses one of the methods below, with one map call or one store at a
// time.
type rawMaps struct {
	keys    [families]*ebpf.Map // sl_fe4, sl_fe6
	sources [families]*ebpf.Map // sl_src4, sl_src6

	fronts   array           // sl_front
	members  array           // sl_member
	backends [families]array // sl_be4, sl_be6

	nFronts, nMembers int
	nBackends         int // per family

	// before is called before every write with the name of the map. Only tests set it, to kill the process there.
	before func(mapName string)
}

// Families of addresses, as indices.
const (
	ip4 = iota
	ip6
	families
)

func familyOf(a netip.Addr) int {
	if a.Is4() {
		return ip4
	}
	return ip6
}

var (
	keyMap     = [families]string{bpf.MapsMapSlFe4, bpf.MapsMapSlFe6}
	backendMap = [families]string{bpf.MapsMapSlBe4, bpf.MapsMapSlBe6}
)

// openRawMaps finds the maps of services.
func openRawMaps(pm *pin.Maps) rawMaps {
	return rawMaps{
		keys:      [families]*ebpf.Map{pm.Map(bpf.MapsMapSlFe4), pm.Map(bpf.MapsMapSlFe6)},
		sources:   [families]*ebpf.Map{pm.Map(bpf.MapsMapSlSrc4), pm.Map(bpf.MapsMapSlSrc6)},
		fronts:    arrayOf(pm, bpf.MapsMapSlFront),
		members:   arrayOf(pm, bpf.MapsMapSlMember),
		backends:  [families]array{arrayOf(pm, bpf.MapsMapSlBe4), arrayOf(pm, bpf.MapsMapSlBe6)},
		nFronts:   int(pm.Map(bpf.MapsMapSlFront).MaxEntries()),
		nMembers:  int(pm.Map(bpf.MapsMapSlMember).MaxEntries()),
		nBackends: int(pm.Map(bpf.MapsMapSlBe4).MaxEntries()),
	}
}

// array is a memory-mapped map.
type array struct {
	name string
	mem  []byte
	// earlier is the array of the previous version, which has fewer elements; nil: it is not pinned. Its elements are
	// equal to the first ones of mem, for programs of the previous version: see pin.Maps.Earlier.
	earlier []byte
}

func arrayOf(pm *pin.Maps, name string) array {
	return array{name: name, mem: pm.Memory(name), earlier: pm.Earlier(name)}
}

// storeWord stores one aligned packed entry, unless it is unchanged.
func (m *rawMaps) storeWord(a *array, offset int, v uint64) {
	w := pin.Word(a.mem, offset)
	if atomic.LoadUint64(w) == v {
		return
	}
	if m.before != nil {
		m.before(a.name)
	}
	if offset < len(a.earlier) {
		atomic.StoreUint64(pin.Word(a.earlier, offset), v)
	}
	atomic.StoreUint64(w, v)
}

func (a *array) loadWord(offset int) uint64 { return atomic.LoadUint64(pin.Word(a.mem, offset)) }

const frontSize = int(unsafe.Sizeof(bpf.MapsSlFront{}))

// frontWords is a value of sl_front: the list; the affinity parameters and the port; the address.
type frontWords [frontSize / 8]uint64

const (
	listWord = iota
	groupWord
	addrWord
)

func (m *rawMaps) front(number uint32) (w frontWords) {
	for i := range w {
		w[i] = m.fronts.loadWord(int(number)*frontSize + i*8)
	}
	return w
}

func (m *rawMaps) storeFrontWord(number uint32, word int, v uint64) {
	m.storeWord(&m.fronts, int(number)*frontSize+word*8, v)
}

// storeFront writes a front that no key refers to. The list is written last.
func (m *rawMaps) storeFront(number uint32, w frontWords) {
	for i := len(w) - 1; i >= 0; i-- {
		m.storeFrontWord(number, i, w[i])
	}
}

// clearFront clears a front, the list first.
func (m *rawMaps) clearFront(number uint32) {
	for i := range len(frontWords{}) {
		m.storeFrontWord(number, i, 0)
	}
}

const memberSize = 8

func (m *rawMaps) member(i int) uint64 { return m.members.loadWord(i * memberSize) }

func (m *rawMaps) storeMember(i int, v uint64) {
	m.storeWord(&m.members, i*memberSize, v)
}

// rawBackend is a decoded value of sl_be4 or sl_be6.
type rawBackend struct {
	addr  netip.Addr
	port  uint16
	state uint8 // SL_BE_...
	gen   uint8
}

// States of a backend: SL_BE_... of service_abi.h.
const (
	backendFree   = 0
	backendActive = 1
	backendGone   = 2
)

const (
	backend6Size = int(unsafe.Sizeof(bpf.MapsSlBe6{}))
	portShift    = 32
	stateShift   = 48
	genShift     = 56
)

// address4 returns the address in network byte order, loaded as a native integer.
func address4(a netip.Addr) uint32 {
	b := a.As4()
	return binary.NativeEndian.Uint32(b[:])
}

// words16 splits the sixteen bytes of an address into two integers.
func words16(b [16]byte) [2]uint64 {
	return [2]uint64{binary.NativeEndian.Uint64(b[:8]), binary.NativeEndian.Uint64(b[8:])}
}

func bytes16(w [2]uint64) (b [16]byte) {
	binary.NativeEndian.PutUint64(b[:8], w[0])
	binary.NativeEndian.PutUint64(b[8:], w[1])
	return b
}

// packed returns the packed entry: all of an IPv4 backend, or all except the address of an IPv6 backend.
func (b rawBackend) packed(fam int) uint64 {
	w := uint64(b.port)<<portShift | uint64(b.state)<<stateShift | uint64(b.gen)<<genShift
	if fam == ip4 && b.state != backendFree {
		w |= uint64(address4(b.addr))
	}
	return w
}

// freeBackend returns a free backend with a generation.
func freeBackend(gen uint8) rawBackend { return rawBackend{state: backendFree, gen: gen} }

// backend reads a backend. A free one has no address.
func (m *rawMaps) backend(fam int, number uint32) rawBackend {
	w := m.backendWord(fam, number)
	b := rawBackend{port: uint16(w >> portShift), state: uint8(w >> stateShift), gen: uint8(w >> genShift)}
	switch {
	case b.state == backendFree:
	case fam == ip4:
		b.addr = pin.Addr4(uint32(w))
	default:
		b.addr = netip.AddrFrom16(bytes16(m.backendAddr(number)))
	}
	return b
}

func (m *rawMaps) backendWord(fam int, number uint32) uint64 {
	if fam == ip4 {
		return m.backends[ip4].loadWord(int(number) * 8)
	}
	return m.backends[ip6].loadWord(int(number) * backend6Size)
}

// backendAddr returns the address of an IPv6 backend.
func (m *rawMaps) backendAddr(number uint32) (w [2]uint64) {
	for i := range w {
		w[i] = m.backends[ip6].loadWord(int(number)*backend6Size + 8 + i*8)
	}
	return w
}

func (m *rawMaps) storeBackendAddr(number uint32, w [2]uint64) {
	for i, v := range w {
		m.storeWord(&m.backends[ip6], int(number)*backend6Size+8+i*8, v)
	}
}

func (m *rawMaps) storeBackendWord(fam int, number uint32, v uint64) {
	size := 8
	if fam == ip6 {
		size = backend6Size
	}
	m.storeWord(&m.backends[fam], int(number)*size, v)
}

// storeBackend writes a backend. The address of an IPv6 backend is only written while it is free, before the packed
// entry.
func (m *rawMaps) storeBackend(fam int, number uint32, b rawBackend) {
	if fam == ip6 && b.state == backendActive {
		m.storeBackendAddr(number, words16(b.addr.As16()))
	}
	m.storeBackendWord(fam, number, b.packed(fam))
	if fam == ip6 && b.state == backendFree {
		m.storeBackendAddr(number, [2]uint64{})
	}
}

// kindAddress, kindNode and kindVIP are SL_FE_... of service_abi.h.
const (
	kindAddress = 0
	kindNode    = 1
	kindVIP     = 2
)

func kindOf(k frontend.Key) uint8 {
	switch {
	case k.Node:
		return kindNode
	case isAddressKey(k):
		return kindVIP
	}
	return kindAddress
}

func key4(k frontend.Key) bpf.MapsSlFeKey4 {
	return bpf.MapsSlFeKey4{Addr: address4(k.Addr), Port: k.Port, Proto: uint8(k.Protocol), Kind: kindOf(k)}
}

func key6(k frontend.Key) bpf.MapsSlFeKey6 {
	return bpf.MapsSlFeKey6{Addr: k.Addr.As16(), Port: k.Port, Proto: uint8(k.Protocol), Kind: kindOf(k)}
}

// numbered is a key with its fronts.
type numbered struct {
	key    frontend.Key
	fronts bpf.MapsSlFe
}

// insertKey inserts a key that must not exist yet.
func (m *rawMaps) insertKey(n numbered) error {
	fam := familyOf(n.key.Addr)
	if m.before != nil {
		m.before(keyMap[fam])
	}
	var err error
	if fam == ip4 {
		k := key4(n.key)
		err = pin.InsertOnce(m.keys[ip4], &k, &n.fronts)
	} else {
		k := key6(n.key)
		err = pin.InsertOnce(m.keys[ip6], &k, &n.fronts)
	}
	if err != nil {
		return fmt.Errorf("map %s: %w", keyMap[fam], err)
	}
	return nil
}

// insertKeys inserts keys of one family that must not exist yet, and returns the number of inserted keys.
func (m *rawMaps) insertKeys(fam int, ns []numbered) (int, error) {
	if m.before != nil {
		m.before(keyMap[fam])
	}
	values := make([]bpf.MapsSlFe, len(ns))
	for i, n := range ns {
		values[i] = n.fronts
	}
	if fam == ip4 {
		return pin.InsertAbsent(m.keys[ip4], mapped(ns, key4), values)
	}
	return pin.InsertAbsent(m.keys[ip6], mapped(ns, key6), values)
}

func mapped[K any](ns []numbered, key func(frontend.Key) K) []K {
	ks := make([]K, len(ns))
	for i, n := range ns {
		ks[i] = key(n.key)
	}
	return ks
}

func (m *rawMaps) deleteKey(k rawKey) error {
	if m.before != nil {
		m.before(keyMap[k.family])
	}
	var err error
	if k.family == ip4 {
		err = pin.DeleteKey(m.keys[ip4], &k.four)
	} else {
		err = pin.DeleteKey(m.keys[ip6], &k.six)
	}
	if err != nil {
		return fmt.Errorf("map %s: %w", keyMap[k.family], err)
	}
	return nil
}

// rawKey is a key in the map, which may not be a valid frontend.
type rawKey struct {
	family int
	four   bpf.MapsSlFeKey4
	six    bpf.MapsSlFeKey6
}

func rawKeyOf(k frontend.Key) rawKey {
	if k.Addr.Is4() {
		return rawKey{family: ip4, four: key4(k)}
	}
	return rawKey{family: ip6, six: key6(k)}
}

// frontend converts the key to a frontend.Key.
func (k rawKey) frontend() frontend.Key {
	if k.family == ip4 {
		return frontend.Key{
			Addr: pin.Addr4(
				k.four.Addr,
			), Port: k.four.Port, Protocol: frontend.Protocol(k.four.Proto), Node: k.four.Kind == kindNode,
		}
	}
	return frontend.Key{
		Addr: netip.AddrFrom16(
			k.six.Addr,
		), Port: k.six.Port, Protocol: frontend.Protocol(k.six.Proto), Node: k.six.Kind == kindNode,
	}
}

// eachKey calls f for all keys.
func (m *rawMaps) eachKey(f func(rawKey, bpf.MapsSlFe)) error {
	err := pin.EachElement(m.keys[ip4], func(k bpf.MapsSlFeKey4, v bpf.MapsSlFe) { f(rawKey{family: ip4, four: k}, v) })
	if err != nil {
		return fmt.Errorf("list map %s: %w", keyMap[ip4], err)
	}
	err = pin.EachElement(m.keys[ip6], func(k bpf.MapsSlFeKey6, v bpf.MapsSlFe) { f(rawKey{family: ip6, six: k}, v) })
	if err != nil {
		return fmt.Errorf("list map %s: %w", keyMap[ip6], err)
	}
	return nil
}
