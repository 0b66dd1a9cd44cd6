// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package hook attaches programs to the tc hooks of devices, and compares the actual state with the expected
// one. It never deletes a program and adds it again, because packets would pass without evaluation in between;
// it replaces. Programs, filters and qdiscs of other components stay.
package hook

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

// Hooks attaches programs to the devices of a node. Its methods may be called concurrently.
type Hooks struct {
	// Home is the host's network namespace.
	Home *netns.Namespace
	// Changes and Reads are rtnetlink sockets in Home. They are separate, so that replacing a filter does
	// not wait for a listing.
	Changes, Reads *rtnl.Conn
	// Filters makes AttachFirst use filters even if the kernel has tcx, as on kernels before 6.6.
	Filters bool

	probe    sync.Once
	probeErr error
	tcx      bool // set by probe
}

// Attach makes programs the first filters at their hooks of a device that has the clsact qdisc.
func (h *Hooks) Attach(d endpoint.HostDevice, programs []*program.Program) error {
	var b rtnl.Batch
	for _, p := range programs {
		setFilter(&b, d.Index, p)
	}
	if err := h.Changes.Do(&b); err != nil {
		return fmt.Errorf("%s: %w", d.Name, err)
	}
	return nil
}

// Prepare adds the clsact qdisc to a device if it has none.
func (h *Hooks) Prepare(d endpoint.HostDevice) error {
	var b rtnl.Batch
	AddClsact(&b, d.Index)
	if err := h.Changes.Do(&b, unix.EEXIST); err != nil {
		return fmt.Errorf("%s: %w", d.Name, err)
	}
	return nil
}

// AttachTo is like Attach, but for a device that may lack the qdisc.
func (h *Hooks) AttachTo(d endpoint.HostDevice, programs []*program.Program) error {
	if err := h.Prepare(d); err != nil {
		return err
	}
	return h.Attach(d, programs)
}

// AttachBeside is like AttachTo, but for a device on which other components may have filters, which stay. It fails if
// one of them has the priority of our filter, or if their qdisc has no such hook.
func (h *Hooks) AttachBeside(d endpoint.HostDevice, programs []*program.Program) error {
	if err := h.Prepare(d); err != nil {
		return err
	}
	kind, err := ingressQdisc(h.Reads, d.Index)
	if err != nil {
		return fmt.Errorf("find the ingress qdisc of %s: %w", d.Name, err)
	}
	for _, p := range programs {
		if kind != "clsact" && p.Hook != program.Ingress {
			return fmt.Errorf("filter %s at %s of %s: the device has the qdisc %s, which excludes clsact; remove it",
				p.Name, p.Hook, d.Name, kind)
		}
		f, ok, err := h.placeTaken(d, p.Hook)
		if err != nil {
			return err
		}
		if ok && (f.name != p.Name || f.handle != filterHandle) {
			return fmt.Errorf("filter %s at %s of %s: priority %d has filter %q of kind %s, handle %d, which is not ours",
				p.Name, p.Hook, d.Name, f.priority, f.name, f.kind, f.handle)
		}
	}
	return h.Attach(d, programs)
}

// placeTaken returns the filter at a hook that has the priority of our filter: our own filter, or a foreign one that
// prevents ours from being attached.
func (h *Hooks) placeTaken(d endpoint.HostDevice, at program.Hook) (filter, bool, error) {
	filters, err := filtersAt(h.Reads, d.Index, parents[at])
	if err != nil {
		return filter{}, false, fmt.Errorf("list filters of %s: %w", d.Name, err)
	}
	i := slices.IndexFunc(filters, func(f filter) bool {
		return f.priority == filterPriority && (f.handle == filterHandle || f.kind != "bpf")
	})
	if i < 0 {
		return filter{}, false, nil
	}
	return filters[i], true, nil
}

// Detach removes our programs from a device, filters as well as tcx programs, and nothing else. It is not an
// error if one is gone.
func (h *Hooks) Detach(d endpoint.HostDevice, specs []program.Spec) error {
	if err := h.removeTCX(d, specs); err != nil {
		return err
	}
	return h.removeFilters(d, specs)
}

// removeTCX is like Detach, but for tcx programs.
func (h *Hooks) removeTCX(d endpoint.HostDevice, specs []program.Spec) error {
	return h.Home.Do(func() error {
		for _, s := range specs {
			places, err := placesAt(d, s.Hook)
			if err != nil {
				return fmt.Errorf("%s: %w", d.Name, err)
			}
			for _, o := range places {
				if !o.ours(s) {
					continue
				}
				if err := detachTCX(d, s.Hook, o.id); err != nil {
					return fmt.Errorf("remove program %s from %s of %s: %w", s.Name, s.Hook, d.Name, err)
				}
			}
		}
		return nil
	})
}

// removeFilters is like Detach, but for filters.
func (h *Hooks) removeFilters(d endpoint.HostDevice, specs []program.Spec) error {
	for _, p := range specs {
		f, ok, err := h.placeTaken(d, p.Hook)
		if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) {
			return nil // the device is gone, or has no such qdisc
		}
		if err != nil {
			return err
		}
		if !ok || f.name != p.Name || f.handle != filterHandle {
			continue
		}
		var b rtnl.Batch
		delFilter(&b, d.Index, p)
		b.For("remove filter %s from %s of %s", p.Name, p.Hook, d.Name)
		if err := h.Changes.Do(&b, unix.ENOENT, unix.ENODEV, unix.EINVAL); err != nil {
			return err
		}
	}
	return nil
}

// Check compares the hooks of a device with the expected programs. A filter or tcx program that runs before
// ours is a difference, too.
func (h *Hooks) Check(d endpoint.HostDevice, programs []*program.Program) (ds []endpoint.Difference, err error) {
	add := func(subject, key, want, have string) {
		ds = append(ds, endpoint.Difference{Subject: subject, Key: key, Want: want, Have: have})
	}
	for _, p := range programs {
		want := fmt.Sprintf("%s, program %d", p.Name, p.ID)
		filters, err := filtersAt(h.Reads, d.Index, parents[p.Hook])
		if errors.Is(err, unix.ENODEV) || errors.Is(err, unix.EINVAL) {
			err = nil // The device, or its qdisc, is gone. If the device is gone, another check reports it.
		}
		if err != nil {
			return nil, fmt.Errorf("list filters of %s: %w", d.Name, err)
		}
		key := d.Name + " " + string(p.Hook)
		if len(filters) == 0 {
			add(endpoint.SubjectFilter, key, want, "")
			continue
		}
		// Only the first filter matters: a filter before ours could let packets pass.
		switch f := filters[0]; {
		case f.kind != "bpf":
			add(endpoint.SubjectFilter, key, want, "a filter of kind "+f.kind)
		case f.priority != filterPriority || f.handle != filterHandle || !f.direct:
			add(endpoint.SubjectFilter, key, want, fmt.Sprintf("%s, priority %d, handle %d", f.name, f.priority, f.handle))
		case !p.Current(ebpf.ProgramID(f.program)):
			add(endpoint.SubjectFilter, key, want, fmt.Sprintf("%s, program %d", f.name, f.program))
		}
	}
	err = h.checkTCX(&ds, d.Index, d.Name)
	return ds, err
}
