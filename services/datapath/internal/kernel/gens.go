// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// firstMarker is where the numbers begin that stand in a connection for a gen
// that it does not have: SL_GENS_BUSY less the number of a CPU. The counter
// does not get there: it would take a century of a thousand changes a minute.
const firstMarker = 0xffff0000

// raiseGens continues the counter of gens behind every gen that is in use. It
// is needed if sl_gen is new and other maps are not: gens that were used twice
// would vouch for verdicts of another policy.
func (k *Kernel) raiseGens() error {
	if !k.Pins.Created(bpf.MapsMapSlGen) || !k.Pins.Adopted {
		return nil
	}
	most := uint32(0)
	raise := func(gen uint32) {
		if gen < firstMarker {
			most = max(most, gen)
		}
	}
	for s := range MaxEndpoints + 1 {
		raise(policyOf(atomic.LoadUint64(k.word(Slot(s)))).Gen)
	}
	for _, m := range connectionMaps(k.Pins) {
		if err := m.eachGens(raise); err != nil {
			return err
		}
	}
	atomic.StoreUint64(pin.Word(k.Pins.Memory(bpf.MapsMapSlGen), 0), uint64(most))
	k.log.Warn("counter of gens was lost and continues behind those in use", "gen", most)
	return nil
}

// connectionMaps are all maps of connections, those of the version before among
// them.
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

// eachGens visits the gens of every connection, which are the first word of its
// value in every layout.
func (m connectionMap) eachGens(visit func(uint32)) error {
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
