// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// Chunk types of RFC 9260.
const (
	sctpData       = 0
	sctpInit       = 1
	sctpInitAck    = 2
	sctpAbort      = 6
	sctpCookieEcho = 10
	sctpCookieAck  = 11
)

// sctp returns a packet with one chunk. The tests' kernel has no SCTP, so verification tag and checksum do not
// matter.
func sctp(sport, dport uint16, chunk byte) []byte {
	b := make([]byte, 16)
	binary.BigEndian.PutUint16(b[0:], sport)
	binary.BigEndian.PutUint16(b[2:], dport)
	b[12], b[15] = chunk, 4
	return b
}

// sctpEnd is an end of an association, on a raw socket.
type sctpEnd struct {
	*net.IPConn
	port uint16
	peer netip.AddrPort // of a server: the client that has sent last
}

// openSCTP opens an end at an address of a namespace. A client only receives from its peer.
func openSCTP(t *testing.T, ns netns.NsHandle, at netip.AddrPort, peer netip.AddrPort) *sctpEnd {
	t.Helper()
	e := &sctpEnd{port: at.Port(), peer: peer}
	inNetns(t, ns, func() {
		network := "ip6:132"
		if at.Addr().Is4() {
			network = "ip4:132"
		}
		var err error
		e.IPConn, err = net.ListenIP(network, &net.IPAddr{IP: at.Addr().AsSlice()})
		must(t, "open a raw socket", err)
	})
	t.Cleanup(func() { e.Close() })
	return e
}

// send sends a chunk to the peer.
func (e *sctpEnd) send(chunk byte) error {
	_, err := e.WriteToIP(sctp(e.port, e.peer.Port(), chunk), &net.IPAddr{IP: e.peer.Addr().AsSlice()})
	return err
}

// hear waits for a chunk, from the peer if there is one. From then on, a server sends to the sender of the last
// INIT.
func (e *sctpEnd) hear(chunk byte) error {
	_ = e.SetReadDeadline(time.Now().Add(time.Second))
	b := make([]byte, 2048)
	for {
		n, from, err := e.ReadFromIP(b)
		if err != nil {
			return err
		}
		addr, _ := netip.AddrFromSlice(from.IP)
		if n < 16 || binary.BigEndian.Uint16(b[2:]) != e.port || b[12] != chunk {
			continue
		}
		sender := netip.AddrPortFrom(addr.Unmap(), binary.BigEndian.Uint16(b))
		if e.peer.IsValid() && e.peer != sender && chunk != sctpInit {
			continue
		}
		e.peer = sender
		return nil
	}
}

// say sends a chunk to another end, which must receive it from the address that it had requested.
func (e *sctpEnd) say(to *sctpEnd, chunk byte) error {
	if err := e.send(chunk); err != nil {
		return err
	}
	if err := to.hear(chunk); err != nil {
		return fmt.Errorf("chunk %d from port %d to %v: %w", chunk, e.port, e.peer, err)
	}
	return nil
}

// associate begins an association between two ends.
func associate(client, server *sctpEnd) error {
	for i, chunk := range []byte{sctpInit, sctpInitAck, sctpCookieEcho, sctpCookieAck} {
		from, to := client, server
		if i%2 == 1 {
			from, to = server, client
		}
		if err := from.say(to, chunk); err != nil {
			return err
		}
	}
	return nil
}

