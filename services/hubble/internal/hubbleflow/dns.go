// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hubbleflow

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/proto/wire/flowwire"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
)

// observationSource is the process that has evaluated the message.
const observationSource = "sluice-dns"

// layer7 returns the DNS message of an event; nil if it has none.
func layer7(m *datapathv1.DNSMessage) *flow.Layer7 {
	if m == nil {
		return nil
	}
	out := &flow.Layer7{Type: flow.L7FlowType_REQUEST}
	dns := &flow.DNS{
		Query: m.GetName(), Qtypes: []string{flowwire.QueryType(m.GetQueryType())}, Rcode: m.GetResponseCode(),
		ObservationSource: observationSource,
	}
	if m.GetResponse() {
		out.Type = flow.L7FlowType_RESPONSE
		dns.Ips, dns.Cnames, dns.Ttl = m.GetAddresses(), m.GetCnameTargets(), m.GetTtlSeconds()
		dns.Rrtypes = recordTypes(dns)
	}
	out.Record = &flow.Layer7_Dns{Dns: dns}
	return out
}

// recordTypes returns the types of the records with the addresses and CNAMEs of an answer.
func recordTypes(dns *flow.DNS) (types []string) {
	if len(dns.GetCnames()) > 0 {
		types = append(types, "CNAME")
	}
	if slices.ContainsFunc(dns.GetQtypes(), func(t string) bool { return t != "A" && t != "AAAA" }) {
		return types // the addresses may be hints in other records
	}
	for _, address := range dns.GetIps() {
		t := "A"
		if strings.Contains(address, ":") {
			t = "AAAA"
		}
		if !slices.Contains(types, t) {
			types = append(types, t)
		}
	}
	return types
}

// dnsSummary returns the text of a message in the last column of `hubble observe`.
func dnsSummary(m *datapathv1.DNSMessage) string {
	question := cmp.Or(m.GetName(), "(redacted)") + " " + flowwire.QueryType(m.GetQueryType())
	if !m.GetResponse() {
		return "DNS Query " + question
	}
	answer := flowwire.ResponseCode(m.GetResponseCode())
	if len(m.GetAddresses()) > 0 {
		answer = fmt.Sprintf("%q TTL: %d", strings.Join(m.GetAddresses(), ","), m.GetTtlSeconds())
	}
	if len(m.GetCnameTargets()) > 0 {
		answer += fmt.Sprintf(" CNAMEs: %q", strings.Join(m.GetCnameTargets(), ","))
	}
	return fmt.Sprintf("DNS Answer %s (%s %s)", answer, observationSource, question)
}
