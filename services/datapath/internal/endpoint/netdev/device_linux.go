// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/devconf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/rtnl"
)

// device is a network device as the kernel reports it.
type device struct {
	index, peer uint32 // peer: index of the other end, in its own namespace
	flags       uint32
	mtu, group  uint32
	state       uint8 // IF_OPER of linux/if.h
	name, kind  string
	qdisc       string // the root qdisc
	addr        []byte
	// The device's sysctls of each address family; nil if it has none of the family.
	conf4, conf6 []byte
}

// Attributes within IFLA_AF_SPEC (linux/if_link.h), and the filter that omits counters from a reply
// (linux/rtnetlink.h).
const (
	inetConf  = 1 // IFLA_INET_CONF
	inet6Conf = 2 // IFLA_INET6_CONF
	skipStats = 8 // RTEXT_FILTER_SKIP_STATS
)

// infomsg encodes a struct ifinfomsg.
func infomsg(index, flags, change uint32) []byte {
	m := make([]byte, unix.SizeofIfInfomsg)
	binary.NativeEndian.PutUint32(m[4:], index)
	binary.NativeEndian.PutUint32(m[8:], flags)
	binary.NativeEndian.PutUint32(m[12:], change)
	return m
}

// getLink requests the device with an index, or with a name if the index is 0.
func getLink(b *rtnl.Batch, index uint32, name string) int {
	i := b.Add(unix.RTM_GETLINK, 0, infomsg(index, 0, 0))
	b.Uint32(unix.IFLA_EXT_MASK, skipStats)
	if index == 0 {
		b.String(unix.IFLA_IFNAME, name)
	}
	return i
}

// deviceOf decodes the reply to getLink.
func deviceOf(m []byte) device {
	var l device
	if len(m) < unix.SizeofIfInfomsg {
		return l
	}
	l.index, l.flags = binary.NativeEndian.Uint32(m[4:]), binary.NativeEndian.Uint32(m[8:])
	rtnl.Attrs(m, unix.SizeofIfInfomsg, func(kind uint16, v []byte) {
		switch kind {
		case unix.IFLA_IFNAME:
			l.name = unix.ByteSliceToString(v)
		case unix.IFLA_LINK:
			l.peer = rtnl.Number(v)
		case unix.IFLA_OPERSTATE:
			if len(v) > 0 {
				l.state = v[0]
			}
		case unix.IFLA_MTU:
			l.mtu = rtnl.Number(v)
		case unix.IFLA_GROUP:
			l.group = rtnl.Number(v)
		case unix.IFLA_ADDRESS:
			l.addr = v
		case unix.IFLA_QDISC:
			l.qdisc = unix.ByteSliceToString(v)
		case unix.IFLA_LINKINFO:
			rtnl.Attrs(v, 0, func(kind uint16, v []byte) {
				if kind == unix.IFLA_INFO_KIND {
					l.kind = unix.ByteSliceToString(v)
				}
			})
		case unix.IFLA_AF_SPEC:
			rtnl.Attrs(v, 0, func(family uint16, v []byte) {
				rtnl.Attrs(v, 0, func(kind uint16, v []byte) {
					switch {
					case family == unix.AF_INET && kind == inetConf:
						l.conf4 = v
					case family == unix.AF_INET6 && kind == inet6Conf:
						l.conf6 = v
					}
				})
			})
		}
	})
	return l
}

var (
	// hostSettings of an endpoint's host end.
	hostSettings = []devconf.Setting{
		devconf.V4("forwarding", 0, 1),
		// Drop packets whose source is not routed to this device. This is the host stack's own anti-spoofing, in case
		// the program is detached.
		devconf.V4("rp_filter", 7, 1),
		// rp_filter looks up the reverse route. Without the packet's mark, this lookup would match
		// the rule that prohibits unmarked packets from the pod range, and packets that the
		// programs pass to the stack for an ICMP error would be dropped.
		devconf.V4("src_valid_mark", 23, 1),
		devconf.V4("accept_local", 22, 0),
		devconf.V4("proxy_arp", 2, 0),
		devconf.V4("send_redirects", 5, 0),
		devconf.V6("disable_ipv6", 26, 0),
		devconf.V6("forwarding", 0, 1),
		devconf.V6("accept_ra", 3, 0),
		devconf.V6("accept_redirects", 4, 0),
	}
	// containerSettings of the device in the container.
	containerSettings = []devconf.Setting{
		devconf.V6("accept_ra", 3, 0),
		devconf.V6("disable_ipv6", 26, 0),
	}
)

// has6 reports whether an endpoint has an IPv6 address. An endpoint without one may be on a node
// without IPv6.
func has6(d endpoint.Device) bool { return len(d.Addrs) > 0 && d.Addrs[len(d.Addrs)-1].Is6() }

func checkSettings(ds *differences, l device, list []devconf.Setting, has6 bool) {
	for _, s := range list {
		have, ok := s.In(l.conf4, l.conf6)
		switch key := "net/" + s.Path(l.name); {
		case !ok && s.V6 && !has6:
		case !ok:
			ds.add("sysctl", key, strconv.Itoa(int(s.Want)), "")
		case have != s.Want:
			value := strconv.Itoa(int(int32(have))) //nolint:gosec // the kernel's numbers are signed
			ds.add("sysctl", key, strconv.Itoa(int(s.Want)), value)
		}
	}
}

