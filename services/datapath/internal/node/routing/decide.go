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

// What the tunnel adds to a packet: IP, UDP and VXLAN headers and the inner Ethernet
// header, in bytes.
const (
	Overhead4 = 50
	Overhead6 = 70
)

// minIPv6 is the least MTU that IPv6 works with.
const minIPv6 = 1280

// peer is another node.
type peer struct {
	cluster.Member
	// adopted says that an earlier process made the entry, and the source has not
	// named the node yet: its mode and port are those of the entry.
	adopted bool
	ranges  [2]bool // it has ranges of IPv4, IPv6
	decision
	err error // why the maps do not have it as decided
}

// decision is how packets to a node travel.
type decision struct {
	nextHops [2]nodemap.NextHop
	paths    [2]Path  // that the next hops were made of
	why      string   // why a family has no next hop in which the node has ranges
	notes    []string // what may keep packets from arriving
}

// at is the place of a family in pairs.
func at(a netip.Addr) int { return a.BitLen() / 128 }

// situation is what decisions depend on beside the other node.
type situation struct {
	mode     cluster.Mode
	port     uint16
	mtu      uint16       // of this node's pods, bytes
	addrs    []netip.Addr // by which others reach this node
	tunnel   uint32       // device that can be used; 0: none
	noTunnel string       // why there is none
	limited  []uint32     // devices of a setting; nil: any
}

// preferred is the first address of a family that packets can be sent to.
func (s situation) preferred(p *peer, family int) netip.Addr {
	for _, a := range p.Addresses {
		if at(a) == family && s.usable(a) {
			return a
		}
	}
	return netip.Addr{}
}

// usable says whether an address can be that of another node.
func (s situation) usable(a netip.Addr) bool {
	return a.IsGlobalUnicast() && !a.Is4In6() && !slices.Contains(s.addrs, a)
}

// node is what the maps have of a peer.
func (s situation) node(p *peer) nodemap.Node {
	n := nodemap.Node{IPv4: s.preferred(p, 0), IPv6: s.preferred(p, 1)}
	for _, a := range p.Addresses {
		if s.usable(a) && !slices.Contains(n.Addrs, a) && len(n.Addrs) < maxAddrs {
			n.Addrs = append(n.Addrs, a)
		}
	}
	return n
}

// maxAddrs is how many addresses of a node the maps take.
const maxAddrs = 16

// asks are the addresses of a peer to which paths are needed, of each family.
func (s situation) asks(p *peer) (asks [2]netip.Addr) {
	if s.incompatible(p) != "" {
		return asks
	}
	for i := range asks {
		asks[i] = s.preferred(p, i)
		if s.mode == cluster.Overlay && !slices.ContainsFunc(s.addrs, func(a netip.Addr) bool { return at(a) == i }) {
			asks[i] = netip.Addr{} // packets would leave without an address that others know
		}
	}
	return asks
}

// incompatible is why no packets travel between the nodes whatever the paths are.
func (s situation) incompatible(p *peer) string {
	switch {
	case p.Mode != s.mode:
		return fmt.Sprintf("mode %s, this node has %s", p.Mode, s.mode)
	case s.mode == cluster.Overlay && p.TunnelPort != s.port:
		return fmt.Sprintf("tunnel port %d, this node has %d", p.TunnelPort, s.port)
	case p.Number == cluster.NoNumber:
		return "no number is left for it"
	case len(s.node(p).Addrs) == 0:
		return fmt.Sprintf("no usable address among %v", p.Addresses)
	case s.mode == cluster.Overlay && s.tunnel == 0:
		return "no tunnel device: " + s.noTunnel
	}
	return ""
}

// decide says how packets to a peer travel. Paths are those to the addresses of asks.
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
			break // it is the same
		}
		// That of the other's pods is its own matter, and no reason to look at a path.
		if path := d.path(i); w != (nodemap.NextHop{}) && w.MTU < s.mtu && (p.MTU == 0 || p.MTU > w.MTU) {
			d.notes = append(d.notes, fmt.Sprintf(
				"pods send up to %d bytes (mtu), the path by %s takes %d of %s", s.mtu, path.Hops[0].Device, w.MTU, families[i]))
		}
	}
	return d
}

// families by their places in pairs.
var families = [2]string{"IPv4", "IPv6"}

// path is that of packets of a family, or of those around them.
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
			d.why = first(d.why, fmt.Sprintf("the path to %v takes packets of %d bytes only", asks[i], path.MTU))
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
			if path.Source.IsValid() && !slices.Contains(s.addrs, path.Source) {
				d.notes = append(d.notes, fmt.Sprintf("packets leave from %v, which is not registered for this node: %s",
					path.Source, "set underlay.addresses"))
			}
			if p.ranges[1] && w.MTU < minIPv6 {
				d.notes = append(d.notes, fmt.Sprintf("packets of %d bytes at most reach it, IPv6 needs %d", w.MTU, minIPv6))
			}
			return d
		}
	}
	d.why = first(d.why, fmt.Sprintf("no address among %v of a family that this node has", p.Addresses))
	return d
}

// narrowed is a way in the tunnel of a path of which the kernel has learned that it takes
// less. Packets of pods follow that, but not below what IPv6 needs: whoever can cause
// errors about packets between the nodes could cut it off else. The tunnel's packets go in
// pieces then.
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
		"errors from the network say that the path by %s takes %d bytes: the tunnel's packets go in pieces",
		path.Hops[0].Device, path.Learned)
}

// minMTU is less than any link has that carries IP.
const minMTU = 68

func (s situation) native(p *peer, paths [2]Path) (d decision) {
	asks := s.asks(p)
	for i, family := range families {
		path := paths[i]
		switch {
		case !asks[i].IsValid():
			if p.ranges[i] {
				d.why = first(d.why, fmt.Sprintf("no %s address, but a range", family))
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
				d.notes = append(d.notes, fmt.Sprintf("the path to %v leaves by %s, which is none of underlay.devices",
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

// hops are the neighbours to which packets of a decision are handed.
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

// route is that of the node's own stack to a range of the peer; false: there is none.
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
