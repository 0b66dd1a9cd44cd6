// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package pin owns the maps of one instance as the kernel keeps them: their pins
// in the instance's bpffs directory, and their layouts. It adopts what an
// earlier process or an earlier version has pinned, makes what is missing, and
// says what the kernel must offer for that. What the entries of a map mean is
// known to the packages that use it, each behind a Gate.
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

// schemaVersion changes when the meaning of a map changes but its layout does
// not. The layout itself is in the pin's name by its hash.
const schemaVersion = 1

// Options say where the maps are pinned.
type Options struct {
	// Dir is the bpffs directory of this instance, for example
	// /run/sluice/bpf. It is created with mode 0700 if it does not exist; a
	// bpffs must be mounted at it or above it.
	Dir string
	// ValidateOnly opens what is there, has private maps for what is missing,
	// and writes nothing below Dir.
	ValidateOnly bool
	// Log receives what was adopted and created.
	Log *slog.Logger
}

// Maps are the maps of one instance.
type Maps struct {
	// Dir of the pins.
	Dir string
	// ValidateOnly says that the maps were opened to look.
	ValidateOnly bool
	// Adopted is set if any map was there already.
	Adopted bool

	gate Gate
	log  *slog.Logger

	byName map[string]*ebpf.Map
	pins   map[string]string // name -> file name of its pin
	specs  map[string]*ebpf.MapSpec

	// previous are the maps of the version before that are still pinned, by the
	// name under which the programs know them.
	previous map[string]*ebpf.Map
	created  map[string]bool   // those that were not there
	memory   map[string][]byte // of every map that can be mapped
}

// Open opens the pinned maps of the compiled ones and creates the missing
// ones.
func Open(o Options, spec *ebpf.CollectionSpec) (_ *Maps, err error) {
	if !o.ValidateOnly {
		if err := makePinDir(o.Dir); err != nil {
			return nil, err
		}
	}
	pm := &Maps{
		Dir: o.Dir, ValidateOnly: o.ValidateOnly, gate: Gate{ValidateOnly: o.ValidateOnly}, log: o.Log, specs: spec.Maps,
		byName: map[string]*ebpf.Map{}, pins: map[string]string{}, created: map[string]bool{}, previous: map[string]*ebpf.Map{},
		memory: map[string][]byte{},
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
	return pm, nil
}

// Map is the map of a name that the compiled maps have.
func (pm *Maps) Map(name string) *ebpf.Map { return pm.byName[name] }

// For are the maps that a compiled program declares, by name, in a map of the
// caller's own.
func (pm *Maps) For(spec *ebpf.CollectionSpec) map[string]*ebpf.Map {
	ms := map[string]*ebpf.Map{}
	for name := range spec.Maps {
		if m := pm.byName[name]; m != nil {
			ms[name] = m
		}
	}
	return ms
}

// Names lists the maps, sorted.
func (pm *Maps) Names() []string { return sortedKeys(pm.byName) }

// Memory is that of an array in shared memory, nil for another map.
func (pm *Maps) Memory(name string) []byte { return pm.memory[name] }

// Created says that the map was not there before.
func (pm *Maps) Created(name string) bool { return pm.created[name] }

// Pin is the path of a map's pin.
func (pm *Maps) Pin(name string) string { return filepath.Join(pm.Dir, pm.pins[name]) }

// Spec is what a map was compiled as, one of the version before too.
func (pm *Maps) Spec(name string) *ebpf.MapSpec { return pm.specs[name] }

// Previous is a map of the version before that is still pinned, by the name
// under which the programs know it; nil: there is none.
func (pm *Maps) Previous(name string) *ebpf.Map { return pm.previous[name] }

// PreviousNames lists the maps of the version before that are still pinned.
func (pm *Maps) PreviousNames() []string { return sortedKeys(pm.previous) }

// openMap adopts the pinned map of this layout, under its name or the one that
// it had before, or creates it.
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

// adoptMap opens a pin. A map that is not what the pin's name says is an error:
// somebody may be using it, so it is neither used nor replaced.
func adoptMap(path string, ms *ebpf.MapSpec) (*ebpf.Map, error) {
	m, err := ebpf.LoadPinnedMap(path, nil)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, err
	case err != nil:
		// The kernel's answer to a directory or a program names no path.
		return nil, fmt.Errorf("%s is not a map; remove it by hand if no program uses it: %w", path, err)
	}
	if err := ms.Compatible(m); err != nil {
		m.Close()
		return nil, fmt.Errorf("%s holds another map; remove it by hand if no program uses it: %w", path, err)
	}
	return m, nil
}

// adoptLegacy opens the map under the name that it had when names of fields
// were part of the hash, and pins it under its own name too. The old pin stays,
// so that the earlier version finds the map if it comes back. It returns nil if
// there is no such pin, or if the layout has changed since.
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

// createMap makes a map and fills it before it is pinned: a pin never leads to
// a map that was filled in part.
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

// CheckMounted refuses a directory that lies on no bpffs. Mounting one takes
// rights over the machine's files, so the command that prepares the start does
// it.
func CheckMounted(dir string) error {
	const advice = "run `sluice prepare` as root before, " +
		"or `mount -t bpf -o nosuid,nodev,noexec,mode=0700 bpf %s` and give it to this user"
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("look at %s: %w; "+advice, dir, err, dir)
	}
	if uint32(st.Type) != unix.BPF_FS_MAGIC {
		return fmt.Errorf("no bpffs is mounted at %s; "+advice, dir, dir)
	}
	return nil
}

// makePinDir creates dir for root alone and checks that pins can live there.
func makePinDir(dir string) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("create the pin directory: %w", err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("look at the pin directory %s: %w", dir, err)
	}
	if uint32(st.Type) != unix.BPF_FS_MAGIC {
		return fmt.Errorf("%w: Dir %s is not on a bpffs: mount one with `mount -t bpf bpf %s`", ErrInvalid, dir, dir)
	}
	return nil
}

// Stride is the distance of an array's elements in memory: the kernel rounds
// it up to eight bytes.
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
	for _, mem := range pm.memory {
		if mem != nil {
			errs = append(errs, unix.Munmap(mem))
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

// Info is one map of the instance.
type Info struct {
	Name       string // "sl_ep"
	Pin        string // file name below Options.Dir
	ID         uint32 // the kernel's id
	MaxEntries uint32
	Bytes      uint64 // memory as the kernel accounts it, 0 if unknown
}

// Infos describes the maps of the instance, sorted by name, for status output.
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
			return nil, fmt.Errorf("look at map %s: %w", name, err)
		}
		id, _ := info.ID()
		bytes, _ := info.Memlock()
		infos = append(infos, Info{
			Name: name, Pin: pm.pins[name], ID: uint32(id), MaxEntries: m.MaxEntries(), Bytes: bytes,
		})
	}
	return infos, nil
}

// Count counts the keys of a map that has them, all of an array, none of a
// ring.
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

// Borrow gives a handle of one's own, which Close leaves open.
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

// Audit compares the pins with the maps that this process and the programs
// use, and names each that is missing or leads elsewhere: the next start would
// begin with other maps, or not at all. With repair the missing ones are pinned
// again; one that leads elsewhere is left to the operator, because somebody put it there.
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
			differences = append(differences, fmt.Sprintf("pin %s is another map", path))
		}
	}
	return differences, nil
}

// LeadsTo says whether the pin at path is the map.
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

// pinAgain pins a copy of the handle: the original would look for the pin that
// it had, to move it.
func pinAgain(m *ebpf.Map, path string) error {
	c, err := m.Clone()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Pin(path)
}
