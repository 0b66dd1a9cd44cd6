// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package exchange

import (
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/services/dns/internal/message"
	"github.com/sluice-net/sluice/services/dns/internal/report"
)

// reportQuery reports a query. refused is the result in the reply to a refused query; NoError means that the query
// was allowed.
func (x *Exchange) reportQuery(c Connection, q *message.Query, refused message.RCode) {
	if x.o.Report == nil || !x.o.Report.Wants(c.Endpoint) {
		return
	}
	x.o.Report.Add(c.Endpoint, report.Message{
		Time: x.o.Now(), Client: c.Client, Server: c.Server, TCP: c.TCP, Name: string(q.Name()), Type: q.Type,
		Dropped: refused != message.NoError, Code: uint16(refused),
	})
}

// reportAnswer reports the last answer that was read.
func (x *Exchange) reportAnswer(c Connection, r *reader, dropped bool) {
	if x.o.Report == nil || !x.o.Report.Wants(c.Endpoint) {
		return
	}
	a := &r.answer
	m := report.Message{
		Time: x.o.Now(), Client: c.Client, Server: c.Server, TCP: c.TCP, Name: string(a.Name()), Type: a.Type, Response: true,
		Dropped: dropped, Code: uint16(a.Code),
	}
	if !dropped { // the content of a dropped answer may be forged
		r.readChain()
		m.Chain = slices.Clone(r.chain)
		m.Addresses = make([]netip.Addr, 0, len(a.Addresses))
		for i, addr := range a.Addresses {
			m.Addresses = append(m.Addresses, addr.Addr)
			if i == 0 || addr.TTL < m.TTL {
				m.TTL = addr.TTL
			}
		}
	}
	x.o.Report.Add(c.Endpoint, m)
}
