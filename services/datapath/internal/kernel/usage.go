// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import "maps"

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
	used := map[string]int{} // of maps where it is not the number of keys
	for _, usage := range []func() (map[string]int, error){k.Tables.Usage, k.Services.Usage, k.Endpoints.Usage} {
		some, err := usage()
		if err != nil {
			return nil, err
		}
		maps.Copy(used, some)
	}
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
