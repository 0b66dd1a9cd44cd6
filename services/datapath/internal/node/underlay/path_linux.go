// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package underlay

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/devconf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
	"github.com/sluice-net/sluice/services/datapath/internal/node/routing"
)

// fibMatch is RTM_F_FIB_MATCH of linux/rtnetlink.h: the answer is the matching route with all its next hops, instead of
// the path of one packet.
const fibMatch = 0x2000

// Attributes of nexthops and metrics in linux/rtnetlink.h.
const (
	rtaVia      = 18 // RTA_VIA: a router of another family
	rtaxMTU     = 2
	sizeofHop   = 8 // struct rtnexthop
	hopUnusable = unix.RTNH_F_DEAD | unix.RTNH_F_LINKDOWN
)

// ErrNoPath is returned if packets to an address do not leave the node.
var ErrNoPath = errors.New("no path leaves the node")

// PathTo returns how the kernel reaches an address.
func (u *Underlay) PathTo(addr netip.Addr) (routing.Path, error) {
	paths, err := u.Paths([]netip.Addr{addr})
	if err != nil {
		return routing.Path{}, err
	}
	return paths[0], paths[0].Err
}

// together is the number of addresses per request, so that the answers fit into the socket's buffer several times.
const together = 256

// Paths implements routing.Links. It sends two requests per address: for the route with all its next hops, and for the
// path of one packet, which includes the learned path MTU.
func (u *Underlay) Paths(addrs []netip.Addr) ([]routing.Path, error) {
	paths := make([]routing.Path, 0, len(addrs))
	links := map[uint32]device{}
	for some := range slices.Chunk(addrs, together) {
		var b rtnl.Batch
		for _, a := range some {
			getRoute(&b, a, 0)
			getRoute(&b, a, fibMatch)
		}
		replies, err := u.conn.Exchange(&b)
		if err != nil {
			return nil, fmt.Errorf("look up routes: %w", err)
		}
		for i, a := range some {
			p, err := u.path(replies[2*i], replies[2*i+1], a, links)
			if err != nil {
				p = routing.Path{Err: fmt.Errorf("path to %v: %w", a, err), Unknown: !absent(err)}
			}
			paths = append(paths, p)
		}
	}
	return paths, nil
}

// absent reports whether an error says that there is no path. Any other error says nothing about the path.
func absent(err error) bool {
	return slices.ContainsFunc([]error{ErrNoPath, unix.ENETUNREACH, unix.EHOSTUNREACH, unix.EACCES, unix.EINVAL},
		func(known error) bool { return errors.Is(err, known) })
}

// getRoute requests the route to an address.
func getRoute(b *rtnl.Batch, a netip.Addr, flags uint32) {
	m := make([]byte, unix.SizeofRtMsg)
	m[0], m[1] = family(a), byte(a.BitLen())
	binary.NativeEndian.PutUint32(m[8:], flags)
	b.Add(unix.RTM_GETROUTE, 0, m)
	b.Attr(unix.RTA_DST, a.AsSlice())
}

// path combines the two answers.
func (u *Underlay) path(one, all rtnl.Reply, to netip.Addr, links map[uint32]device) (p routing.Path, err error) {
	if err := errors.Join(one.Err, all.Err); err != nil {
		return p, err
	}
	route, match := readRoute(one.Data), readRoute(all.Data)
	if route.kind != unix.RTN_UNICAST {
		return p, fmt.Errorf("%w: %s", ErrNoPath, kindName(route.kind))
	}
	if p.Hops = match.hops; len(p.Hops) == 0 || match.kind != unix.RTN_UNICAST {
		p.Hops = route.hops
	}
	if len(p.Hops) == 0 {
		return p, ErrNoPath
	}
	p.Source = route.source
	p.Special = match.special(p.Hops)
	mtu := uint32(65535)
	for i, h := range p.Hops {
		l, ok := links[h.Ifindex]
		if !ok {
			if l, err = u.device(h.Ifindex, ""); err != nil {
				return p, fmt.Errorf("find device %d: %w", h.Ifindex, err)
			}
			links[h.Ifindex] = l
		}
		p.Hops[i].Device = l.name
		if l.hardware != unix.ARPHRD_ETHER && p.Special == "" {
			p.Special = fmt.Sprintf("%s has no Ethernet header", l.name)
		}
		mtu = min(mtu, l.mtu)
		if v6, ok := devconf.V6("mtu", conf6MTU, 0).In(l.conf4, l.conf6); ok && to.Is6() {
			mtu = min(mtu, v6) // router advertisements may have lowered it
		}
	}
	if match.mtu != 0 {
		mtu = min(mtu, match.mtu)
	}
	p.MTU = uint16(mtu) //nolint:gosec // at most 65535
	if route.mtu != 0 && route.mtu < mtu {
		p.Learned = uint16(route.mtu) //nolint:gosec // less than that
	}
	return p, nil
}

