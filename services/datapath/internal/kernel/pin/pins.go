// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package pin owns the maps of one instance: their pins in the instance's bpffs directory, and their layouts.
// It adopts the maps that an earlier process or version has pinned, creates missing ones, and checks the kernel
// features that this requires. The packages that use a map define the meaning of its entries; each guards its
// access by a Gate.
package pin

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// schemaVersion changes when the meaning of a map changes but its layout does not. The hash of the layout
// itself is part of the pin's name.
const schemaVersion = 1

// Options select where the maps are pinned.
type Options struct {
	// Dir is the bpffs directory of this instance, for example
	// /run/sluice/bpf. It is created with mode 0700 if it does not exist; a
	// bpffs must be mounted at it or above it.
	Dir string
	// ValidateOnly opens existing maps, uses private maps for missing ones, and writes nothing below Dir.
	ValidateOnly bool
	// Log receives which maps were adopted and created.
	Log *slog.Logger
}

// Maps are the maps of one instance.
type Maps struct {
	// Dir is the directory of the pins.
	Dir string
	// ValidateOnly reports that the maps were opened for validation only.
	ValidateOnly bool
	// Adopted reports whether any map existed already.
	Adopted bool

	gate Gate
	log  *slog.Logger

	byName map[string]*ebpf.Map
	pins   map[string]string // name -> file name of its pin
	specs  map[string]*ebpf.MapSpec

	// previous are the maps of the previous version that are still pinned, by the names that the programs
	// use.
	previous map[string]*ebpf.Map
	created  map[string]bool   // maps that did not exist
	memory   map[string][]byte // of every map with BPF_F_MMAPABLE
	earlier  map[string][]byte // see Earlier
}

// Open opens the pinned maps of the specification and creates missing ones.
func Open(o Options, spec *ebpf.CollectionSpec) (_ *Maps, err error) {
	if !o.ValidateOnly {
		if err := makePinDir(o.Dir); err != nil {
			return nil, err
		}
	}
	pm := &Maps{
		Dir: o.Dir, ValidateOnly: o.ValidateOnly, gate: Gate{ValidateOnly: o.ValidateOnly}, log: o.Log, specs: spec.Maps,
		byName: map[string]*ebpf.Map{}, pins: map[string]string{}, created: map[string]bool{}, previous: map[string]*ebpf.Map{},
		memory: map[string][]byte{}, earlier: map[string][]byte{},
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, pm.Close())
		}
	}()
	for name, ms := range spec.Maps {
		if !strings.HasPrefix(name, "sl_") || isPrevious(name) {
			continue
		}
		m, adopted, err := openMap(o.Dir, ms, o.ValidateOnly, o.Log)
		if err != nil {
			return nil, err
		}
		pm.Adopted = pm.Adopted || adopted
		pm.created[name] = !adopted
		pm.byName[name], pm.pins[name] = m, Name(ms)
	}
	if err := pm.openPrevious(); err != nil {
		return nil, err
	}
	for name, m := range pm.byName {
		if m.Flags()&unix.BPF_F_MMAPABLE == 0 {
			continue
		}
		if pm.memory[name], err = mapMemory(m, o.ValidateOnly); err != nil {
			return nil, fmt.Errorf("map the memory of %s: %w", name, err)
		}
	}
	if err := pm.openEarlier(); err != nil {
		return nil, err
	}
	return pm, nil
}

// Map returns the map with a name of the specification.
func (pm *Maps) Map(name string) *ebpf.Map { return pm.byName[name] }

// For returns the maps that a compiled program declares, by name. The caller owns the Go map.
func (pm *Maps) For(spec *ebpf.CollectionSpec) map[string]*ebpf.Map {
	ms := map[string]*ebpf.Map{}
	for name := range spec.Maps {
		if m := pm.byName[name]; m != nil {
			ms[name] = m
		}
	}
	return ms
}

// Names returns the names of the maps, sorted.
func (pm *Maps) Names() []string { return sortedKeys(pm.byName) }

// Memory returns the mapped memory of an array with BPF_F_MMAPABLE; nil for other maps.
func (pm *Maps) Memory(name string) []byte { return pm.memory[name] }

// Created reports whether the map did not exist before.
func (pm *Maps) Created(name string) bool { return pm.created[name] }

// Pin returns the path of a map's pin.
func (pm *Maps) Pin(name string) string { return filepath.Join(pm.Dir, pm.pins[name]) }

// Spec returns the specification of a map, also for a map of the previous version.
func (pm *Maps) Spec(name string) *ebpf.MapSpec { return pm.specs[name] }

// Previous returns a map of the previous version, by the name that the programs use; nil if it is not pinned any more.
func (pm *Maps) Previous(name string) *ebpf.Map { return pm.previous[name] }

