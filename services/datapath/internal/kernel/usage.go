// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"maps"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// MapUsage returns the usage of all maps, sorted by name. For maps with a value at every index, Entries is the
// number of indices in use.
func (k *Kernel) MapUsage() ([]pin.Usage, error) {
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
	us := make([]pin.Usage, len(infos))
	for i, info := range infos {
		n, ok := used[info.Name]
		if !ok {
			if n, err = k.Pins.Count(info.Name); err != nil {
				return nil, err
			}
		}
		us[i] = pin.Usage{Info: info, Entries: n}
	}
	return us, nil
}
