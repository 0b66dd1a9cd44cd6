// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/mapdump"
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
		if visit, err = k.Endpoints.MarkDeleted(visit); err != nil {
			return err
		}
	}
	return format.Each(m, mapdump.Names{Node: nodeName, Now: conntrack.MonotonicSeconds()}, visit)
}