// fibRoute is a route as the kernel describes it.
type fibRoute struct {
	dst      netip.Prefix
	table    uint32
	protocol uint8
	kind     uint8 // RTN of linux/rtnetlink.h
	metric   uint32
	mtu      uint32 // 0: none
	source   netip.Addr
	encap    bool              // the route encapsulates packets
	hops     []routing.Nexthop // usable next hops
}

// special describes what a route does beyond passing packets to one next hop of their family; "": nothing.
func (r fibRoute) special(hops []routing.Nexthop) string {
	switch {
	case r.encap:
		return fmt.Sprintf("the route %v encapsulates packets", r.dst)
	case len(hops) > 1:
		return fmt.Sprintf("the route %v has %d next hops", r.dst, len(hops))
	case hops[0].Via.IsValid() && hops[0].Via.Is4() != r.dst.Addr().Is4():
		return fmt.Sprintf("the next hop %v of the route %v is of another family", hops[0].Via, r.dst)
	}
	return ""
}

func readRoute(m []byte) (r fibRoute) {
	if len(m) < unix.SizeofRtMsg {
		return r
	}
	bits := int(m[1])
	addr := netip.IPv6Unspecified()
	if m[0] == unix.AF_INET {
		addr = netip.IPv4Unspecified()
	}
	r.table, r.protocol, r.kind = uint32(m[4]), m[5], m[7]
	single := routing.Nexthop{Weight: 1}
	usable := binary.NativeEndian.Uint32(m[8:])&hopUnusable == 0
	rtnl.Attrs(m, unix.SizeofRtMsg, func(kind uint16, v []byte) {
		switch kind {
		case unix.RTA_DST:
			addr = addrOf(v)
		case unix.RTA_TABLE:
			r.table = rtnl.Number(v)
		case unix.RTA_PRIORITY:
			r.metric = rtnl.Number(v)
		case unix.RTA_PREFSRC:
			r.source = addrOf(v)
		case unix.RTA_METRICS:
			rtnl.Attrs(v, 0, func(kind uint16, v []byte) {
				if kind == rtaxMTU {
					r.mtu = rtnl.Number(v)
				}
			})
		case unix.RTA_MULTIPATH:
			r.hops = readHops(v)
		case unix.RTA_ENCAP, unix.RTA_ENCAP_TYPE:
			r.encap = true
		}
		readHop(&single, kind, v)
	})
	r.dst = netip.PrefixFrom(addr, bits)
	if single.Ifindex != 0 && len(r.hops) == 0 && usable {
		r.hops = []routing.Nexthop{single}
	}
	return r
}

func readHop(h *routing.Nexthop, kind uint16, v []byte) {
	switch {
	case kind == unix.RTA_OIF:
		h.Ifindex = rtnl.Number(v)
	case kind == unix.RTA_GATEWAY:
		h.Via = addrOf(v)
	case kind == rtaVia && len(v) > 2:
		h.Via = addrOf(v[2:])
	}
}

// readHops parses the next hops of a multipath route.
func readHops(v []byte) (hops []routing.Nexthop) {
	for len(v) >= sizeofHop {
		size := int(binary.NativeEndian.Uint16(v))
		if size < sizeofHop || size > len(v) {
			return hops
		}
		h := routing.Nexthop{Ifindex: binary.NativeEndian.Uint32(v[4:]), Weight: uint16(v[3]) + 1}
		rtnl.Attrs(v[:size], sizeofHop, func(kind uint16, v []byte) { readHop(&h, kind, v) })
		if v[2]&hopUnusable == 0 {
			hops = append(hops, h)
		}
		v = v[min((size+3)&^3, len(v)):]
	}
	return hops
}

func addrOf(v []byte) netip.Addr {
	a, _ := netip.AddrFromSlice(v)
	return a.Unmap()
}

func kindName(kind uint8) string {
	switch kind {
	case unix.RTN_LOCAL:
		return "it is an address of this node"
	case unix.RTN_BROADCAST, unix.RTN_ANYCAST, unix.RTN_MULTICAST:
		return "it is not the address of one node"
	}
	return fmt.Sprintf("the route is of type %d", kind)
}
