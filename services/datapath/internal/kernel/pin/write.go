// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pin

import (
	"errors"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// InsertOnce inserts an entry into a hash, whose values are written once: see the
// package comment. A key that exists is ErrExists, a full map ErrFull.
func InsertOnce(m *ebpf.Map, key, value any) error {
	return MapError(m.Update(key, value, ebpf.UpdateNoExist))
}

// InsertAbsent inserts entries whose keys the caller knows the hash does not have,
// in one call of the kernel, and returns how many it has inserted. The kernel's
// batches know no NOEXIST: they would replace a value under a key that exists.
func InsertAbsent[K, V any](m *ebpf.Map, keys []K, values []V) (int, error) {
	// in place: nothing is, as none of the keys exists
	n, err := m.BatchUpdate(keys, values, nil)
	return n, MapError(err)
}

// DeleteKey deletes an entry. A key that does not exist is no error.
func DeleteKey(m *ebpf.Map, key any) error {
	if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// ReplaceInTrie writes a value of at most eight bytes, over an older one if
// there is one.
func ReplaceInTrie[V bpf.MapsSlIpcache | bpf.MapsSlCidr](m *ebpf.Map, key any, value *V) error {
	// in place: a trie's readers see the old value or the new one
	return MapError(m.Update(key, value, ebpf.UpdateAny))
}

// Word is an aligned 64-bit word in shared memory.
func Word(mem []byte, offset int) *uint64 {
	return (*uint64)(unsafe.Pointer(&mem[offset]))
}

// Word32 is an aligned 32-bit word in shared memory.
func Word32(mem []byte, offset int) *uint32 {
	return (*uint32)(unsafe.Pointer(&mem[offset]))
}
