// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
)

// Filter says which events a reader wants: what meets the criteria, and none of those
// that are excluded.
type Filter struct {
	Criteria

	Excluded []Criteria
	// Until leaves out what is later; zero: nothing is.
	Until time.Time
}

// Criteria of different kinds must all hold, of one kind one; an empty kind always
// holds. A repair is about an endpoint and no packet: criteria that only a packet can
// meet leave it out.
type Criteria struct {
	Owners     map[workload.Owner]bool
	Pods       map[Pod]bool
	Identities map[uint32]bool
	Prefixes   []netip.Prefix
	Reasons    map[uint32]bool
	Egress     *bool
	Protocols  map[uint8]bool
	Ports      map[uint16]bool
	Verdicts   map[Verdict]bool
	Types      map[Type]bool
	Selectors  []Selector
	// Services are "shop/web", for all ports of the service.
	Services map[string]bool
	// Backend reports whether an address is a backend of Services: packets to it meet them,
	// too, unless they asked for another service. Nil: no address is.
	Backend func(at netip.AddrPort, protocol uint8) bool
	// Source and Destination say what the sender and the receiver are; nil: anything.
	Source, Destination *EndCriteria
}

// Empty says whether everything meets the criteria.
func (c *Criteria) Empty() bool { return reflect.ValueOf(*c).IsZero() }

// Pod is the name of a pod.
type Pod struct{ Namespace, Name string }

// EndCriteria say what one end of a packet is: one of what names it must hold, and one
// of the ports, if there are any.
type EndCriteria struct {
	Owners     map[workload.Owner]bool
	Pods       map[Pod]bool
	Identities map[uint32]bool
	Prefixes   []netip.Prefix
	Selectors  []Selector
	Ports      map[uint16]bool
}

// LabelsOf gives the labels of an identity, if they are known.
type LabelsOf func(identity uint32) ([]label.Label, bool)

// Match says whether e passes. What is not known matches no selector. labels is asked
// only if everything else of the criteria holds.
func (f Filter) Match(e Event, labels LabelsOf) bool {
	return (f.Until.IsZero() || !e.Time.After(f.Until)) && f.Criteria.Match(e, labels) &&
		!slices.ContainsFunc(f.Excluded, func(c Criteria) bool { return c.Match(e, labels) })
}

// MayHaveLost says whether what the kernel left out before e may have passed. It counts
// by reason, and the ends of connections apart; an event without a type is nothing but a
// loss, of any reason.
func (f Filter) MayHaveLost(e Event) bool {
	return e.KernelLost > 0 && (e.Type == 0 ||
		(len(f.Reasons) == 0 || f.Reasons[e.Reason]) && (e.Type != Closed || len(f.Types) == 0 || f.Types[Closed]))
}

// Match says whether e meets the criteria, as Filter.Match does.
func (c *Criteria) Match(e Event, labels LabelsOf) bool {
	either := func(n int, a, b bool) bool { return n == 0 || a || b }
	return either(len(c.Owners), c.Owners[e.From.Owner], c.Owners[e.To.Owner]) &&
		either(len(c.Pods), c.Pods[e.From.pod()], c.Pods[e.To.pod()]) &&
		either(len(c.Identities), c.Identities[e.SourceIdentity], c.Identities[e.DestinationIdentity]) &&
		either(len(c.Prefixes), inAny(c.Prefixes, e.Source.Addr()),
			inAny(c.Prefixes, e.Destination.Addr()) || inAny(c.Prefixes, e.Original.Addr())) &&
		either(len(c.Reasons), c.Reasons[e.Reason], false) &&
		(c.Egress == nil || e.Type != Repair && *c.Egress == e.Egress) &&
		either(len(c.Protocols), e.Type != Repair && c.Protocols[e.Protocol], false) &&
		either(len(c.Ports), e.hasPorts() && c.Ports[e.Source.Port()], e.hasPorts() && c.Ports[e.Destination.Port()] ||
			e.Original.IsValid() && c.Ports[e.Original.Port()]) &&
		either(len(c.Services), e.Service != "" && c.Services[e.serviceName()], c.toBackend(e)) &&
		either(len(c.Verdicts), c.Verdicts[e.Verdict], false) &&
		either(len(c.Types), c.Types[e.Type], false) &&
		(c.Source == nil || e.Type != Repair && c.Source.match(e, e.From, e.Source, netip.AddrPort{}, e.SourceIdentity,
			labels)) &&
		(c.Destination == nil || e.Type != Repair &&
			c.Destination.match(e, e.To, e.Destination, e.Original, e.DestinationIdentity, labels)) &&
		(len(c.Selectors) == 0 || selects(c.Selectors, e.SourceIdentity, labels) ||
			selects(c.Selectors, e.DestinationIdentity, labels))
}

// toBackend reports whether the packet belongs to a connection with a backend of the services,
// to which a socket may have been led before it sent anything.
func (c *Criteria) toBackend(e Event) bool {
	if c.Backend == nil || e.Original.IsValid() || e.Type == Repair {
		return false
	}
	if e.Reply {
		return c.Backend(e.Source, e.Protocol)
	}
	return c.Backend(e.Destination, e.Protocol)
}

// match says whether an end is as the criteria say. It may have had another address
// when the packet was sent.
func (c *EndCriteria) match(e Event, end End, at, original netip.AddrPort, identity uint32, labels LabelsOf) bool {
	if len(c.Ports) > 0 && (!e.hasPorts() || !c.Ports[at.Port()] && !(original.IsValid() && c.Ports[original.Port()])) {
		return false
	}
	if len(c.Owners)+len(c.Pods)+len(c.Identities)+len(c.Prefixes)+len(c.Selectors) == 0 {
		return true
	}
	return c.Owners[end.Owner] || c.Pods[end.pod()] || c.Identities[identity] || inAny(c.Prefixes, at.Addr()) ||
		inAny(c.Prefixes, original.Addr()) || selects(c.Selectors, identity, labels)
}

// inAny says whether a prefix has the address; none has an invalid one.
func inAny(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// selects says whether a selector selects the identity, if its labels are known.
func selects(selectors []Selector, identity uint32, labels LabelsOf) bool {
	if len(selectors) == 0 {
		return false
	}
	ls, ok := labels(identity)
	return ok && slices.ContainsFunc(selectors, func(s Selector) bool { return s.Matches(ls) })
}

// pod is the name of the endpoint's pod, of which no criterion is empty.
func (e End) pod() Pod { return Pod{e.Pod.Namespace, e.Pod.Name} }

// serviceName is the service without its port.
func (e Event) serviceName() string {
	name, _, _ := strings.Cut(e.Service, ":")
	return name
}

// hasPorts is false where the ports hold something else, or nothing.
func (e Event) hasPorts() bool {
	switch e.Protocol {
	case 6, 17, 33, 132, 136: // TCP, UDP, DCCP, SCTP, UDP-Lite
		return true
	}
	return false
}
