// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"fmt"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// PacketsPart describes the packets that the programs counted.
type PacketsPart struct{ Packets }

var (
	packetsDesc = desc("packets_total", "Packets by reason and direction, since the maps were created.", "reason",
		"direction", "dropped")
	bytesDesc = desc("bytes_total", "Bytes by reason and direction, Ethernet headers included.", "reason", "direction",
		"dropped")
	lostDesc = desc("events_lost_total", "Events that the kernel dropped, since the maps were created.")
)

func (p PacketsPart) packets() ([]event.Counter, error) {
	counters, err := p.PacketCounters()
	if err != nil {
		return nil, fmt.Errorf("read counters: %w", err)
	}
	return counters, nil
}

func (p PacketsPart) report(r *report) (err error) {
	counters, err := p.packets()
	if err != nil {
		return err
	}
	if r.EventsLost, err = p.LostEvents(); err != nil {
		return fmt.Errorf("read lost events: %w", err)
	}
	for _, c := range counters {
		r.PacketCounters = append(r.PacketCounters, &datapathv1.PacketCounter{
			Reason: datapathv1.Reason(c.Reason), Direction: netv1.Direction(c.Direction), Dropped: c.Reason.Dropped(),
			Packets: c.Packets, Bytes: c.Bytes,
		})
	}
	return nil
}

// Describe implements prometheus.Collector.
func (PacketsPart) Describe(ch chan<- *prometheus.Desc) {
	describe(ch, packetsDesc, bytesDesc, lostDesc)
}

// Collect implements prometheus.Collector.
func (p PacketsPart) Collect(ch chan<- prometheus.Metric) {
	counters, err := p.packets()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(packetsDesc, err)
	}
	for _, c := range counters {
		labels := []string{c.Reason.String(), c.Direction.String(), strconv.FormatBool(c.Reason.Dropped())}
		counter(ch, packetsDesc, c.Packets, labels...)
		counter(ch, bytesDesc, c.Bytes, labels...)
	}
	if lost, err := p.LostEvents(); err == nil {
		counter(ch, lostDesc, lost)
	}
}

// MapsPart describes how full the maps are.
type MapsPart struct {
	Usage func() ([]pin.Usage, error)
}

var (
	mapBytesDesc = desc("map_bytes", "Memory of each map as the kernel accounts it.", "map")
	usedDesc     = desc("map_entries", "Entries in use, by map.", "map")
	sizeDesc     = desc("map_entries_max", "Maximum number of entries, by map.", "map")
	capacityDesc = desc("connections_max", "Connections that fit.", "family")
)

// connectionMaps maps the connection tables to their families.
var connectionMaps = map[string]string{"sl_ct4": "ipv4", "sl_ct6": "ipv6"}

func (p MapsPart) usage() ([]pin.Usage, error) {
	usage, err := p.Usage()
	if err != nil {
		return nil, fmt.Errorf("read the usage of maps: %w", err)
	}
	return usage, nil
}

func (p MapsPart) report(r *report) error {
	usage, err := p.usage()
	for _, m := range usage {
		r.Maps = append(r.Maps, &datapathv1.MapUsage{
			Name: m.Name, Entries: int64(m.Entries), MaxEntries: m.MaxEntries, Bytes: m.Bytes,
		})
	}
	return err
}

// Describe implements prometheus.Collector.
func (MapsPart) Describe(ch chan<- *prometheus.Desc) {
	describe(ch, mapBytesDesc, usedDesc, sizeDesc, capacityDesc)
}

// Collect implements prometheus.Collector.
func (p MapsPart) Collect(ch chan<- prometheus.Metric) {
	usage, err := p.usage()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(mapBytesDesc, err)
	}
	for _, u := range usage {
		gauge(ch, mapBytesDesc, float64(u.Bytes), u.Name)
		gauge(ch, usedDesc, float64(u.Entries), u.Name)
		gauge(ch, sizeDesc, float64(u.MaxEntries), u.Name)
		if family, ok := connectionMaps[u.Name]; ok {
			gauge(ch, capacityDesc, float64(u.MaxEntries), family)
		}
	}
}

// Connections counts tracked connections.
type Connections struct {
	LiveIPv4, LiveIPv6                           uint64 // as of the last collection
	Created, Revoked, Expired, Evicted, PickedUp uint64
	Reevaluated, Related, Unremembered           uint64
	PickUpStopped                                int           // endpoints whose connections are not picked up
	Collected                                    time.Duration // how long the last collection took
	EvictedAt                                    time.Time     // when new evictions were last found; zero: never in this run
	OutsideSpent                                 time.Time     // when the external budget was last spent; zero: never in this run
}

// connectionsIn returns the counts of a subject.
func connectionsIn(x ConnectionCounts) (Connections, error) {
	c, last, stopped, err := x.CountConnections()
	if err != nil {
		return Connections{}, err
	}
	return Connections{
		LiveIPv4: uint64(last.Live[0]), LiveIPv6: uint64(last.Live[1]), Created: c.Created, Revoked: c.Revoked, Expired: c.Expired,
		Evicted: last.Evicted, PickedUp: c.PickedUp, Reevaluated: c.Reevaluated, Related: c.Related, Unremembered: c.Unremembered,
		PickUpStopped: stopped, Collected: last.Took, EvictedAt: last.EvictedAt, OutsideSpent: last.OutsideSpent,
	}, nil
}

// lossNews is the time for which a warning is shown after evictions or exhausted budgets were found.
const lossNews = 5 * time.Minute

