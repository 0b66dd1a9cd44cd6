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

	"github.com/sluice-net/sluice/model/flow"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/observe"
)

// Observed converts the verdict of one side for observers; empty if the side was not evaluated.
func (s SideVerdict) Observed(slot endpointmap.ID) flow.Side {
	if s.By == ByNobody {
		return flow.Side{}
	}
	o := flow.Side{
		By: uint8(s.By), Verdict: flow.Dropped, Rule: s.Rule, Table: uint16(s.Table), Epoch: s.Epoch, Slot: slot,
	}
	switch {
	case s.Audited:
		o.Verdict = flow.Audited
	case s.Redirects():
		o.Verdict = flow.Redirected
	case s.Action == ActionAllow:
		o.Verdict = flow.Forwarded
	}
	return o
}

// lossInterval is the maximum delay before a loss is reported if no event follows.
const lossInterval = time.Second

// Owners maps endpoint IDs to endpoints.
type Owners interface {
	SpecOfSlot(slot uint16) (endpoint.Spec, bool)
}

// Services maps addresses to services.
type Services interface {
	// ServiceAt returns the service, as "shop/web:http"; empty: none is known.
	ServiceAt(at netip.AddrPort, protocol uint8) string
}

// Policies maps the numbers of rules and epochs to policies.
type Policies interface {
	// Revision returns the policy revision of an endpoint's epoch.
	Revision(slot uint16, epoch uint32) (revision uint64, ok bool)
	// RuleSources returns the source locations of a rule in the endpoint's table for a direction and epoch; empty if
	// unknown.
	RuleSources(slot uint16, epoch uint32, egress bool, rule uint16) []string
	// Proxy returns the kind of proxy that the rule redirects to; 0 if it does not redirect, or if it is unknown.
	Proxy(slot uint16, epoch uint32, egress bool, rule uint16) uint16
}

// Names resolves the numbers in events.
type Names struct {
	Owners   Owners
	Services Services
	Policies Policies // nil: no policies
}

// Observe moves the programs' events into the ring until ctx ends. Names are resolved at that time, so that a later
// reader sees the rule that decided even if it no longer exists. Events that the kernel dropped are reported with the
// next event that indicates a loss or, without one, after lossInterval, because a flood may end with dropped events.
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
		// Each event contains the number of events that its CPU dropped before it. The sum over all CPUs
		// contains them, too, so each loss is reported once.
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
		o := flow.Event{Time: time.Now()}
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

func (e Event) observed(names Names) flow.Event {
	o := flow.Event{
		Type: flow.Type(e.Type), Time: e.Time, Reason: uint32(e.Reason), Egress: e.Direction == Egress,
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

// side adds the policy revision and the rule's source locations and proxy.
func (n Names) side(s flow.Side, egress bool) flow.Side {
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

func endOf(owners Owners, slot endpointmap.ID) flow.End {
	if slot == endpointmap.NoID {
		return flow.End{}
	}
	spec, _ := owners.SpecOfSlot(slot)
	return flow.End{Slot: slot, Owner: spec.Owner, Pod: spec.Pod}
}

func (e Event) verdict() flow.Verdict {
	switch {
	case e.Reason.Dropped():
		return flow.Dropped
	case e.Egress.Audited || e.Ingress.Audited:
		return flow.Audited
	case e.Egress.Redirects() || e.Ingress.Redirects():
		return flow.Redirected
	}
	return flow.Forwarded
}
