// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package mapdump writes the entries of eBPF maps as text. What keys and values are is
// read from the type information of the compiled maps, so that a new map, or a new
// field, needs nothing here. bpf/include/sluice/describe.h says how C describes a
// field that is more than a number or an address.
//
// A key has all its fields. In a value, fields that are zero are left out, unless
// zero has a name. Fields whose name begins with "pad" are never written.
package mapdump

import (
	"bytes"
	"errors"
	"fmt"
	"reflect"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Names are what the kernel does not say about numbers.
type Names struct {
	// Node names a node by its ID; nil or "": its name is not known.
	Node func(id uint16) string
	// Now is CLOCK_MONOTONIC in seconds. Times are written as what has passed since.
	Now uint32
}

// Format knows how to write the entries of one map.
type Format struct {
	spec       *ebpf.MapSpec
	key, value phrases
}

// Of compiles the format of a map. types are those of the object that spec is of.
func Of(spec *ebpf.MapSpec, types *btf.Spec) (*Format, error) {
	c := compiler{types: types}
	f := &Format{spec: spec}
	var err error
	if f.key, err = c.key(spec); err != nil {
		return nil, fmt.Errorf("key of %s: %w", spec.Name, err)
	}
	if f.value, err = c.of(spec.Value, "", nil); err != nil {
		return nil, fmt.Errorf("value of %s: %w", spec.Name, err)
	}
	return f, nil
}

// Each hands the entries of a map to visit in the order in which the kernel lists
// them, until visit returns an error. Elements of arrays that are all zero, or have
// nothing to show, are left out. What each CPU counts is summed. Of a map whose entries
// cannot be listed, it says so in one entry.
func (f *Format) Each(m *ebpf.Map, names Names, visit func(key, value string) error) error {
	switch f.spec.Type {
	case ebpf.RingBuf:
		return visit("ring", fmt.Sprintf("%d bytes; only the datapath reads it, see sluice observe", m.MaxEntries()))
	case ebpf.SkStorage:
		return visit("sockets", "the kernel keeps values in the sockets, and cannot list them")
	case ebpf.PerCPUArray:
		return f.perCPU(m, names, visit)
	}
	size := min(pin.BatchSize, int(m.MaxEntries()))
	keys, values := room(m.KeySize(), size), room(m.ValueSize(), size)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys.Interface(), values.Interface(), nil)
		end := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !end {
			return fmt.Errorf("list %v: %w", m, err)
		}
		for i := range n {
			if err := f.entry(keys.Index(i).Bytes(), values.Index(i).Bytes(), names, visit); err != nil {
				return err
			}
		}
		if end {
			return nil
		}
	}
}

// room is a slice of byte arrays, as the library wants it.
func room(size uint32, n int) reflect.Value {
	return reflect.MakeSlice(reflect.SliceOf(reflect.ArrayOf(int(size), reflect.TypeFor[byte]())), n, n)
}

func (f *Format) perCPU(m *ebpf.Map, names Names, visit func(key, value string) error) error {
	for i := range m.MaxEntries() {
		var perCPU [][]byte
		if err := m.Lookup(i, &perCPU); err != nil {
			return fmt.Errorf("look up element %d of %v: %w", i, m, err)
		}
		total := make([]byte, m.ValueSize())
		for _, one := range perCPU {
			sum(total, one, f.spec.Value)
		}
		key := make([]byte, 4)
		put(key, uint64(i))
		if err := f.entry(key, total, names, visit); err != nil {
			return err
		}
	}
	return nil
}

// sum adds the integers of a value.
func sum(total, b []byte, t btf.Type) {
	switch t := btf.UnderlyingType(t).(type) {
	case *btf.Struct:
		for _, m := range t.Members {
			at := m.Offset.Bytes()
			sum(total[at:], b[at:], m.Type)
		}
	case *btf.Array:
		size, _ := btf.Sizeof(t.Type) // compiled
		for i := range int(t.Nelems) {
			sum(total[i*size:], b[i*size:], t.Type)
		}
	case *btf.Int:
		put(total[:t.Size], number(total[:t.Size])+number(b[:t.Size]))
	}
}

func (f *Format) entry(key, value []byte, names Names, visit func(key, value string) error) error {
	array := f.spec.Type == ebpf.Array || f.spec.Type == ebpf.PerCPUArray
	if array && len(bytes.Trim(value, "\x00")) == 0 {
		return nil
	}
	words := strings.Join(f.value(value, context{Names: names}), " ")
	if words == "" {
		if array {
			return nil
		}
		words = "0"
	}
	return visit(strings.Join(f.key(key, context{Names: names, zeros: true}), " "), words)
}