// TestKernelAssociationsByServicesSurviveTheLossOfAnEntry: SCTP associations of outside clients and of pods, to
// backends on this and other nodes, continue after their entry was lost, whichever end sends next.
func TestKernelAssociationsByServicesSurviveTheLossOfAnEntry(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		local := f.a.newPod(t, 20)
		port := uint16(30100)
		for family := range 2 {
			node, outside := []netip.Addr{f.a.addr4, f.a.addr6}[family], f.outsideAddrs()[family]
			for _, c := range []struct {
				name   string
				from   netns.NsHandle
				source netip.Addr
				asked  netip.AddrPort
				kind   uint8
				server *pod
			}{
				{"outside, local backend", f.outsider, outside, netip.AddrPortFrom(node, port), feNode, local},
				{"outside, backend elsewhere", f.outsider, outside, netip.AddrPortFrom(node, port+1), feNode, f.b.pod},
				{"pod, local backend", f.a.pod.ns, f.a.pod.Addrs()[family], netip.AddrPortFrom(serviceAddr(node, 50).Addr(), port+2), feAddress, local},
				{"pod, backend elsewhere", f.a.pod.ns, f.a.pod.Addrs()[family], netip.AddrPortFrom(serviceAddr(node, 51).Addr(), port+3), feAddress, f.b.pod},
			} {
				backend := netip.AddrPortFrom(c.server.Addrs()[family], c.asked.Port())
				n.lead(c.asked, c.kind, backend)
				sport := uint16(5000)
				for what, lose := range losses {
					if lose == nil {
						continue
					}
					for _, serverFirst := range []bool{true, false} {
						name := fmt.Sprintf("IPv%d, %s, loses %s, server first %t", 4+2*family, c.name, what, serverFirst)
						sport++
						client := openSCTP(t, c.from, netip.AddrPortFrom(c.source, sport), c.asked)
						server := openSCTP(t, c.server.ns, backend, netip.AddrPort{})
						if err := associate(client, server); err != nil {
							t.Fatalf("%s: %v", name, err)
						}
						lose(t, n.k)
						from, to := client, server
						if serverFirst {
							from, to = server, client
						}
						for range 2 {
							if err := from.say(to, sctpData); err != nil {
								t.Errorf("%s: %v", name, err)
							}
							from, to = to, from
						}
						client.Close()
						server.Close()
					}
				}
			}
			port += 10
		}
	})
}

// TestKernelHalfOpenAssociationsGiveWay: an association takes its client's port towards a backend on another
// node, unless an open association of another client uses it.
func TestKernelHalfOpenAssociationsGiveWay(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	const port = 5000
	nodePort := netip.AddrPortFrom(f.a.addr4, 30080)
	backend := netip.AddrPortFrom(f.b.pod.IPv4, nodePort.Port())
	n := &serviceNode{T: t, runner: f.a.runner}
	n.lead(nodePort, feNode, backend)
	must(t, "route to a stranger", f.a.h.RouteAdd(&netlink.Route{
		Dst: &net.IPNet{IP: silent(1).AsSlice(), Mask: net.CIDRMask(32, 32)}, Gw: f.outside.AsSlice(),
	}))
	server := openSCTP(t, f.b.pod.ns, backend, netip.AddrPort{})
	// A server does not answer an unknown cookie.
	forge := func(chunk byte) {
		t.Helper()
		f.asOutside(t, [][]byte{
			ip4Header{src: silent(1), dst: f.a.addr4, proto: unix.IPPROTO_SCTP}.with(sctp(port, nodePort.Port(), chunk)),
		})
		must(t, "hear what is forged", server.hear(chunk))
	}
	forge(sctpInit)
	must(t, "answer", server.send(sctpInitAck))
	forge(sctpCookieEcho)
	first := openSCTP(t, f.outsider, netip.AddrPortFrom(f.outside, port), nodePort)
	if err := associate(first, server); err != nil {
		t.Fatalf("despite a half-open association: %v", err)
	}
	before := f.a.counters(t)
	second := openSCTP(t, f.b.ns, netip.AddrPortFrom(f.b.addr4, port), nodePort)
	if err := second.say(server, sctpInit); err == nil {
		t.Error("the port of an open association is given to another sender")
	}
	if n := f.a.gained(t, before)[cell{event.NATExhausted, event.Egress}]; n == 0 {
		t.Errorf("counted %v, want %v", f.a.gained(t, before), event.NATExhausted)
	}
	for _, step := range []struct {
		from, to *sctpEnd
		chunk    byte
	}{{server, first, sctpData}, {first, server, sctpAbort}} {
		if err := step.from.say(step.to, step.chunk); err != nil {
			t.Errorf("the open association: %v", err)
		}
	}
	server.peer = netip.AddrPort{}
	if err := associate(second, server); err != nil {
		t.Errorf("after the end of the first association: %v", err)
	}
}
