// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/kit/desired/loop/loopmetrics"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
)

type metric struct {
	desc  *prometheus.Desc
	value func(owner.Status) float64
}

func newMetric(name, help string, value func(owner.Status) float64) metric {
	return metric{prometheus.NewDesc("sluice_loadbalancer_"+name, help, nil, nil), value}
}

// ofSubscribers returns a value that is aggregated over all subscribers.
func ofSubscribers(add func(sum uint64, s owner.SubscriberStatus) uint64) func(owner.Status) float64 {
	return func(st owner.Status) float64 {
		sum := uint64(0)
		for _, s := range st.Subscribers {
			sum = add(sum, s)
		}
		return float64(sum)
	}
}

var metrics = []metric{
	newMetric("services", "Services currently applied, including services without frontends.",
		func(st owner.Status) float64 { return float64(st.Services) }),
	newMetric("endpoint_slices", "Endpoint slices currently applied.",
		func(st owner.Status) float64 { return float64(st.Slices) }),
	newMetric("orphaned_slices", "Endpoint slices whose service is missing.",
		func(st owner.Status) float64 { return float64(st.Orphans) }),
	newMetric("frontends", "Frontends of all services.", func(st owner.Status) float64 { return float64(st.Frontends) }),
	newMetric("contested_frontends", "Frontends that several services claim; one of these services has it.",
		func(st owner.Status) float64 { return float64(st.Contested) }),
	newMetric("backends", "Distinct addresses and ports of endpoints.",
		func(st owner.Status) float64 { return float64(st.Backends) }),
	newMetric("refused_objects",
		"Files and objects whose newest version is not applied; `sluice status` lists the reasons.",
		func(st owner.Status) float64 { return float64(st.Refused) }),
	newMetric("revision", "Revision of the services.", func(st owner.Status) float64 { return float64(st.Revision) }),
	newMetric("connected_subscribers", "Connected subscribers of frontends.",
		ofSubscribers(func(sum uint64, s owner.SubscriberStatus) uint64 {
			if s.Connected {
				sum++
			}
			return sum
		})),
	newMetric("enforced_revision", "Revision that every connected datapath has enforced; 0 if none is connected.",
		func(st owner.Status) float64 {
			least, some := uint64(0), false
			for _, s := range st.Subscribers {
				if s.Connected && s.Enforces && (!some || s.Revision < least) {
					least, some = s.Revision, true
				}
			}
			return float64(least)
		}),
	newMetric("waiting_frontends",
		"Changed frontends that are not sent yet to the connected subscriber with the most of them.",
		ofSubscribers(func(most uint64, s owner.SubscriberStatus) uint64 {
			if s.Connected {
				most = max(most, uint64(s.Waiting))
			}
			return most
		})),
	newMetric("refused_frontends",
		"Frontends that subscribers refused, so that the kernel only removes their backends; `sluice status` shows why.",
		ofSubscribers(func(sum uint64, s owner.SubscriberStatus) uint64 { return sum + uint64(len(s.Refusals)+s.Omitted) })),
	newMetric("health_check_services", "Services that have a health check port.",
		func(st owner.Status) float64 { return float64(st.HealthChecks) }),
	newMetric("unsynced_sources", "Sources not listed completely since the start.", func(st owner.Status) float64 {
		n := 0
		for _, s := range st.Sources {
			if !s.Synced && s.Manager == "" { // a manager need not send all its objects
				n++
			}
		}
		return float64(n)
	}),
	newMetric("state_bytes", "Size of the state file.", func(st owner.Status) float64 { return float64(st.Journal) }),
	newMetric("problems", "Problems in the status.", func(st owner.Status) float64 { return float64(st.ProblemCount) }),
}

// Metrics of the limits that tenants share; the label limit is "frontends" or "backends".
var (
	limitDesc = prometheus.NewDesc("sluice_loadbalancer_limit",
		"Size of a limit that tenants share: the smaller one of the setting and the datapath's capacity.",
		[]string{"limit"}, nil)
	limitUsedDesc = prometheus.NewDesc("sluice_loadbalancer_limit_used", "Units of the limit that are in use.",
		[]string{"limit"}, nil)
	exceedsDesc = prometheus.NewDesc("sluice_loadbalancer_exceeds_share",
		"Units that tenants ask for beyond their share of the limit; they are not applied.", []string{"limit"}, nil)
)

// turns are the metrics of the owner's loop; the values of the label operation are defined in package owner.
var turns = loopmetrics.New("sluice_loadbalancer_", "the services")

// Collector exports the owner's metrics.
type Collector struct{ Owner *owner.Owner }

// Describe implements prometheus.Collector.
func (Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range metrics {
		ch <- m.desc
	}
	ch <- limitDesc
	ch <- limitUsedDesc
	ch <- exceedsDesc
	turns.Describe(ch)
}

// collectTimeout is the maximum time that a scrape waits for the owner.
const collectTimeout = 5 * time.Second

// Collect implements prometheus.Collector. If the owner does not answer in time, it exports no values, so that it never
// exports old ones.
func (c Collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout)
	defer cancel()
	st, err := c.Owner.Reader().Status(ctx)
	if err != nil {
		return
	}
	for _, m := range metrics {
		ch <- prometheus.MustNewConstMetric(m.desc, prometheus.GaugeValue, m.value(st))
	}
	for _, l := range st.Limits {
		ch <- prometheus.MustNewConstMetric(limitDesc, prometheus.GaugeValue, float64(l.Size), l.Name)
		ch <- prometheus.MustNewConstMetric(limitUsedDesc, prometheus.GaugeValue, float64(l.Used), l.Name)
		ch <- prometheus.MustNewConstMetric(exceedsDesc, prometheus.GaugeValue, float64(l.Asked-l.Used), l.Name)
	}
	turns.Collect(ch, c.Owner.Figures())
}
