// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// TCP connections that a policy has terminated are recorded in sl_revoked4 and sl_revoked6, in addition to
// their entries, which the kernel may evict. The programs insert and refresh the records; the collector removes
// records that were not used for the life of an established connection, and divides the maps among the endpoints.

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

// revokedSlot is SL_REVOKED_SLOT_SHIFT: above it, the flags of a record hold the endpoint that the record is charged
// to.
const revokedSlot = 16

// collectRevoked removes the records that were not used for life seconds, and those whose endpoint was removed. It
// counts the remaining ones, and divides the maps among the endpoints.
func (ct *Connections) collectRevoked(now, life uint32) (remain [2]int, err error) {
	c := revokedCollection{ct: ct, now: now, life: life, present: map[endpointmap.ID]endpointmap.Endpoint{}}
	remain[0], err = collectRecords(&c, bpf.MapsMapSlRevoked4, bound.Revoked4, func(k bpf.MapsSlCtKey4) [2]netip.Addr {
		return [2]netip.Addr{pin.Addr4(k.Lo), pin.Addr4(k.Hi)}
	})
	if err != nil {
		return remain, err
	}
	remain[1], err = collectRecords(&c, bpf.MapsMapSlRevoked6, bound.Revoked6, func(k bpf.MapsSlCtKey6) [2]netip.Addr {
		return [2]netip.Addr{netip.AddrFrom16(k.Lo), netip.AddrFrom16(k.Hi)}
	})
	return remain, err
}

// revokedCollection is one collection of the records.
type revokedCollection struct {
	ct        *Connections
	now, life uint32
	present   map[endpointmap.ID]endpointmap.Endpoint // without addresses: removed
}

// isOver reports whether a record is no longer needed. A record that names no endpoint comes from a flush or from an
// earlier version.
func (c *revokedCollection) isOver(v bpf.MapsSlRevoked, ends [2]netip.Addr) (bool, error) {
	if int32(c.now-v.LastS) >= int32(c.life) {
		return true, nil
	}
	s := endpointmap.ID(v.Flags >> revokedSlot)
	if s == endpointmap.HostID {
		return false, nil
	}
	e, ok := c.present[s]
	if !ok {
		var err error
		if e, err = c.ct.endpoints.Lookup(s); err != nil && !errors.Is(err, endpointmap.ErrNotFound) {
			return false, err
		}
		c.present[s] = e
	}
	return !slices.Contains(ends[:], e.IPv4) && !slices.Contains(ends[:], e.IPv6), nil
}

func collectRecords[K any](
	c *revokedCollection, name string, of bound.Bound, ends func(K) [2]netip.Addr,
) (remain int, err error) {
	m, pass := c.ct.pins.Map(name), c.ct.bounds.Begin(of)
	err = pin.EachEntry(m, c.ct.gate.Read, func(keys []K, values []bpf.MapsSlRevoked) error {
		for i := range keys {
			over, err := c.isOver(values[i], ends(keys[i]))
			if err != nil {
				return err
			}
			if over {
				if err := pin.DeleteKey(m, &keys[i]); err != nil {
					return fmt.Errorf("delete from %s: %w", name, err)
				}
				continue
			}
			remain++
			if s := endpointmap.ID(values[i].Flags >> revokedSlot); s != endpointmap.HostID {
				pass.Add(s, 1)
			}
		}
		return nil
	})
	if err != nil {
		return remain, fmt.Errorf("collect %s: %w", name, err)
	}
	pass.Finish()
	return remain, nil
}
