// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/routing"
	"github.com/sluice-net/sluice/services/datapath/internal/node/underlay"
	"github.com/sluice-net/sluice/services/datapath/internal/server"
)

// throughDevice returns how many packets the tunnel device of a node has sent and received.
func (n *routed) throughDevice() (packets uint64) {
	n.t.Helper()
	var devices []byte
	if err := n.home.Do(func() (err error) {
		devices, err = os.ReadFile("/proc/thread-self/net/dev")
		return err
	}); err != nil {
		n.t.Fatal(err)
	}
	for line := range strings.Lines(string(devices)) {
		name, counts, _ := strings.Cut(strings.TrimSpace(line), ":")
		fields := strings.Fields(counts)
		if name != underlay.TunnelName("test") {
			continue
		}
		for _, at := range []int{1, 9} { // packets received, sent
			count, err := strconv.ParseUint(fields[at], 10, 64)
			if err != nil {
				n.t.Fatal(err)
			}
			packets += count
		}
		return packets
	}
	n.t.Fatalf("no tunnel device in %s", devices)
	return 0
}

// bypasses waits until tunnel packets of a node to the other bypass the tunnel device, or do not for a reason that
// contains a text.
func (n *routed) bypasses(why string) {
	n.t.Helper()
	servicetest.EventuallyNil(n.t, "the path of tunnel packets", func() error {
		r := server.PodRouting(n.node.Node.Router.State(), nil)
		if len(r.GetTunnelPaths()) != 1 {
			return fmt.Errorf("paths %v, warnings %v", r, n.node.Node.Host.Warnings())
		}
		p := r.GetTunnelPaths()[0]
		if p.GetBypassesDevice() != (why == "") || !strings.Contains(p.GetReason(), why) {
			return fmt.Errorf("path %v, want reason %q", p, why)
		}
		return nil
	})
}

// exchanged returns how many packets pass a's tunnel device while a connection is used.
func (n *routed) exchanged(c net.Conn) uint64 {
	n.t.Helper()
	before := n.throughDevice()
	for range 10 {
		if _, err := ask(c); err != nil {
			n.t.Fatal(err)
		}
	}
	return n.throughDevice() - before
}

// TestKernelTunnelPacketsBypassTheDeviceWhileNothingSpeaksAgainstIt changes what the administrator of a node configures
// for packets between nodes. Open connections continue on the other path, also while the process is down.
func TestKernelTunnelPacketsBypassTheDeviceWhileNothingSpeaksAgainstIt(t *testing.T) {
	a, b := newPair(t, RoutingConfig{Mode: "overlay", Shortcut: shortcutAuto}, "4", "6")
	pa, pb := a.pod("a"), b.pod("b")
	a.bypasses("")
	b.bypasses("")
	pa.reaches(pb)
	for i, addr := range pb.spec.Addrs {
		c := a.dial(pa.ns, "tcp", pb.mirror(addr))
		if n := a.exchanged(c); n != 0 {
			t.Errorf("%v: %d packets have passed the device", addr, n)
		}
		for _, obstacle := range []struct{ add, del, why string }{
			{
				"xfrm policy add dir out src 198.51.100.1 dst 198.51.100.2 action block",
				"xfrm policy del dir out src 198.51.100.1 dst 198.51.100.2", "xfrm policies: 1 out",
			},
			{
				"xfrm policy add dir in src 198.51.100.1 dst 198.51.100.2 action block",
				"xfrm policy del dir in src 198.51.100.1 dst 198.51.100.2", "xfrm policies: 1 in",
			},
			{
				"rule add pref 1000 ipproto udp dport 4789 lookup main", "rule del pref 1000",
				"rule 1000 selects by the destination port and the protocol",
			},
			{
				"rule add pref 1001 fwmark 0x1000/0x1000 lookup main", "rule del pref 1001", "rule 1001 selects by the mark",
			},
			{
				"route add 192.0.2.2 encap ip id 7 dst 192.0.2.2 dev uplink0", "route del 192.0.2.2",
				"the route 192.0.2.2/32 encapsulates packets",
			},
		} {
			a.ip(obstacle.add)
			a.bypasses(obstacle.why)
			if !strings.Contains(obstacle.add, "encap") { // no other end takes these packets out
				if n := a.exchanged(c); n == 0 {
					t.Errorf("%v, %s: no packet has passed the device", addr, obstacle.add)
				}
			}
			a.ip(obstacle.del)
			a.bypasses("")
			if n := a.exchanged(c); n != 0 {
				t.Errorf("%v, after %s: %d packets have passed the device", addr, obstacle.del, n)
			}
		}
		if found := a.findings(false, ""); len(found) > 0 {
			t.Errorf("findings %v, want none", found)
		}
		if i > 0 {
			continue
		}
		a.stop()
		servicetest.Eventually(t, "the kernel to route tunnel packets without the process", func() bool {
			return a.exchanged(c) > 0
		})
		a.start(true)
		a.bypasses("")
		if n := a.exchanged(c); n != 0 {
			t.Errorf("after a restart %d packets have passed the device", n)
		}
	}
}

