// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hook

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
)

// tcxHooks are the attach types of a device's hooks.
var tcxHooks = map[program.Hook]ebpf.AttachType{
	program.Ingress: ebpf.AttachTCXIngress,
	program.Egress:  ebpf.AttachTCXEgress,
}

var deviceHooks = []program.Hook{program.Ingress, program.Egress}

// nameLength is the number of characters of a program's name that the kernel keeps.
const nameLength = unix.BPF_OBJ_NAME_LEN - 1

// attached is a tcx program at a hook.
type attached struct {
	id   ebpf.ProgramID
	name string
}

// ours reports whether a program's name matches a Spec: in full if the program has type information, otherwise the part
// that the kernel keeps.
func (p attached) ours(s program.Spec) bool {
	return p.name == s.Name || p.name == s.Name[:min(len(s.Name), nameLength)]
}

// AttachFirst attaches programs to a permanent device, before all other programs of their hooks. Programs of one hook
// run in the order of the list. With tcx, a packet costs less, and neither `tc` nor another component's qdisc can
// remove our programs or take their place. Attaching with tcx waits for an RCU grace period (8 to 15 ms, with RTNL
// held), which is too long for an endpoint's device. Without tcx, AttachFirst does the same as AttachBeside: a hook has
// one program, and the optional ones are not attached. Finally it detaches programs that an earlier process, or an
// earlier kernel, has attached in the other way.
func (h *Hooks) AttachFirst(d endpoint.HostDevice, programs []*program.Program) error {
	has, err := h.usesTCX()
	if err != nil {
		return err
	}
	if !has {
		return errors.Join(h.AttachBeside(d, required(programs)), h.removeTCX(d, specsOf(programs)))
	}
	last := map[program.Hook][]*program.Program{}
	for _, p := range programs {
		if err := h.Home.Do(func() error { return h.attachTCX(d, p, last[p.Hook]) }); err != nil {
			return fmt.Errorf("program %s at %s of %s: %w", p.Name, p.Hook, d.Name, err)
		}
		last[p.Hook] = append(last[p.Hook], p)
	}
	return h.removeFilters(d, specsOf(programs))
}

// required returns the programs that are attached on a kernel without tcx.
func required(programs []*program.Program) []*program.Program {
	return slices.DeleteFunc(slices.Clone(programs), func(p *program.Program) bool { return p.Optional })
}

// attachTCX attaches p to its hook, directly behind the programs in after, which are the first of the hook. It
// detaches all other programs with the same name as p. The calling thread must be in the host's namespace.
func (h *Hooks) attachTCX(d endpoint.HostDevice, p *program.Program, after []*program.Program) error {
	at := len(after)
	places, err := placesAt(d, p.Hook)
	if err != nil {
		return err
	}
	attach := link.RawAttachProgramOptions{Target: int(d.Index), Program: p.Prog, Attach: tcxHooks[p.Hook]}
	switch {
	case len(places) > at && places[at].id == p.ID:
	case len(places) > at && places[at].ours(p.Spec):
		err = replaceTCX(attach, places[at].id)
	case slices.ContainsFunc(places, func(o attached) bool { return o.id == p.ID }):
		// The kernel cannot move a program, so p is detached and attached again. In between, a filter replaces
		// it; an optional program is not replaced, because packets also pass without it.
		if err := h.AttachBeside(d, required([]*program.Program{p})); err != nil {
			return err
		}
		if err := detachTCX(d, p.Hook, p.ID); err != nil {
			return err
		}
		fallthrough
	default:
		attach.Anchor = link.Head()
		if at > 0 {
			attach.Anchor = link.AfterProgram(after[at-1].Prog)
		}
		err = link.RawAttachProgram(attach)
	}
	if err != nil {
		return err
	}
	for _, o := range places {
		if o.id != p.ID && o.ours(p.Spec) {
			if err := detachTCX(d, p.Hook, o.id); err != nil {
				return err
			}
		}
	}
	return nil
}

// replaceTCX atomically replaces a program by another one.
func replaceTCX(at link.RawAttachProgramOptions, old ebpf.ProgramID) error {
	prog, err := ebpf.NewProgramFromID(old)
	if err != nil {
		return err
	}
	defer prog.Close()
	at.Anchor = link.ReplaceProgram(prog)
	return link.RawAttachProgram(at)
}

