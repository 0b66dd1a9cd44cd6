// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pin

import (
	"errors"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// InsertOnce inserts an entry into a hash map. Its values must not be overwritten; see package kernel. It
// returns ErrExists if the key exists, ErrFull if the map is full.
func InsertOnce(m *ebpf.Map, key, value any) error {
	return MapError(m.Update(key, value, ebpf.UpdateNoExist))
}

// InsertAbsent inserts entries with one system call, and returns how many it has inserted. The caller must know
// that the hash map does not have the keys: batches do not support BPF_NOEXIST and would replace existing
// values.
func InsertAbsent[K, V any](m *ebpf.Map, keys []K, values []V) (int, error) {
	// in place: no, because none of the keys exists
	n, err := m.BatchUpdate(keys, values, nil)
	return n, MapError(err)
}

// DeleteKey deletes an entry. It is not an error if the key does not exist.
func DeleteKey(m *ebpf.Map, key any) error {
	if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// ReplaceInTrie sets a value of at most eight bytes in an LPM trie.
func ReplaceInTrie[V bpf.MapsSlIpcache | bpf.MapsSlCidr](m *ebpf.Map, key any, value *V) error {
	// in place: readers of a trie see the old value or the new one
	return MapError(m.Update(key, value, ebpf.UpdateAny))
}

// Word returns an aligned 64-bit word in mapped memory.
func Word(mem []byte, offset int) *uint64 {
	return (*uint64)(unsafe.Pointer(&mem[offset]))
}

// Word32 returns an aligned 32-bit word in mapped memory.
func Word32(mem []byte, offset int) *uint32 {
	return (*uint32)(unsafe.Pointer(&mem[offset]))
}
