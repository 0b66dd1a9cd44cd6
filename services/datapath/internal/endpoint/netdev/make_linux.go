// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"encoding/binary"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

// queueLength of both ends, in packets: the kernel's default for Ethernet devices.
const queueLength = 1000

// replace creates an object, or replaces an existing one.
const replace = unix.NLM_F_CREATE | unix.NLM_F_REPLACE

// vethInfoPeer is VETH_INFO_PEER of linux/veth.h.
const vethInfoPeer = 1

// addPair requests the veth pair of an endpoint, with the peer in the namespace netns.
func addPair(b *rtnl.Batch, d endpoint.Device, group uint32, netns int) {
	b.Add(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, infomsg(0, 0, 0))
	addEnd(b, d.HostName, d.HostMAC, d.MTU)
	b.Uint32(unix.IFLA_GROUP, group)
	b.Nest(unix.IFLA_LINKINFO, nil, func() {
		b.String(unix.IFLA_INFO_KIND, "veth")
		b.Nest(unix.IFLA_INFO_DATA, nil, func() {
			b.Nest(vethInfoPeer, infomsg(0, 0, 0), func() {
				addEnd(b, d.Name, d.MAC, d.MTU)
				b.Uint32(unix.IFLA_NET_NS_FD, uint32(netns)) //nolint:gosec // a descriptor
			})
		})
	})
}

func addEnd(b *rtnl.Batch, name string, mac endpoint.MAC, mtu uint16) {
	b.String(unix.IFLA_IFNAME, name)
	b.Attr(unix.IFLA_ADDRESS, mac[:])
	b.Uint32(unix.IFLA_MTU, uint32(mtu))
	b.Uint32(unix.IFLA_TXQLEN, queueLength)
}

// setHostEnd requests the settings of the host end, and no IPv6 link-local address.
func setHostEnd(b *rtnl.Batch, l device) {
	b.Add(unix.RTM_SETLINK, 0, infomsg(l.index, 0, 0))
	b.For("settings of %s", l.name)
	b.Nest(unix.IFLA_AF_SPEC, nil, func() {
		addSettings(b, l, hostSettings)
		if l.conf6 != nil {
			b.Nest(unix.AF_INET6, nil, func() { b.Attr(unix.IFLA_INET6_ADDR_GEN_MODE, []byte{nl.IN6_ADDR_GEN_MODE_NONE}) })
		}
	})
}

func setUp(b *rtnl.Batch, ifindex uint32, name string) {
	b.Add(unix.RTM_SETLINK, 0, infomsg(ifindex, unix.IFF_UP, unix.IFF_UP))
	b.For("set %s up", name)
}

// setAddr requests an address of the container's device.
func setAddr(b *rtnl.Batch, ifindex uint32, a netip.Addr) {
	m := make([]byte, unix.SizeofIfAddrmsg)
	m[0], m[1] = byte(family(a)), byte(a.BitLen())
	if a.Is6() {
		m[2] = unix.IFA_F_NODAD // duplicates are impossible: sluice-ipam leases each address once
	}
	binary.NativeEndian.PutUint32(m[4:], ifindex)
	b.Add(unix.RTM_NEWADDR, replace, m)
	b.For("address %v", a)
	b.Attr(unix.IFA_LOCAL, a.AsSlice())
	b.Attr(unix.IFA_ADDRESS, a.AsSlice())
}

func setNeighbour(b *rtnl.Batch, ifindex uint32, a netip.Addr, mac endpoint.MAC) {
	b.Add(unix.RTM_NEWNEIGH, replace, ndmsg(ifindex, a, unix.NUD_PERMANENT))
	b.For("neighbour %v", a)
	b.Attr(unix.NDA_DST, a.AsSlice())
	b.Attr(unix.NDA_LLADDR, mac[:])
}

type route struct {
	dst      netip.Prefix
	ifindex  uint32
	gateway  netip.Addr // invalid: none; else on-link, reached by the device without a route
	source   netip.Addr // invalid: the kernel chooses
	table    uint32
	scope    uint8
	protocol uint8
}

func setRoute(b *rtnl.Batch, r route) {
	m := make([]byte, unix.SizeofRtMsg)
	m[0], m[1] = byte(family(r.dst.Addr())), byte(r.dst.Bits())
	if r.table < 256 {
		m[4] = byte(r.table)
	}
	m[5], m[6], m[7] = r.protocol, r.scope, unix.RTN_UNICAST
	if r.gateway.IsValid() {
		binary.NativeEndian.PutUint32(m[8:], unix.RTNH_F_ONLINK)
	}
	b.Add(unix.RTM_NEWROUTE, replace, m)
	b.For("route to %v", r.dst)
	b.Attr(unix.RTA_DST, r.dst.Addr().AsSlice())
	b.Uint32(unix.RTA_OIF, r.ifindex)
	b.Uint32(unix.RTA_TABLE, r.table)
	if r.gateway.IsValid() {
		b.Attr(unix.RTA_GATEWAY, r.gateway.AsSlice())
	}
	if r.source.IsValid() {
		b.Attr(unix.RTA_PREFSRC, r.source.AsSlice())
	}
}
