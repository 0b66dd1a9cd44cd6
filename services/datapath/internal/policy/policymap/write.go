// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"errors"
	"fmt"
	"math/bits"
	"net/netip"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// tableMaps are the maps that hold tables. Every write goes through one of the methods below, one
// map call or one store at a time.
type tableMaps struct {
	tableKeys, classKeys *ebpf.Map // sl_table_key, sl_class_key
	ports, rules         *ebpf.Map // sl_ports, sl_rule
	peers                *ebpf.Map // sl_peer
	cidr4, cidr6         *ebpf.Map // sl_cidr4, sl_cidr6

	tableMem []byte // sl_table
	classMem []byte // sl_class
	idMem    []byte // sl_id

	// before is called before every write with the name of the map. An error fails the write. Only
	// tests set it.
	before func(mapName string) error
}

func (m *tableMaps) ask(mapName string) error {
	if m.before == nil {
		return nil
	}
	return m.before(mapName)
}

// writeArray writes consecutive elements that no program uses yet, or a single element.
func writeArray[V any](tm *tableMaps, m *ebpf.Map, mapName string, base int, values []V) error {
	if len(values) == 0 {
		return nil
	}
	if m.Type() != ebpf.Array {
		return fmt.Errorf("map %s: %w: it is not an array", mapName, pin.ErrInvalid)
	}
	if err := tm.ask(mapName); err != nil {
		return err
	}
	keys := make([]uint32, len(values))
	for i := range keys {
		keys[i] = uint32(base + i)
	}
	// in place: it is an array
	n, err := m.BatchUpdate(keys, values, nil)
	if err == nil && n != len(keys) {
		err = fmt.Errorf("%d of %d elements were written", n, len(keys))
	}
	if err != nil {
		return fmt.Errorf("map %s from %d: %w", mapName, base, pin.MapError(err))
	}
	return nil
}

func clearArray[V any](tm *tableMaps, m *ebpf.Map, mapName string, s span) error {
	return writeArray(tm, m, mapName, s.base, make([]V, s.n))
}

// storeWord stores a 32-bit element of a memory-mapped array.
func (m *tableMaps) storeWord(mapName string, mem []byte, index int, v uint32) error {
	if err := m.ask(mapName); err != nil {
		return err
	}
	atomic.StoreUint32(element32(mem, index), v)
	return nil
}

// wordStride is the distance of two 32-bit elements in a memory-mapped array.
var wordStride = pin.Stride(4)

func element32(mem []byte, index int) *uint32 { return pin.Word32(mem, index*wordStride) }

const (
	tableSize  = int(unsafe.Sizeof(bpf.MapsSlTable{}))
	tableWords = tableSize / 8
)

// The 64-bit words of sl_table that change while a table is in use.
const (
	setsWord   = 0 // peer_set, cidr_set
	basesWord  = 1 // class_base, rule_base
	countsWord = 2 // n_class, n_rule, flags

	defaultsWord = 3 // def_class, four kinds in each word
	defaultWords = int(identity.Kinds) * 2 / 8
)

// headerWords views a header as the 64-bit words in the map.
func headerWords(h *bpf.MapsSlTable) *[tableWords]uint64 {
	return (*[tableWords]uint64)(unsafe.Pointer(h))
}

// storeHeader writes the header of a table that no endpoint refers to.
func (m *tableMaps) storeHeader(t nodetable.ID, h bpf.MapsSlTable) error {
	if err := m.ask(bpf.MapsMapSlTable); err != nil {
		return err
	}
	for i, w := range headerWords(&h) {
		atomic.StoreUint64(pin.Word(m.tableMem, int(t)*tableSize+i*8), w)
	}
	return nil
}

// storeHeaderWord changes one word of a header by one store.
func (m *tableMaps) storeHeaderWord(t nodetable.ID, h bpf.MapsSlTable, i int) error {
	if err := m.ask(bpf.MapsMapSlTable); err != nil {
		return err
	}
	atomic.StoreUint64(pin.Word(m.tableMem, int(t)*tableSize+i*8), headerWords(&h)[i])
	return nil
}

func (m *tableMaps) header(t nodetable.ID) bpf.MapsSlTable {
	var h bpf.MapsSlTable
	for i := range headerWords(&h) {
		headerWords(&h)[i] = atomic.LoadUint64(pin.Word(m.tableMem, int(t)*tableSize+i*8))
	}
	return h
}

func (m *tableMaps) class(i int) uint32 { return atomic.LoadUint32(element32(m.classMem, i)) }

// storeClasses stores consecutive elements of sl_class.
func (m *tableMaps) storeClasses(base int, words []uint32) error {
	for i, w := range words {
		if err := m.storeWord(bpf.MapsMapSlClass, m.classMem, base+i, w); err != nil {
			return err
		}
	}
	return nil
}

func (m *tableMaps) clearClasses(s span) error {
	return m.storeClasses(s.base, make([]uint32, s.n))
}

func (m *tableMaps) storeTableKey(t nodetable.ID, hash [32]byte) error {
	return writeArray(m, m.tableKeys, bpf.MapsMapSlTableKey, int(t), []bpf.MapsSlTableKey{{Hash: hash}})
}

