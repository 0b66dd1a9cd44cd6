// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpointmap

import (
	"fmt"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Usage returns the number of elements in use, by map name, for maps where this is not the number of keys.
func (eps *Maps) Usage() (map[string]int, error) {
	n, err := eps.Count()
	return map[string]int{bpf.MapsMapSlEp: n + 1}, err // with the host
}

// MarkDeleted returns a visitor for dumped entries of sl_ep. It marks the entries that no device refers to, and passes
// all entries to visit. A released endpoint ID keeps the entry of its last endpoint, which denies everything.
func (eps *Maps) MarkDeleted(visit func(key, value string) error) (func(key, value string) error, error) {
	used := map[string]bool{"endpoint 0": true} // the host, which has no device
	err := pin.EachEntry(eps.devices, eps.gate.Read, func(_, ids []uint32) error {
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
