// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/test/internal/pod"
)

// Devices of a node without Sluice.
const (
	podPort   = "pod0"
	linuxVTEP = "vxlan0"
)

// Properties of the tunnel between nodes without Sluice: a port that Sluice does not use, and the MTU that remains of
// 1,500 bytes.
const (
	linuxVNI   = 42
	linuxPort  = 4790
	linuxInner = 1450
)

// linuxNode is a node without Sluice and with one pod.
type linuxNode struct {
	netns string
	pod   pod.Pod
	// address is the node's address in the network between the nodes. gateway is the pod's default gateway, the first
	// address of podRange.
	address, gateway netip.Addr
	podRange         netip.Prefix
	mac              net.HardwareAddr // of the uplink and of the tunnel
}

// linuxNodes makes two nodes with a pod each that Linux connects by routes alone, or by routes and a VXLAN device.
// Sluice is compared with them. As in a cluster of devnode, a bridge in a separate namespace joins them. They do not
// use connection tracking.
func linuxNodes(prefix string, tunnel bool) (_ path, remove func() error, err error) {
	hub := pod.NetnsPath(prefix + "-h")
	namespaces := []string{hub}
	var nodes [2]linuxNode
	for i := range nodes {
		n := byte(i + 1)
		name := fmt.Sprintf("%s-p%d", prefix, n)
		nodes[i] = linuxNode{
			netns:    pod.NetnsPath(fmt.Sprintf("%s-n%d", prefix, n)),
			pod:      pod.Pod{Name: name, Netns: pod.NetnsPath(name), IPv4: netip.AddrFrom4([4]byte{10, 98, n, 2})},
			address:  netip.AddrFrom4([4]byte{198, 51, 100, n}),
			gateway:  netip.AddrFrom4([4]byte{10, 98, n, 1}),
			podRange: netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 98, n}), 24),
			mac:      net.HardwareAddr{2, 0, 0, 0, 1, n},
		}
		namespaces = append(namespaces, nodes[i].netns, nodes[i].pod.Netns)
	}
	remove = func() error {
		var errs []error
		for _, ns := range namespaces {
			errs = append(errs, pod.DeleteNetns(ns))
		}
		return errors.Join(errs...)
	}
	for _, ns := range namespaces {
		if err := pod.NewNetns(ns); err != nil {
			return path{}, nil, errors.Join(err, remove())
		}
	}
	err = pod.In(hub, func() error { return joinByBridge(nodes[:]) })
	for i, n := range nodes {
		if err == nil {
			err = n.configure(nodes[1-i], tunnel)
		}
	}
	if err != nil {
		return path{}, nil, errors.Join(fmt.Errorf("make nodes without Sluice: %w", err), remove())
	}
	name := "Linux routing"
	if tunnel {
		name = "Linux VXLAN"
	}
	return path{name: name, from: nodes[0].pod, to: nodes[1].pod}, remove, nil
}

// joinByBridge makes a bridge in the current namespace with a port for each node. The node's uplink is eth0.
func joinByBridge(nodes []linuxNode) error {
	attributes := netlink.NewLinkAttrs()
	attributes.Name = "br0"
	bridge := &netlink.Bridge{LinkAttrs: attributes}
	if err := netlink.LinkAdd(bridge); err != nil {
		return fmt.Errorf("make a bridge: %w", err)
	}
	if err := netlink.LinkSetUp(bridge); err != nil {
		return err
	}
	for i, n := range nodes {
		port, err := hostEnd(fmt.Sprintf("node%d", i+1), n.netns, n.mac)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetMaster(port, bridge); err != nil {
			return err
		}
	}
	return nil
}

// configure lets the node forward between its pod and the other node.
func (n linuxNode) configure(other linuxNode, tunnel bool) error {
	if err := forward(n.netns); err != nil {
		return err
	}
	err := pod.In(n.netns, func() error {
		if _, err := addressed("eth0", netip.PrefixFrom(n.address, 24)); err != nil {
			return err
		}
		if _, err := hostEnd(podPort, n.pod.Netns, nil); err != nil {
			return err
		}
		if _, err := addressed(podPort, netip.PrefixFrom(n.gateway, n.podRange.Bits())); err != nil {
			return err
		}
		if tunnel {
			return n.tunnelTo(other)
		}
		return netlink.RouteAdd(&netlink.Route{Dst: ipNet(other.podRange), Gw: other.address.AsSlice()})
	})
	if err != nil {
		return err
	}
	return pod.In(n.pod.Netns, func() error {
		link, err := addressed("eth0", netip.PrefixFrom(n.pod.IPv4, n.podRange.Bits()))
		if err != nil {
			return err
		}
		if tunnel {
			if err := netlink.LinkSetMTU(link, linuxInner); err != nil {
				return err
			}
		}
		return netlink.RouteAdd(&netlink.Route{Gw: n.gateway.AsSlice()})
	})
}

// tunnelTo makes the tunnel device with one remote end, and the route over it.
func (n linuxNode) tunnelTo(other linuxNode) error {
	if err := makeVXLAN(n, other); err != nil {
		return fmt.Errorf("make %s: %w", linuxVTEP, err)
	}
	link, err := netlink.LinkByName(linuxVTEP)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	err = netlink.NeighSet(&netlink.Neigh{
		LinkIndex: link.Attrs().Index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT,
		IP: other.gateway.AsSlice(), HardwareAddr: other.mac,
	})
	if err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{
		LinkIndex: link.Attrs().Index, Dst: ipNet(other.podRange), Gw: other.gateway.AsSlice(),
		Flags: int(netlink.FLAG_ONLINK),
	})
}

// makeVXLAN makes the tunnel device without checksums of the outer packet, as in Sluice. It calls ip because
// netlink.Vxlan has no option for this.
func makeVXLAN(n, other linuxNode) error {
	request := nl.NewNetlinkRequest(unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL|unix.NLM_F_ACK)
	request.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	request.AddData(nl.NewRtAttr(unix.IFLA_IFNAME, nl.ZeroTerminated(linuxVTEP)))
	request.AddData(nl.NewRtAttr(unix.IFLA_ADDRESS, n.mac))
	request.AddData(nl.NewRtAttr(unix.IFLA_MTU, nl.Uint32Attr(linuxInner)))
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(nl.IFLA_INFO_KIND, nl.NonZeroTerminated("vxlan"))
	data := info.AddRtAttr(nl.IFLA_INFO_DATA, nil)
	data.AddRtAttr(nl.IFLA_VXLAN_ID, nl.Uint32Attr(linuxVNI))
	data.AddRtAttr(nl.IFLA_VXLAN_PORT, []byte{linuxPort >> 8, linuxPort & 0xff})
	data.AddRtAttr(nl.IFLA_VXLAN_LOCAL, n.address.AsSlice())
	data.AddRtAttr(nl.IFLA_VXLAN_GROUP, other.address.AsSlice())
	data.AddRtAttr(nl.IFLA_VXLAN_LEARNING, nl.Uint8Attr(0))
	data.AddRtAttr(nl.IFLA_VXLAN_UDP_CSUM, nl.Uint8Attr(0))
	request.AddData(info)
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// addressed adds an address to a device of the current namespace and sets the device up.
func addressed(device string, address netip.Prefix) (netlink.Link, error) {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return nil, err
	}
	if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: ipNet(address)}); err != nil {
		return nil, fmt.Errorf("give %s to %s: %w", address, device, err)
	}
	return link, netlink.LinkSetUp(link)
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
