// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package service defines the objects of the load balancer: services and endpoint slices, with only the fields that
// affect the handling of connections.
//
// The types are plain values. They do not depend on manifests or on the source of an object. An
// object is immutable, so that it may be shared.
package service

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"unique"
)

// Kind is the kind of an object.
type Kind uint8

// The kinds.
const (
	KindService Kind = iota + 1
	KindSlice
)

// String returns the kind as Kubernetes spells it.
func (k Kind) String() string {
	switch k {
	case KindService:
		return "Service"
	case KindSlice:
		return "EndpointSlice"
	}
	return "unknown"
}

// KindOf returns the kind with the spelling of String; 0 for any other text.
func KindOf(text string) Kind {
	switch text {
	case "Service":
		return KindService
	case "EndpointSlice":
		return KindSlice
	}
	return 0
}

// Name identifies a service within the cluster.
type Name struct {
	Namespace, Name string
}

// String returns "namespace/name".
func (n Name) String() string { return n.Namespace + "/" + n.Name }

// Compare orders names by namespace, then by name.
func (n Name) Compare(o Name) int {
	return cmp.Or(strings.Compare(n.Namespace, o.Namespace), strings.Compare(n.Name, o.Name))
}

// ObjectKey identifies an object.
type ObjectKey struct {
	Kind Kind
	Name
}

// String returns "Kind namespace/name".
func (k ObjectKey) String() string { return k.Kind.String() + " " + k.Name.String() }

// Compare orders keys by kind, as Kubernetes spells it, namespace and name.
func (k ObjectKey) Compare(o ObjectKey) int {
	return cmp.Or(strings.Compare(k.Kind.String(), o.Kind.String()), k.Name.Compare(o.Name))
}

// Protocol is the number of a transport protocol.
type Protocol uint8

// The protocols of services.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// String returns the protocol as Kubernetes spells it.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "TCP"
	case UDP:
		return "UDP"
	case SCTP:
		return "SCTP"
	}
	return "unknown"
}

// ProtocolOf returns the protocol with the spelling of String; 0 for any other text.
func ProtocolOf(text string) Protocol {
	for _, p := range []Protocol{TCP, UDP, SCTP} {
		if p.String() == text {
			return p
		}
	}
	return 0
}

// Type is spec.type of a service.
type Type uint8

// The types.
const (
	ClusterIP Type = iota
	NodePort
	LoadBalancer
	ExternalName
)

// String returns the type as Kubernetes spells it.
func (t Type) String() string {
	switch t {
	case ClusterIP:
		return "ClusterIP"
	case NodePort:
		return "NodePort"
	case LoadBalancer:
		return "LoadBalancer"
	case ExternalName:
		return "ExternalName"
	}
	return "unknown"
}

// Service is the content of a Service. There may be tens of thousands of services, so small fields are adjacent to
// avoid padding.
type Service struct {
	Name Name
	// Created is the time at which the service was created, in nanoseconds since 1970; 0: unknown.
	Created int64
	Type    Type
	// Headless means spec.clusterIP: None.
	Headless bool
	// IPv4 and IPv6 are the families of the service. The service has node ports in these families.
	IPv4, IPv6 bool
	// InternalLocal and ExternalLocal mean that the internal or the external traffic policy is Local.
	InternalLocal, ExternalLocal bool
	// HealthCheckNodePort is set only with ExternalLocal; 0: none.
	HealthCheckNodePort uint16
	// OtherProxy is the value of the label service.kubernetes.io/service-proxy-name. If it is set, another program
	// implements the service.
	OtherProxy string

	ClusterIPs   []netip.Addr
	ExternalIPs  []netip.Addr
	Ingress      []Ingress
	SourceRanges []netip.Prefix

	Ports []Port
	// AffinitySeconds is the timeout of session affinity ClientIP; 0: none.
	AffinitySeconds uint32
	// Table means that a rendezvous table selects the backends.
	Table bool
	// Closed means that the source has replaced the service by a version that cannot be read. Its frontends refuse
	// connections.
	Closed bool
	// ExceedsShare means that the service exceeds its tenant's share of limits.services. The service is then also
	// Closed, and has only the parts that are needed to refuse connections to its addresses and node ports.
	ExceedsShare bool
}

// Ingress is an address of a load balancer in front of the cluster.
type Ingress struct {
	Addr netip.Addr
	// Proxy means that the load balancer terminates connections itself (ipMode Proxy). Packets from pods are then
	// sent to the load balancer, as to any external address.
	Proxy bool
}

// Port is a port of a service.
type Port struct {
	Name     string // unique within the service; empty if there is only one
	Protocol Protocol
	Port     uint16
	NodePort uint16 // 0: none
}

// HasFrontends reports whether the service can have frontends in Sluice.
func (s *Service) HasFrontends() bool {
	return s.Type != ExternalName && !s.Headless && s.OtherProxy == ""
}

// Refusing returns the form of the service that is used if the service exceeds limits.services. This form refuses
// connections to the addresses and node ports, and has no external addresses. It contains only the first port and the
// ports with node ports, because a virtual IP refuses connections to every port without a frontend.
func (s *Service) Refusing() *Service {
	out := s.Clone()
	out.Closed, out.ExceedsShare = true, true
	out.HealthCheckNodePort, out.AffinitySeconds, out.Table = 0, 0, false
	out.ExternalIPs, out.SourceRanges = nil, nil
	first := true
	out.Ports = slices.DeleteFunc(out.Ports, func(p Port) bool {
		needed := first || p.NodePort != 0
		first = false
		return !needed
	})
	return out
}

