// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// ErrNoProgram says that the program id is not, or no longer, loaded.
var ErrNoProgram = errors.New("no such program")

// ProgramID is the kernel's number of a loaded program.
type ProgramID uint32

// Program is one loaded program. The Kernel keeps it open; a filter that was
// attached with FD keeps it alive after Close.
type Program struct {
	// Name of the tc filter: sluice_from_pod or sluice_to_pod.
	Name string
	// FD to attach, valid until Close.
	FD int
	// ID and Tag as the kernel reports them. The tag covers the instructions
	// only: neither the maps nor the constants. A filter with the same ID needs
	// no replacement; Audit says in what another one differs.
	ID  ProgramID
	Tag string
	// VerifiedInstructions is how many the verifier walked, 0 if the kernel
	// does not say (before 5.16).
	VerifiedInstructions uint32
}

// loadedProgram is a program with the ids of all maps that it uses.
type loadedProgram struct {
	Program
	maps []ebpf.MapID
}

// FromPod is the program for the ingress hook of an endpoint's host end:
// everything that the pod sends. Attach it with the name sluice_from_pod.
func (k *Kernel) FromPod() Program { return k.fromPod }

// ToPod is the program for the egress hook of an endpoint's host end: what the
// host's stack sends to the pod. Attach it with the name sluice_to_pod.
func (k *Kernel) ToPod() Program { return k.toPod }

const (
	fromPodName = "sluice_from_pod"
	toPodName   = "sluice_to_pod"
)

// readyProgram is a program that was adopted or loaded.
type readyProgram struct {
	prog    *ebpf.Program
	pin     string // file name below Options.Dir
	adopted bool
	loaded  loadedProgram
}

// loadPrograms adopts the pinned programs that are what this build would load,
// or loads them. Both are verified, at the same time because that is most of a
// start, before either pin is written.
func (k *Kernel) loadPrograms(o Options) error {
	k.programs = map[string]loadedProgram{}
	var ready [2]readyProgram
	var errs [2]error
	var both sync.WaitGroup
	for i, p := range []struct {
		name string
		spec func() (*ebpf.CollectionSpec, error)
	}{
		{fromPodName, o.build.fromPod},
		{toPodName, o.build.toPod},
	} {
		both.Go(func() { ready[i], errs[i] = k.loadProgram(p.name, p.spec, o) })
	}
	both.Wait()
	for i, out := range []*Program{&k.fromPod, &k.toPod} {
		if ready[i].prog != nil {
			k.progs = append(k.progs, ready[i].prog)
		}
		lp := ready[i].loaded
		k.programs[lp.Name] = lp
		*out = lp.Program
	}
	if err := errors.Join(errs[:]...); err != nil || k.validateOnly {
		return err
	}
	for _, r := range ready {
		if r.adopted {
			continue
		}
		if err := r.prog.Pin(filepath.Join(k.dir, r.pin)); err != nil {
			return fmt.Errorf("pin program %s: %w", r.pin, err)
		}
	}
	return nil
}

// loadProgram adopts or loads one program. It may return one with an error.
func (k *Kernel) loadProgram(name string, read func() (*ebpf.CollectionSpec, error), o Options) (r readyProgram, err error) {
	spec, err := read()
	if err != nil {
		return r, fmt.Errorf("read the compiled program %s: %w", name, err)
	}
	if err := setConstants(spec, o); err != nil {
		return r, fmt.Errorf("program %s: %w", name, err)
	}
	bound, err := k.Pins.Bind(spec)
	if err != nil {
		return r, fmt.Errorf("program %s: %w", name, err)
	}
	if r.pin, err = programPin(name, spec, bound); err != nil {
		return r, fmt.Errorf("program %s: %w", name, err)
	}
	if r.prog, r.adopted, err = k.adoptOrLoad(name, filepath.Join(k.dir, r.pin), spec, bound); err != nil {
		return r, err
	}
	if r.loaded, err = describe(name, r.prog); err != nil {
		return r, fmt.Errorf("look at program %s: %w", name, err)
	}
	k.log.Debug("program ready", "program", name, "id", r.loaded.ID, "tag", r.loaded.Tag, "adopted", r.adopted,
		"verified_instructions", r.loaded.VerifiedInstructions)
	return r, nil
}

// worlds are the identities of addresses that the ipcache does not know.
func (o Options) worlds() (v4, v6 identity.Numeric) {
	if len(o.PodCIDRs) == 2 {
		return identity.WorldIPv4, identity.WorldIPv6
	}
	return identity.World, identity.World
}

// setConstants fixes what config.h declares.
func setConstants(spec *ebpf.CollectionSpec, o Options) error {
	var ports [MaxTunnelPorts]uint16
	copy(ports[:], o.TunnelPorts)
	world4, world6 := o.worlds()
	connectionEvents := uint32(1)
	if o.NoConnectionEvents {
		connectionEvents = 0
	}
	for name, value := range map[string]any{
		"cfg_tunnel_ports":      ports,
		"cfg_world4":            uint32(world4),
		"cfg_world6":            uint32(world6),
		"cfg_event_rate":        o.EventsPerSecond,
		"cfg_connection_events": connectionEvents,
	} {
		v := spec.Variables[name]
		if v == nil {
			continue // a program that does not read it does not carry it
		}
		if err := v.Set(value); err != nil {
			return fmt.Errorf("constant %s: %w", name, err)
		}
	}
	return nil
}

// programPin is the name under which a program with the same instructions,
// constants and maps is found again.
func programPin(name string, spec *ebpf.CollectionSpec, bound map[string]*ebpf.Map) (string, error) {
	h := sha256.New()
	// It names our own pin and is never compared with what the kernel says.
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
		id, _ := info.ID()
		fmt.Fprintf(h, "%s %d\n", m, id)
	}
	return name + "_" + hex.EncodeToString(h.Sum(nil)[:6]), nil
}