func (m *tableMaps) storeClassKey(nc nodetable.IdentityClass, key policytable.ClassKey) error {
	return writeArray(m, m.classKeys, bpf.MapsMapSlClassKey, int(nc), []bpf.MapsSlClassKey{{Key: key}})
}

func (m *tableMaps) insertPeer(set uint32, nc nodetable.IdentityClass, class uint16) error {
	if err := m.ask(bpf.MapsMapSlPeer); err != nil {
		return err
	}
	key := bpf.MapsSlPeerKey{PeerSet: set, NodeClass: uint32(nc)}
	if err := pin.InsertOnce(m.peers, &key, uint32(class)); err != nil {
		return fmt.Errorf("row of identity class %d: %w", nc, err)
	}
	return nil
}

func (m *tableMaps) deletePeer(set, nc uint32) error {
	if err := m.ask(bpf.MapsMapSlPeer); err != nil {
		return err
	}
	if err := pin.DeleteKey(m.peers, &bpf.MapsSlPeerKey{PeerSet: set, NodeClass: nc}); err != nil {
		return fmt.Errorf("row of identity class %d: %w", nc, err)
	}
	return nil
}

// peer returns the class of a row, false if the row does not exist.
func (m *tableMaps) peer(set uint32, nc nodetable.IdentityClass) (uint32, bool, error) {
	var class uint32
	key := bpf.MapsSlPeerKey{PeerSet: set, NodeClass: uint32(nc)}
	switch err := m.peers.Lookup(&key, &class); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return 0, false, nil
	case err != nil:
		return 0, false, fmt.Errorf("row of identity class %d: %w", nc, err)
	}
	return class, true, nil
}

// prefixTrie returns the map of a prefix's family, its name, and the key of the prefix in a set.
func (m *tableMaps) prefixTrie(set uint32, p netip.Prefix) (*ebpf.Map, string, any) {
	if p.Addr().Is4() {
		return m.cidr4, bpf.MapsMapSlCidr4, &bpf.MapsSlCidrKey4{
			Bits: 32 + uint32(p.Bits()), Set: bigEndian(set), Addr: p.Addr().As4(),
		}
	}
	return m.cidr6, bpf.MapsMapSlCidr6, &bpf.MapsSlCidrKey6{
		Bits: 32 + uint32(p.Bits()), Set: bigEndian(set), Addr: p.Addr().As16(),
	}
}

// bigEndian converts a number to network byte order in memory, and back: a trie compares its keys
// byte by byte. The programs are compiled for little-endian machines only.
func bigEndian(v uint32) uint32 { return bits.ReverseBytes32(v) }

func (m *tableMaps) putPrefix(set uint32, p netip.Prefix, classes policytable.PrefixClasses) error {
	trie, name, key := m.prefixTrie(set, p)
	if err := m.ask(name); err != nil {
		return err
	}
	if err := pin.ReplaceInTrie(trie, key, &bpf.MapsSlCidr{Class: classes}); err != nil {
		return fmt.Errorf("map %s: prefix %v: %w", name, p, err)
	}
	return nil
}

func (m *tableMaps) deletePrefix(set uint32, p netip.Prefix) error {
	trie, name, key := m.prefixTrie(set, p)
	if err := m.ask(name); err != nil {
		return err
	}
	if err := pin.DeleteKey(trie, key); err != nil {
		return fmt.Errorf("map %s: prefix %v: %w", name, p, err)
	}
	return nil
}

// prefix looks up a prefix in the trie: the value of the longest stored prefix that contains it.
func (m *tableMaps) prefix(set uint32, p netip.Prefix) (v bpf.MapsSlCidr, found bool, err error) {
	trie, name, key := m.prefixTrie(set, p)
	switch err := trie.Lookup(key, &v); {
	case errors.Is(err, ebpf.ErrKeyNotExist):
		return v, false, nil
	case err != nil:
		return v, false, fmt.Errorf("map %s: prefix %v: %w", name, p, err)
	}
	return v, true, nil
}

// eachPeer calls f for all rows of all tables.
func (m *tableMaps) eachPeer(f func(set, nc, class uint32)) error {
	err := pin.EachElement(m.peers, func(key bpf.MapsSlPeerKey, class uint32) { f(key.PeerSet, key.NodeClass, class) })
	if err != nil {
		return fmt.Errorf("list map %s: %w", bpf.MapsMapSlPeer, err)
	}
	return nil
}

// eachPrefix calls f for all prefixes of all sets.
func (m *tableMaps) eachPrefix(f func(set uint32, p netip.Prefix, v bpf.MapsSlCidr)) error {
	err := pin.EachElement(m.cidr4, func(key bpf.MapsSlCidrKey4, v bpf.MapsSlCidr) {
		f(bigEndian(key.Set), netip.PrefixFrom(netip.AddrFrom4(key.Addr), int(key.Bits)-32), v)
	})
	if err != nil {
		return fmt.Errorf("list map %s: %w", bpf.MapsMapSlCidr4, err)
	}
	err = pin.EachElement(m.cidr6, func(key bpf.MapsSlCidrKey6, v bpf.MapsSlCidr) {
		f(bigEndian(key.Set), netip.PrefixFrom(netip.AddrFrom16(key.Addr), int(key.Bits)-32), v)
	})
	if err != nil {
		return fmt.Errorf("list map %s: %w", bpf.MapsMapSlCidr6, err)
	}
	return nil
}