// detachTCX removes a program from a hook. It is not an error if the program is gone.
func detachTCX(d endpoint.HostDevice, at program.Hook, id ebpf.ProgramID) error {
	prog, err := ebpf.NewProgramFromID(id)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer prog.Close()
	err = link.RawDetachProgram(link.RawDetachProgramOptions{
		Target: int(d.Index), Program: prog, Attach: tcxHooks[at],
	})
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// placesAt lists the tcx programs of a hook in the order in which they run.
func placesAt(d endpoint.HostDevice, at program.Hook) (places []attached, err error) {
	programs, err := tcxPrograms(int(d.Index), tcxHooks[at])
	if err != nil {
		return nil, fmt.Errorf("query tcx: %w", err)
	}
	for _, p := range programs {
		o := attached{id: p.ID}
		if _, linked := p.LinkID(); !linked { // our programs are attached without a bpf_link
			o.name = nameOf(p.ID)
		}
		places = append(places, o)
	}
	return places, nil
}

// nameOf returns the name of a program; "" if it has no name, or opening it fails.
func nameOf(id ebpf.ProgramID) string {
	prog, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return ""
	}
	defer prog.Close()
	info, err := prog.Info()
	if err != nil {
		return ""
	}
	return info.Name
}

// usesTCX reports whether AttachFirst uses tcx.
func (h *Hooks) usesTCX() (bool, error) {
	has, err := h.hasTCX()
	return has && !h.Filters, err
}

// hasTCX reports whether the kernel has tcx; it probes once.
func (h *Hooks) hasTCX() (has bool, err error) {
	h.probe.Do(func() {
		h.probeErr = h.Home.Do(func() error {
			_, err := link.QueryPrograms(link.QueryOptions{Target: loopback, Attach: ebpf.AttachTCXIngress})
			switch {
			case err == nil:
				h.tcx = true
			case errors.Is(err, unix.EINVAL), errors.Is(err, ebpf.ErrNotSupported):
				err = nil
			}
			return err
		})
	})
	if h.probeErr != nil {
		return false, fmt.Errorf("probe for tcx: %w", h.probeErr)
	}
	return h.tcx, nil
}

// loopback is the index of lo, which every network namespace has.
const loopback = 1

func specsOf(programs []*program.Program) (specs []program.Spec) {
	for _, p := range programs {
		specs = append(specs, p.Spec)
	}
	return specs
}

// CheckFirst compares the hooks of a device with the result of AttachFirst.
func (h *Hooks) CheckFirst(d endpoint.HostDevice, programs []*program.Program) ([]endpoint.Difference, error) {
	has, err := h.usesTCX()
	if err != nil {
		return nil, err
	}
	if !has {
		return h.Check(d, required(programs))
	}
	var ds []endpoint.Difference
	at := map[program.Hook]int{}
	for _, p := range programs {
		want := fmt.Sprintf("%s, program %d, first tcx program", p.Name, p.ID)
		first := at[p.Hook]
		if first > 0 {
			want = fmt.Sprintf("%s, program %d, tcx program %d", p.Name, p.ID, first+1)
		}
		key := d.Name + " " + string(p.Hook)
		at[p.Hook]++
		add := func(have string) {
			ds = append(ds, endpoint.Difference{Subject: endpoint.SubjectFilter, Key: key, Want: want, Have: have})
		}
		var places []attached
		if err := h.Home.Do(func() (err error) { places, err = placesAt(d, p.Hook); return err }); err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		i := slices.IndexFunc(places, func(o attached) bool { return o.ours(p.Spec) })
		switch {
		case i < 0:
			add("")
		case i > first:
			add(fmt.Sprintf("program %d runs before it", places[first].id))
		case i < first:
			add("another program of Sluice is missing before it")
		case !p.Current(places[i].id):
			add(fmt.Sprintf("program %d", places[i].id))
		}
		f, ok, err := h.placeTaken(d, p.Hook)
		if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) {
			continue // the device is gone, or has no such qdisc
		}
		if err != nil {
			return nil, err
		}
		if ok && f.name == p.Name && f.handle == filterHandle {
			add("also attached as a filter")
		}
	}
	return ds, nil
}

// Attached returns the tcx programs at the hooks of a device. Callers compare the results, because the kernel
// sends no event when a program is attached or detached. On kernels without tcx the result is empty.
func (h *Hooks) Attached(d endpoint.HostDevice) (ids []ebpf.ProgramID, err error) {
	has, err := h.hasTCX()
	if err != nil || !has {
		return nil, err
	}
	err = h.Home.Do(func() error {
		for _, at := range deviceHooks {
			programs, err := tcxPrograms(int(d.Index), tcxHooks[at])
			if err != nil {
				return fmt.Errorf("query tcx of %s: %w", d.Name, err)
			}
			for _, p := range programs {
				ids = append(ids, p.ID)
			}
			ids = append(ids, 0) // 0 marks the end of a hook
		}
		return nil
	})
	return ids, err
}
