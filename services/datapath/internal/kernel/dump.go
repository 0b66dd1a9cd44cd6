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

// MapNames lists the maps, sorted.
func (k *Kernel) MapNames() []string { return k.Pins.Names() }

// Dump hands the entries of a map to visit as text, as package mapdump writes them.
// Entries that come or go meanwhile may be missing.
//
// No lock is held while visit runs, so that it may be as slow as it likes.
func (k *Kernel) Dump(name string, visit func(key, value string) error) error {
	return k.dump(name, nil, visit)
}

// Dumper dumps maps with the names of nodes beside their IDs.
type Dumper struct {
	*Kernel
	NodeName func(id uint16) string // "": it is not known
}

// Dump is Kernel's.
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

// withoutEndpoint marks the entries of sl_ep that no device leads to: an endpoint ID that
// was given back keeps the entry of the endpoint that it had, and denies everything.
func (k *Kernel) withoutEndpoint(visit func(key, value string) error) (func(key, value string) error, error) {
	devices, err := k.Pins.Borrow(bpf.MapsMapSlIf)
	if err != nil {
		return nil, err
	}
	defer devices.Close()
	used := map[string]bool{"endpoint 0": true} // of the node's own processes, without a device
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
