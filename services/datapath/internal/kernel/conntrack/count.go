// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
)

// Responder is the end that did not begin a connection.
type Responder struct {
	netip.AddrPort
	Protocol uint8
}

// Count is the number of connections of a responder.
type Count struct {
	Responder
	Connections int
}

// CountByResponder counts the connections of each wanted responder, sorted by address, port and protocol. It does not
// count connections that are opening, have ended or were terminated by a policy. It does not count connections that the
// next pass of a Collector with the same timeouts would remove, or that no packet has moved from the maps of the
// previous version. It calls wanted for each connection. Its memory use is proportional to the number of wanted
// responders with connections.
func (ct *Connections) CountByResponder(
	ctx context.Context, t Timeouts, wanted func(Responder) bool,
) ([]Count, error) {
	counts := map[Responder]int{}
	err := ct.Each(func(cs []Connection) error {
		// Read after the batch: if an endpoint is missing now, it has been removed.
		present := map[endpointmap.ID]endpointmap.Endpoint{}
		now := MonotonicSeconds()
		for i := range cs {
			c := &cs[i]
			r := Responder{c.Responder, c.Protocol}
			if !c.open(now, t) || !wanted(r) {
				continue
			}
			orphaned, err := ct.orphaned(c, present)
			if err != nil {
				return err
			}
			if !orphaned {
				counts[r]++
			}
		}
		return ctx.Err()
	})
	if err != nil {
		return nil, err
	}
	sorted := make([]Count, 0, len(counts))
	for r, n := range counts {
		sorted = append(sorted, Count{r, n})
	}
	slices.SortFunc(sorted, func(a, b Count) int {
		return cmp.Or(a.AddrPort.Compare(b.AddrPort), cmp.Compare(a.Protocol, b.Protocol))
	})
	return sorted, nil
}

// open reports whether the ends of the connection can exchange data: any handshake is complete, and neither an
// end, a policy nor the idle timeout has ended it.
func (c *Connection) open(now uint32, t Timeouts) bool {
	if c.Asked || c.Flags.Closing() || c.Flags.Revoked() ||
		int32(now-c.LastSeen) >= int32(t.Of(c.Protocol, c.Flags)/time.Second) {
		return false
	}
	switch c.Protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_SCTP:
		return c.Flags&Established != 0
	}
	return true
}
