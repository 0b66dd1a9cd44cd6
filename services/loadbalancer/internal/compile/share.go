// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package compile

import (
	"net/netip"
	"slices"
	"sort"

	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// units counts how much of the limit of frontends a set of frontends needs: one unit for each frontend or, with
// CountElements, the elements of the datapath's maps.
//
// A frontend uses elements in two kinds of maps: the map of fronts, which both families share, and the map of keys of
// its family. Each virtual IP has one additional key, which makes all ports without a frontend refuse connections.
// The three maps have the same size, so a service needs the largest of its three sums. If the total of all services
// fits, each map has capacity for its part.
type units struct {
	elements bool
	fronts   int
	keys     [2]int // IPv4, IPv6
}

func (u units) most() int { return max(u.fronts, u.keys[0], u.keys[1]) }

// frontends adds the units of n frontends.
func (u *units) frontends(k need, n int, ipv6 bool) {
	if !u.elements {
		u.fronts += n
		return
	}
	u.fronts += n * k.fronts()
	u.keys[family(ipv6)] += n
}

// address adds the additional key of a virtual IP.
func (u *units) address(ipv6 bool) {
	if u.elements {
		u.keys[family(ipv6)]++
	}
}

func family(ipv6 bool) int {
	if ipv6 {
		return 1
	}
	return 0
}

// standing adds a virtual IP with one frontend, which may refuse connections.
func (u *units) standing(k need, ipv6 bool) {
	u.address(ipv6)
	u.frontends(k, 1, ipv6)
}

// need is a kind of frontend, which determines its number of fronts.
type need int

const (
	alone    need = iota // a cluster IP
	alone2               // a load balancer address that only services use
	ofProxy              // a load balancer address at which the load balancer itself answers (ipMode Proxy)
	ofNode               // a node port
	ofOthers             // an external address
)

func (n need) fronts() int {
	switch n {
	case alone, ofProxy:
		return 1
	}
	return 2 // one for inside, one for outside
}

// reserved reports whether the address keeps one element even if the service has no share. The frontend of the first
// port uses this element. If the frontend exceeds the share, it refuses connections, and so do all other ports of the
// address.
func (n need) reserved() bool { return n == alone || n == alone2 }

// hasNodePorts reports whether the type of the service has node ports.
func hasNodePorts(s *service.Service) bool {
	return s.Type == service.NodePort || s.Type == service.LoadBalancer
}

// external returns the external addresses that the configuration allows.
func (n *Node) external(s *service.Service) []netip.Addr {
	var out []netip.Addr
	for _, a := range s.ExternalIPs {
		if n.allows(a) {
			out = append(out, a)
		}
	}
	return out
}

// standing is a virtual IP of a service.
type standing struct {
	need
	ipv6 bool
}

// addresses returns the virtual IPs of a service.
func addresses(s *service.Service) []standing {
	var out []standing
	for _, a := range s.ClusterIPs {
		out = append(out, standing{alone, a.Is6()})
	}
	if s.Type == service.LoadBalancer {
		for _, in := range s.Ingress {
			if !in.Proxy {
				out = append(out, standing{alone2, in.Addr.Is6()})
			}
		}
	}
	return out
}

// Needs contains the units of the limit of frontends that a service asks for.
type Needs struct {
	All int
	// Addresses is the part of All that the virtual IPs need to refuse connections at every port.
	Addresses int
	// NodePorts is the number of elements that the node ports need to refuse connections. It is not part of All.
	NodePorts int
}

// Needs returns the units that a service asks for.
func (n *Node) Needs(s *service.Service) (out Needs) {
	if s == nil || !s.HasFrontends() || len(s.Ports) == 0 {
		return out
	}
	e, least := units{elements: n.CountElements}, units{elements: n.CountElements}
	for _, a := range addresses(s) {
		e.address(a.ipv6)
		least.standing(a.need, a.ipv6)
	}
	each := func(k need, ipv6 bool) { e.frontends(k, len(s.Ports), ipv6) }
	for _, a := range s.ClusterIPs {
		each(alone, a.Is6())
	}
	for _, a := range n.external(s) {
		each(ofOthers, a.Is6())
	}
	if s.Type == service.LoadBalancer {
		for _, in := range s.Ingress {
			if in.Proxy {
				each(ofProxy, in.Addr.Is6())
			} else {
				each(alone2, in.Addr.Is6())
			}
		}
	}
	if hasNodePorts(s) {
		for _, p := range s.Ports {
			for _, ipv6 := range []bool{false, true} {
				if p.NodePort != 0 && (ipv6 && s.IPv6 || !ipv6 && s.IPv4) {
					e.frontends(ofNode, 1, ipv6)
					out.NodePorts++
					if n.CountElements { // it needs the fronts for inside and for outside
						out.NodePorts++
					}
				}
			}
		}
	}
	out.All, out.Addresses = e.most(), least.most()
	return out
}

// Count returns the number of frontends that a service asks for.
func (n *Node) Count(s *service.Service) int {
	node := *n
	node.CountElements = false
	return node.Needs(s).All
}

// budget decides which frontends of a service fit into its share.
type budget struct {
	share    *int // nil: all fit
	used     units
	standing int  // number of addresses that keep an element whatever the share is
	full     bool // no further frontend fits
}

func (n *Node) budget(s *service.Service, share *int) *budget {
	b := &budget{share: share, used: units{elements: n.CountElements}}
	if share == nil {
		return b
	}
	for _, a := range addresses(s) {
		more := b.used
		more.standing(a.need, a.ipv6)
		if more.most() > *share {
			b.full = true
			break
		}
		b.used = more
		b.standing++
	}
	return b
}

// next decides whether the next frontend is served, refuses connections, or is omitted. first is set for frontends of
// the first port.
func (b *budget) next(k need, ipv6, first bool) (take, refuse bool) {
	if b.share == nil {
		return true, false
	}
	stands := first && k.reserved() && b.standing > 0
	if first && k.reserved() {
		b.standing--
	}
	if !b.full {
		more := b.used
		if !stands {
			more.frontends(k, 1, ipv6)
		}
		if more.most() <= *b.share {
			b.used = more
			return true, false
		}
		b.full = true
	}
	return false, stands || k == ofNode
}

// HasAddress reports whether a is an address of the service that may have frontends.
func (n *Node) HasAddress(s *service.Service, a netip.Addr) bool {
	if s == nil || !s.HasFrontends() || len(s.Ports) == 0 {
		return false
	}
	isOf := func(in service.Ingress) bool { return in.Addr == a }
	return slices.Contains(s.ClusterIPs, a) || slices.Contains(s.ExternalIPs, a) && n.allows(a) ||
		s.Type == service.LoadBalancer && slices.ContainsFunc(s.Ingress, isOf)
}

// Ports contains the names and protocols of a service's ports.
type Ports struct {
	few  []service.Port // searched one by one if many is nil
	many map[service.SlicePort]struct{}
}

// fewPorts is the maximum number of ports for which searching is cheaper than a map.
const fewPorts = 8

// PortsOf returns the ports of a service.
func PortsOf(s *service.Service) Ports {
	if len(s.Ports) <= fewPorts {
		return Ports{few: s.Ports}
	}
	many := make(map[service.SlicePort]struct{}, len(s.Ports))
	for _, p := range s.Ports {
		many[service.SlicePort{Name: p.Name, Protocol: p.Protocol}] = struct{}{}
	}
	return Ports{many: many}
}

func (p Ports) has(x service.SlicePort) bool {
	for i := range p.few {
		if p.few[i].Name == x.Name && p.few[i].Protocol == x.Protocol {
			return true
		}
	}
	x.Port = 0
	_, ok := p.many[x]
	return ok
}

// some reports whether a slice has one of the ports.
func (p Ports) some(s *service.Slice) bool { return slices.ContainsFunc(s.Ports, p.has) }

// counts reports whether an endpoint may be a backend.
func counts(s *service.Slice, e service.Endpoint) bool {
	st := e.State()
	return (st.Ready() || st.Keeps()) && e.Addr().Is6() == s.IPv6 && CheckAddr(e.Addr()) == nil
}

// Count returns the number of backends in a slice for the ports of a service.
func (p Ports) Count(s *service.Slice) int {
	ports, endpoints := 0, 0
	for _, x := range s.Ports {
		if p.has(x) {
			ports++
		}
	}
	if ports == 0 {
		return 0
	}
	for _, e := range s.Endpoints {
		if counts(s, e) {
			endpoints++
		}
	}
	return ports * endpoints
}

// Cut returns slices that contain only the first n backends of a slice for the ports of a service.
func (p Ports) Cut(s *service.Slice, n int) []*service.Slice {
	part := *s
	part.Ports, part.Endpoints = nil, nil
	for _, x := range s.Ports {
		if p.has(x) {
			part.Ports = append(part.Ports, x)
		}
	}
	if len(part.Ports) == 0 || n <= 0 {
		return nil
	}
	whole, rest := n/len(part.Ports), n%len(part.Ports)
	var out []*service.Slice
	for _, e := range s.Endpoints {
		if !counts(s, e) {
			continue
		}
		if len(part.Endpoints) == whole {
			if rest > 0 {
				last := part
				last.Ports, last.Endpoints = part.Ports[:rest], []service.Endpoint{e}
				out = append(out, &last)
			}
			break
		}
		part.Endpoints = append(part.Endpoints, e)
	}
	if len(part.Endpoints) > 0 {
		out = append(out, &part)
	}
	return out
}

// Charge counts how many units of the limit of backends the slices of a service need. The caller adds the slices one
// by one.
type Charge struct {
	ports  Ports
	tables int            // number of tables of each port and family
	has    map[portID]int // backends by port; only with tables: otherwise each backend needs one unit
}

// ChargeOf returns the charge of a service without slices.
func ChargeOf(s *service.Service) *Charge {
	c := &Charge{ports: PortsOf(s)}
	if s.Table {
		c.tables, c.has = 1, make(map[portID]int)
		if s.InternalLocal || s.ExternalLocal {
			c.tables = 2
		}
	}
	return c
}

// each calls f for each port of a slice, with the number of backends that the port has among the first n of the slice.
func (c *Charge) each(s *service.Slice, n int, f func(p portID, backends int)) {
	var ports []portID
	for _, x := range s.Ports {
		if c.ports.has(x) {
			ports = append(ports, portID{x.Name, x.Protocol, s.IPv6})
		}
	}
	for i, p := range ports {
		backends := n / len(ports)
		if i < n%len(ports) {
			backends++
		}
		f(p, backends)
	}
}

// Units returns the number of additional units that the first n backends of a slice need.
func (c *Charge) Units(s *service.Slice, n int) (units int) {
	if c.tables == 0 {
		if c.ports.some(s) {
			return n
		}
		return 0
	}
	c.each(s, n, func(p portID, backends int) {
		units += frontend.Units(c.has[p]+backends, c.tables) - frontend.Units(c.has[p], c.tables)
	})
	return units
}

// Within returns how many of the first n backends of a slice fit into the given number of units.
func (c *Charge) Within(s *service.Slice, n, units int) int {
	if c.tables == 0 && c.ports.some(s) {
		return min(n, max(units, 0))
	}
	return sort.Search(n, func(i int) bool { return c.Units(s, i+1) > units })
}

// Add adds the first n backends of a slice.
func (c *Charge) Add(s *service.Slice, n int) {
	if c.tables == 0 {
		return
	}
	c.each(s, n, func(p portID, backends int) { c.has[p] += backends })
}
