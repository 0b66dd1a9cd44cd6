// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package flow

import (
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
)

// Filter selects events: those that meet the criteria and none of the excluded criteria.
type Filter struct {
	Criteria

	Excluded []Criteria
	// Until excludes later events; zero: no limit.
	Until time.Time
}

// Criteria of different kinds must all match; of one kind, one must match. An empty kind always matches. A repair event
// is about an endpoint, not a packet: criteria that only a packet can meet exclude it.
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
	// Services are names such as "shop/web", for all ports of the service.
	Services map[string]bool
	// Backend reports whether an address is a backend of Services. Packets to it match, too, unless they were sent to
	// another service. Nil: no address is.
	Backend func(at netip.AddrPort, protocol uint8) bool
	// Source and Destination are criteria for the sender and the receiver; nil: any.
	Source, Destination *EndCriteria
}

// Empty reports whether all events match.
func (c *Criteria) Empty() bool { return reflect.ValueOf(*c).IsZero() }

// Pod is the name of a pod.
type Pod struct{ Namespace, Name string }

// EndCriteria are criteria for one end of a packet: it must match one of the names, addresses, identities or selectors,
// and one of the ports, if there are any.
type EndCriteria struct {
	Owners     map[workload.Owner]bool
	Pods       map[Pod]bool
	Identities map[uint32]bool
	Prefixes   []netip.Prefix
	Selectors  []Selector
	Ports      map[uint16]bool
}

// LabelsOf returns the labels of an identity, if they are known.
type LabelsOf func(identity uint32) ([]label.Label, bool)

// Match reports whether e passes the filter. If labels are unknown, no selector matches. labels is only called if all
// other criteria match.
func (f Filter) Match(e Event, labels LabelsOf) bool {
	return (f.Until.IsZero() || !e.Time.After(f.Until)) && f.Criteria.Match(e, labels) &&
		!slices.ContainsFunc(f.Excluded, func(c Criteria) bool { return c.Match(e, labels) })
}

// MayHaveLost reports whether the filter might select events that the kernel lost before e. The kernel counts losses
// by reason, and separately for closed connections. An event without a type reports only a loss, of any reason.
func (f Filter) MayHaveLost(e Event) bool {
	return e.KernelLost > 0 && (e.Type == 0 ||
		(len(f.Reasons) == 0 || f.Reasons[e.Reason]) && (e.Type != Closed || len(f.Types) == 0 || f.Types[Closed]))
}

// MayHaveLostDNS reports whether DNS messages that were not reported before e might have passed the filter.
func (f Filter) MayHaveLostDNS(e Event) bool {
	return e.DNSLost > 0 && len(f.Reasons) == 0 && (len(f.Types) == 0 || f.Types[DNS])
}

// Match reports whether e matches the criteria, as Filter.Match does.
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

// toBackend reports whether the packet belongs to a connection with a backend of the services, which a socket may have
// selected before it sent a packet.
func (c *Criteria) toBackend(e Event) bool {
	if c.Backend == nil || e.Original.IsValid() || e.Type == Repair {
		return false
	}
	if e.Reply {
		return c.Backend(e.Source, e.Protocol)
	}
	return c.Backend(e.Destination, e.Protocol)
}

// match reports whether an end matches the criteria. original is the address before translation.
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

// inAny reports whether a prefix contains the address; false for an invalid address.
func inAny(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}

// selects reports whether a selector matches the labels of the identity, if they are known.
func selects(selectors []Selector, identity uint32, labels LabelsOf) bool {
	if len(selectors) == 0 {
		return false
	}
	ls, ok := labels(identity)
	return ok && slices.ContainsFunc(selectors, func(s Selector) bool { return s.Matches(ls) })
}

// pod returns the name of the endpoint's pod. Criteria never contain an empty name.
func (e End) pod() Pod { return Pod{e.Pod.Namespace, e.Pod.Name} }

// serviceName returns the service without its port.
func (e Event) serviceName() string {
	name, _, _ := strings.Cut(e.Service, ":")
	return name
}

// hasPorts reports whether the protocol has ports; otherwise the port fields have another meaning.
func (e Event) hasPorts() bool {
	switch e.Protocol {
	case 6, 17, 33, 132, 136: // TCP, UDP, DCCP, SCTP, UDP-Lite
		return true
	}
	return false
}