// Equal reports whether two services have the same content.
func (s *Service) Equal(o *Service) bool {
	return s.Name == o.Name && s.Created == o.Created && s.Type == o.Type && s.Headless == o.Headless &&
		s.OtherProxy == o.OtherProxy &&
		slices.Equal(s.ClusterIPs, o.ClusterIPs) && slices.Equal(s.ExternalIPs, o.ExternalIPs) &&
		slices.Equal(s.Ingress, o.Ingress) &&
		slices.Equal(s.SourceRanges, o.SourceRanges) && s.IPv4 == o.IPv4 && s.IPv6 == o.IPv6 &&
		slices.Equal(s.Ports, o.Ports) &&
		s.InternalLocal == o.InternalLocal && s.ExternalLocal == o.ExternalLocal && s.AffinitySeconds == o.AffinitySeconds &&
		s.HealthCheckNodePort == o.HealthCheckNodePort && s.Table == o.Table && s.Closed == o.Closed &&
		s.ExceedsShare == o.ExceedsShare
}

// Clone returns a copy that shares no memory with the input of the decoder. The decoder's memory can then be freed as
// a whole.
func (s *Service) Clone() *Service {
	out := *s
	out.Name, out.OtherProxy = s.Name.clone(), shared(s.OtherProxy)
	out.ClusterIPs, out.ExternalIPs = slices.Clone(s.ClusterIPs), slices.Clone(s.ExternalIPs)
	out.Ingress, out.SourceRanges, out.Ports = slices.Clone(s.Ingress), slices.Clone(s.SourceRanges), slices.Clone(s.Ports)
	for i := range out.Ports {
		out.Ports[i].Name = shared(out.Ports[i].Name)
	}
	return &out
}

func (n Name) clone() Name { return Name{shared(n.Namespace), strings.Clone(n.Name)} }

// shared returns a copy of a text that is shared by all objects with the same text.
func shared(s string) string { return unique.Make(s).Value() }

// Slice is the content of an EndpointSlice.
type Slice struct {
	Name Name
	// Created is the time at which the slice was created, in nanoseconds since 1970; 0: unknown.
	Created int64
	// Service is the label kubernetes.io/service-name; empty if the slice belongs to no service.
	Service string
	// IPv6 means that the addresses are IPv6 addresses. A slice of type FQDN has no endpoints here.
	IPv6      bool
	Ports     []SlicePort
	Endpoints []Endpoint
}

// Clone returns a copy, like Service.Clone.
func (s *Slice) Clone() *Slice {
	out := *s
	out.Name, out.Service = s.Name.clone(), strings.Clone(s.Service)
	out.Ports, out.Endpoints = slices.Clone(s.Ports), slices.Clone(s.Endpoints)
	for i := range out.Ports {
		out.Ports[i].Name = shared(out.Ports[i].Name)
	}
	return &out
}

// SlicePort is the port that all endpoints of a slice have for the service port of the same name.
type SlicePort struct {
	Name     string
	Protocol Protocol
	Port     uint16
}

// Of returns the name of the service that the slice belongs to.
func (s *Slice) Of() Name { return Name{s.Name.Namespace, s.Service} }

// Equal reports whether two slices have the same content.
func (s *Slice) Equal(o *Slice) bool {
	return s.Name == o.Name && s.Created == o.Created && s.Service == o.Service && s.IPv6 == o.IPv6 &&
		slices.Equal(s.Ports, o.Ports) && slices.Equal(s.Endpoints, o.Endpoints)
}

// State contains the conditions of an endpoint.
type State uint8

// The conditions.
const (
	Ready State = 1 << iota
	Serving
	Terminating
)

// Ready reports whether the endpoint gets new connections.
func (s State) Ready() bool { return s&Ready != 0 }

// Draining reports whether the endpoint is terminating but still serves.
func (s State) Draining() bool { return s&(Serving|Terminating) == Serving|Terminating }

// Keeps reports whether existing connections to the endpoint are kept: the endpoint still serves, or is terminating
// and may still finish them.
func (s State) Keeps() bool { return s&(Serving|Terminating) != 0 }

// Endpoint is an endpoint of a slice. There may be a hundred thousand endpoints, so they share equal values of
// everything except the address.
type Endpoint struct {
	addr  [16]byte
	about unique.Handle[About]
}

// About contains everything about an endpoint except its address.
type About struct {
	State State
	// Node and Zone are the location of the endpoint.
	Node, Zone string
	// ForNodes and ForZones are topology hints: names, sorted and joined by ",".
	ForNodes, ForZones string
}

// NewEndpoint returns an endpoint. The address must not be an IPv4 address in IPv6 form.
func NewEndpoint(addr netip.Addr, about About) Endpoint {
	return Endpoint{addr.As16(), unique.Make(about)}
}

// Addr returns the address.
func (e Endpoint) Addr() netip.Addr { return netip.AddrFrom16(e.addr).Unmap() }

// About returns everything except the address.
func (e Endpoint) About() About { return e.about.Value() }

// State returns the conditions.
func (e Endpoint) State() State { return e.about.Value().State }

// JoinHints returns names in the format of ForNodes and ForZones.
func JoinHints(names []string) string {
	return strings.Join(slices.Compact(slices.Sorted(slices.Values(names))), ",")
}

// Hinted reports whether the hints contain name. It is false for an empty name.
func Hinted(hints, name string) bool {
	for hint := range strings.SplitSeq(hints, ",") {
		if hint == name && name != "" {
			return true
		}
	}
	return false
}
