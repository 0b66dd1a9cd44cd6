// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"encoding/binary"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// EachEpoch passes the epochs of all connections to visit.
func (ct *Connections) EachEpoch(visit func(uint32)) error {
	for _, m := range connectionMaps(ct.pins) {
		if err := m.eachEpochs(visit); err != nil {
			return err
		}
	}
	return nil
}

// connectionMaps returns all maps of connections, including the previous version's.
func connectionMaps(pm *pin.Maps) []connectionMap {
	var ms []connectionMap
	for _, p := range pin.PreviousMaps {
		ms = append(ms, connectionMap{pm.Map(p.Current)})
		if m := pm.Previous(p.Previous); m != nil {
			ms = append(ms, connectionMap{m})
		}
	}
	return ms
}

type connectionMap struct{ *ebpf.Map }

// eachEpochs passes the epochs of every connection to visit. In every layout they are the first word of the
// value.
func (m connectionMap) eachEpochs(visit func(uint32)) error {
	visitAll := func(values [][6]uint64) error {
		for _, v := range values {
			visit(uint32(v[0] >> 32))
			visit(uint32(v[0]))
		}
		return nil
	}
	if int(m.KeySize()) == binary.Size(bpf.MapsSlCtKey4{}) {
		return pin.EachEntry(m.Map, pin.Unguarded, func(_ []bpf.MapsSlCtKey4, v [][6]uint64) error { return visitAll(v) })
	}
	return pin.EachEntry(m.Map, pin.Unguarded, func(_ []bpf.MapsSlCtKey6, v [][6]uint64) error { return visitAll(v) })
}
