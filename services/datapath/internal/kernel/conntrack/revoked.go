// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// TCP connections that a policy has terminated are recorded in sl_revoked4 and sl_revoked6, in addition to
// their entries, which the kernel may evict. The programs insert and refresh the records; the collector removes
// records that were not used for the life of an established connection.

// lostConnections reports whether the programs have lost connections: one of their maps was created although
// other maps of the instance were adopted. A new map of another layout has lost none if it takes over the
// entries of the previous map.
func lostConnections(pm *pin.Maps) bool {
	for _, m := range []struct{ connections, previous, revoked string }{
		{bpf.MapsMapSlCt4, bpf.MapsMapSlPrev4, bpf.MapsMapSlRevoked4},
		{bpf.MapsMapSlCt6, bpf.MapsMapSlPrev6, bpf.MapsMapSlRevoked6},
	} {
		lost := pm.Created(m.connections) && pm.Previous(m.previous) == nil ||
			pm.Created(m.revoked) && !pm.Created(m.connections)
		if pm.Adopted && lost {
			return true
		}
	}
	return false
}

// collectRevoked removes the records that were not used for life seconds, and counts the remaining ones.
func (ct *Connections) collectRevoked(now, life uint32) (remain [2]int, err error) {
	if remain[0], err = collectRecords[bpf.MapsSlCtKey4](ct, bpf.MapsMapSlRevoked4, now, life); err != nil {
		return remain, err
	}
	remain[1], err = collectRecords[bpf.MapsSlCtKey6](ct, bpf.MapsMapSlRevoked6, now, life)
	return remain, err
}

func collectRecords[K any](ct *Connections, name string, now, life uint32) (remain int, err error) {
	const some = 512 // of at most 12,288; usually there are few
	keys, values := make([]K, some), make([]bpf.MapsSlRevoked, some)
	var cursor ebpf.MapBatchCursor
	for end := false; !end; {
		if err := ct.gate.RLock(); err != nil {
			return remain, err
		}
		m := ct.pins.Map(name)
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		if end = errors.Is(err, ebpf.ErrKeyNotExist); err != nil && !end {
			ct.gate.RUnlock()
			return remain, fmt.Errorf("list %s: %w", name, err)
		}
		for i := range n {
			remain++
			if int32(now-values[i].LastS) < int32(life) {
				continue
			}
			if err := pin.DeleteKey(m, &keys[i]); err != nil {
				ct.gate.RUnlock()
				return remain, fmt.Errorf("delete from %s: %w", name, err)
			}
			remain--
		}
		ct.gate.RUnlock()
	}
	return remain, nil
}
