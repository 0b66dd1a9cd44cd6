// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// Addresses outside of the cluster, reserved for documentation (RFC 5737, 3849).
var (
	worldGateways = []netip.Prefix{netip.MustParsePrefix("203.0.113.1/24"), netip.MustParsePrefix("2001:db8:ffff::1/64")}
	worldHosts    = []netip.Prefix{netip.MustParsePrefix("203.0.113.2/24"), netip.MustParsePrefix("2001:db8:ffff::2/64")}
)

// outside makes a host that is neither a pod nor a node, behind a device of the node. Policies call it world.
func (n *testNode) outside(t *testing.T) pod.Pod {
	t.Helper()
	world := newPod(t, "world")
	for _, p := range worldHosts {
		world = world.WithAddresses(append(world.Addresses(), p.Addr()))
	}
	ns, err := os.Open(world.Netns)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	err = pod.In(n.Netns(), func() error {
		attributes := netlink.NewLinkAttrs()
		attributes.Name = "world"
		pair := &netlink.Veth{LinkAttrs: attributes, PeerName: "eth0", PeerNamespace: netlink.NsFd(int(ns.Fd()))}
		if err := netlink.LinkAdd(pair); err != nil {
			return err
		}
		return address("world", worldGateways)
	})
	if err != nil {
		t.Fatalf("join the world to the node: %v", err)
	}
	err = pod.In(world.Netns, func() error {
		if err := address("eth0", worldHosts); err != nil {
			return err
		}
		for _, gateway := range worldGateways {
			bits := gateway.Addr().BitLen()
			err := netlink.RouteAdd(&netlink.Route{
				Gw: gateway.Addr().AsSlice(), Dst: &net.IPNet{IP: make(net.IP, bits/8), Mask: net.CIDRMask(0, bits)},
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatalf("configure the world: %v", err)
	}
	return world
}

// address adds addresses to a device of the current namespace and sets the device up. Its link-local address is valid
// at once: before, the kernel asks for no neighbour of a forwarded packet, and drops the packet after three seconds.
func address(device string, prefixes []netip.Prefix) error {
	link, err := netlink.LinkByName(device)
	if err != nil {
		return err
	}
	if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+device+"/accept_dad", []byte("0"), 0o644); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	for _, p := range prefixes {
		a := &netlink.Addr{
			IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())},
			Flags: unix.IFA_F_NODAD,
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return err
		}
	}
	return nil
}

// noRest disables the quarantine of released addresses.
func noRest(o *devnode.Options) {
	if o.Args == nil {
		o.Args = make(map[string][]string)
	}
	o.Args[devnode.IPAM] = append(o.Args[devnode.IPAM], "--quarantine=0s")
}

// TestPodsHearFromOutsideWhateverTheUplinkFilters enables the reverse path filter of the uplink, as distributions do.
// The datapath disables it, and packets from outside reach pods.
func TestPodsHearFromOutsideWhateverTheUplinkFilters(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	p := n.addPods(t, "client")[0]
	var gateway netip.Addr
	err := pod.In(n.Netns(), func() error {
		if err := os.WriteFile("/proc/sys/net/ipv4/conf/eth0/rp_filter", []byte("2"), 0o644); err != nil {
			return err
		}
		routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
		for _, r := range routes {
			if ones, _ := r.Dst.Mask.Size(); ones == 0 {
				gateway, _ = netip.AddrFromSlice(r.Gw.To4())
			}
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", netip.AddrPortFrom(gateway, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	servicetest.EventuallyNil(t, "the caller answers the pod", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		c, err := p.Dial(ctx, l.Addr().(*net.TCPAddr).AddrPort())
		if err == nil {
			err = c.Close()
		}
		return err
	})
}
