// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"net"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
)

// TestKernelSilentSendersReplaceEachOther: connections that outside senders begin but never continue get an
// eighth of the map, also without a collector. Open connections stay, of pods and of outside clients, to
// services with backends on this and other nodes.
func TestKernelSilentSendersReplaceEachOther(t *testing.T) {
	for name, c := range map[string]struct {
		proto  byte
		packet func(i int, port uint16) []byte
	}{
		"TCP": {protoTCP, func(i int, port uint16) []byte { return tcp(uint16(1000+i&0x3f), port, flagSYN) }},
		"UDP": {protoUDP, func(i int, port uint16) []byte { return udp(uint16(1000+i&0x3f), port) }},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFabric(t, RoutingOverlay, false)
			n := &serviceNode{T: t, runner: f.a.runner}
			here, away := netip.AddrPortFrom(f.a.pod.IPv4, 8080), netip.AddrPortFrom(f.b.pod.IPv4, 8080)
			tell(t, f.a.pod.ns, here)
			tell(t, f.b.pod.ns, away)
			ports := []netip.AddrPort{netip.AddrPortFrom(f.a.addr4, 30080), netip.AddrPortFrom(f.a.addr4, 30081)}
			n.lead(ports[0], feNode, here)
			n.lead(ports[1], feNode, away)
			vip := serviceAddr(here.Addr(), 1)
			n.lead(vip, feAddress, away)
			var conns []net.Conn
			for _, to := range append(ports, vip) {
				from := f.outsider
				if to == vip {
					from = f.a.pod.ns
				}
				conn, err := dialIn(t, from, "tcp", to)
				must(t, "connect", err)
				_, err = readLine(conn)
				must(t, "read", err)
				conns = append(conns, conn)
			}
			prog := n.k.program(program.FromUplink)
			header := [14]byte{12: 8}
			const ring = 131072 / 8
			for i := range 3 * ring {
				src := netip.AddrFrom4([4]byte{198, 18, byte(i >> 14), byte(i >> 6)})
				in := ip4Header{src: src, dst: f.a.addr4, proto: c.proto}.with(c.packet(i, ports[i&1].Port()))
				_, err := prog.Run(&ebpf.RunOptions{Data: append(header[:], in...)})
				must(t, "run", err)
			}
			for i, c := range conns {
				_, err := c.Write([]byte("on\n"))
				must(t, "write", err)
				if got, err := readLine(c); err != nil || got != "on" {
					t.Errorf("connection %d: %q, %v", i, got, err)
				}
			}
			silent := 0
			must(t, "list", n.k.Connections.Each(func(cs []conntrack.Connection) error {
				for _, conn := range cs {
					if conn.Flags&conntrack.InRing != 0 && conn.Protocol == c.proto {
						silent++
					}
				}
				return nil
			}))
			if silent < ring-1 || silent > ring {
				t.Errorf("%d connections are in the ring, want %d", silent, ring)
			}
		})
	}
}
