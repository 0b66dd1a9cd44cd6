// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

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

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// schemaVersion changes when the meaning of a map changes but its layout does
// not. The layout itself is in the pin's name by its hash.
const schemaVersion = 1

// pinnedMaps are the maps of one instance.
type pinnedMaps struct {
	byName map[string]*ebpf.Map
	pins   map[string]string // name -> file name of its pin

	// previous are the maps of the version before that are still pinned, by the
	// name under which the programs know them.
	previous map[string]*ebpf.Map
	states   map[string]stateAt // of the maps of connections, by name

	// adopted is set if any map was there already, created names those that
	// were not.
	adopted bool
	created map[string]bool

	ep, gen, ifs     *ebpf.Map
	ip4, ip6         *ebpf.Map
	ipc4, ipc6       *ebpf.Map
	counters, limits *ebpf.Map
	events           *ebpf.Map

	slotMem []byte // sl_ep
	genMem  []byte // sl_gen

	memory map[string][]byte // by name, of every map that can be mapped
}

// openMaps opens the pinned maps below dir and creates the missing ones. With
// validateOnly the missing ones are private and nothing is written.
func openMaps(dir string, b build, validateOnly bool, log *slog.Logger) (_ *pinnedMaps, err error) {
	spec, err := b.maps()
	if err != nil {
		return nil, fmt.Errorf("read the compiled maps: %w", err)
	}
	if !validateOnly {
		if err := makePinDir(dir); err != nil {
			return nil, err
		}
	}

	pm := &pinnedMaps{
		byName: map[string]*ebpf.Map{}, pins: map[string]string{}, created: map[string]bool{}, previous: map[string]*ebpf.Map{},
		states: map[string]stateAt{},
	}
	defer func() {
		if err != nil {
			pm.close()
		}
	}()
	for name, ms := range spec.Maps {
		if !strings.HasPrefix(name, "sl_") || isPrevious(name) {
			continue
		}
		m, adopted, err := openMap(dir, ms, validateOnly, log)
		if err != nil {
			return nil, err
		}
		pm.adopted = pm.adopted || adopted
		pm.created[name] = !adopted
		pm.byName[name], pm.pins[name] = m, pinName(ms)
	}
	if err := pm.openPrevious(dir, spec.Maps); err != nil {
		return nil, err
	}
	pm.ep, pm.gen, pm.ifs = pm.byName[bpf.MapsMapSlEp], pm.byName[bpf.MapsMapSlGen], pm.byName[bpf.MapsMapSlIf]
	pm.ip4, pm.ip6 = pm.byName[bpf.MapsMapSlIp4], pm.byName[bpf.MapsMapSlIp6]
	pm.ipc4, pm.ipc6 = pm.byName[bpf.MapsMapSlIpc4], pm.byName[bpf.MapsMapSlIpc6]
	pm.counters, pm.limits = pm.byName[bpf.MapsMapSlMetrics], pm.byName[bpf.MapsMapSlLimits]
	pm.events = pm.byName[bpf.MapsMapSlEvents]

	pm.memory = map[string][]byte{}
	for name, m := range pm.byName {
		if m.Flags()&unix.BPF_F_MMAPABLE == 0 {
			continue
		}
		if pm.memory[name], err = mapMemory(m, validateOnly); err != nil {
			return nil, fmt.Errorf("map the memory of %s: %w", name, err)
		}
	}
	pm.slotMem, pm.genMem = pm.memory[bpf.MapsMapSlEp], pm.memory[bpf.MapsMapSlGen]
	return pm, nil
}

// openMap adopts the pinned map of this layout, under its name or the one that
// it had before, or creates it.
func openMap(dir string, ms *ebpf.MapSpec, validateOnly bool, log *slog.Logger) (m *ebpf.Map, adopted bool, err error) {
	pin := pinName(ms)
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
		log.Debug("map of an earlier version adopted", "map", ms.Name, "pin", legacyPins[ms.Name].pin)
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
	l, ok := legacyPins[ms.Name]
	if !ok || l.layout != layoutHash(ms) {
		return nil, nil
	}
	m, err := adoptMap(filepath.Join(dir, l.pin), ms)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil || validateOnly:
		return m, err
	}
	if err := pinAgain(m, filepath.Join(dir, pinName(ms))); err != nil {
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

// stride is the distance of an array's elements in memory: the kernel rounds
// it up to eight bytes.
func stride(valueSize uint32) int { return int(valueSize+7) / 8 * 8 }

// mapMemory maps the values of an array into this process.
func mapMemory(m *ebpf.Map, readOnly bool) ([]byte, error) {
	prot := unix.PROT_READ | unix.PROT_WRITE
	if readOnly {
		prot = unix.PROT_READ
	}
	page := os.Getpagesize()
	size := (stride(m.ValueSize())*int(m.MaxEntries()) + page - 1) / page * page
	return unix.Mmap(m.FD(), 0, size, prot, unix.MAP_SHARED)
}

func (pm *pinnedMaps) close() error {
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

// MapInfo is one map of the instance.
type MapInfo struct {
	Name       string // "sl_ep"
	Pin        string // file name below Options.Dir
	ID         uint32 // the kernel's id
	MaxEntries uint32
	Bytes      uint64 // memory as the kernel accounts it, 0 if unknown
}

// Maps describes the maps of the instance, sorted by name, for status output.
func (k *Kernel) Maps() ([]MapInfo, error) {
	if err := k.rlock(); err != nil {
		return nil, err
	}
	defer k.mu.RUnlock()
	var infos []MapInfo
	for _, name := range sortedKeys(k.maps.byName) {
		m := k.maps.byName[name]
		info, err := m.Info()
		if err != nil {
			return nil, fmt.Errorf("look at map %s: %w", name, err)
		}
		id, _ := info.ID()
		bytes, _ := info.Memlock()
		infos = append(infos, MapInfo{
			Name: name, Pin: k.maps.pins[name], ID: uint32(id), MaxEntries: m.MaxEntries(), Bytes: bytes,
		})
	}
	return infos, nil
}

// AuditPins compares the pins with the maps that this process and the programs
// use, and names each that is missing or leads elsewhere: the next start would
// begin with other maps, or not at all. With repair the missing ones are pinned
// again; one that leads elsewhere is left to the operator, because somebody put it there.
func (k *Kernel) AuditPins(repair bool) (differences []string, err error) {
	if err := k.lock(); err != nil {
		return nil, err
	}
	defer k.mu.Unlock()
	for _, name := range sortedKeys(k.maps.byName) {
		path := filepath.Join(k.dir, k.maps.pins[name])
		same, err := leadsTo(path, k.maps.byName[name])
		switch {
		case errors.Is(err, fs.ErrNotExist):
			differences = append(differences, fmt.Sprintf("pin %s is missing", path))
			if repair {
				if err := pinAgain(k.maps.byName[name], path); err != nil {
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

func leadsTo(path string, m *ebpf.Map) (bool, error) {
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
