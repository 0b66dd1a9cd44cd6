// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package program loads the programs of the program table against the pinned maps, pins them, and adopts the
// programs that an earlier process has pinned. It does not attach them: the owner of a device attaches the
// programs for that kind of device.
package program

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// ErrNoProgram: no program with the ID is loaded.
var ErrNoProgram = errors.New("no such program")

// Options select what is loaded.
type Options struct {
	// Table lists the programs to load.
	Table []Spec
	// Constants are the values of the variables that config.h declares. A program that does not read a
	// variable does not contain it.
	Constants map[string]any
	// Log receives which programs were adopted and loaded.
	Log *slog.Logger
}

// Programs are the loaded programs of one instance.
//
// Its methods may be called concurrently.
type Programs struct {
	maps  *pin.Maps
	log   *slog.Logger
	table []Spec

	mu        sync.Mutex     // held while programs are loaded; guards the following fields
	constants map[string]any // of all
	all       []*Program     // one per row of the table; nil: not loaded yet
	left      []*Program     // replaced by Reload, but possibly still in use
}

// Program is a loaded program.
type Program struct {
	Spec
	// Prog is open until Close; a filter keeps the program alive longer.
	Prog *ebpf.Program
	// ID and Tag are as the kernel reports them. The tag covers only the instructions, not the maps and
	// constants.
	ID  ebpf.ProgramID
	Tag string
	// VerifiedInstructions is the number of instructions that the verifier processed; 0 if unknown (before 5.16).
	VerifiedInstructions uint32

	maps    []ebpf.MapID // IDs of the maps that it uses
	pin     string       // file name of its pin
	adopted bool
}

// Open adopts pinned programs with the same code, maps and constants as this build's, and loads the others. All
// are verified before any pin is written, and in parallel, because verification is most of the start time.
func Open(pm *pin.Maps, o Options) (*Programs, error) {
	ps := &Programs{maps: pm, log: o.Log, table: o.Table}
	if err := ps.Reload(o.Constants); err != nil {
		return nil, err
	}
	return ps, nil
}

// Reload is like Open, but with other constants. Afterwards On returns the new programs; the caller must attach
// them. If it fails, the previous programs stay.
func (ps *Programs) Reload(constants map[string]any) (err error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	all, err := ps.load(constants, func(i int) bool {
		lazy := ps.table[i].Lazy && !ps.maps.ValidateOnly
		return !lazy || i < len(ps.all) && ps.all[i] != nil
	})
	if err != nil {
		return err
	}
	ps.constants, ps.all, ps.left = constants, all, append(ps.left, ps.all...)
	return nil
}

// Load returns the programs for a set of devices, and first loads the lazy ones that are not loaded yet.
func (ps *Programs) Load(d Devices) ([]*Program, error) {
	return ps.find(func(s Spec) bool { return s.Devices == d })
}

// Find returns the program with a name, and loads it if it is lazy; ErrNoProgram if the table has none.
func (ps *Programs) Find(name string) (*Program, error) {
	found, err := ps.find(func(s Spec) bool { return s.Name == name })
	switch {
	case err != nil:
		return nil, err
	case len(found) == 0:
		return nil, fmt.Errorf("%s: %w", name, ErrNoProgram)
	}
	return found[0], nil
}

func (ps *Programs) find(wanted func(Spec) bool) (found []*Program, err error) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	more, err := ps.load(ps.constants, func(i int) bool { return ps.all[i] == nil && wanted(ps.table[i]) })
	if err != nil {
		return nil, err
	}
	for i, s := range ps.table {
		if more[i] != nil {
			ps.all[i] = more[i]
		}
		if wanted(s) {
			found = append(found, ps.all[i])
		}
	}
	return found, nil
}

// load returns the programs of the rows that wanted selects, loaded and pinned.
func (ps *Programs) load(constants map[string]any, wanted func(row int) bool) (all []*Program, err error) {
	all, errs := make([]*Program, len(ps.table)), make([]error, len(ps.table))
	defer func() {
		if err != nil {
			err = errors.Join(err, closeAll(all))
			all = nil
		}
	}()
	var loads sync.WaitGroup
	for i, s := range ps.table {
		if wanted(i) {
			loads.Go(func() { all[i], errs[i] = ps.open(s, constants) })
		}
	}
	loads.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	for _, p := range all {
		if p == nil || p.adopted || ps.maps.ValidateOnly {
			continue
		}
		if err := p.Prog.Pin(filepath.Join(ps.maps.Dir, p.pin)); err != nil {
			return nil, fmt.Errorf("pin program %s: %w", p.pin, err)
		}
	}
	return all, nil
}

