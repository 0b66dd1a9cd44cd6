// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package routing

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
)

// Bytes that the tunnel adds to a packet: outer IP, UDP and VXLAN headers and the inner Ethernet header.
const (
	Overhead4 = 50
	Overhead6 = 70
)

// minIPv6 is the minimum MTU that IPv6 requires.
const minIPv6 = 1280

// peer is another node.
type peer struct {
	cluster.Member
	// adopted: a previous process wrote the entry, and the source has not listed the node yet. Mode and port are
	// derived from the entry.
	adopted bool
	ranges  [2]bool // it has ranges of IPv4, IPv6
	decision
	err error // the error of the last attempt to write the decision to the maps
}

// decision is the result of deciding how packets to a node travel.
type decision struct {
	nextHops [2]nodemap.NextHop
	paths    [2]Path       // the paths that the next hops use
	asked    [2]netip.Addr // the addresses of the other node to which paths were looked up
	direct   nodemap.Direct
	device   string   // why tunnel packets pass the tunnel device although direct paths are configured
	why      string   // why a family in which the node has ranges has no next hop
	notes    []string // problems that may block packets
}

// at returns the index of the family of an address in arrays of two elements: IPv4 0, IPv6 1.
func at(a netip.Addr) int { return a.BitLen() / 128 }

// situation is the input of decisions, apart from the other node.
type situation struct {
	mode     cluster.Mode
	port     uint16
	mtu      uint16       // of this node's pods, bytes
	addrs    []netip.Addr // by which others reach this node
	tunnel   uint32       // usable tunnel device; 0: none
	noTunnel string       // why there is none
	limited  []uint32     // configured uplinks; nil: any device
	shortcut bool         // tunnel packets bypass the tunnel device where that is equivalent
}

// preferred returns the first usable address of a family.
func (s situation) preferred(p *peer, family int) netip.Addr {
	for _, a := range p.Addresses {
		if at(a) == family && s.usable(a) {
			return a
		}
	}
	return netip.Addr{}
}

// usable reports whether an address can belong to another node.
func (s situation) usable(a netip.Addr) bool {
	return a.IsGlobalUnicast() && !a.Is4In6() && !slices.Contains(s.addrs, a)
}

// node returns the desired map entry of a peer.
func (s situation) node(p *peer) nodemap.Node {
	n := nodemap.Node{IPv4: s.preferred(p, 0), IPv6: s.preferred(p, 1)}
	for _, a := range p.Addresses {
		if s.usable(a) && !slices.Contains(n.Addrs, a) && len(n.Addrs) < nodemap.MaxAddrs {
			n.Addrs = append(n.Addrs, a)
		}
	}
	return n
}

// asks returns the addresses of a peer for which paths are looked up, by family.
func (s situation) asks(p *peer) (asks [2]netip.Addr) {
	if s.incompatible(p) != "" {
		return asks
	}
	for i := range asks {
		asks[i] = s.preferred(p, i)
		if s.mode == cluster.Overlay && !slices.ContainsFunc(s.addrs, func(a netip.Addr) bool { return at(a) == i }) {
			asks[i] = netip.Addr{} // A limit that the other node's pod MTU sets is not a problem of the path.
		}
	}
	return asks
}

// incompatible returns the reason why no packets can travel between the nodes, independent of paths; "" if they can.
func (s situation) incompatible(p *peer) string {
	switch {
	case p.Mode != s.mode:
		return fmt.Sprintf("mode %s, this node has %s", p.Mode, s.mode)
	case s.mode == cluster.Overlay && p.TunnelPort != s.port:
		return fmt.Sprintf("tunnel port %d, this node has %d", p.TunnelPort, s.port)
	case p.Number == cluster.NoNumber:
		return "no node ID is free"
	case len(s.node(p).Addrs) == 0:
		return fmt.Sprintf("no usable address among %v", p.Addresses)
	case s.mode == cluster.Overlay && s.tunnel == 0:
		return "no tunnel device: " + s.noTunnel
	}
	return ""
}

// decide decides how packets to a peer travel. paths are the paths to the addresses of asks.
func (s situation) decide(p *peer, paths [2]Path) decision {
	if why := s.incompatible(p); why != "" {
		return decision{why: why}
	}
	var d decision
	if s.mode == cluster.Overlay {
		d = s.overlay(p, paths)
	} else {
		d = s.native(p, paths)
	}
	for i, w := range d.nextHops {
		if i > 0 && s.mode == cluster.Overlay {
			break // the same next hop
		}
		// If the limit is the other node's pod MTU, the path is not the cause.
		if path := d.path(i); w != (nodemap.NextHop{}) && w.MTU < s.mtu && (p.MTU == 0 || p.MTU > w.MTU) {
			d.notes = append(d.notes, fmt.Sprintf(
				"pods send up to %d bytes (mtu), the path by %s carries %d of %s", s.mtu, path.Hops[0].Device, w.MTU, families[i]))
		}
	}
	return d
}

// families are the names of the families, by index in pairs.
var families = [2]string{"IPv4", "IPv6"}

// path returns the path of packets of a family, or of the outer packets of the tunnel.
func (d decision) path(family int) Path {
	switch f := d.nextHops[family].Flags; {
	case f&nodemap.Underlay6 != 0:
		return d.paths[1]
	case f&nodemap.Overlay != 0:
		return d.paths[0]
	}
	return d.paths[family]
}

