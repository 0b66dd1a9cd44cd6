// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package frontend defines the types in which the load balancer sends frontends to the datapath: the addresses of
// Services with their backends, and the steps that change them.
//
// proto/wire/frontendwire converts the types to the messages of sluice.loadbalancer.v1 and back.
package frontend

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/model/shares"
)

// ErrInvalid means that a frontend is invalid. The text names the field.
var ErrInvalid = errors.New("invalid frontend")

// MaxAffinity is the longest time for which a client keeps its backend.
const MaxAffinity = 24 * time.Hour

// Protocol is an IP protocol with ports.
type Protocol uint8

// The protocols of Services.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// String returns the lower-case name of the protocol.
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	case SCTP:
		return "sctp"
	}
	return fmt.Sprintf("protocol %d", uint8(p))
}

// Key identifies a frontend.
type Key struct {
	// Addr is the address that clients connect to. A node port, and a host port of every
	// address, has the unspecified address of the family.
	Addr netip.Addr
	// Port is the port that clients connect to.
	Port     uint16
	Protocol Protocol
	// Node reports whether the frontend applies to all addresses of the node.
	Node bool
}

// String returns "10.96.0.1:80/tcp", or "0.0.0.0:30080/tcp" for a node port.
func (k Key) String() string {
	return fmt.Sprintf("%v/%v", netip.AddrPortFrom(k.Addr, k.Port), k.Protocol)
}

// NodePort returns the key of the node port with the same port and protocol. That node port also receives the traffic
// of k if the address of k is an address of the node.
func (k Key) NodePort() Key {
	k.Addr, k.Node = Unspecified(k.Addr), true
	return k
}

// Unspecified returns the unspecified address of the family of a.
func Unspecified(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// Validate rejects a key that matches no packet.
func (k Key) Validate() error {
	switch {
	case !k.Addr.IsValid() || k.Addr.Is4In6() || k.Addr.Zone() != "":
		return fmt.Errorf("%w: address %v", ErrInvalid, k.Addr)
	case k.Port == 0:
		return fmt.Errorf("%w: port 0", ErrInvalid)
	case k.Protocol != TCP && k.Protocol != UDP && k.Protocol != SCTP:
		return fmt.Errorf("%w: %v", ErrInvalid, k.Protocol)
	case k.Node != k.Addr.IsUnspecified():
		return fmt.Errorf("%w: address %v, node port %t", ErrInvalid, k.Addr, k.Node)
	}
	return nil
}

// Compare orders keys by address, port and protocol.
func (k Key) Compare(o Key) int {
	return cmp.Or(k.Addr.Compare(o.Addr), cmp.Compare(k.Port, o.Port), cmp.Compare(k.Protocol, o.Protocol))
}

// Kind is the origin of a frontend's address.
type Kind uint8

// The kinds of frontends. All but HostPort are the kinds of Kubernetes.
const (
	ClusterIP Kind = iota + 1
	NodePort
	ExternalIP
	LoadBalancer
	// HostPort is the host port of a container. The load balancer sends no such frontend.
	HostPort
)

// Frontend is an address, port and protocol of a Service with its backends.
type Frontend struct {
	Key Key
	// Kind is 0 if the kind is unknown.
	Kind Kind
	// Service is the ServicePort of the frontend. All frontends of one ServicePort share session affinity. For a host
	// port it is the name of the endpoint.
	Service string
	// Tenant is the tenant of the Service's namespace, or of the pod of a host port. The zero tenant is unknown.
	Tenant shares.Tenant
	// Inside is the list for sockets and pods of the node; nil means that they do not use the frontend.
	Inside *List
	// Outside is the list for packets from elsewhere; nil means the Inside list.
	Outside *List
	// Affinity is the timeout of session affinity in whole seconds; 0: no affinity.
	Affinity time.Duration
	// SourceRanges lists the clients that may use the frontend; empty means all clients.
	SourceRanges []netip.Prefix
	// ExceedsShare reports that the frontend has no backends because the tenant of the Service exceeds its share.
	// Connections are refused.
	ExceedsShare bool
}

// ServicePort returns the name of a port of a Service: "shop/web:http", or "shop/web" if the port has no name.
func ServicePort(namespace, name, port string) string {
	if port == "" {
		return namespace + "/" + name
	}
	return namespace + "/" + name + ":" + port
}

// SplitServicePort returns the parts of a ServicePort.
func SplitServicePort(s string) (namespace, name, port string) {
	s, port, _ = strings.Cut(s, ":")
	namespace, name, _ = strings.Cut(s, "/")
	return namespace, name, port
}

// Equal reports whether two frontends have the same key, lists and options.
func (f *Frontend) Equal(o *Frontend) bool {
	return f.Key == o.Key && f.Kind == o.Kind && f.Service == o.Service && f.Tenant == o.Tenant &&
		f.Affinity == o.Affinity && f.ExceedsShare == o.ExceedsShare && f.Inside.equal(o.Inside) &&
		f.Outside.equal(o.Outside) && slices.Equal(f.SourceRanges, o.SourceRanges)
}

// String returns the frontend and its lists on one line.
func (f *Frontend) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s of %s", f.Key, f.Service)
	if f.ExceedsShare {
		b.WriteString(" exceeds the share")
	}
	for _, l := range []struct {
		name string
		list *List
	}{{"inside", f.Inside}, {"outside", f.Outside}} {
		if l.list == nil {
			continue
		}
		fmt.Fprintf(&b, " %s", l.name)
		if l.list.Table {
			b.WriteString(" by a table")
		}
		for _, x := range l.list.Backends {
			fmt.Fprintf(&b, " %s", x.AddrPort)
			if x.Terminating {
				b.WriteString("(terminating)")
			}
		}
		for _, x := range l.list.Draining {
			fmt.Fprintf(&b, " %s(draining)", x.AddrPort)
		}
		if len(l.list.Backends) == 0 {
			b.WriteString(map[bool]string{false: " reject", true: " drop"}[l.list.Drop])
		}
	}
	return b.String()
}

