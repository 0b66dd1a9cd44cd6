// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
	"github.com/sluice-net/sluice/services/datapath/internal/node/routing"
	"github.com/sluice-net/sluice/services/datapath/internal/node/underlay"
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
		r := podRouting(n.node.Node.Router.State(), nil)
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
	if r := podRouting(s, rules); !slices.Equal(r.GetBypassedRules(), rules) {
		t.Errorf("%v, want the rules", r)
	}
	s.Closed = "xfrm policies: 1 in"
	if r := podRouting(s, rules); len(r.GetBypassedRules()) > 0 {
		t.Errorf("%v, want no rules", r)
	}
	s.Closed, s.Peers[0].Direct, s.Peers[0].Device = "", false, "the tunnel uses IPv6"
	if r := podRouting(s, rules); len(r.GetBypassedRules()) > 0 {
		t.Errorf("%v, want no rules", r)
	}
}