func (ps *Programs) open(s Spec, constants map[string]any) (*Program, error) {
	spec, err := s.Load()
	if err != nil {
		return nil, fmt.Errorf("read the compiled program %s: %w", s.Name, err)
	}
	if err := SetConstants(spec, constants); err != nil {
		return nil, fmt.Errorf("program %s: %w", s.Name, err)
	}
	bound, err := ps.maps.Bind(spec)
	if err != nil {
		return nil, fmt.Errorf("program %s: %w", s.Name, err)
	}
	pinned, err := programPin(s.Name, spec, bound)
	if err != nil {
		return nil, fmt.Errorf("program %s: %w", s.Name, err)
	}
	prog, adopted, err := ps.adoptOrLoad(s.Name, filepath.Join(ps.maps.Dir, pinned), spec, bound)
	if err != nil {
		return nil, err
	}
	p, err := describe(prog)
	if err != nil {
		prog.Close()
		return nil, fmt.Errorf("inspect program %s: %w", s.Name, err)
	}
	p.Spec, p.pin, p.adopted = s, pinned, adopted
	ps.log.Debug("program ready", "program", s.Name, "id", p.ID, "tag", p.Tag, "adopted", adopted,
		"verified_instructions", p.VerifiedInstructions)
	return p, nil
}

// SetConstants sets the variables of a compiled program. It ignores constants that the program does not have;
// TestEveryConstantIsOfAProgramAndHasAValue of package kernel checks that each constant is in some program.
func SetConstants(spec *ebpf.CollectionSpec, constants map[string]any) error {
	for name, value := range constants {
		v := spec.Variables[name]
		if v == nil {
			continue
		}
		if err := v.Set(value); err != nil {
			return fmt.Errorf("constant %s: %w", name, err)
		}
	}
	return nil
}

// On returns the loaded programs for a set of devices.
func (ps *Programs) On(d Devices) []*Program {
	return slices.DeleteFunc(ps.current(), func(p *Program) bool { return p.Devices != d })
}

// current returns a copy of the list of current programs.
func (ps *Programs) current() []*Program {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(ps.all), func(p *Program) bool { return p == nil })
}

// Close releases the handles. Attached and pinned programs stay.
func (ps *Programs) Close() error {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	return errors.Join(closeAll(ps.all), closeAll(ps.left))
}

func closeAll(programs []*Program) error {
	var errs []error
	for _, p := range programs {
		if p != nil {
			errs = append(errs, p.Prog.Close())
		}
	}
	return errors.Join(errs...)
}

// programPin returns the pin's name for a program; programs with the same instructions, constants and maps share a pin.
func programPin(name string, spec *ebpf.CollectionSpec, bound map[string]*ebpf.Map) (string, error) {
	h := sha256.New()
	// The tag is only part of our pin's name and is never compared with a tag from the kernel.
	tag, err := spec.Programs[name].Tag() //nolint:staticcheck // see above
	if err != nil {
		return "", fmt.Errorf("tag: %w", err)
	}
	fmt.Fprintln(h, tag)
	for _, v := range slices.Sorted(maps.Keys(spec.Variables)) {
		fmt.Fprintf(h, "%s %x\n", v, spec.Variables[v].Value)
	}
	for _, m := range slices.Sorted(maps.Keys(bound)) {
		info, err := bound[m].Info()
		if err != nil {
			return "", fmt.Errorf("map %s: %w", m, err)
		}
		id, ok := info.ID()
		if !ok {
			return "", fmt.Errorf("map %s: the kernel reports no id", m)
		}
		fmt.Fprintf(h, "%s %d\n", m, id)
	}
	return name + "_" + hex.EncodeToString(h.Sum(nil)[:6]), nil
}

// adoptOrLoad opens the pin, or loads the program. With ValidateOnly the program is always loaded, and so
// verified.
func (ps *Programs) adoptOrLoad(name, path string, spec *ebpf.CollectionSpec, bound map[string]*ebpf.Map) (
	_ *ebpf.Program, adopted bool, _ error,
) {
	if !ps.maps.ValidateOnly {
		switch prog, err := ebpf.LoadPinnedProgram(path, nil); {
		case err == nil:
			return prog, true, nil
		case !errors.Is(err, fs.ErrNotExist):
			return nil, false, fmt.Errorf("adopt program %s: %w", path, err)
		}
	}
	coll, err := ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{
		MapReplacements: bound,
	})
	if err != nil {
		return nil, false, fmt.Errorf("load program %s: %w", name, err)
	}
	defer coll.Close()
	return coll.DetachProgram(name), false, nil
}

// describe reads the kernel's information about a program.
func describe(prog *ebpf.Program) (*Program, error) {
	info, err := prog.Info()
	if err != nil {
		return nil, err
	}
	p := &Program{Prog: prog, Tag: info.Tag}
	var ok bool
	if p.ID, ok = info.ID(); !ok {
		return nil, errors.New("the kernel reports no program id")
	}
	p.VerifiedInstructions, _ = info.VerifiedInstructions()
	if p.maps, ok = info.MapIDs(); !ok {
		return nil, errors.New("the kernel reports no map ids")
	}
	return p, nil
}

