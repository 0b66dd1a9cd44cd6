// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pin

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// PreviousMap is a map that has another layout in the previous version.
type PreviousMap struct {
	// Current is the map's name in both versions, Previous is the programs' name for the previous version's
	// map.
	Current, Previous string
	bit               uint32 // in previousConstant
}

// PreviousMaps are the maps that have another layout in the previous version.
var PreviousMaps = []PreviousMap{
	{bpf.MapsMapSlCt4, bpf.MapsMapSlPrev4, 1},
	{bpf.MapsMapSlCt6, bpf.MapsMapSlPrev6, 2},
}

// previousConstant is set to the bits of the existing previous maps.
const previousConstant = "cfg_previous"

func isPrevious(name string) bool {
	return slices.ContainsFunc(PreviousMaps, func(p PreviousMap) bool { return p.Previous == name })
}

// openPrevious opens the maps of the previous version that are still pinned.
func (pm *Maps) openPrevious() error {
	for _, p := range PreviousMaps {
		ms := pm.specs[p.Previous].Copy()
		ms.Name = p.Current // that version's name
		pins := []string{Name(ms)}
		if l, ok := LegacyPins[p.Current]; ok && l.Layout == Layout(ms) {
			pins = append(pins, l.Pin)
		}
		for _, pin := range pins {
			m, err := adoptMap(filepath.Join(pm.Dir, pin), ms)
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return fmt.Errorf("open the previous map of %s: %w", p.Current, err)
			}
			pm.previous[p.Previous] = m
			pm.Adopted = true
			break
		}
	}
	return nil
}

// Bind prepares a program for the maps of this instance and returns them. If there is no previous map, a
// constant disables the code that uses it. But the kernel resolves maps before it removes disabled code, so the
// program still needs a map there and gets the current one. The maps have the sizes of this instance, whatever
// the program was compiled with.
func (pm *Maps) Bind(spec *ebpf.CollectionSpec) (map[string]*ebpf.Map, error) {
	bound := pm.For(spec)
	for name, m := range bound {
		spec.Maps[name].MaxEntries = m.MaxEntries()
	}
	bits := uint32(0)
	for _, p := range PreviousMaps {
		if spec.Maps[p.Previous] == nil {
			continue // the program does not use it
		}
		if m := pm.previous[p.Previous]; m != nil {
			bits |= p.bit
			bound[p.Previous] = m
			continue
		}
		spec.Maps[p.Previous] = spec.Maps[p.Current].Copy()
		bound[p.Previous] = pm.byName[p.Current]
	}
	if v := spec.Variables[previousConstant]; v != nil {
		if err := v.Set(bits); err != nil {
			return nil, fmt.Errorf("constant %s: %w", previousConstant, err)
		}
	}
	return bound, nil
}

// mapPin matches the results of Name.
var mapPin = regexp.MustCompile(`^sl_\w+_v\d+_[0-9a-f]{8}$`)

// DropOld removes the pins of maps that this build does not use. The programs keep the previous maps, which are
// empty by then, until the next start loads programs that do not use them.
func (pm *Maps) DropOld() error {
	if err := pm.gate.Lock(); err != nil {
		return err
	}
	defer pm.gate.Unlock()
	entries, err := os.ReadDir(pm.Dir)
	if err != nil {
		return fmt.Errorf("list pins: %w", err)
	}
	ours := map[string]bool{}
	for _, pin := range pm.pins {
		ours[pin] = true
	}
	var errs []error
	removed := []string{}
	for _, entry := range entries {
		name := entry.Name()
		if ours[name] || !mapPin.MatchString(name) {
			continue
		}
		if err := os.Remove(filepath.Join(pm.Dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("remove the pin of an old map: %w", err))
			continue
		}
		removed = append(removed, name)
	}
	if len(removed) > 0 {
		pm.log.Info("pins of earlier versions removed", "pins", removed)
	}
	for name, m := range pm.previous {
		errs = append(errs, m.Close())
		delete(pm.previous, name)
	}
	return errors.Join(errs...)
}
