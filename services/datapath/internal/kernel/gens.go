// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
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
	raiseAll := func(values []bpf.MapsSlCt) error {
		for _, v := range values {
			raise(uint32(v.Gens >> 32))
			raise(uint32(v.Gens))
		}
		return nil
	}
	err := errors.Join(
		eachEntry(k.maps.byName[bpf.MapsMapSlCt4], func(_ []bpf.MapsSlCtKey4, v []bpf.MapsSlCt) error { return raiseAll(v) }),
		eachEntry(k.maps.byName[bpf.MapsMapSlCt6], func(_ []bpf.MapsSlCtKey6, v []bpf.MapsSlCt) error { return raiseAll(v) }),
	)
	if err != nil {
		return err
	}
	atomic.StoreUint64(word(k.maps.genMem, 0), uint64(most))
	k.log.Warn("counter of gens was lost and continues behind those in use", "gen", most)
	return nil
}

// eachEntry reads a hash by batches, as eachBatch does.
func eachEntry[K, V any](m *ebpf.Map, visit func([]K, []V) error) error {
	keys, values := make([]K, connectionBatch), make([]V, connectionBatch)
	var cursor ebpf.MapBatchCursor
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		end := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !end {
			return fmt.Errorf("list %v: %w", m, err)
		}
		if err := visit(keys[:n], values[:n]); err != nil || end {
			return err
		}
	}
}
