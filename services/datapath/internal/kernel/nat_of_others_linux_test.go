// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
)

// addContainer gives a node a container of another network, behind a masquerade of its own. The node publishes a port
// of the container at each of its own addresses.
func (n *fabricNode) addContainer(t *testing.T, published, port uint16) (ns netns.NsHandle, addrs [2]netip.Addr) {
	t.Helper()
	ns = newNetns(t)
	addrs = [2]netip.Addr{netip.MustParseAddr("172.30.0.2"), netip.MustParseAddr("fd00:172::2")}
	gateways := [2]netip.Addr{netip.MustParseAddr("172.30.0.1"), netip.MustParseAddr("fd00:172::1")}
	must(t, "add the container's device", n.h.LinkAdd(&netlink.Veth{
		LinkAttrs: netlink.LinkAttrs{Name: "con0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(ns),
	}))
	inside, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	must(t, "netlink", err)
	defer inside.Close()
	for _, end := range []struct {
		h     *netlink.Handle
		name  string
		addrs [2]netip.Addr
	}{{n.h, "con0", gateways}, {inside, "eth0", addrs}} {
		l, err := end.h.LinkByName(end.name)
		must(t, "find "+end.name, err)
		must(t, "set "+end.name+" up", end.h.LinkSetUp(l))
		for i, a := range end.addrs {
			ip := ipNet(a)
			ip.Mask = [][]byte{{255, 255, 255, 0}, {255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0}}[i]
			must(t, "add an address", end.h.AddrAdd(l, &netlink.Addr{IPNet: ip, Flags: unix.IFA_F_NODAD}))
		}
	}
	servicetest.Eventually(t, "carrier of the container", func() bool {
		l, err := inside.LinkByName("eth0")
		return err == nil && l.Attrs().OperState == netlink.OperUp
	})
	for _, g := range gateways {
		must(t, "default route", inside.RouteAdd(&netlink.Route{Gw: g.AsSlice()}))
	}
	inNetns(t, n.ns, func() {
		cmd := exec.Command("nft", "-f", "-")
		cmd.Stdin = strings.NewReader(fmt.Sprintf(`
			table inet containers {
				chain pre {
					type nat hook prerouting priority dstnat
					ip daddr { %[3]v, %[4]v } meta l4proto { tcp, udp } th dport %[1]d dnat ip to %[7]v:%[2]d
					ip6 daddr { %[5]v, %[6]v } meta l4proto { tcp, udp } th dport %[1]d dnat ip6 to [%[8]v]:%[2]d
				}
				chain post {
					type nat hook postrouting priority srcnat
					oifname != "con0" ip saddr 172.30.0.0/24 masquerade
					oifname != "con0" ip6 saddr fd00:172::/64 masquerade
				}
			}`, published, port, n.addr4, n.over4, n.addr6, n.over6, addrs[0], addrs[1]))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("nft: %v: %s", err, out)
		}
	})
	return ns, addrs
}

// TestKernelPortsForBackendsMayBeTranslatedByOthers: a container behind the node's masquerade uses a source port in the
// range of ports for backends on other nodes, and the node publishes another such port of the container. No socket of
// the node has these ports. Pods of another node answer the container, and reach it.
func TestKernelPortsForBackendsMayBeTranslatedByOthers(t *testing.T) {
	for name, routing := range map[string]Routing{"overlay": RoutingOverlay, "native": RoutingNative} {
		t.Run(name, func(t *testing.T) {
			f := newFabric(t, routing, false)
			const published, port = 25000, 8080
			ns, addrs := f.a.addContainer(t, published, port)
			for i, a := range addrs {
				server := netip.AddrPortFrom(f.b.pod.Addrs()[i], 7000)
				tell(t, f.b.pod.ns, server)
				tell(t, ns, netip.AddrPortFrom(a, port))
				own := netip.AddrPortFrom([]netip.Addr{f.a.over4, f.a.over6}[i], published)
				if routing == RoutingNative {
					own = netip.AddrPortFrom([]netip.Addr{f.a.addr4, f.a.addr6}[i], published)
				}
				for _, proto := range []string{"udp", "tcp"} {
					what := fmt.Sprintf("%s of IPv%d", proto, 4+2*i)
					wantAnswers(t, "the container asks by "+what, dialFrom(t, ns, proto, 25001+uint16(i), server), server)
					c, err := dialIn(t, f.b.pod.ns, proto, own)
					must(t, "connect", err)
					wantAnswers(t, "a pod asks the container by "+what, c, netip.AddrPortFrom(a, port))
				}
			}
		})
	}
}
