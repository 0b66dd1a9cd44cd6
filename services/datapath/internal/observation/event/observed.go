// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package event

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"time"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/observe"
)

// Observed is what one side said, as observers see it; empty if it was not
// evaluated.
func (s SideVerdict) Observed(slot endpointmap.ID) observe.Side {
	if s.By == ByNobody {
		return observe.Side{}
	}
	o := observe.Side{
		By: uint8(s.By), Verdict: observe.Dropped, Rule: s.Rule, Table: uint16(s.Table), Epoch: s.Epoch, Slot: slot,
	}
	switch {
	case s.Audited:
		o.Verdict = observe.Audited
	case s.Redirects():
		o.Verdict = observe.Redirected
	case s.Action == ActionAllow:
		o.Verdict = observe.Forwarded
	}
	return o
}

// lossInterval is how long a loss may stay untold when no event follows.
const lossInterval = time.Second

// Owners says whose slots are.
type Owners interface {
	SpecOfSlot(slot uint16) (endpoint.Spec, bool)
}

// Services says which service answers at an address.
type Services interface {
	// ServiceAt is "shop/web:http"; empty: none is known.
	ServiceAt(at netip.AddrPort, protocol uint8) string
}

// Policies know what the numbers of rules and epochs mean.
type Policies interface {
	// Revision of the policy that the epoch of a slot enforces.
	Revision(slot uint16, epoch uint32) (revision uint64, ok bool)
	// RuleSources are the places of a rule of the table that the slot had in that
	// direction in that epoch; empty if not known.
	RuleSources(slot uint16, epoch uint32, egress bool, rule uint16) []string
	// Proxy is the kind of proxy that the rule redirects to, 0 if it does not, or that
	// is not known.
	Proxy(slot uint16, epoch uint32, egress bool, rule uint16) uint16
}

// Names give names to the numbers of events.
type Names struct {
	Owners   Owners
	Services Services
	Policies Policies // nil: there are none
}

// Observe moves the programs' events into the ring until ctx ends. Each has the names
// of that time: whoever reads it later sees the rule that decided, also when that is
// gone. What the
// kernel has left out is told with the next event that knows of a loss, and
// without one after a while: a flood may end with what was left out.
func (es *Events) Observe(ctx context.Context, names Names, ring *observe.Ring) error {
	reader, err := es.Read()
	if err != nil {
		return err
	}
	defer reader.Close()
	told, err := es.Lost()
	if err != nil {
		return err
	}
	for {
		e, rerr := readWithin(ctx, reader, lossInterval)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		quiet := errors.Is(rerr, context.DeadlineExceeded)
		if rerr != nil && !quiet {
			return fmt.Errorf("read events: %w", rerr)
		}
		// Each event tells what its CPU left out before it; the sum of all CPUs
		// has that too, and is told once.
		if quiet && reader.Waiting() == 0 {
			es.bounds.NoEvents()
		}
		var lost uint64
		if quiet || e.Lost > 0 {
			total, err := es.Lost()
			if err != nil {
				return err
			}
			lost, told = total-told, total
		}
		o := observe.Event{Time: time.Now()}
		if !quiet {
			o = e.observed(names)
		}
		o.KernelLost = uint32(min(lost, math.MaxUint32))
		if !quiet || lost > 0 {
			ring.Add(o)
		}
	}
}

func readWithin(ctx context.Context, r *Reader, d time.Duration) (Event, error) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return r.Read(ctx)
}

func (e Event) observed(names Names) observe.Event {
	o := observe.Event{
		Type: observe.Type(e.Type), Time: e.Time, Reason: uint32(e.Reason), Egress: e.Direction == Egress,
		Verdict: e.verdict(),
		Source:  e.Source, Destination: e.Destination, Protocol: e.Protocol, TCPFlags: e.TCPFlags,
		SourceIdentity: uint32(e.SourceIdentity), DestinationIdentity: uint32(e.DestinationIdentity),
		Length: e.Length, SourceMAC: e.SourceMAC, Ifindex: e.Ifindex, EtherType: e.EtherType, Reply: e.Reply, Node: e.Node,
	}
	if e.Original.IsValid() {
		o.Original, o.Service = e.Original, names.Services.ServiceAt(e.Original, e.Protocol)
	}
	sender, receiver := e.SourceSlot, e.DestinationSlot
	if e.Reply {
		sender, receiver = receiver, sender
	}
	o.Sender = names.side(e.Egress.Observed(sender), true)
	o.Receiver = names.side(e.Ingress.Observed(receiver), false)
	o.From, o.To = endOf(names.Owners, e.SourceSlot), endOf(names.Owners, e.DestinationSlot)
	return o
}

// side adds the names of the policy and the rule.
func (n Names) side(s observe.Side, egress bool) observe.Side {
	if n.Policies == nil || s.By == 0 {
		return s
	}
	if revision, ok := n.Policies.Revision(s.Slot, s.Epoch); ok {
		s.Revision = revision
	}
	if s.Rule != 0 {
		s.Sources = n.Policies.RuleSources(s.Slot, s.Epoch, egress, s.Rule)
		s.Proxy = n.Policies.Proxy(s.Slot, s.Epoch, egress, s.Rule)
	}
	return s
}

func endOf(owners Owners, slot endpointmap.ID) observe.End {
	if slot == endpointmap.NoID {
		return observe.End{}
	}
	spec, _ := owners.SpecOfSlot(slot)
	return observe.End{Slot: slot, Owner: spec.Owner, Pod: spec.Pod}
}

// verdict says what became of the packet.
func (e Event) verdict() observe.Verdict {
	switch {
	case e.Reason.Dropped():
		return observe.Dropped
	case e.Egress.Audited || e.Ingress.Audited:
		return observe.Audited
	case e.Egress.Redirects() || e.Ingress.Redirects():
		return observe.Redirected
	}
	return observe.Forwarded
}