func (c Connections) warnings(now time.Time) (all []string) {
	if !c.EvictedAt.IsZero() && now.Sub(c.EvictedAt) < lossNews {
		all = append(all, fmt.Sprintf("connections were evicted because the map is full, found at %s, %d in all: late "+
			"answers over UDP may be dropped, TCP connections continue; `sluice map list` shows how full it is, `sluice "+
			"observe --reason connection-budget` which containers use it up", c.EvictedAt.UTC().Format(time.RFC3339), c.Evicted))
	}
	if !c.OutsideSpent.IsZero() && now.Sub(c.OutsideSpent) < lossNews {
		all = append(all, fmt.Sprintf("connections from outside exceeded their budget, last at %s: new ones from outside "+
			"were dropped, even if policies allow them; open connections and new ones of containers are not affected; `sluice "+
			"observe --reason connection-budget` shows who begins them", c.OutsideSpent.UTC().Format(time.RFC3339)))
	}
	if c.PickUpStopped > 0 {
		all = append(all, fmt.Sprintf("policies have terminated more connections than endpoints may record, %d so far: "+
			"TCP connections of %d endpoints without an entry are not picked up, and have to be opened again; `sluice shares` "+
			"shows the records", c.Unremembered, c.PickUpStopped))
	}
	return all
}

// ConnectionsPart describes the tracked connections.
type ConnectionsPart struct {
	Counts func() (Connections, error)
}

var (
	liveDesc     = desc("connections", "Tracked connections as of the last collection.", "family")
	begunDesc    = desc("connections_created_total", "Connections created, since the maps were created.")
	endedDesc    = desc("connections_ended_total", "Connections removed, by reason.", "reason")
	evictedDesc  = desc("connections_evicted_total", "Connections evicted because the table was full; a lower bound.")
	pickedUpDesc = desc("connections_picked_up_total", "Connections picked up mid-stream after their eviction.")

	unrememberedDesc = desc("connections_unremembered_total",
		"Revoked connections that only their entry records, because their endpoint had used up its share of records.")
	stoppedDesc = desc("endpoints_without_pick_up",
		"Endpoints whose connections are not picked up, because the record of a revoked one may be missing.")
	reevaluatedDesc = desc("packets_reevaluated_total",
		"Packets whose connection was evaluated again because a policy or an address had changed.")
	relatedDesc    = desc("connections_related_total", "ICMP errors forwarded because they belong to a connection.")
	collectingDesc = desc("connection_collect_seconds", "How long the last collection took.")
)

func (p ConnectionsPart) report(r *report) error {
	c, err := p.Counts()
	if err != nil {
		return err
	}
	r.Connections = &datapathv1.ConnectionCounts{
		Live: c.LiveIPv4 + c.LiveIPv6, Created: c.Created, Revoked: c.Revoked, Expired: c.Expired, Evicted: c.Evicted,
		PickedUp: c.PickedUp,
	}
	r.warn(c.warnings(time.Now())...)
	return nil
}

// Describe implements prometheus.Collector.
func (ConnectionsPart) Describe(ch chan<- *prometheus.Desc) {
	describe(ch, liveDesc, begunDesc, endedDesc, evictedDesc, pickedUpDesc, unrememberedDesc, stoppedDesc, reevaluatedDesc,
		relatedDesc, collectingDesc)
}

// Collect implements prometheus.Collector.
func (p ConnectionsPart) Collect(ch chan<- prometheus.Metric) {
	c, err := p.Counts()
	if err != nil {
		ch <- prometheus.NewInvalidMetric(begunDesc, err)
		return
	}
	gauge(ch, liveDesc, float64(c.LiveIPv4), "ipv4")
	gauge(ch, liveDesc, float64(c.LiveIPv6), "ipv6")
	counter(ch, endedDesc, c.Revoked, "revoked")
	counter(ch, endedDesc, c.Expired, "expired")
	counter(ch, begunDesc, c.Created)
	counter(ch, evictedDesc, c.Evicted)
	counter(ch, pickedUpDesc, c.PickedUp)
	counter(ch, reevaluatedDesc, c.Reevaluated)
	counter(ch, relatedDesc, c.Related)
	counter(ch, unrememberedDesc, c.Unremembered)
	gauge(ch, stoppedDesc, float64(c.PickUpStopped))
	gauge(ch, collectingDesc, c.Collected.Seconds())
}

// BoundsPart describes the limits that endpoints share in the programs' maps. Status does not have them.
type BoundsPart struct {
	Bounds *bound.Bounds
}

// The metrics of limits, of endpoints and of tenants.
var (
	limitDesc = desc("limit", "Size of a limit: capacity of the policy maps that tenants share, or capacity of another map "+
		"that endpoints share.", "limit")
	limitUsedDesc = desc("limit_used", "Units of the limit that are in use.", "limit")
)

func (BoundsPart) report(*report) error { return nil }

// Describe implements prometheus.Collector.
func (BoundsPart) Describe(ch chan<- *prometheus.Desc) { describe(ch, limitDesc, limitUsedDesc) }

// Collect implements prometheus.Collector.
func (p BoundsPart) Collect(ch chan<- prometheus.Metric) {
	for _, b := range bound.Counted() {
		if size := p.Bounds.Size(b); size > 0 {
			gauge(ch, limitDesc, float64(size), b.String())
			gauge(ch, limitUsedDesc, float64(p.Bounds.Total(b)), b.String())
		}
	}
}
