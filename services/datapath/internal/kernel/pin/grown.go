// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pin

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// earlierSizes are the numbers of elements of memory-mapped arrays that were smaller in the previous version.
//
// Elements of such an array refer to each other by index, also from other maps, which both versions share. So the array
// of the previous version stays equal to the first elements of the current one while it is pinned: Open copies its
// elements, and the package that owns the array writes each change to both (see Earlier). Programs of the previous
// version that still run, and that version after a rollback, find what they need in its own array.
var earlierSizes = map[string]uint32{
	bpf.MapsMapSlMember: 262_144,
	bpf.MapsMapSlBe4:    131_072,
	bpf.MapsMapSlBe6:    131_072,
}

// Earlier returns the mapped memory of an array of the previous version with fewer elements; nil: it is not pinned.
// The owner of the array writes it before the current one: if a process is killed in between, the next one completes
// the change by copying the element.
func (pm *Maps) Earlier(name string) []byte { return pm.earlier[name] }

// openEarlier maps the pinned arrays of the previous version that have fewer elements, and copies their elements into
// the current arrays. After a rollback, these elements are newer than the current ones.
func (pm *Maps) openEarlier() error {
	for name, size := range earlierSizes {
		ms := pm.specs[name]
		if ms == nil || ms.MaxEntries <= size {
			continue
		}
		ms = ms.Copy()
		ms.MaxEntries = size
		m, err := adoptMap(filepath.Join(pm.Dir, Name(ms)), ms)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("open the smaller map %s of the previous version: %w", name, err)
		}
		mem, err := mapMemory(m, pm.ValidateOnly)
		if err = errors.Join(err, m.Close()); err != nil { // the mapping keeps the map alive
			return fmt.Errorf("map the memory of the smaller map %s: %w", name, err)
		}
		pm.earlier[name] = mem
		if err := pm.copyEarlier(name, mem[:Stride(ms.ValueSize)*int(size)]); err != nil {
			return fmt.Errorf("copy the smaller map %s: %w", name, err)
		}
	}
	return nil
}

// copyEarlier copies elements of the previous version into the current array. A process that only validates copies
// them into its private array, and changes no pinned one.
func (pm *Maps) copyEarlier(name string, from []byte) error {
	to := pm.memory[name]
	if pm.ValidateOnly {
		if !pm.created[name] {
			return nil
		}
		var err error
		if to, err = mapMemory(pm.byName[name], false); err != nil {
			return err
		}
		defer unix.Munmap(to) //nolint:errcheck // unmapping a valid mapping never fails
	}
	for at := 0; at < len(from); at += 8 {
		if w, v := Word(to, at), atomic.LoadUint64(Word(from, at)); atomic.LoadUint64(w) != v {
			atomic.StoreUint64(w, v)
		}
	}
	pm.created[name], pm.Adopted = false, true
	return nil
}
