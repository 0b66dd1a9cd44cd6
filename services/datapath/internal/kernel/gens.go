// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
)

// firstMarker is where the numbers begin that stand in a connection for a gen
// that it does not have: SL_GENS_BUSY less the number of a CPU. The counter
// does not get there: it would take a century of a thousand changes a minute.
const firstMarker = 0xffff0000

// raiseGens continues the counter of gens behind every gen that is in use. It
// is needed if sl_gen is new and other maps are not: gens that were used twice
// would vouch for verdicts of another policy.
func (k *Kernel) raiseGens() error {
	if !k.maps.created[bpf.MapsMapSlGen] || !k.maps.adopted {
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
	for _, m := range k.maps.connections() {
		if err := m.eachGens(raise); err != nil {
			return err
		}
	}
	atomic.StoreUint64(word(k.maps.genMem, 0), uint64(most))
	k.log.Warn("counter of gens was lost and continues behind those in use", "gen", most)
	return nil
}

// connections are all maps of connections, those of the version before among
// them.
func (pm *pinnedMaps) connections() []connectionMap {
	var ms []connectionMap
	for _, p := range previousMaps {
		ms = append(ms, connectionMap{pm.byName[p.current]})
		if m := pm.previous[p.previous]; m != nil {
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
		return eachEntry(m.Map, unguarded, func(_ []bpf.MapsSlCtKey4, v [][6]uint64) error { return visitAll(v) })
	}
	return eachEntry(m.Map, unguarded, func(_ []bpf.MapsSlCtKey6, v [][6]uint64) error { return visitAll(v) })
}

// eachEntry reads a hash by batches, as eachBatch does. Each batch is read and
// visited within guard.
func eachEntry[K, V any](m *ebpf.Map, guard func(func() error) error, visit func([]K, []V) error) error {
	keys, values := make([]K, connectionBatch), make([]V, connectionBatch)
	var cursor ebpf.MapBatchCursor
	for end := false; !end; {
		err := guard(func() error {
			n, err := m.BatchLookup(&cursor, keys, values, nil)
			end = errors.Is(err, ebpf.ErrKeyNotExist)
			if err != nil && !end {
				return fmt.Errorf("list %v: %w", m, err)
			}
			return visit(keys[:n], values[:n])
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// unguarded is for Open: nothing else uses the maps yet.
func unguarded(f func() error) error { return f() }
