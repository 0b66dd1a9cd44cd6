// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

//go:build modules

package kernel

import (
	"fmt"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// The devices of this file are modules of Debian's kernels, which scripts/test-kernels boots with the tag
// modules.

const vlanID = 5

// overVLAN makes up0 a VLAN of a device of the bridge.
func overVLAN(t *testing.T, bridge netlink.Link, n byte, ns netns.NsHandle) {
	t.Helper()
	addPort(t, bridge, fmt.Sprintf("slport%d", n), ns, "wire0")
	addVLAN(t, ns, "wire0")
}

// overBond makes up0 a bond of two devices of the bridge, one of which is active.
func overBond(t *testing.T, bridge netlink.Link, n byte, ns netns.NsHandle) {
	t.Helper()
	addBond(t, bridge, n, ns, "up0")
}

// overBondedVLAN makes up0 a VLAN of a bond.
func overBondedVLAN(t *testing.T, bridge netlink.Link, n byte, ns netns.NsHandle) {
	t.Helper()
	addBond(t, bridge, n, ns, "bond0")
	addVLAN(t, ns, "bond0")
}

func addVLAN(t *testing.T, ns netns.NsHandle, parent string) {
	t.Helper()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	must(t, "netlink", err)
	defer h.Close()
	l, err := h.LinkByName(parent)
	must(t, "find "+parent, err)
	must(t, "set "+parent+" up", h.LinkSetUp(l))
	must(t, "add the VLAN", h.LinkAdd(&netlink.Vlan{
		LinkAttrs: netlink.LinkAttrs{Name: "up0", ParentIndex: l.Attrs().Index}, VlanId: vlanID,
	}))
}

func addBond(t *testing.T, bridge netlink.Link, n byte, ns netns.NsHandle, name string) {
	t.Helper()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	must(t, "netlink", err)
	defer h.Close()
	bond := netlink.NewLinkBond(netlink.LinkAttrs{Name: name})
	bond.Mode, bond.Miimon = netlink.BOND_MODE_ACTIVE_BACKUP, 10
	must(t, "add the bond", h.LinkAdd(bond))
	l, err := h.LinkByName(name)
	must(t, "find the bond", err)
	for i := range 2 {
		wire := fmt.Sprint("wire", i)
		addPort(t, bridge, memberPort(n, i), ns, wire)
		w, err := h.LinkByName(wire)
		must(t, "find "+wire, err)
		must(t, "add "+wire+" to the bond", h.LinkSetMasterByIndex(w, l.Attrs().Index))
	}
	must(t, "set the bond up", h.LinkSetUp(l))
}

// memberPort returns the port of the bridge that a member of a node's bond leads to.
func memberPort(n byte, member int) string { return fmt.Sprintf("slport%d-%d", n, member) }

// eachUplink runs a test in all modes over each kind of uplink.
func eachUplink(t *testing.T, test func(t *testing.T, f *fabric, bonded bool)) {
	for _, kind := range []struct {
		name   string
		make   uplinkKind
		bonded bool
	}{{"VLAN", overVLAN, false}, {"bond", overBond, true}, {"VLAN of a bond", overBondedVLAN, true}} {
		t.Run(kind.name, func(t *testing.T) {
			eachUnderlayOn(t, kind.make, func(t *testing.T, f *fabric, _ Routing) { test(t, f, kind.bonded) })
		})
	}
}

// TestKernelUplinksMayBeBondsAndVLANs makes pods of two nodes exchange packets over such uplinks, bypassing
// both stacks, as policy allows; and over the other member of a bond after the active one has lost its carrier.
func TestKernelUplinksMayBeBondsAndVLANs(t *testing.T) {
	eachUplink(t, func(t *testing.T, f *fabric, bonded bool) {
		speak := func(when string) {
			t.Helper()
			for i, addr := range f.b.pod.Addrs() {
				before := f.b.counters(t)
				servicetest.EventuallyNil(t, when, func() error {
					return exchange(t, f.a.pod.ns, f.a.pod.Addrs()[i], f.b.pod.ns, addr)
				})
				wantNoDrops(t, when, f.b.gained(t, before))
			}
		}
		speak("at first")
		if bonded {
			for member := range 2 {
				port, err := netlink.LinkByName(memberPort(1, member))
				must(t, "find the port of a member", err)
				must(t, "set it down", netlink.LinkSetDown(port))
				time.Sleep(50 * time.Millisecond) // several intervals of miimon
				speak(fmt.Sprintf("member %d of the bond has no carrier", member))
				must(t, "set it up", netlink.LinkSetUp(port))
				time.Sleep(50 * time.Millisecond) // likewise
			}
		}
		(&theatre{runner: f.b.runner}).putTables(t)
		setPolicy(t, f.b.k, f.b.pod.Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: friends})
		before := f.b.counters(t)
		for i, addr := range f.b.pod.Addrs() {
			if err := exchange(t, f.a.pod.ns, f.a.pod.Addrs()[i], f.b.pod.ns, addr); err == nil {
				t.Errorf("a pod that is no friend has reached %s", addr)
			}
		}
		denied := uint64(0)
		for c, n := range f.b.gained(t, before) {
			if c.reason.Dropped() {
				denied += n
			}
		}
		if denied == 0 {
			t.Error("nothing was counted as dropped")
		}
	})
}
