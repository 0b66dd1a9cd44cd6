// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package flowmetrics counts flows in metrics with Hubble's names, so that dashboards for Hubble work.
package flowmetrics

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/filter"
)

// Names are the groups of metrics that can be enabled.
var Names = []string{"dns", "drop", "flow", "icmp", "port-distribution", "tcp"}

// Labels are the labels that can be added to each metric, as in Hubble's labelsContext, in the order of the metrics.
var Labels = []string{
	"source_ip", "source_pod", "source_namespace", "source_app", "destination_ip", "destination_pod",
	"destination_namespace", "destination_app", "traffic_direction",
}

// Options select metrics. The zero value has none.
type Options struct {
	Names  []string // of Names
	Labels []string // of Labels
	// MaxSeries limits the number of series of all metrics together. All tenants share one half of the series; the
	// other half is divided equally among maxTenants. Flows that would need a further series are only counted as
	// omitted.
	MaxSeries int
}

// maxTenants is the number of tenants with a guarantee. All further tenants share one guarantee.
const maxTenants = 64

// Validate returns an error that names the first unknown value.
func (o Options) Validate() error {
	for _, name := range o.Names {
		if !slices.Contains(Names, name) {
			return fmt.Errorf("%q is not one of %s", name, strings.Join(Names, ", "))
		}
	}
	for _, name := range o.Labels {
		if !slices.Contains(Labels, name) {
			return fmt.Errorf("the label %q is not one of %s", name, strings.Join(Labels, ", "))
		}
	}
	if o.MaxSeries < 2*maxTenants {
		return fmt.Errorf("%d series are less than %d", o.MaxSeries, 2*maxTenants)
	}
	return nil
}

// Metrics counts flows.
type Metrics struct {
	enabled map[string]bool
	labels  []string // in the order of Labels
	max     int

	drops, flows, icmp, ports, tcp *prometheus.CounterVec
	dns                            dnsMetrics
	lost                           *prometheus.CounterVec
	leftOut                        prometheus.Counter

	mu     sync.Mutex
	key    []byte                        // guarded by mu; key of the series that add looks up
	series map[string]prometheus.Counter // guarded by mu
	shared int                           // guarded by mu; series beyond the guarantees
	owned  map[string]int                // guarded by mu; series within the guarantee, by tenant
}

// New returns metrics that have no series yet.
func New(o Options) *Metrics {
	m := &Metrics{
		enabled: make(map[string]bool), max: o.MaxSeries, series: make(map[string]prometheus.Counter),
		owned: make(map[string]int),
	}
	for _, name := range o.Names {
		m.enabled[name] = true
	}
	for _, name := range Labels {
		if slices.Contains(o.Labels, name) {
			m.labels = append(m.labels, name)
		}
	}
	counter := func(name, help string, first, last []string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help},
			slices.Concat(first, m.labels, last))
	}
	m.drops = counter("hubble_drop_total", "Dropped packets that were reported, by reason.", nil,
		[]string{"reason", "protocol"})
	m.flows = counter("hubble_flows_processed_total", "Flows, by type and verdict.",
		[]string{"protocol", "type", "subtype", "verdict"}, nil)
	m.icmp = counter("hubble_icmp_total", "Flows of ICMP, by type.", []string{"family", "type"}, nil)
	m.ports = counter("hubble_port_distribution_total", "Forwarded flows that are no replies, by destination port.",
		[]string{"protocol", "port"}, nil)
	m.tcp = counter("hubble_tcp_flags_total", "Flags of forwarded TCP flows.", []string{"flag", "family"}, nil)
	m.dns = newDNSMetrics(func(name, help string, last ...string) *prometheus.CounterVec {
		return counter(name, help, nil, last)
	})
	m.lost = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "hubble_lost_events_total", Help: "Events that are missing, by where they were lost.",
	}, []string{"source"})
	m.leftOut = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "sluice_hubble_metrics_left_out_total",
		Help: "Increments that were left out, because flowMetrics.maxSeries is reached.",
	})
	return m
}

// NeedLabels reports whether Count needs the labels of flows.
func (m *Metrics) NeedLabels() bool {
	return slices.ContainsFunc(m.labels, func(name string) bool { return strings.HasSuffix(name, "_app") })
}