// PreviousNames returns the names of the maps of the previous version that are still pinned.
func (pm *Maps) PreviousNames() []string { return sortedKeys(pm.previous) }

// openMap adopts the pinned map of this layout, from its current or its legacy pin, or creates it.
func openMap(dir string, ms *ebpf.MapSpec, validateOnly bool, log *slog.Logger) (m *ebpf.Map, adopted bool, err error) {
	pin := Name(ms)
	path := filepath.Join(dir, pin)
	m, err = adoptMap(path, ms)
	if err == nil {
		log.Debug("map adopted", "map", ms.Name, "pin", pin)
		return m, true, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, false, fmt.Errorf("adopt map %s: %w", ms.Name, err)
	}
	if m, err = adoptLegacy(dir, ms, validateOnly); err != nil {
		return nil, false, fmt.Errorf("adopt map %s: %w", ms.Name, err)
	}
	if m != nil {
		log.Debug("map of an earlier version adopted", "map", ms.Name, "pin", LegacyPins[ms.Name].Pin)
		return m, true, nil
	}
	var carried bool
	m, err = createMap(path, ms, validateOnly, func(m *ebpf.Map) (err error) {
		carried, err = carryOver(dir, ms.Name, m)
		return err
	})
	if err != nil {
		return nil, false, fmt.Errorf("create map %s: %w", ms.Name, err)
	}
	log.Debug("map created", "map", ms.Name, "pin", pin, "carried_over", carried)
	return m, carried, nil
}

// adoptMap opens a pin. If the map does not match the specification, it returns an error: the map may be in
// use, so it is neither used nor replaced.
func adoptMap(path string, ms *ebpf.MapSpec) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, err
	case err != nil:
		// The kernel's error for a directory or a program contains no path.
		return nil, fmt.Errorf("%s is not a map; remove it by hand if no program uses it: %w", path, err)
	}
	if err := ms.Compatible(m); err != nil {
		m.Close()
		return nil, fmt.Errorf("%s holds another map; remove it by hand if no program uses it: %w", path, err)
	}
	return m, nil
}

// adoptLegacy opens the map at its legacy pin, and pins it under its current name, too. The legacy pin stays,
// so that an earlier version finds the map after a rollback. It returns nil if there is no such pin, or if the
// layout has changed since.
func adoptLegacy(dir string, ms *ebpf.MapSpec, validateOnly bool) (*ebpf.Map, error) {
	l, ok := LegacyPins[ms.Name]
	if !ok || l.Layout != Layout(ms) {
		return nil, nil
	}
	m, err := adoptMap(filepath.Join(dir, l.Pin), ms)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil || validateOnly:
		return m, err
	}
	if err := pinAgain(m, filepath.Join(dir, Name(ms))); err != nil {
		m.Close()
		return nil, fmt.Errorf("pin: %w", err)
	}
	return m, nil
}

// createMap creates a map and fills it before it is pinned, so that a pinned map is never partially filled.
func createMap(path string, ms *ebpf.MapSpec, private bool, fill func(*ebpf.Map) error) (*ebpf.Map, error) {
	m, err := ebpf.NewMap(ms)
	if err != nil {
		return nil, err
	}
	if err := fill(m); err != nil {
		m.Close()
		return nil, err
	}
	if private {
		return m, nil
	}
	if err := m.Pin(path); err != nil {
		m.Close()
		return nil, fmt.Errorf("pin: %w", err)
	}
	return m, nil
}

// CheckMounted returns an error if a directory is not on a bpffs. Mounting requires privileges on the host, so
// `sluice prepare` does it.
func CheckMounted(dir string) error {
	const advice = "run `sluice prepare` as root before, " +
		"or `mount -t bpf -o nosuid,nodev,noexec,mode=0700 bpf %s` and give it to this user"
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("inspect %s: %w; "+advice, dir, err, dir)
	}
	if uint32(st.Type) != unix.BPF_FS_MAGIC {
		return fmt.Errorf("no bpffs is mounted at %s; "+advice, dir, dir)
	}
	return nil
}

// makePinDir creates dir, accessible for root only, and checks that it is on a bpffs.
func makePinDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("create the pin directory: %w", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("inspect the pin directory %s: %w", dir, err)
	}
	if uint32(st.Type) != unix.BPF_FS_MAGIC {
		return fmt.Errorf("%w: Dir %s is not on a bpffs: mount one with `mount -t bpf bpf %s`", ErrInvalid, dir, dir)
	}
	return nil
}

// Stride returns the distance of an array's elements in memory: the kernel rounds it up to eight bytes.
func Stride(valueSize uint32) int { return int(valueSize+7) / 8 * 8 }

