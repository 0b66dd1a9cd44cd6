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

// Responder is the end of connections that did not begin them.
type Responder struct {
	netip.AddrPort
	Protocol uint8
}

// Count says how many connections a responder has.
type Count struct {
	Responder
	Connections int
}

// CountByResponder counts the connections of each responder that is wanted, sorted by
// address, port and protocol. Those that are opening, that have ended, that a policy
// has terminated, or that the next pass of a Collector with the same timeouts removes
// are not counted, and neither are those that no packet has moved from the maps of the
// version before. It takes memory for what it returns alone, and calls wanted for each
// connection.
func (ct *Connections) CountByResponder(
	ctx context.Context, t Timeouts, wanted func(Responder) bool,
) ([]Count, error) {
	counts := map[Responder]int{}
	err := ct.Each(func(cs []Connection) error {
		// read after the batch: an endpoint that is not there now is gone
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

// open says whether the ends of the connection can exchange data: its handshake is over
// if it has one, and neither its ends nor a policy nor its idle time has ended it.
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
