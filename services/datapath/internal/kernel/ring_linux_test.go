// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"net"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
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

// TestKernelRingLeavesALaterConnectionOfTheSameEnds: the entry of a connection is removed while the connection has a
// position in the ring, and the client uses its port again. When the former position is reused, the later connection
// stays.
func TestKernelRingLeavesALaterConnectionOfTheSameEnds(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	here, port := netip.AddrPortFrom(f.a.pod.IPv4, 8080), netip.AddrPortFrom(f.a.addr4, 30080)
	tell(t, f.a.pod.ns, here)
	n.lead(port, feNode, here)
	prog := n.k.program(program.FromUplink)
	header := [14]byte{12: 8}
	begin := func(src netip.AddrPort) {
		t.Helper()
		in := ip4Header{src: src.Addr(), dst: port.Addr(), proto: protoTCP}.with(tcp(src.Port(), port.Port(), flagSYN))
		_, err := prog.Run(&ebpf.RunOptions{Data: append(header[:], in...)})
		must(t, "run", err)
	}
	client := netip.MustParseAddrPort("198.18.255.1:1000")
	tuple := conntrack.Tuple{Initiator: client, Responder: here, Protocol: protoTCP}
	const ring = 131072 / 8
	others := 0
	other := func() {
		t.Helper()
		src := netip.AddrFrom4([4]byte{198, 18, byte(others >> 14), byte(others >> 6)})
		begin(netip.AddrPortFrom(src, uint16(2000+others&0x3f)))
		others++
	}

	begin(client)
	conn, there, err := n.k.Connections.Lookup(tuple)
	if err != nil || !there {
		t.Fatalf("the first connection: %t, %v", there, err)
	}
	if deleted, err := n.k.Connections.Remove(conn); err != nil || deleted != 1 {
		t.Fatalf("remove the first connection: %d, %v", deleted, err)
	}
	for range ring - 2 {
		other()
	}
	begin(client)
	other() // at the position of the first connection
	if _, there, err := n.k.Connections.Lookup(tuple); err != nil || !there {
		t.Errorf("the second connection: %t, %v; it was removed at the position of the first one", there, err)
	}
	for range ring - 2 {
		other()
	}
	if _, there, err := n.k.Connections.Lookup(tuple); err != nil || !there {
		t.Errorf("the second connection before its position is reused: %t, %v", there, err)
	}
	other()
	if _, there, err := n.k.Connections.Lookup(tuple); err != nil || there {
		t.Errorf("the second connection after its position was reused: %t, %v", there, err)
	}
}

// TestKernelRingSparesWhatWasJustUsed: all entries at the next positions of the ring were used since its last round.
// The one goes that was used least recently, and not one whose answer may be on its way.
func TestKernelRingSparesWhatWasJustUsed(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	here, port := netip.AddrPortFrom(f.a.pod.IPv4, 8080), netip.AddrPortFrom(f.a.addr4, 30080)
	n.lead(port, feNode, here)
	prog := n.k.program(program.FromUplink)
	header := [14]byte{12: 8}
	const ring, tries = 131072 / 8, 5
	client := func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(i >> 14), byte(i >> 6)}), uint16(2000+i&0x3f))
	}
	for i := range ring {
		src := client(i)
		in := ip4Header{src: src.Addr(), dst: port.Addr(), proto: protoUDP}.with(udp(src.Port(), port.Port()))
		_, err := prog.Run(&ebpf.RunOptions{Data: append(header[:], in...)})
		must(t, "run", err)
	}
	// ages[i] is for how many seconds the connection at the i-th position was not used.
	ages := [tries]uint32{3, 40, 20, 30, 0}
	for i, age := range ages {
		key, value := n.entryOf(t, client(i), here)
		value.LastS -= age + 1
		if age == 0 {
			value.LastS += 2 // used again since its position was taken
		}
		must(t, "change the time", n.k.Pins.Map(bpf.MapsMapSlCt4).Update(key, value, ebpf.UpdateExist))
	}
	late := client(ring)
	in := ip4Header{src: late.Addr(), dst: port.Addr(), proto: protoUDP}.with(udp(late.Port(), port.Port()))
	_, err := prog.Run(&ebpf.RunOptions{Data: append(header[:], in...)})
	must(t, "run", err)
	for i, age := range ages {
		tuple := conntrack.Tuple{Initiator: client(i), Responder: here, Protocol: protoUDP}
		_, there, err := n.k.Connections.Lookup(tuple)
		if want := age != 40; err != nil || there != want {
			t.Errorf("connection %d, unused for %d s: exists %t, %v, want %t", i, age, there, err, want)
		}
	}
}

// entryOf returns the entry of a UDP connection of an outside client.
func (n *serviceNode) entryOf(t *testing.T, from, to netip.AddrPort) (any, *bpf.MapsSlCt) {
	t.Helper()
	m, key := n.k.Connections.Map(conntrack.Tuple{Initiator: from, Responder: to, Protocol: protoUDP})
	var value bpf.MapsSlCt
	must(t, "read the entry", m.Lookup(key, &value))
	return key, &value
}