// DropOld removes the pins of programs other than the current ones. Call it when every filter has been
// replaced: a filter keeps an old program alive without its pin, but the next start could not adopt it.
func (ps *Programs) DropOld() error {
	if ps.maps.ValidateOnly {
		return pin.ErrValidateOnly
	}
	entries, err := os.ReadDir(ps.maps.Dir)
	if err != nil {
		return fmt.Errorf("list pins: %w", err)
	}
	var errs []error
	all := ps.current()
	for _, entry := range entries {
		name := entry.Name()
		if !slices.ContainsFunc(all, func(p *Program) bool { return strings.HasPrefix(name, p.Name+"_") }) {
			continue
		}
		if err := dropIfOld(all, filepath.Join(ps.maps.Dir, name)); err != nil {
			errs = append(errs, fmt.Errorf("pin %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

func dropIfOld(all []*Program, path string) error {
	prog, err := ebpf.LoadPinnedProgram(path, nil)
	if err != nil {
		return err
	}
	defer prog.Close()
	info, err := prog.Info()
	if err != nil {
		return err
	}
	id, ok := info.ID()
	if !ok {
		return fmt.Errorf("program %s: the kernel reports no id", path)
	}
	if slices.ContainsFunc(all, func(p *Program) bool { return p.ID == id }) {
		return nil
	}
	return os.Remove(path)
}

// Audit is the result of comparing a program in a filter with ours.
type Audit struct {
	// SameCode: both have the same instructions.
	SameCode bool
	// SameMaps: it uses exactly the maps that are pinned for this instance.
	SameMaps bool
	// SameConfig: it was loaded with the same constants.
	SameConfig bool
	// Differences describes the differences for a log line; empty without differences.
	Differences []string
}

// Current reports whether the filter need not be replaced.
func (a Audit) Current() bool { return a.SameCode && a.SameMaps && a.SameConfig }

// Audit compares the program with the given ID, as found in a filter, with this one. It returns ErrNoProgram if
// the program is gone. Reading another program than this one requires CAP_SYS_ADMIN.
func (p *Program) Audit(id ebpf.ProgramID) (Audit, error) {
	if id == p.ID {
		return Audit{SameCode: true, SameMaps: true, SameConfig: true}, nil
	}
	theirs, err := inspect(id)
	if err != nil {
		return Audit{}, err
	}
	mine, err := inspect(p.ID)
	if err != nil {
		return Audit{}, err
	}
	a := Audit{
		SameCode:   theirs.tag == mine.tag,
		SameMaps:   slices.Equal(theirs.pinned, mine.pinned),
		SameConfig: slices.Equal(theirs.constants, mine.constants),
	}
	if !a.SameCode {
		a.Differences = append(a.Differences, fmt.Sprintf("tag %s, ours %s", theirs.tag, mine.tag))
	}
	if !a.SameMaps {
		a.Differences = append(a.Differences, fmt.Sprintf("maps %v, ours %v", theirs.pinned, mine.pinned))
	}
	if !a.SameConfig {
		a.Differences = append(a.Differences, fmt.Sprintf("constants %x, ours %x", theirs.constants, mine.constants))
	}
	return a, nil
}

// Current reports whether a filter with the given program need not be replaced.
func (p *Program) Current(id ebpf.ProgramID) bool {
	a, err := p.Audit(id)
	return err == nil && a.Current()
}

// inspection contains a program's code, maps and constants as the kernel holds them.
type inspection struct {
	tag       string
	pinned    []ebpf.MapID // sorted, without the map of constants
	constants []byte
}

func inspect(id ebpf.ProgramID) (i inspection, err error) {
	prog, err := ebpf.NewProgramFromID(id)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return i, fmt.Errorf("program %d: %w", id, ErrNoProgram)
	case err != nil:
		return i, fmt.Errorf("open program %d: %w", id, err)
	}
	defer prog.Close()
	p, err := describe(prog)
	if err == nil {
		i.tag = p.Tag
		err = i.readMaps(p.maps)
	}
	if err != nil {
		return i, fmt.Errorf("inspect program %d: %w", id, err)
	}
	return i, nil
}

func (i *inspection) readMaps(ids []ebpf.MapID) error {
	for _, id := range ids {
		m, err := ebpf.NewMapFromID(id)
		if err != nil {
			return fmt.Errorf("open map %d: %w", id, err)
		}
		info, err := m.Info()
		if err == nil && strings.HasSuffix(info.Name, ".rodata") {
			i.constants, err = m.LookupBytes(uint32(0))
		} else {
			i.pinned = append(i.pinned, id)
		}
		m.Close()
		if err != nil {
			return fmt.Errorf("inspect map %d: %w", id, err)
		}
	}
	slices.Sort(i.pinned)
	return nil
}
