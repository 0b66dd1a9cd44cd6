// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package frontend holds what the datapath calls a service: the addresses that
// services are reached at, and the backends that they lead to. It knows neither
// the wire nor the kernel.
package frontend

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// ErrInvalid says that a frontend makes no sense; the text names the field.
var ErrInvalid = errors.New("invalid frontend")

// MaxAffinity is the longest time for which a client keeps its backend.
const MaxAffinity = 24 * time.Hour

// Protocol is an IP protocol with ports.
type Protocol uint8

// The protocols that services have.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// String is the lower-case name of the protocol.
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

// Key names a frontend. Two frontends never have one key.
type Key struct {
	// Addr is the address that clients ask; of a node port, and of a host port of
	// every address, the unspecified address of the family.
	Addr netip.Addr
	// Port that clients ask.
	Port     uint16
	Protocol Protocol
	// Node is set for these: they are asked at addresses of the node.
	Node bool
}

// String is "10.96.0.1:80/tcp"; of a node port "0.0.0.0:30080/tcp".
func (k Key) String() string {
	return fmt.Sprintf("%v/%v", netip.AddrPortFrom(k.Addr, k.Port), k.Protocol)
}

// NodePort is the key of the node port that answers at the key's port, if its address is
// one of the node.
func (k Key) NodePort() Key {
	k.Addr, k.Node = Unspecified(k.Addr), true
	return k
}

// Unspecified is the unspecified address of the family of another one.
func Unspecified(a netip.Addr) netip.Addr {
	if a.Is4() {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// Validate refuses a key that no packet can ask for.
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

// Kind is where the address of a frontend comes from.
type Kind uint8

// The kinds of frontends, as Kubernetes has them.
const (
	ClusterIP Kind = iota + 1
	NodePort
	ExternalIP
	LoadBalancer
	// HostPort is of no service: a port of the node leads to one container.
	HostPort
)

// Frontend is an address that a service is reached at, with what it leads to.
type Frontend struct {
	Key  Key
	Kind Kind // 0: of Closed
	// Service names the port of a service: "shop/web:http". All its frontends
	// share what affinity remembers. Of a host port it names the endpoint.
	Service string
	// Inside is for the node's own pods and sockets; nil: they pass as if there
	// were no frontend.
	Inside *List
	// Outside is for what comes from elsewhere; nil: as Inside.
	Outside *List
	// Affinity is for how long a client keeps its backend, in whole seconds; 0:
	// it does not.
	Affinity time.Duration
	// SourceRanges are the clients that may use it; empty: all.
	SourceRanges []netip.Prefix
}

// Closed returns a frontend that refuses connections. Its kind and its service are those of
// the frontend that the kernel has of the key; without one there is nothing to close.
func Closed(k Key) *Frontend { return &Frontend{Key: k, Inside: &List{}} }

// List is a list of backends, and what becomes of connections without one.
type List struct {
	// Backends are sorted by address and port, each once.
	Backends []Backend
	// Drop drops connections while there is no backend; else they are refused.
	Drop bool
	// Table asks for a rendezvous table: a hash keeps its backend while others come and
	// go, however many there are.
	Table bool
	// Draining are backends that get no new connections, and keep those that the
	// frontend has led to them. Sorted by address and port, each once, none of them in
	// Backends.
	Draining []netip.AddrPort
}

// Backend is an address that answers for a service.
type Backend struct {
	netip.AddrPort
	// Terminating says that it finishes its connections, and gets new ones only
	// because no other backend is ready.
	Terminating bool
}

// compare orders a backend and an address.
func (b Backend) compare(at netip.AddrPort) int { return b.Compare(at) }

// Validate refuses a frontend that the kernel's maps cannot express.
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

// validate refuses a list that no frontend of a family can have.
func (l *List) validate(ipv4 bool) error {
	check := func(at, before netip.AddrPort, what string) error {
		a := at.Addr()
		switch {
		case !a.IsValid() || a.Is4() != ipv4 || a.Is4In6() || a.Zone() != "" || a.IsUnspecified():
			return fmt.Errorf("%w: address of %s %v", ErrInvalid, what, at)
		case at.Port() == 0:
			return fmt.Errorf("%w: port of %s %v", ErrInvalid, what, at)
		case before.Compare(at) >= 0:
			return fmt.Errorf("%w: %s %v is not in its place", ErrInvalid, what, at)
		}
		return nil
	}
	var before netip.AddrPort // in front of every valid one
	for _, b := range l.Backends {
		if err := check(b.AddrPort, before, "backend"); err != nil {
			return err
		}
		before = b.AddrPort
	}
	before = netip.AddrPort{}
	for _, at := range l.Draining {
		if err := check(at, before, "draining backend"); err != nil {
			return err
		}
		if _, ok := slices.BinarySearchFunc(l.Backends, at, Backend.compare); ok {
			return fmt.Errorf("%w: draining backend %v gets connections", ErrInvalid, at)
		}
		before = at
	}
	return nil
}

// Transaction is a set of changes that lead from one state to another. It keeps
// the last change of each key: a frontend that is removed and made again is
// changed.
type Transaction struct {
	// Partial says that others than these frontends are not known: backends that one of
	// them may drain stay.
	Partial bool

	changes []Change
	at      map[Key]int
}

// Change is one frontend that a transaction changes.
type Change struct {
	Key Key
	// Frontend is what it becomes, nil: it is removed.
	Frontend *Frontend
}

// Upsert makes a frontend what it says.
func (t *Transaction) Upsert(f *Frontend) { t.set(Change{f.Key, f}) }

// Remove removes a frontend. One that does not exist is no error.
func (t *Transaction) Remove(k Key) { t.set(Change{Key: k}) }

func (t *Transaction) set(c Change) {
	if i, ok := t.at[c.Key]; ok {
		t.changes[i] = c
		return
	}
	if t.at == nil {
		t.at = map[Key]int{}
	}
	t.at[c.Key] = len(t.changes)
	t.changes = append(t.changes, c)
}

// Changes are the changes, each key once. The caller changes none of them.
func (t *Transaction) Changes() []Change { return t.changes }

// Has says whether a key is changed.
func (t *Transaction) Has(k Key) bool {
	_, ok := t.at[k]
	return ok
}

// Refusal says that a frontend is not what it should be. One that was absent is absent. Of
// another one the backends are removed that it should not have, and none is added.
type Refusal struct {
	Key Key
	Err error
}

// Result is what a transaction came to.
type Result struct {
	// Changed is the number of frontends that were written or removed.
	Changed int
	// Refused are the frontends that are not what they should be; those closed for their
	// source ranges too.
	Refused []Refusal
}

// SortRefusals sorts by key.
func SortRefusals(rs []Refusal) {
	slices.SortFunc(rs, func(a, b Refusal) int { return a.Key.Compare(b.Key) })
}

// NoRoomError says that a frontend does not fit. Nothing of it was written.
type NoRoomError struct {
	// Map is the name of the map that is too small.
	Map string
	// Need is the number of elements that the change takes; Free how many there
	// are for it; Limit how many one list may have, a quarter of the map.
	Need, Free, Limit int
}

// Error names the map and the figures.
func (e *NoRoomError) Error() string {
	return fmt.Sprintf("map %s: %d elements needed, %d free, at most %d for one list", e.Map, e.Need, e.Free, e.Limit)
}