// TestKernelShortcutThatIsTurnedOffLeavesNothing restarts a node with the setting off, while the other has it on.
func TestKernelShortcutThatIsTurnedOffLeavesNothing(t *testing.T) {
	a, b := newPair(t, RoutingConfig{Mode: "overlay", Shortcut: shortcutAuto}, "4", "6")
	pa, pb := a.pod("a"), b.pod("b")
	a.bypasses("")
	c := a.dial(pa.ns, "tcp", pb.mirror(pb.spec.Addrs[0]))
	if _, err := ask(c); err != nil {
		t.Fatal(err)
	}
	a.stop()
	a.routing.Shortcut = "off"
	a.start(true)
	a.bypasses("routing.shortcut is off")
	b.bypasses("")
	if n := a.exchanged(c); n < 20 {
		t.Errorf("%d packets of 10 exchanges have passed the device", n)
	}
	if a.hasPrograms(t, "uplink0") {
		t.Error("the uplink still has programs")
	}
	if found := a.findings(false, ""); len(found) > 0 {
		t.Errorf("findings %v, want none", found)
	}
	pb.reaches(pa)
}

// TestBypassedRulesAreNamedOnlyWhilePacketsBypassThem checks what status says about the firewall's rules.
func TestBypassedRulesAreNamedOnlyWhilePacketsBypassThem(t *testing.T) {
	peer := routing.PeerState{Name: "b", Direct: true}
	peer.Paths[0].MTU = 1500
	s := routing.State{Mode: cluster.Overlay, Shortcut: true, Peers: []routing.PeerState{peer}}
	rules := []string{"rule 4"}
	if r := server.PodRouting(s, rules); !slices.Equal(r.GetBypassedRules(), rules) {
		t.Errorf("%v, want the rules", r)
	}
	s.Closed = "xfrm policies: 1 in"
	if r := server.PodRouting(s, rules); len(r.GetBypassedRules()) > 0 {
		t.Errorf("%v, want no rules", r)
	}
	s.Closed, s.Peers[0].Direct, s.Peers[0].Device = "", false, "the tunnel uses IPv6"
	if r := server.PodRouting(s, rules); len(r.GetBypassedRules()) > 0 {
		t.Errorf("%v, want no rules", r)
	}
}

// sentBy returns how many packets a device of a node has sent.
func (n *routed) sentBy(device string) (sent uint64) {
	n.t.Helper()
	if err := n.home.Do(func() error {
		l, err := netlink.LinkByName(device)
		if err == nil {
			sent = l.Attrs().Statistics.TxPackets
		}
		return err
	}); err != nil {
		n.t.Fatal(err)
	}
	return sent
}

// pathTo waits until the direct path to the only other node uses a device and a next hop.
func (n *routed) pathTo(device string, via string) {
	n.t.Helper()
	var index uint32
	if err := n.home.Do(func() error {
		l, err := netlink.LinkByName(device)
		if err == nil {
			index = uint32(l.Attrs().Index)
		}
		return err
	}); err != nil {
		n.t.Fatal(err)
	}
	servicetest.EventuallyNil(n.t, "the direct path by "+device+" and "+via, func() error {
		nodes, err := n.node.Kernel.Nodes.Nodes()
		if err != nil {
			return err
		}
		for _, e := range nodes {
			if e.Direct.Ifindex == index && e.Direct.Via.String() == via {
				return nil
			}
		}
		return fmt.Errorf("nodes %+v", nodes)
	})
}

