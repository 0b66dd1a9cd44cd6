// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package flowmetrics

import (
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
)

// dnsMetrics count DNS messages. Their labels contain no name, because each lookup may be for another one.
type dnsMetrics struct{ queries, responses, responseTypes *prometheus.CounterVec }

func newDNSMetrics(counter func(name, help string, last ...string) *prometheus.CounterVec) dnsMetrics {
	return dnsMetrics{
		queries: counter("hubble_dns_queries_total", "DNS queries, by type.", "rcode", "qtypes", "ips_returned"),
		responses: counter("hubble_dns_responses_total", "DNS responses, by response code.",
			"rcode", "qtypes", "ips_returned"),
		responseTypes: counter("hubble_dns_response_types_total", "Types of records in DNS responses.", "type", "qtypes"),
	}
}

// rcodes are Hubble's names of response codes.
var rcodes = map[uint32]string{
	0: "No Error", 1: "Format Error", 2: "Server Failure", 3: "Non-Existent Domain", 4: "Not Implemented",
	5: "Query Refused", 6: "Name Exists when it should not", 7: "RR Set Exists when it should not",
	8: "RR Set that should exist does not", 9: "Not Authorized", 10: "Name not contained in zone",
	11: "DSO-TYPE Not Implemented", 16: "Bad OPT Version",
}

// countDNS counts a DNS message, as Hubble does: a refused query has the response code "Policy denied", and other
// queries have none.
func (m *Metrics) countDNS(tenant string, f *flow.Flow, context []string) {
	message := f.GetL7().GetDns()
	if message == nil {
		return
	}
	types, addresses := strings.Join(message.GetQtypes(), ","), strconv.Itoa(len(message.GetIps()))
	switch {
	case f.GetVerdict() == flow.Verdict_DROPPED:
		m.add(tenant, "dns", m.dns.queries, nil, context, "Policy denied", types, addresses)
	case f.GetL7().GetType() != flow.L7FlowType_RESPONSE:
		m.add(tenant, "dns", m.dns.queries, nil, context, "", types, addresses)
	default:
		code := rcodes[message.GetRcode()]
		m.add(tenant, "dnsr", m.dns.responses, nil, context, code, types, addresses)
		for _, t := range message.GetRrtypes() {
			m.add(tenant, "dnst", m.dns.responseTypes, nil, context, t, types)
		}
	}
}