// adoptOrLoad opens the pin, or loads the program for it. In a validation the
// program is always loaded, and verified with it.
func (k *Kernel) adoptOrLoad(name, path string, spec *ebpf.CollectionSpec, bound map[string]*ebpf.Map) (*ebpf.Program, bool, error) {
	if !k.validateOnly {
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

// describe asks the kernel what it has loaded.
func describe(name string, prog *ebpf.Program) (loadedProgram, error) {
	lp := loadedProgram{Program: Program{Name: name, FD: prog.FD()}}
	info, err := prog.Info()
	if err != nil {
		return lp, err
	}
	id, ok := info.ID()
	if !ok {
		return lp, errors.New("the kernel gives no program id")
	}
	lp.ID, lp.Tag = ProgramID(id), info.Tag
	lp.VerifiedInstructions, _ = info.VerifiedInstructions()
	ids, ok := info.MapIDs()
	if !ok {
		return lp, errors.New("the kernel gives no map ids")
	}
	lp.maps = ids
	return lp, nil
}

// DropOldPrograms removes the pins of programs that Open did not return. Call
// it when every filter has been replaced: a filter that still holds an old
// program keeps it alive, but the next start could not adopt it.
func (k *Kernel) DropOldPrograms() error {
	if err := k.lock(); err != nil {
		return err
	}
	defer k.mu.Unlock()
	k.Connections.FiltersReplaced()
	entries, err := os.ReadDir(k.dir)
	if err != nil {
		return fmt.Errorf("list pins: %w", err)
	}
	var errs []error
	for _, entry := range entries {
		name := entry.Name()
		if !strings.HasPrefix(name, fromPodName+"_") && !strings.HasPrefix(name, toPodName+"_") {
			continue
		}
		if err := k.dropIfOld(filepath.Join(k.dir, name)); err != nil {
			errs = append(errs, fmt.Errorf("pin %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

func (k *Kernel) dropIfOld(path string) error {
	prog, err := ebpf.LoadPinnedProgram(path, nil)
	if err != nil {
		return err
	}
	defer prog.Close()
	info, err := prog.Info()
	if err != nil {
		return err
	}
	if id, _ := info.ID(); ProgramID(id) == k.fromPod.ID || ProgramID(id) == k.toPod.ID {
		return nil
	}
	return os.Remove(path)
}

// Audit is the difference between a program in a filter and ours.
type Audit struct {
	// SameCode: both have the same instructions.
	SameCode bool
	// SameMaps: it uses exactly the maps that are pinned for this instance.
	SameMaps bool
	// SameConfig: it was loaded with the same constants.
	SameConfig bool
	// Differences in words, for a log line. Empty if all are equal.
	Differences []string
}

// Current says that the filter need not be replaced.
func (a Audit) Current() bool { return a.SameCode && a.SameMaps && a.SameConfig }

// Audit compares the program with the given id, as found in a filter, with
// want (FromPod or ToPod). A program that is gone is ErrNoProgram. The kernel
// wants CAP_SYS_ADMIN for looking at a program other than want itself.
func (k *Kernel) Audit(id ProgramID, want Program) (Audit, error) {
	if err := k.rlock(); err != nil {
		return Audit{}, err
	}
	defer k.mu.RUnlock()
	ours, ok := k.programs[want.Name]
	if !ok {
		return Audit{}, fmt.Errorf("%w: program %q is not ours", pin.ErrInvalid, want.Name)
	}
	if id == ours.ID {
		return Audit{SameCode: true, SameMaps: true, SameConfig: true}, nil
	}
	theirs, err := inspect(want.Name, id)
	if err != nil {
		return Audit{}, err
	}
	defer theirs.close()
	mine, err := inspect(want.Name, ours.ID)
	if err != nil {
		return Audit{}, err
	}
	defer mine.close()

	a := Audit{
		SameCode:   theirs.Tag == mine.Tag,
		SameMaps:   slices.Equal(theirs.pinned, mine.pinned),
		SameConfig: slices.Equal(theirs.constants, mine.constants),
	}
	if !a.SameCode {
		a.Differences = append(a.Differences, fmt.Sprintf("tag %s, ours %s", theirs.Tag, mine.Tag))
	}
	if !a.SameMaps {
		a.Differences = append(a.Differences, fmt.Sprintf("maps %v, ours %v", theirs.pinned, mine.pinned))
	}
	if !a.SameConfig {
		a.Differences = append(a.Differences, fmt.Sprintf("constants %x, ours %x", theirs.constants, mine.constants))
	}
	return a, nil
}

// inspection is a program's code, maps and constants as the kernel holds them.
type inspection struct {
	loadedProgram
	pinned    []ebpf.MapID // sorted, without the constants
	constants []byte
	prog      *ebpf.Program
}

func (i *inspection) close() { i.prog.Close() }

func inspect(name string, id ProgramID) (*inspection, error) {
	prog, err := ebpf.NewProgramFromID(ebpf.ProgramID(id))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("program %d: %w", id, ErrNoProgram)
	case err != nil:
		return nil, fmt.Errorf("open program %d: %w", id, err)
	}
	i := &inspection{prog: prog}
	if i.loadedProgram, err = describe(name, prog); err == nil {
		err = i.readMaps()
	}
	if err != nil {
		prog.Close()
		return nil, fmt.Errorf("look at program %d: %w", id, err)
	}
	return i, nil
}

func (i *inspection) readMaps() error {
	for _, id := range i.maps {
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
			return fmt.Errorf("look at map %d: %w", id, err)
		}
	}
	slices.Sort(i.pinned)
	return nil
}
