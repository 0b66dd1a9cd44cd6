// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"maps"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// MapUsage says how full a map is.
type MapUsage struct {
	Name       string
	Entries    int // in use
	MaxEntries uint32
	Bytes      uint64 // memory as the kernel accounts it, 0 if unknown
}

// MapUsage says how full the maps are, sorted by name. Maps that hold a value
// for every index count those that are in use.
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
