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

// ofSubscribers aggregates a value over all subscribers.
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
	newMetric("contested_frontends", "Frontends that several services want; one has it.",
		func(st owner.Status) float64 { return float64(st.Contested) }),
	newMetric("backends", "Distinct addresses and ports of endpoints.",
		func(st owner.Status) float64 { return float64(st.Backends) }),
	newMetric("refused_objects", "Files and objects whose last version is not applied. Each needs a look.",
		func(st owner.Status) float64 { return float64(st.Refused) }),
	newMetric("revision", "Revision of the services.", func(st owner.Status) float64 { return float64(st.Revision) }),
	newMetric("connected_subscribers", "Connected subscribers of frontends.",
		ofSubscribers(func(sum uint64, s owner.SubscriberStatus) uint64 {
			if s.Connected {
				sum++
			}
			return sum
		})),
	newMetric("enforced_revision", "Revision that every connected subscriber that enforces has; 0 without one.",
		func(st owner.Status) float64 {
			least, some := uint64(0), false
			for _, s := range st.Subscribers {
				if s.Connected && s.Enforces && (!some || s.Revision < least) {
					least, some = s.Revision, true
				}
			}
			return float64(least)
		}),
	newMetric("waiting_frontends", "Frontends that changed and are not sent, of the connected subscriber that has most.",
		ofSubscribers(func(most uint64, s owner.SubscriberStatus) uint64 {
			if s.Connected {
				most = max(most, uint64(s.Waiting))
			}
			return most
		})),
	newMetric("refused_frontends",
		"Frontends that subscribers refused; the kernel removes backends from them and adds none. Each needs a look.",
		ofSubscribers(func(sum uint64, s owner.SubscriberStatus) uint64 { return sum + uint64(len(s.Refusals)+s.Omitted) })),
	newMetric("health_check_services", "Services that ask for a health check port.",
		func(st owner.Status) float64 { return float64(st.HealthChecks) }),
	newMetric("unsynced_sources", "Sources not listed completely since the start.", func(st owner.Status) float64 {
		n := 0
		for _, s := range st.Sources {
			if !s.Synced && s.Manager == "" { // a manager need not list what it has
				n++
			}
		}
		return float64(n)
	}),
	newMetric("state_bytes", "Size of the state file.", func(st owner.Status) float64 { return float64(st.Journal) }),
	newMetric("problems", "Problems in the status.", func(st owner.Status) float64 { return float64(st.ProblemCount) }),
}

// Limits that tenants share; the label limit is "frontends" or "backends".
var (
	limitDesc = prometheus.NewDesc("sluice_loadbalancer_limit",
		"Size of a limit that tenants share: the smaller of the setting and of what the datapath can hold.",
		[]string{"limit"}, nil)
	limitUsedDesc = prometheus.NewDesc("sluice_loadbalancer_limit_used", "Units of the limit that are in use.",
		[]string{"limit"}, nil)
	exceedsDesc = prometheus.NewDesc("sluice_loadbalancer_exceeds_share",
		"Units that tenants ask for beyond their share of the limit; they are not applied.", []string{"limit"}, nil)
)

// turns are the metrics of the owner's loop; the label operation is an operation of package owner.
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

// collectTimeout bounds the wait of a scrape for the owner.
const collectTimeout = 5 * time.Second

// Collect implements prometheus.Collector. If the owner does not answer in time, it exports nothing
// instead of old values.
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
