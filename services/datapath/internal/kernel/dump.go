// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/mapdump"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// MapNames returns the names of the maps, sorted.
func (k *Kernel) MapNames() []string { return k.Pins.Names() }

// Dump passes the entries of a map to visit as text, in the format of package mapdump. Entries that are added
// or deleted during the call may be missing.
//
// No lock is held while visit runs, so visit may be slow.
func (k *Kernel) Dump(name string, visit func(key, value string) error) error {
	return k.dump(name, nil, visit)
}

// Dumper dumps maps with the names of nodes next to their IDs.
type Dumper struct {
	*Kernel
	NodeName func(id uint16) string // "" if unknown
}

// Dump is Kernel.Dump with names of nodes.
func (d Dumper) Dump(name string, visit func(key, value string) error) error {
	return d.dump(name, d.NodeName, visit)
}

func (k *Kernel) dump(name string, nodeName func(uint16) string, visit func(key, value string) error) error {
	m, err := k.Pins.Borrow(name)
	if err != nil {
		return err
	}
	defer m.Close()
	compiled, err := bpf.LoadMaps()
	if err != nil {
		return fmt.Errorf("read the compiled maps: %w", err)
	}
	format, err := mapdump.Of(compiled.Maps[name], compiled.Types)
	if err != nil {
		return fmt.Errorf("dump %s: %w", name, err)
	}
	if name == bpf.MapsMapSlEp {
		if visit, err = k.withoutEndpoint(visit); err != nil {
			return err
		}
	}
	return format.Each(m, mapdump.Names{Node: nodeName, Now: conntrack.MonotonicSeconds()}, visit)
}

// withoutEndpoint marks the entries of sl_ep that no device refers to: a released endpoint ID keeps the entry
// of its last endpoint, and denies everything.
func (k *Kernel) withoutEndpoint(visit func(key, value string) error) (func(key, value string) error, error) {
	devices, err := k.Pins.Borrow(bpf.MapsMapSlIf)
	if err != nil {
		return nil, err
	}
	defer devices.Close()
	used := map[string]bool{"endpoint 0": true} // the host, which has no device
	err = pin.EachEntry(devices, pin.Unguarded, func(_, ids []uint32) error {
		for _, id := range ids {
			used[fmt.Sprintf("endpoint %d", id)] = true
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return func(key, value string) error {
		if !used[key] {
			value = "deleted: " + value
		}
		return visit(key, value)
	}, nil
}
