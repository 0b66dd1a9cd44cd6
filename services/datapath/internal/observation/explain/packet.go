// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"fmt"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/dryrun"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// packets runs a program of an endpoint on the first packet of a connection.
type packets struct {
	endpoints *endpointmap.Maps
	nodes     *nodemap.Maps
	replicas  *dryrun.Programs
}

func (packets) reads() facts { return ends }
func (packets) sets() facts  { return verdict | nextPacket }

func (p packets) explain(t *query, x *Explanation) (err error) {
	q := dryrun.Question{Program: program.FromPod, Far: x.Destination.Slot}
	near := x.Source
	if !x.Source.endpoint() {
		q.Program, q.Far, near = program.ToPod, x.Source.Slot, x.Destination
		// a packet with an address of the host is sent by the host itself, not forwarded
		q.Forwarded = x.Source.Slot != endpointmap.HostID
		if x.Source.Node != 0 {
			// as if the tunnel's program had passed the packet to the stack: a test run cannot set the tunnel key
			local, err := p.nodes.Local()
			if err != nil {
				return err
			}
			q.Tunnel = local.TunnelIfindex
		}
	}
	if !near.endpoint() {
		return fmt.Errorf("%v, %v: %w", t.Initiator.Addr(), t.Responder.Addr(), ErrNotLocal)
	}
	if q.Near, err = p.endpoints.At(near.Slot); err != nil {
		return err
	}
	frame := func(begins bool) []byte {
		if q.Program == program.FromPod {
			return dryrun.Frame(q.Near.MAC, q.Near.HostMAC, t.Tuple, begins)
		}
		return dryrun.Frame(q.Near.HostMAC, q.Near.MAC, t.Tuple, begins)
	}
	t.next = q
	t.next.Frame = frame(false)
	q.Frame = frame(true)
	return p.first(x, q)
}

// first evaluates a packet that belongs to no connection.
func (p packets) first(x *Explanation, q dryrun.Question) error {
	a, err := p.replicas.Run(q)
	if err != nil {
		return err
	}
	x.Reason = a.Reason
	x.Source.Identity, x.Destination.Identity = a.Source, a.Destination
	egress, ingress := a.Egress, a.Ingress
	if egress.By != event.ByNobody && ingress.By == event.ByNobody && x.Destination.Slot != endpointmap.NoID {
		q.LetOut = true
		if a, err = p.replicas.Run(q); err != nil {
			return err
		}
		ingress = a.Ingress
	}
	if egress.By != event.ByNobody {
		x.Egress = &Side{SideVerdict: egress}
	}
	if ingress.By != event.ByNobody {
		x.Ingress = &Side{SideVerdict: ingress}
	}
	return nil
}
