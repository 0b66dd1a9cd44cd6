// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// tooBig returns an ICMP error that reports an MTU for a packet.
func tooBig(from netip.Addr, packet []byte, mtu uint16) []byte {
	icmp := append([]byte{3, 4, 0, 0, 0, 0, byte(mtu >> 8), byte(mtu)}, packet[:28]...)
	binary.BigEndian.PutUint16(icmp[2:], checksum(icmp, 0))
	to, _ := netip.AddrFromSlice(packet[12:16])
	return ip(from, to, unix.IPPROTO_ICMP, part{}, icmp)
}

// TestErrorsFromOutsideCutNoTunnel sends forged ICMP errors that report a path MTU of 600 bytes between two nodes,
// and that quote packets of the attacked node. Any machine that exchanges packets with the node can forge them, also
// about packets that the node sends for a service with a backend on another host. Pods follow a reported MTU that
// leaves at least 1280 bytes for IPv6. Below that, the node fragments the tunnel's packets.
func TestErrorsFromOutsideCutNoTunnel(t *testing.T) {
	t.Parallel()
	c := newCluster(t, devnode.ClusterOptions{Nodes: 2, Routing: "overlay"})
	here, there := c.nodes[0], c.nodes[1]
	near, far := here.add(t, "near"), there.add(t, "far")
	serveSource(t, near)
	serveSource(t, far)
	outside := c.plug(t)
	w := newWire(t, outside.Netns)
	mac, _ := hardware(t, here.Netns(), "eth0")
	from, to := here.Addresses()[0], there.Addresses()[0]
	u, err := here.host().ListenPacket(netip.AddrPortFrom(from, 0))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = u.Close() })
	port := netip.MustParseAddrPort(u.LocalAddr().String()).Port()
	sent := datagram(netip.AddrPortFrom(from, port), netip.AddrPortFrom(to, 9), []byte("sent"))
	for _, mtu := range []int{1400, 600} {
		if err := w.send(mac, tooBig(outside.Addresses()[0], sent, uint16(mtu))); err != nil {
			t.Fatal(err)
		}
		servicetest.EventuallyNil(t, fmt.Sprintf("the kernel has learned %d", mtu), func() error {
			return pod.In(here.Netns(), func() error {
				routes, err := netlink.RouteGet(to.AsSlice())
				if err == nil && (len(routes) != 1 || routes[0].MTU != mtu) {
					err = fmt.Errorf("routes %v", routes)
				}
				return err
			})
		})
		way := fmt.Sprintf("mtu %d overlay", mtu-50)
		if mtu == 600 {
			way = "mtu 1280 overlay pieces"
		}
		servicetest.EventuallyNil(t, "the way is "+way, func() error {
			out, err := here.run(t.Context(), "map", "dump", "sl_node")
			if err == nil && strings.Count(string(out), way) != 2 {
				err = fmt.Errorf("ways are %s", out)
			}
			return err
		})
		for i, a := range far.Addresses() {
			servicetest.EventuallyNil(t, fmt.Sprintf("a megabyte to and from %s", a), func() error {
				_, _, err := ask(t.Context(), "tcp", near, netip.AddrPortFrom(a, webPort), 1<<20)
				return err
			})
			servicetest.EventuallyNil(t, fmt.Sprintf("a megabyte back to %s", near.Addresses()[i]), func() error {
				_, _, err := ask(t.Context(), "tcp", far, netip.AddrPortFrom(near.Addresses()[i], webPort), 1<<20)
				return err
			})
		}
	}
}
