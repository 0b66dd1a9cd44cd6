// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pin

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"reflect"

	"github.com/cilium/ebpf"
)

// BatchSize is the number of elements that one system call reads. It exceeds the size of any bucket of a hash map.
const BatchSize = 4096

// EachElement calls f for all elements of a map. There must be no concurrent writers.
func EachElement[K, V any](m *ebpf.Map, f func(K, V)) error {
	var cursor ebpf.MapBatchCursor
	n := min(BatchSize, int(m.MaxEntries()))
	keys, values := make([]K, n), make([]V, n)
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		for i := range n {
			f(keys[i], values[i])
		}
		switch {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			return nil
		case err != nil:
			return err
		}
	}
}

// AllElements reads an array. There must be no concurrent writers.
func AllElements[V any](m *ebpf.Map) ([]V, error) {
	all := make([]V, m.MaxEntries())
	err := EachElement(m, func(i uint32, v V) { all[i] = v })
	return all, err
}

// EachEntry reads a hash map in batches, whole buckets at a time, so that no stable entry is missed or read
// twice. Each batch is read and visited within guard.
func EachEntry[K, V any](m *ebpf.Map, guard func(func() error) error, visit func([]K, []V) error) error {
	keys, values := make([]K, BatchSize), make([]V, BatchSize)
	var cursor ebpf.MapBatchCursor
	for end := false; !end; {
		err := guard(func() error {
			n, err := m.BatchLookup(&cursor, keys, values, nil)
			end = errors.Is(err, ebpf.ErrKeyNotExist)
			if err != nil && !end {
				return fmt.Errorf("list %v: %w", m, err)
			}
			return visit(keys[:n], values[:n])
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// Addr4 converts an IPv4 address from a map: in network order, loaded as a native integer.
func Addr4(v uint32) netip.Addr {
	var b [4]byte
	binary.NativeEndian.PutUint32(b[:], v)
	return netip.AddrFrom4(b)
}

// Unguarded is a guard for Open, while nothing else uses the maps.
func Unguarded(f func() error) error { return f() }

// EachPerCPU reads all elements of a per-CPU array with one system call.
func EachPerCPU[V any](m *ebpf.Map, visit func(key uint32, perCPU []V)) error {
	cpus, err := ebpf.PossibleCPU()
	if err != nil {
		return fmt.Errorf("read %v: %w", m, err)
	}
	keys := make([]uint32, m.MaxEntries())
	values := make([]V, len(keys)*cpus)
	var cursor ebpf.MapBatchCursor
	n, err := m.BatchLookup(&cursor, keys, values, nil)
	if err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return fmt.Errorf("read %v: %w", m, err)
	}
	for i, key := range keys[:n] {
		visit(key, values[i*cpus:(i+1)*cpus])
	}
	return nil
}

// countSize is the number of elements that one system call counts. It is small, because a status counts dozens of maps,
// most of which have few elements.
const countSize = 512

// countEntries counts the entries of a map: all elements of an array, none of a ring buffer.
func countEntries(m *ebpf.Map) (int, error) {
	switch m.Type() {
	case ebpf.Hash, ebpf.LRUHash, ebpf.LPMTrie:
	case ebpf.RingBuf:
		return 0, nil
	default:
		return int(m.MaxEntries()), nil
	}
	chunk := min(countSize, int(m.MaxEntries()))
	room := func(size uint32) any {
		return reflect.MakeSlice(reflect.SliceOf(reflect.ArrayOf(int(size), reflect.TypeFor[byte]())), chunk, chunk).Interface()
	}
	keys, values := room(m.KeySize()), room(m.ValueSize())
	var cursor ebpf.MapBatchCursor
	total := 0
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		total += n
		switch {
		case errors.Is(err, ebpf.ErrKeyNotExist):
			return total, nil
		case err != nil:
			return 0, err
		}
	}
}