// List is a list of backends. Frontends may share a list, so it must not be modified.
type List struct {
	// Backends is sorted by address and port, without duplicates.
	Backends []Backend
	// Drop selects what happens to connections while there are no backends: they are dropped if it is set, and
	// refused otherwise.
	Drop bool
	// Table requests a rendezvous table: a connection keeps its backend while other backends are added and removed,
	// however many there are.
	Table bool
	// Draining lists backends that get no new connections but keep their existing ones. It is sorted by address and
	// port, without duplicates. No backend is in both lists.
	Draining []Backend
}

func (l *List) equal(o *List) bool {
	return l == o || l != nil && o != nil && l.Drop == o.Drop && l.Table == o.Table &&
		slices.Equal(l.Backends, o.Backends) && slices.Equal(l.Draining, o.Draining)
}

// Backend is an address and port of an endpoint of a Service.
type Backend struct {
	netip.AddrPort
	// Terminating reports that the endpoint is being removed and finishes its connections. A terminating backend in
	// Backends also gets new connections, because no endpoint is ready.
	Terminating bool
}

func (b Backend) compare(o Backend) int { return b.Compare(o.AddrPort) }

// Validate rejects a frontend that the datapath cannot represent.
func (f *Frontend) Validate() error {
	if err := f.Key.Validate(); err != nil {
		return err
	}
	if f.Inside == nil && f.Outside == nil {
		return fmt.Errorf("%w: neither an inside nor an outside list", ErrInvalid)
	}
	if f.Affinity < 0 || f.Affinity > MaxAffinity || f.Affinity%time.Second != 0 {
		return fmt.Errorf("%w: affinity %v", ErrInvalid, f.Affinity)
	}
	for _, l := range []*List{f.Inside, f.Outside} {
		if l == nil {
			continue
		}
		if err := l.validate(f.Key.Addr.Is4()); err != nil {
			return err
		}
	}
	return nil
}

// validate rejects a list that is invalid for a frontend of the family.
func (l *List) validate(ipv4 bool) error {
	check := func(at, before netip.AddrPort, what string) error {
		a := at.Addr()
		switch {
		case !a.IsValid() || a.Is4() != ipv4 || a.Is4In6() || a.Zone() != "" || a.IsUnspecified():
			return fmt.Errorf("%w: address of %s %v", ErrInvalid, what, at)
		case at.Port() == 0:
			return fmt.Errorf("%w: port of %s %v", ErrInvalid, what, at)
		case before.Compare(at) >= 0:
			return fmt.Errorf("%w: %s %v is out of order or a duplicate", ErrInvalid, what, at)
		}
		return nil
	}
	var before netip.AddrPort // sorts before every valid address
	for _, b := range l.Backends {
		if err := check(b.AddrPort, before, "backend"); err != nil {
			return err
		}
		before = b.AddrPort
	}
	before = netip.AddrPort{}
	for _, b := range l.Draining {
		if err := check(b.AddrPort, before, "draining backend"); err != nil {
			return err
		}
		if _, ok := slices.BinarySearchFunc(l.Backends, b, Backend.compare); ok {
			return fmt.Errorf("%w: backend %v is draining and also gets new connections", ErrInvalid, b.AddrPort)
		}
		before = b.AddrPort
	}
	return nil
}