func (m *Metrics) all() []prometheus.Collector {
	return []prometheus.Collector{
		m.drops, m.flows, m.icmp, m.ports, m.tcp, m.dns.queries, m.dns.responses, m.dns.responseTypes, m.lost, m.leftOut,
	}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.all() {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.all() {
		c.Collect(ch)
	}
}

// CountLost counts events that are missing.
func (m *Metrics) CountLost(source flow.LostEventSource, count uint64) {
	m.lost.WithLabelValues(strings.ToLower(source.String())).Add(float64(count))
}

// Count counts a flow of a tenant.
func (m *Metrics) Count(tenant string, f *flow.Flow) {
	context := m.values(f)
	protocol := protocolOf(f)
	if m.enabled["drop"] && f.GetVerdict() == flow.Verdict_DROPPED && f.GetL7() == nil {
		m.add(tenant, "drop", m.drops, nil, context, f.GetDropReasonDesc().String(), protocol)
	}
	if m.enabled["flow"] {
		kind, subtype := typeOf(f)
		m.add(tenant, "flow", m.flows, []string{protocol, kind, subtype, f.GetVerdict().String()}, context)
	}
	if m.enabled["dns"] {
		m.countDNS(tenant, f, context)
	}
	if x := f.GetL4().GetICMPv4(); x != nil && m.enabled["icmp"] {
		m.add(tenant, "icmp", m.icmp, []string{"IPv4", hubbleflow.ICMPName(false, x.GetType(), x.GetCode())}, context)
	}
	if x := f.GetL4().GetICMPv6(); x != nil && m.enabled["icmp"] {
		m.add(tenant, "icmp", m.icmp, []string{"IPv6", hubbleflow.ICMPName(true, x.GetType(), x.GetCode())}, context)
	}
	if f.GetVerdict() != flow.Verdict_FORWARDED && f.GetVerdict() != flow.Verdict_REDIRECTED || f.GetL7() != nil {
		return // the packet was counted with the verdict on its connection
	}
	if m.enabled["tcp"] {
		for _, flag := range flags(f.GetL4().GetTCP().GetFlags()) {
			m.add(tenant, "tcp", m.tcp, []string{flag, f.GetIP().GetIpVersion().String()}, context)
		}
	}
	if _, port, ok := filter.Ports(f); ok && m.enabled["port-distribution"] && f.GetIsReply() != nil &&
		!f.GetIsReply().GetValue() {
		m.add(tenant, "port", m.ports, []string{protocol, strconv.Itoa(int(port))}, context)
	}
}

// add increments a series, if it exists or may be created.
func (m *Metrics) add(
	tenant, name string, c *prometheus.CounterVec, first, context []string, last ...string,
) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.key = append(m.key[:0], name...)
	for _, values := range [][]string{first, context, last} {
		for _, v := range values {
			m.key = append(append(m.key, 0), v...)
		}
	}
	series, ok := m.series[string(m.key)] // the conversion does not copy the key
	if !ok {
		if !m.admit(tenant) {
			m.leftOut.Inc()
			return
		}
		series = c.WithLabelValues(slices.Concat(first, context, last)...)
		m.series[string(m.key)] = series
	}
	series.Inc()
}

// admit reports whether a further series may be created. Called with mu held.
func (m *Metrics) admit(tenant string) bool {
	if _, known := m.owned[tenant]; !known && len(m.owned) >= maxTenants-1 {
		tenant = "" // all tenants without a guarantee of their own
	}
	switch {
	case m.owned[tenant] < m.max/2/maxTenants:
		m.owned[tenant]++
	case m.shared < m.max/2:
		m.shared++
	default:
		return false
	}
	return true
}

// values returns the values of the chosen labels.
func (m *Metrics) values(f *flow.Flow) (values []string) {
	for _, name := range m.labels {
		e, address := f.GetSource(), f.GetIP().GetSource()
		side, property, _ := strings.Cut(name, "_")
		if side == "destination" {
			e, address = f.GetDestination(), f.GetIP().GetDestination()
		}
		switch property {
		case "ip":
			values = append(values, address)
		case "pod":
			values = append(values, e.GetPodName())
		case "namespace":
			values = append(values, e.GetNamespace())
		case "app":
			values = append(values, app(e.GetLabels()))
		default: // traffic_direction
			direction := "unknown"
			if d := f.GetTrafficDirection(); d != flow.TrafficDirection_TRAFFIC_DIRECTION_UNKNOWN {
				direction = strings.ToLower(d.String())
			}
			values = append(values, direction)
		}
	}
	return values
}

// app returns the name of the application from labels, by the same keys as Hubble.
func app(labels []string) string {
	for _, key := range []string{"k8s:app.kubernetes.io/name=", "k8s:k8s-app=", "k8s:app="} {
		for _, l := range labels {
			if value, ok := strings.CutPrefix(l, key); ok && value != "" {
				return value
			}
		}
	}
	return ""
}

func protocolOf(f *flow.Flow) string {
	switch f.GetL4().GetProtocol().(type) {
	case *flow.Layer4_TCP:
		return "TCP"
	case *flow.Layer4_UDP:
		return "UDP"
	case *flow.Layer4_ICMPv4:
		return "ICMPv4"
	case *flow.Layer4_ICMPv6:
		return "ICMPv6"
	case *flow.Layer4_SCTP:
		return "SCTP"
	}
	return "Unknown L4"
}

// typeOf returns the type and subtype of a flow in Hubble's metrics.
func typeOf(f *flow.Flow) (kind, subtype string) {
	switch f.GetEventType().GetType() {
	case hubbleflow.TypeDrop:
		return "Drop", ""
	case hubbleflow.TypePolicyVerdict:
		return "PolicyVerdict", ""
	case hubbleflow.TypeTrace:
		return "Trace", strings.ToLower(strings.ReplaceAll(f.GetTraceObservationPoint().String(), "_", "-"))
	case hubbleflow.TypeAccessLog:
		if f.GetL7().GetDns() != nil {
			return "L7", "DNS"
		}
		return "L7", ""
	}
	return "Unknown", strconv.Itoa(int(f.GetEventType().GetType()))
}

// flags returns the flags that Hubble counts.
func flags(x *flow.TCPFlags) (names []string) {
	if x.GetFIN() {
		names = append(names, "FIN")
	}
	switch {
	case x.GetSYN() && x.GetACK():
		names = append(names, "SYN-ACK")
	case x.GetSYN():
		names = append(names, "SYN")
	}
	if x.GetRST() {
		names = append(names, "RST")
	}
	return names
}
