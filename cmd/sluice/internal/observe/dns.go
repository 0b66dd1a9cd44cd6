// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/proto/wire/flowwire"
)

// messageText returns a query or an answer.
func messageText(m *datapathv1.DNSMessage, dropped bool) string {
	name := cmp.Or(m.GetName(), "(redacted)")
	if !m.GetResponse() {
		text := fmt.Sprintf("query %s %s", name, flowwire.QueryType(m.GetQueryType()))
		if dropped {
			text += ": " + flowwire.ResponseCode(m.GetResponseCode())
		}
		return text
	}
	text := fmt.Sprintf("answer %s %s: %s", name, flowwire.QueryType(m.GetQueryType()),
		flowwire.ResponseCode(m.GetResponseCode()))
	if len(m.GetCnameTargets()) > 0 {
		text += ", CNAME " + strings.Join(m.GetCnameTargets(), ", ")
	}
	if len(m.GetAddresses()) > 0 {
		text += fmt.Sprintf(", %s, TTL %d", strings.Join(m.GetAddresses(), ", "), m.GetTtlSeconds())
	}
	if dropped {
		text += ", to no query"
	}
	return text
}

// messageLine returns a DNS message with its time.
func messageLine(f *datapathv1.Flow, at string) string {
	return fmt.Sprintf("%s  %-9s %-14s %-7s %s  %s -> %s  %s by sluice-dns: %s", at,
		output.Enum(f.GetVerdict(), "VERDICT_"), "dns", output.Enum(f.GetDirection(), "DIRECTION_"), ownerText(f),
		endText(f.GetSource(), true), endText(f.GetDestination(), true), ports.ProtocolText(uint32(f.GetProtocol())),
		messageText(f.GetDns(), f.GetVerdict() == datapathv1.Verdict_VERDICT_DROPPED))
}
