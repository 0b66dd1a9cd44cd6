// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package underlay

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
	"github.com/sluice-net/sluice/services/datapath/internal/node/routing"
)

// Protocol marks routes to other nodes. Routes to this node's own ranges and endpoints have another protocol.
const Protocol = 0x5d

// routeMetric returns the metric of an instance's routes. With its own metric, a route replaces neither routes of
// others nor of another instance. A foreign route to the same range has priority, and is reported.
func routeMetric(instance string) uint32 {
	sum := sha256.Sum256([]byte("route metric\x00" + instance))
	return 0x5d0000 | uint32(binary.BigEndian.Uint16(sum[:]))
}

// Routes implements routing.Links.
func (u *Underlay) Routes() (routes map[netip.Prefix]routing.Route, err error) {
	err = whole(func() error {
		routes = map[netip.Prefix]routing.Route{}
		for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
			m := make([]byte, unix.SizeofRtMsg)
			m[0], m[4], m[5] = family, unix.RT_TABLE_MAIN, Protocol
			var b rtnl.Batch
			b.Add(unix.RTM_GETROUTE, 0, m)
			err := u.lists.Dump(&b, func(m []byte) {
				if r := readRoute(m); u.ours(r) {
					mtu := uint16(min(r.mtu, 65535)) //nolint:gosec // bounded
					routes[r.dst] = routing.Route{Range: r.dst, Hops: r.hops, Source: r.source, MTU: mtu}
				}
			})
			if err != nil && !hasNone(err) {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("list routes to other nodes: %w", err)
	}
	return routes, nil
}

// hasNone reports whether listing a family's routes failed because none exist: the kernel lacks IPv6, or the
// namespace has had no routes yet.
func hasNone(err error) bool {
	return errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOENT)
}

func (u *Underlay) ours(r fibRoute) bool {
	return r.table == unix.RT_TABLE_MAIN && r.protocol == Protocol && r.metric == u.metric
}

// routeMsg returns the struct rtmsg of a route to a range.
func routeMsg(p netip.Prefix, scope uint8) []byte {
	m := make([]byte, unix.SizeofRtMsg)
	m[0], m[1] = family(p.Addr()), byte(p.Bits())
	m[4], m[5], m[6], m[7] = unix.RT_TABLE_MAIN, Protocol, scope, unix.RTN_UNICAST
	return m
}

// SetRoute implements routing.Links.
func (u *Underlay) SetRoute(r routing.Route) error {
	scope := uint8(unix.RT_SCOPE_UNIVERSE)
	if r.Range.Addr().Is4() && len(r.Hops) == 1 && !r.Hops[0].Via.IsValid() {
		scope = unix.RT_SCOPE_LINK
	}
	var b rtnl.Batch
	b.Add(unix.RTM_NEWROUTE, unix.NLM_F_CREATE|unix.NLM_F_REPLACE, routeMsg(r.Range, scope))
	b.For("route to %v %s", r.Range, describeHops(r.Hops))
	b.Attr(unix.RTA_DST, r.Range.Addr().AsSlice())
	b.Uint32(unix.RTA_PRIORITY, u.metric)
	if r.Source.IsValid() {
		b.Attr(unix.RTA_PREFSRC, r.Source.AsSlice())
	}
	if r.MTU != 0 {
		b.Nest(unix.RTA_METRICS, nil, func() { b.Uint32(rtaxMTU, uint32(r.MTU)) })
	}
	if len(r.Hops) == 1 {
		b.Uint32(unix.RTA_OIF, r.Hops[0].Ifindex)
		addVia(&b, r.Range.Addr(), r.Hops[0].Via)
		return u.conn.Do(&b)
	}
	b.Nest(unix.RTA_MULTIPATH, nil, func() {
		for _, h := range r.Hops {
			addNexthop(&b, r.Range.Addr(), h)
		}
	})
	return u.conn.Do(&b)
}

func addVia(b *rtnl.Batch, of, via netip.Addr) {
	switch {
	case !via.IsValid():
	case via.Is4() == of.Is4():
		b.Attr(unix.RTA_GATEWAY, via.AsSlice())
	default:
		b.Attr(rtaVia, append(binary.NativeEndian.AppendUint16(nil, uint16(family(via))), via.AsSlice()...))
	}
}

// addNexthop adds a struct rtnexthop with its attributes. Its layout equals an attribute with flags and weight in place
// of the type.
func addNexthop(b *rtnl.Batch, of netip.Addr, h routing.Nexthop) {
	index := binary.NativeEndian.AppendUint32(nil, h.Ifindex)
	weight := (max(h.Weight, 1) - 1) & 0xff
	b.Nest(binary.NativeEndian.Uint16([]byte{0, byte(weight)}), index, func() { addVia(b, of, h.Via) })
}

// RemoveRoute implements routing.Links. A missing route is not an error.
func (u *Underlay) RemoveRoute(p netip.Prefix) error {
	var b rtnl.Batch
	b.Add(unix.RTM_DELROUTE, 0, routeMsg(p, unix.RT_SCOPE_NOWHERE))
	b.For("remove the route to %v", p)
	b.Attr(unix.RTA_DST, p.Addr().AsSlice())
	b.Uint32(unix.RTA_PRIORITY, u.metric)
	return u.conn.Do(&b, unix.ESRCH, unix.ENODEV)
}

// Foreign implements routing.Links: it looks up the route to the first address that a node assigns in each range.
func (u *Underlay) Foreign(ranges []netip.Prefix) (map[netip.Prefix]string, error) {
	foreign := map[netip.Prefix]string{}
	for some := range slices.Chunk(ranges, together) {
		var b rtnl.Batch
		for _, p := range some {
			getRoute(&b, inside(p), fibMatch)
		}
		replies, err := u.conn.Exchange(&b)
		if err != nil {
			return nil, fmt.Errorf("look up routes: %w", err)
		}
		for i, p := range some {
			switch r := readRoute(replies[i].Data); {
			case replies[i].Err != nil:
				foreign[p] = replies[i].Err.Error()
			case !u.ours(r) || r.dst != p:
				foreign[p] = describeRoute(r)
			}
		}
	}
	return foreign, nil
}

// inside returns an address inside a range, other than the network address.
func inside(p netip.Prefix) netip.Addr {
	if a := p.Addr().Next(); p.Contains(a) {
		return a
	}
	return p.Addr()
}

func describeRoute(r fibRoute) string {
	text := fmt.Sprintf("%v %s proto %d", r.dst, describeHops(r.hops), r.protocol)
	if r.kind != unix.RTN_UNICAST {
		text = fmt.Sprintf("%v of type %d proto %d", r.dst, r.kind, r.protocol)
	}
	if r.table != unix.RT_TABLE_MAIN {
		text += fmt.Sprintf(" table %d", r.table)
	}
	return text
}

func describeHops(hops []routing.Nexthop) string {
	var texts []string
	for _, h := range hops {
		text := ""
		if h.Via.IsValid() {
			text = fmt.Sprintf("via %v ", h.Via)
		}
		if h.Device != "" {
			text += "dev " + h.Device
		} else {
			text += fmt.Sprintf("dev %d", h.Ifindex)
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, ", ")
}
