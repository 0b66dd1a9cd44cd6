// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package event

import (
	"fmt"
	"maps"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// Reason is the reason why a packet was forwarded or dropped. Its numbers are the same in the programs and in
// sluice.datapath.v1.Reason; String returns the stable name for metrics and events.
type Reason uint32

// Reasons returns every reason that this build knows, by number.
func Reasons() []Reason { return slices.Sorted(maps.Keys(reasonNames)) }

// String returns the stable name, or the number if this build does not know the reason.
func (r Reason) String() string {
	if name, ok := reasonNames[r]; ok {
		return name
	}
	return fmt.Sprintf("reason-%d", uint32(r))
}

// Dropped reports whether the packet was dropped.
func (r Reason) Dropped() bool { return r >= firstDrop }

// Quiet reports whether the reason is only counted and sends no events, because every pod regularly causes it.
func (r Reason) Quiet() bool { return r >= firstQuiet && r < firstLate }

// Direction is the direction, seen from the endpoint, in which a packet was counted.
type Direction uint32

const (
	// Egress: sent by an endpoint.
	Egress = Direction(bpf.MapsSlDirectionSL_EGRESS)
	// Ingress: received by an endpoint.
	Ingress = Direction(bpf.MapsSlDirectionSL_INGRESS)
)

// String returns "egress" or "ingress".
func (d Direction) String() string {
	switch d {
	case Egress:
		return "egress"
	case Ingress:
		return "ingress"
	}
	return fmt.Sprintf("direction-%d", uint32(d))
}

// Events are the maps of events and counters.
type Events struct {
	gate                   pin.Gate
	ring, counters, limits *ebpf.Map
	bounds                 *bound.Bounds
}

// Open finds the maps of events.
func Open(pm *pin.Maps, bounds *bound.Bounds) *Events {
	return &Events{
		bounds: bounds,
		gate:   pin.Gate{ValidateOnly: pm.ValidateOnly},
		ring:   pm.Map(bpf.MapsMapSlEvents), counters: pm.Map(bpf.MapsMapSlMetrics), limits: pm.Map(bpf.MapsMapSlLimits),
	}
}

// Close makes every later call fail. Readers are closed by their owner.
func (es *Events) Close() { es.gate.Close() }

// Counter is the counter of one reason and direction.
type Counter struct {
	Reason    Reason
	Direction Direction
	Packets   uint64
	// Bytes includes Ethernet headers; a GSO packet counts with its full length.
	Bytes uint64
}

// Metrics returns the non-zero counters, summed over the CPUs, sorted by reason. They only grow while the maps exist. A
// packet between two local pods is counted once: as egress, or as ingress if the receiver's policy dropped it.
func (es *Events) Metrics() ([]Counter, error) {
	if err := es.gate.RLock(); err != nil {
		return nil, err
	}
	defer es.gate.RUnlock()
	var cs []Counter
	err := pin.EachPerCPU(es.counters, func(key uint32, perCPU []bpf.MapsSlCounter) {
		c := Counter{Reason: Reason(key >> 1), Direction: Direction(key&1 + 1)}
		for _, v := range perCPU {
			c.Packets += v.Packets
			c.Bytes += v.Bytes
		}
		if c.Packets > 0 {
			cs = append(cs, c)
		}
	})
	if err != nil {
		return nil, err
	}
	return cs, nil
}

// Lost returns the number of events that were dropped since the maps were created, because a reason exceeded its rate
// or the reader was too slow. The packets themselves are counted in Metrics.
func (es *Events) Lost() (uint64, error) {
	if err := es.gate.RLock(); err != nil {
		return 0, err
	}
	defer es.gate.RUnlock()
	var lost uint64
	err := pin.EachPerCPU(es.limits, func(_ uint32, perCPU []bpf.MapsSlLimit) {
		for _, v := range perCPU {
			lost += v.LostTotal
		}
	})
	if err != nil {
		return 0, err
	}
	return lost, nil
}
