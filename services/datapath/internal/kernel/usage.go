// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"maps"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// MapUsage describes how full a map is.
type MapUsage struct {
	Name       string
	Entries    int // in use
	MaxEntries uint32
	Bytes      uint64 // memory as the kernel accounts it, 0 if unknown
}

// MapUsage returns the usage of all maps, sorted by name. For maps with a value at every index, Entries is the
// number of indices in use.
func (k *Kernel) MapUsage() ([]MapUsage, error) {
	infos, err := k.Pins.Infos()
	if err != nil {
		return nil, err
	}
	used, err := k.Tables.Usage()
	if err != nil {
		return nil, err
	}
	services, err := k.Services.Usage()
	if err != nil {
		return nil, err
	}
	maps.Copy(used, services)
	endpoints, err := k.Endpoints.Count()
	if err != nil {
		return nil, err
	}
	used[bpf.MapsMapSlEp] = endpoints + 1
	us := make([]MapUsage, len(infos))
	for i, info := range infos {
		n, ok := used[info.Name]
		if !ok {
			if n, err = k.Pins.Count(info.Name); err != nil {
				return nil, err
			}
		}
		us[i] = MapUsage{Name: info.Name, Entries: n, MaxEntries: info.MaxEntries, Bytes: info.Bytes}
	}
	return us, nil
}