// mapMemory maps the values of an array into this process.
func mapMemory(m *ebpf.Map, readOnly bool) ([]byte, error) {
	prot := unix.PROT_READ | unix.PROT_WRITE
	if readOnly {
		prot = unix.PROT_READ
	}
	page := os.Getpagesize()
	size := (Stride(m.ValueSize())*int(m.MaxEntries()) + page - 1) / page * page
	return unix.Mmap(m.FD(), 0, size, prot, unix.MAP_SHARED)
}

// Close releases the handles. It unpins nothing.
func (pm *Maps) Close() error {
	if !pm.gate.Close() {
		return nil
	}
	var errs []error
	for _, memories := range []map[string][]byte{pm.memory, pm.earlier} {
		for _, mem := range memories {
			if mem != nil {
				errs = append(errs, unix.Munmap(mem))
			}
		}
	}
	for _, m := range pm.byName {
		errs = append(errs, m.Close())
	}
	for _, m := range pm.previous {
		errs = append(errs, m.Close())
	}
	return errors.Join(errs...)
}

// Info describes one map of the instance.
type Info struct {
	Name       string // "sl_ep"
	Pin        string // file name below Options.Dir
	ID         uint32 // the kernel's id
	MaxEntries uint32
	Bytes      uint64 // memory as the kernel accounts it, 0 if unknown
}

// Usage describes how full a map is.
type Usage struct {
	Info
	Entries int // in use
}

// Infos returns descriptions of all maps, sorted by name.
func (pm *Maps) Infos() ([]Info, error) {
	if err := pm.gate.RLock(); err != nil {
		return nil, err
	}
	defer pm.gate.RUnlock()
	var infos []Info
	for _, name := range sortedKeys(pm.byName) {
		m := pm.byName[name]
		info, err := m.Info()
		if err != nil {
			return nil, fmt.Errorf("inspect map %s: %w", name, err)
		}
		id, _ := info.ID()
		bytes, _ := info.Memlock()
		infos = append(infos, Info{
			Name: name, Pin: pm.pins[name], ID: uint32(id), MaxEntries: m.MaxEntries(), Bytes: bytes,
		})
	}
	return infos, nil
}

// Count returns the number of entries of a map: all elements of an array, 0 for a ring buffer.
func (pm *Maps) Count(name string) (int, error) {
	if err := pm.gate.RLock(); err != nil {
		return 0, err
	}
	defer pm.gate.RUnlock()
	n, err := countEntries(pm.byName[name])
	if err != nil {
		return 0, fmt.Errorf("count the entries of %s: %w", name, err)
	}
	return n, nil
}

// Borrow returns a handle of a map that the caller owns and that stays open after Close.
func (pm *Maps) Borrow(name string) (*ebpf.Map, error) {
	if err := pm.gate.RLock(); err != nil {
		return nil, err
	}
	defer pm.gate.RUnlock()
	m, ok := pm.byName[name]
	if !ok {
		return nil, fmt.Errorf("%q: %w; there are %s", name, ErrNoMap, strings.Join(pm.Names(), ", "))
	}
	c, err := m.Clone()
	if err != nil {
		return nil, fmt.Errorf("open map %s: %w", name, err)
	}
	return c, nil
}

// Audit compares the pins with the maps that this process and the programs use, and reports each pin that is missing or
// refers to a different map: the next start would then use other maps, or would fail. With repair it restores missing
// pins. A pin of another map is left to the operator, because somebody put it there.
func (pm *Maps) Audit(repair bool) (differences []string, err error) {
	if err := pm.gate.Lock(); err != nil {
		return nil, err
	}
	defer pm.gate.Unlock()
	for _, name := range sortedKeys(pm.byName) {
		path := pm.Pin(name)
		same, err := LeadsTo(path, pm.byName[name])
		switch {
		case errors.Is(err, fs.ErrNotExist):
			differences = append(differences, fmt.Sprintf("pin %s is missing", path))
			if repair {
				if err := pinAgain(pm.byName[name], path); err != nil {
					return differences, fmt.Errorf("pin map %s again: %w", name, err)
				}
			}
		case err != nil:
			differences = append(differences, fmt.Sprintf("pin %s is not a map: %v", path, err))
		case !same:
			differences = append(differences, fmt.Sprintf("pin %s refers to a different map", path))
		}
	}
	return differences, nil
}

// LeadsTo reports whether the pin at path is the map.
func LeadsTo(path string, m *ebpf.Map) (bool, error) {
	pinned, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return false, err
	}
	defer pinned.Close()
	there, err := pinned.Info()
	if err != nil {
		return false, err
	}
	ours, err := m.Info()
	if err != nil {
		return false, err
	}
	a, _ := there.ID()
	b, _ := ours.ID()
	return a == b, nil
}

// pinAgain pins a clone of the handle; with the original handle the library would move the former pin.
func pinAgain(m *ebpf.Map, path string) error {
	c, err := m.Clone()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Pin(path)
}