// addSettings adds the IPv4 settings that differ to a request about the device. The kernel accepts
// no IPv6 settings in this request: applySettings writes them.
func addSettings(b *rtnl.Batch, l device, list []devconf.Setting) {
	b.Nest(unix.AF_INET, nil, func() {
		b.Nest(inetConf, nil, func() {
			for _, s := range list {
				if have, _ := s.In(l.conf4, l.conf6); !s.V6 && have != s.Want {
					b.Uint32(uint16(s.At+1), s.Want) //nolint:gosec // an attribute number, which is small
				}
			}
		})
	})
}

// applySettings writes the IPv6 settings that differ, below the directory conf in dir. dir must be
// of the calling thread's namespace.
func applySettings(dir int, conf string, l device, list []devconf.Setting) error {
	for _, s := range list {
		if have, ok := s.In(l.conf4, l.conf6); !s.V6 || ok && have == s.Want {
			continue
		}
		value := strconv.Itoa(int(s.Want))
		if err := writeAt(dir, filepath.Join(conf, l.name, s.Name), value); err != nil {
			return fmt.Errorf("sysctl net/%s=%s: %w", s.Path(l.name), value, err)
		}
	}
	return nil
}

func writeAt(dir int, path, value string) error {
	fd, err := unix.Openat(dir, path, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	_, err = unix.Write(fd, []byte(value))
	return errors.Join(err, unix.Close(fd))
}

func checkDevice(ds *differences, l device, name string, mac endpoint.MAC, mtu uint16) {
	if l.flags&unix.IFF_UP == 0 {
		ds.add("device state", name, "up", "down")
	}
	if !bytes.Equal(l.addr, mac[:]) {
		ds.add("device address", name, mac.String(), net.HardwareAddr(l.addr).String())
	}
	if l.mtu != uint32(mtu) {
		ds.add("device mtu", name, strconv.Itoa(int(mtu)), strconv.Itoa(int(l.mtu)))
	}
}

// getRoute asks for the node's route to an address.
func getRoute(b *rtnl.Batch, a netip.Addr) int {
	m := make([]byte, unix.SizeofRtMsg)
	m[0], m[1] = byte(family(a)), byte(a.BitLen())
	i := b.Add(unix.RTM_GETROUTE, 0, m)
	b.Attr(unix.RTA_DST, a.AsSlice())
	return i
}

// checkRoute compares the reply to getRoute.
func (n *Netdev) checkRoute(ds *differences, r rtnl.Reply, d endpoint.Device, a netip.Addr) {
	want := "by " + d.HostName
	src, hasSrc := n.nodeAddr(a)
	if hasSrc {
		want += " from " + src.String()
	}
	if r.Err != nil || r.Data == nil {
		ds.add("route", a.String(), want, fmt.Sprint(r.Err))
		return
	}
	var oif uint32
	var from netip.Addr
	rtnl.Attrs(r.Data, unix.SizeofRtMsg, func(kind uint16, v []byte) {
		switch kind {
		case unix.RTA_OIF:
			oif = rtnl.Number(v)
		case unix.RTA_PREFSRC:
			from, _ = netip.AddrFromSlice(v)
		}
	})
	if oif != d.HostIndex || hasSrc && from.Unmap() != src {
		ds.add("route", a.String(), want, fmt.Sprintf("by device %d from %v", oif, from))
	}
}

// Offsets in struct ndmsg, and its size.
const (
	sizeofNdmsg = 12
	ndmIfindex  = 4
	ndmState    = 8
)

func ndmsg(ifindex uint32, a netip.Addr, state uint16) []byte {
	m := make([]byte, sizeofNdmsg)
	m[0] = byte(family(a))
	binary.NativeEndian.PutUint32(m[ndmIfindex:], ifindex)
	binary.NativeEndian.PutUint16(m[ndmState:], state)
	return m
}

// getNeighbour requests a single neighbour; a listing would contain all devices' neighbours.
func getNeighbour(b *rtnl.Batch, ifindex uint32, a netip.Addr) int {
	i := b.Add(unix.RTM_GETNEIGH, 0, ndmsg(ifindex, a, 0))
	b.Attr(unix.NDA_DST, a.AsSlice())
	return i
}

// checkNeighbour compares the reply to getNeighbour.
func checkNeighbour(ds *differences, r rtnl.Reply, device string, a netip.Addr, mac endpoint.MAC) error {
	if r.Err != nil && !errors.Is(r.Err, unix.ENOENT) {
		return fmt.Errorf("neighbour %v on %s: %w", a, device, r.Err)
	}
	var addr []byte
	permanent := len(r.Data) >= sizeofNdmsg && binary.NativeEndian.Uint16(r.Data[ndmState:])&unix.NUD_PERMANENT != 0
	rtnl.Attrs(r.Data, sizeofNdmsg, func(kind uint16, v []byte) {
		if kind == unix.NDA_LLADDR {
			addr = v
		}
	})
	if !permanent || !bytes.Equal(addr, mac[:]) {
		ds.add("neighbour", a.String()+" on "+device, mac.String(), "")
	}
	return nil
}