func (s situation) overlay(p *peer, paths [2]Path) (d decision) {
	asks := s.asks(p)
	for i, overhead := range []uint16{Overhead4, Overhead6} {
		switch path := paths[i]; {
		case !asks[i].IsValid():
		case path.Err != nil:
			d.why = first(d.why, path.Err.Error())
		case path.MTU < overhead+minMTU:
			d.why = first(d.why, fmt.Sprintf("the path to %v only carries packets of up to %d bytes", asks[i], path.MTU))
		default:
			w := nodemap.NextHop{Ifindex: s.tunnel, MTU: path.MTU - overhead, Flags: nodemap.Overlay}
			if i == 1 {
				w.Flags |= nodemap.Underlay6
			}
			w, note := narrowed(w, path, overhead)
			if note != "" {
				d.notes = append(d.notes, note)
			}
			if p.MTU != 0 {
				w.MTU = min(w.MTU, p.MTU)
			}
			d = decision{nextHops: [2]nodemap.NextHop{w, w}}
			d.paths[i] = path
			if s.shortcut {
				d.direct, d.device = s.directPath(asks[i], path, w)
			}
			if path.Source.IsValid() && !slices.Contains(s.addrs, path.Source) {
				d.notes = append(d.notes, fmt.Sprintf("packets leave with source %v, which is not registered for this node: %s",
					path.Source, "set underlay.addresses"))
			}
			if p.ranges[1] && w.MTU < minIPv6 {
				d.notes = append(d.notes, fmt.Sprintf("the node receives packets of at most %d bytes, IPv6 needs %d", w.MTU,
					minIPv6))
			}
			return d
		}
	}
	d.why = first(d.why, fmt.Sprintf("none of the addresses %v is of a family that this node has", p.Addresses))
	return d
}

// directPath returns the direct path to a node, or the reason why packets must pass the tunnel device: the kernel has
// to process them in a way that the programs cannot.
func (s situation) directPath(to netip.Addr, path Path, w nodemap.NextHop) (d nodemap.Direct, device string) {
	switch {
	case w.Flags&nodemap.Underlay6 != 0:
		return d, "the tunnel uses IPv6"
	case w.Flags&nodemap.Fragments != 0:
		return d, "tunnel packets are fragmented"
	case path.Special != "":
		return d, path.Special
	case !slices.Contains(s.addrs, path.Source):
		return d, fmt.Sprintf("packets leave with source %v, which is not registered for this node", path.Source)
	}
	hop := path.Hops[0]
	if !hop.Via.IsValid() {
		hop.Via = to
	}
	return nodemap.Direct{Ifindex: hop.Ifindex, Via: hop.Via, Local: path.Source}, ""
}

// narrowed adjusts a tunnel next hop if the kernel has learned a smaller path MTU. The MTU of pods follows it, but not
// below the minimum of IPv6: otherwise a host that can trigger ICMP errors about packets between the nodes could
// disconnect IPv6. In that case, the outer packets are fragmented.
func narrowed(w nodemap.NextHop, path Path, overhead uint16) (_ nodemap.NextHop, note string) {
	if path.Learned == 0 {
		return w, ""
	}
	if path.Learned >= overhead+minIPv6 {
		w.MTU = path.Learned - overhead
		return w, ""
	}
	w.MTU = min(w.MTU, minIPv6)
	w.Flags |= nodemap.Fragments
	return w, fmt.Sprintf(
		"ICMP errors report that the path by %s carries only %d bytes: tunnel packets are fragmented",
		path.Hops[0].Device, path.Learned)
}

// minMTU is below the MTU of any link that carries IP.
const minMTU = 68

func (s situation) native(p *peer, paths [2]Path) (d decision) {
	asks := s.asks(p)
	for i, family := range families {
		path := paths[i]
		switch {
		case !asks[i].IsValid():
			if p.ranges[i] {
				d.why = first(d.why, fmt.Sprintf("it has an %[1]s range, but no %[1]s address", family))
			}
			continue
		case path.Err != nil:
			if p.ranges[i] {
				d.why = first(d.why, path.Err.Error())
			}
			continue
		}
		d.paths[i] = path
		d.nextHops[i] = nodemap.NextHop{Ifindex: path.Hops[0].Ifindex, MTU: path.MTU, Flags: nodemap.Lookup}
		if path.Direct() {
			d.nextHops[i].Flags = nodemap.Hop
		}
		for _, h := range path.Hops {
			if s.limited != nil && !slices.Contains(s.limited, h.Ifindex) {
				d.notes = append(d.notes, fmt.Sprintf("the path to %v leaves by %s, which is not in underlay.devices",
					asks[i], h.Device))
			}
		}
	}
	return d
}

func first(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// hops returns the neighbours that packets are sent to.
func (d decision) hops(asks [2]netip.Addr) (hops []Nexthop) {
	for i, path := range d.paths {
		for _, h := range path.Hops {
			if !h.Via.IsValid() {
				h.Via = asks[i]
			}
			hops = append(hops, h)
		}
	}
	return hops
}

// route returns the route of the host stack to a range of the peer; false: none.
func (s situation) route(d decision, p netip.Prefix, asks [2]netip.Addr, overlay []netip.Addr) (Route, bool) {
	i := at(p.Addr())
	if d.nextHops[i] == (nodemap.NextHop{}) {
		return Route{}, false
	}
	r := Route{Range: p, MTU: d.nextHops[i].MTU}
	if s.mode == cluster.Overlay {
		r.Hops = []Nexthop{{Ifindex: s.tunnel, Weight: 1}}
		for _, a := range overlay {
			if at(a) == i {
				r.Source = a
			}
		}
		return r, true
	}
	for _, h := range d.paths[i].Hops {
		if !h.Via.IsValid() {
			h.Via = asks[i]
		}
		r.Hops = append(r.Hops, h)
	}
	return r, true
}