// TestKernelDirectPathFollowsTheRoute changes the device, the next hop, the neighbour and the address by which a node
// is reached. An open connection continues, and still bypasses the tunnel device. While the process is down, the kernel
// follows a change after a few seconds, and the connection continues as well.
func TestKernelDirectPathFollowsTheRoute(t *testing.T) {
	a, b := newPair(t, RoutingConfig{Mode: "overlay", Shortcut: shortcutAuto}, "4", "6")
	for _, n := range []*routed{a, b} {
		n.stop()
		n.underlay.Devices = []string{"uplink0", "uplink1"}
	}
	a.ip("link add uplink1 type veth peer name far")
	moveTo(t, a.world, "far", b.home)
	b.ip("link set far name uplink1")
	for i, n := range []*routed{a, b} {
		n.ip("link set uplink1 up")
		n.ip(fmt.Sprintf("address add 198.51.100.%d/24 dev uplink1", i+1))
		n.start(true)
	}
	pa, pb := a.pod("a"), b.pod("b")
	a.bypasses("")
	b.bypasses("")
	a.pathTo("uplink0", "192.0.2.2")
	pa.reaches(pb)
	c := a.dial(pa.ns, "tcp", pb.mirror(pb.spec.Addrs[0]))
	direct := func(what, device string) {
		t.Helper()
		if _, err := ask(c); err != nil { // a neighbour may have to be resolved, and retransmissions pass either way
			t.Fatalf("%s: %v", what, err)
		}
		before := a.sentBy(device)
		if n := a.exchanged(c); n != 0 {
			t.Errorf("%s: %d packets have passed the tunnel device", what, n)
		}
		if a.sentBy(device)-before < 10 {
			t.Errorf("%s: %s has sent %d packets of 10 exchanges", what, device, a.sentBy(device)-before)
		}
	}
	direct("at first", "uplink0")

	a.ip("route add 192.0.2.2 dev uplink1 src 192.0.2.1")
	b.ip("route add 192.0.2.1 dev uplink1 src 192.0.2.2")
	a.pathTo("uplink1", "192.0.2.2")
	b.pathTo("uplink1", "192.0.2.1")
	direct("another device", "uplink1")

	a.ip("route replace 192.0.2.2 via 198.51.100.2 dev uplink1 src 192.0.2.1")
	b.ip("route replace 192.0.2.1 via 198.51.100.1 dev uplink1 src 192.0.2.2")
	a.pathTo("uplink1", "198.51.100.2")
	b.pathTo("uplink1", "198.51.100.1")
	direct("a next hop", "uplink1")

	b.ip("link set uplink1 address 02:00:00:00:77:02")
	a.ip("neigh flush dev uplink1")
	direct("another neighbour", "uplink1")

	// while the process is down, the old path is cut
	a.stop()
	a.ip("route del 192.0.2.2")
	b.ip("route del 192.0.2.1")
	b.pathTo("uplink0", "192.0.2.1")
	a.ip("link set uplink1 down")
	servicetest.EventuallyNil(t, "an answer without the process", func() error { _, err := ask(c); return err })
	servicetest.Eventually(t, "the kernel to route tunnel packets without the process", func() bool {
		return a.exchanged(c) > 0
	})
	a.start(true)
	a.bypasses("")
	a.pathTo("uplink0", "192.0.2.2")
	direct("the process is back", "uplink0")

	b.ip("address del 192.0.2.2/24 dev uplink0")
	b.ip("address add 192.0.2.3/24 dev uplink0")
	b.addrs = []netip.Addr{netip.MustParseAddr("192.0.2.3"), b.addrs[1]}
	a.say(b)
	a.pathTo("uplink0", "192.0.2.3")
	b.bypasses("")
	direct("another address of the node", "uplink0")
	for _, n := range []*routed{a, b} {
		servicetest.EventuallyNil(t, "no findings on "+n.name, func() error { // the former node ID is removed later
			if found := n.findings(false, ""); len(found) > 0 {
				return fmt.Errorf("findings %v", found)
			}
			return nil
		})
	}
}
