// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/kit/desired/loop/loopmetrics"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/summary"
)

// figures holds the values of the metrics.
type figures struct {
	summary.Status
	weight int
	cut    uint64
}

type metric struct {
	desc  *prometheus.Desc
	kind  prometheus.ValueType
	value func(figures) float64
}

func newMetric(name, help string, kind prometheus.ValueType, value func(figures) float64) metric {
	return metric{prometheus.NewDesc("sluice_policy_"+name, help, nil, nil), kind, value}
}

var metrics = []metric{
	newMetric("policies", "Policies that are enforced.", prometheus.GaugeValue,
		func(f figures) float64 { return float64(f.Policies) }),
	newMetric("refused_sources", "Files and objects that were refused, and stored policies that are not enforced; `sluice status` lists the reasons.", prometheus.GaugeValue,
		func(f figures) float64 { return float64(f.Refused) }),
	newMetric("reduced_tables",
		"Tables that lack rules of their subjects because of a limit; `sluice status` lists them.",
		prometheus.GaugeValue,
		func(f figures) float64 { return float64(f.Reduced) }),
	newMetric("policy_revision", "Revision of the policies.", prometheus.GaugeValue, func(f figures) float64 { return float64(f.Revision) }),
	newMetric("identities", "Identities known.", prometheus.GaugeValue, func(f figures) float64 { return float64(f.Identities) }),
	newMetric("waiting_identities",
		"Identities that a table treats as unknown because it has no capacity for them.", prometheus.GaugeValue,
		func(f figures) float64 { return float64(f.Waiting) }),
	newMetric("subjects", "Identities that have tables on this node.", prometheus.GaugeValue,
		func(f figures) float64 { return float64(f.Size.Subjects) }),
	newMetric("tables", "Tables; subjects with equal policy share them.", prometheus.GaugeValue, func(f figures) float64 { return float64(f.Size.Tables) }),
	newMetric("table_rows", "Rows of all tables: identity class to class.", prometheus.GaugeValue, func(f figures) float64 { return float64(f.Size.PeerRows) }),
	newMetric("table_intervals", "Port intervals of all tables.", prometheus.GaugeValue,
		func(f figures) float64 { return float64(f.Size.Intervals) }),
	newMetric("table_prefixes", "Prefixes of all tables.", prometheus.GaugeValue, func(f figures) float64 { return float64(f.Size.Prefixes) }),
	newMetric("merged_tables", "Tables with too many address classes, in which classes with equal verdicts are merged; a rule number may then mean several rules.",
		prometheus.GaugeValue, func(f figures) float64 { return float64(f.Size.Merged) }),
	newMetric("identity_classes", "Sets of peers that no table distinguishes.", prometheus.GaugeValue,
		func(f figures) float64 { return float64(f.Size.IdentityClasses) }),
	newMetric("compiled_tables_total", "Tables compiled.", prometheus.CounterValue, func(f figures) float64 { return float64(f.Counters.Tables) }),
	newMetric("learned_names", "DNS names with learned addresses.", prometheus.GaugeValue, func(f figures) float64 { return float64(f.Names) }),
	newMetric("learned_addresses",
		"Addresses learned for DNS names, including expired addresses that old connections use.", prometheus.GaugeValue,
		func(f figures) float64 { return float64(f.Addresses) }),
	newMetric("connected_subscribers", "Connected subscribers of the table stream.", prometheus.GaugeValue, func(f figures) float64 {
		n := 0
		for _, s := range f.Subscribers {
			if s.Connected {
				n++
			}
		}
		return float64(n)
	}),
	newMetric("unacknowledged_messages", "Largest number of unacknowledged messages, sent or due, of a connected subscriber.", prometheus.GaugeValue, func(f figures) float64 {
		most := uint64(0)
		for _, s := range f.Subscribers {
			most = max(most, s.Behind)
		}
		return float64(most)
	}),
	newMetric("refused_tables",
		"Tables that subscribers refused because they do not fit; a part is enforced, or the subject is isolated in that direction.",
		prometheus.GaugeValue, func(f figures) float64 {
			n := 0
			for _, s := range f.Subscribers {
				n += len(s.Refusals)
			}
			return float64(n)
		}),
	newMetric("disconnected_subscribers_total", "Subscribers that were disconnected for being too far behind.", prometheus.CounterValue, func(f figures) float64 { return float64(f.cut) }),
	newMetric("stream_log_bytes", "Approximate size of the steps kept for subscribers that are behind or may reconnect.",
		prometheus.GaugeValue, func(f figures) float64 { return float64(f.weight) }),
	newMetric("journal_bytes", "Size of the state files.", prometheus.GaugeValue, func(f figures) float64 { return float64(f.Journal) }),
	newMetric("unsynced_sources", "Sources that have not been complete since the start.", prometheus.GaugeValue, func(f figures) float64 {
		n := 0
		for _, s := range f.Sources {
			if !s.Synced && s.Manager == "" { // a manager need not list its policies
				n++
			}
		}
		return float64(n)
	}),
	newMetric("problems", "Problems in the status.", prometheus.GaugeValue, func(f figures) float64 { return float64(f.ProblemCount) }),
}

// turns measures the owner's time; package owner lists the values of the label operation.
var turns = loopmetrics.New("sluice_policy_", "policy")

// Metrics of the limits that tenants share. The label limit is the limit's name in the settings.
var (
	limitDesc = prometheus.NewDesc("sluice_policy_limit",
		"Size of a limit that tenants share.", []string{"limit"}, nil)
	limitUsedDesc = prometheus.NewDesc("sluice_policy_limit_used",
		"Units of the limit that are in use.", []string{"limit"}, nil)
	exceedsDesc = prometheus.NewDesc("sluice_policy_exceeds_share",
		"Units that tenants ask for beyond their share of the limit; policies that need them isolate their pods.",
		[]string{"limit"}, nil)
)

func collectLimit(ch chan<- prometheus.Metric, u shares.Usage) {
	for desc, v := range map[*prometheus.Desc]int{
		limitDesc: u.Limit.Size, limitUsedDesc: u.Used, exceedsDesc: u.Asked - u.Used,
	} {
		ch <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, float64(v), u.Limit.Name)
	}
}

// Collector exports the owner's figures to Prometheus.
type Collector struct{ Owner *owner.Owner }

// Describe implements prometheus.Collector.
func (Collector) Describe(ch chan<- *prometheus.Desc) {
	for _, m := range metrics {
		ch <- m.desc
	}
	for _, d := range []*prometheus.Desc{limitDesc, limitUsedDesc, exceedsDesc} {
		ch <- d
	}
	turns.Describe(ch)
}

// collectTimeout limits how long a scrape waits for a turn of the owner.
const collectTimeout = 5 * time.Second

// Collect implements prometheus.Collector. If the owner does not answer, it exports no values, so that it never exports
// old ones.
func (c Collector) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), collectTimeout)
	defer cancel()
	st, err := c.Owner.Reader().Status(ctx)
	if err != nil {
		return
	}
	f := figures{Status: st}
	f.weight, f.cut = c.Owner.Reader().Figures()
	for _, m := range metrics {
		ch <- prometheus.MustNewConstMetric(m.desc, m.kind, m.value(f))
	}
	for _, u := range f.Limits {
		collectLimit(ch, u)
	}
	turns.Collect(ch, f.Busy)
}
