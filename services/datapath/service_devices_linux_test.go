// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// addBridge adds a device with an address to the node.
func (w *world) addBridge(name string, a netip.Addr) {
	w.t.Helper()
	err := w.home.Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = name
		bridge := &netlink.Bridge{LinkAttrs: attrs}
		if err := netlink.LinkAdd(bridge); err != nil {
			return err
		}
		return netlink.AddrAdd(bridge, &netlink.Addr{IPNet: netlink.NewIPNet(a.AsSlice())})
	})
	if err != nil {
		w.t.Fatal(err)
	}
}

// TestKernelAddressesOfServicesAreNotTheHosts adds service addresses to a device of the node, as kube-proxy in IPVS
// mode does. Packets from a pod to such an address are not packets to the host.
func TestKernelAddressesOfServicesAreNotTheHosts(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	a := w.pod("a")
	service, vip := netip.MustParseAddr("10.96.0.1"), netip.MustParseAddr("10.96.0.2")
	both, own := netip.MustParseAddr("10.96.0.3"), netip.MustParseAddr("10.97.0.1")
	w.addBridge("kube-ipvs0", service)
	w.addBridge("vip7", vip)
	w.addBridge("vip8", both)
	w.addBridge("br0", both)
	w.addBridge("br1", own)
	servicetest.EventuallyNil(t, "the host's own address", func() error {
		have, err := w.node.Kernel.Endpoints.HostAddrs()
		if err == nil && !(slices.Contains(have, own) && slices.Contains(have, both)) {
			err = fmt.Errorf("host addresses %v", have)
		}
		return err
	})
	have, err := w.node.Kernel.Endpoints.HostAddrs()
	if err != nil || slices.Contains(have, service) || slices.Contains(have, vip) {
		t.Errorf("host addresses %v, %v; want neither %v nor %v", have, err, service, vip)
	}
	for to, want := range map[netip.Addr]event.Reason{service: event.ForwardedOutside, own: event.ForwardedToHost} {
		before := w.counted(want)
		a.sendFrom(a.spec.Addrs[0], netip.AddrPortFrom(to, 53))
		if n := w.counted(want) - before; n != 1 {
			t.Errorf("a packet to %v: %d counted as %v, want 1", to, n, want)
		}
	}
}
