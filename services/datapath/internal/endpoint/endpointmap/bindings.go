// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpointmap

import "github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"

// Bindings lists the endpoints with the tables that evaluate them.
func (eps *Maps) Bindings() ([]nodetable.Binding, error) {
	endpoints, err := eps.List()
	if err != nil {
		return nil, err
	}
	out := make([]nodetable.Binding, len(endpoints))
	for i := range endpoints {
		e := &endpoints[i]
		out[i] = nodetable.Binding{
			Slot: e.Slot, Identity: uint32(e.Identity), Addrs: e.Addrs(),
			Egress: e.Policy.Egress, Ingress: e.Policy.Ingress, Epoch: e.Policy.Epoch,
		}
	}
	return out, nil
}
