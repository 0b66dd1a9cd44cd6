// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package mapdump renders the entries of eBPF maps as text. The format of keys and values is derived from the
// type information of the compiled maps, so that new maps and fields need no code here.
// bpf/include/sluice/describe.h explains how C describes fields that are not plain numbers or addresses.
//
// Keys are shown with all fields. In values, zero fields are omitted unless zero has a name. Fields whose name
// begins with "pad" are never shown.
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

// Names provides information that the maps do not contain.
type Names struct {
	// Node returns the name of a node; nil or "": unknown.
	Node func(id uint16) string
	// Now is CLOCK_MONOTONIC in seconds. Times are shown relative to it.
	Now uint32
}

// Format renders the entries of one map.
type Format struct {
	spec       *ebpf.MapSpec
	key, value phrases
}

// Of compiles the format of a map. types are the types of the object that spec is from.
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

// Each passes the entries of a map to visit, in the kernel's order, until visit returns an error. Array
// elements that are all zero or show nothing are omitted. Per-CPU values are summed. If the entries of a map
// cannot be listed, visit gets a single entry that explains it.
func (f *Format) Each(m *ebpf.Map, names Names, visit func(key, value string) error) error {
	switch f.spec.Type {
	case ebpf.RingBuf:
		return visit("ring", fmt.Sprintf("%d bytes; read by the datapath only, see sluice observe", m.MaxEntries()))
	case ebpf.SkStorage:
		return visit("sockets", "the values are stored in the sockets; the kernel cannot list them")
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

// room makes a slice of byte arrays, as the library requires.
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

// sum adds the integer fields of a value to total.
func sum(total, b []byte, t btf.Type) {
	switch t := btf.UnderlyingType(t).(type) {
	case *btf.Struct:
		for _, m := range t.Members {
			at := m.Offset.Bytes()
			sum(total[at:], b[at:], m.Type)
		}
	case *btf.Array:
		size, _ := btf.Sizeof(t.Type) // the type was compiled without error
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
