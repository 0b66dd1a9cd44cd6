// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// from7 and to7 return the endpoints of the packets that attacks carry.
func from7(a netip.Addr) netip.AddrPort { return netip.AddrPortFrom(a, 4000) }
func to7(a netip.Addr) netip.AddrPort   { return netip.AddrPortFrom(a, attackedPorts[0]) }

// forgedInside returns a tunnelled packet from node 1's pod to the pod of the attacked node.
func (a *arena) forgedInside(family int, payload []byte) []byte {
	from, to := a.pods[1].Addresses()[family], a.pods[0].Addresses()[family]
	return a.tunnelled(a.ids[1], datagram(from7(from), to7(to), payload))
}

// TestPodsSendNothingToATunnel sends packets from a raw socket of a pod to the tunnel port of every node, at each
// address of the node. There are whole packets, fragments, packets with extension headers, and packets with forged
// sources. The pod's node drops all of them.
func TestPodsSendNothingToATunnel(t *testing.T) {
	all := [][]string{{"--masquerade-enabled"}}
	if allFaults() {
		all = append(all, nil)
	}
	for _, args := range all {
		t.Run(fmt.Sprint(args), func(t *testing.T) {
			a := newArena(t, "overlay", args...)
			w, gateway := newWire(t, a.pods[0].Netns), hostEnd(t, a.nodes[0], a.pods[0])
			var shots []shot
			for i, n := range a.nodes {
				for _, at := range append(n.Addresses(), n.overlay()...) {
					own := addressOf(a.pods[0].Addresses(), at)
					sources := []netip.Addr{own, addressOf(a.pods[1].Addresses(), at), addressOf(a.nodes[2].Addresses(), at)}
					for _, source := range sources {
						for k := range 10 {
							outer, to := netip.AddrPortFrom(source, uint16(40000+k)), netip.AddrPortFrom(at, tunnelPort)
							what := fmt.Sprintf("from %s to node %d at %s", source, i, at)
							inner := func(payload []byte) []byte { return a.forgedInside(k%2, payload) }
							shots = append(shots, a.crafted("whole "+what, func(payload []byte) []byte {
								return datagram(outer, to, inner(payload))
							}))
							for part := range 2 {
								shots = append(shots, a.crafted(fmt.Sprintf("fragment %d %s", part, what), func(payload []byte) []byte {
									return fragmented(outer, to, inner(payload), 8+8*k, uint16(100+k))[part]
								}))
							}
							if at.Is6() { // a destination options header that contains only padding
								shots = append(shots, a.crafted("behind options "+what, func(payload []byte) []byte {
									options := []byte{unix.IPPROTO_UDP, 0, 1, 4, 0, 0, 0, 0}
									return ip(source, at, unix.IPPROTO_DSTOPTS, part{}, append(options, udp(outer, to, inner(payload))...))
								}))
							}
						}
					}
				}
			}
			a.fire(t, "a pod to the tunnels", w, gateway, shots)
			t.Logf("%d packets", a.sent)
		})
	}
}

// TestBrokenTunnelPacketsAreNotReceived sends tunnel packets that would be valid from another node, but truncated at
// each byte, with other flags, or with invalid lengths.
func TestBrokenTunnelPacketsAreNotReceived(t *testing.T) {
	a := newArena(t, "overlay")
	for family, at := range a.attacked.Addresses() {
		outer := netip.AddrPortFrom(addressOf(a.nodes[2].Addresses(), at), 40000)
		to := netip.AddrPortFrom(at, tunnelPort)
		inner := func(payload []byte) []byte {
			from := a.pods[2].Addresses()[family]
			return a.tunnelled(a.ids[2], datagram(from7(from), to7(a.pods[0].Addresses()[family]), payload))
		}
		var broken []shot
		for cut := range len(inner([]byte(marker))) {
			broken = append(broken, a.crafted(fmt.Sprint("cut off at ", cut), func(payload []byte) []byte {
				return datagram(outer, to, inner(payload)[:cut])
			}))
		}
		for flag := range 32 {
			if flag == 3 { // the valid VNI flag
				continue
			}
			broken = append(broken, a.crafted(fmt.Sprint("flag ", flag), func(payload []byte) []byte {
				b := inner(payload)
				flags := binary.BigEndian.Uint32(b) | 1<<(31-flag)
				if flag == 4 {
					flags = 0
				}
				binary.BigEndian.PutUint32(b, flags)
				return datagram(outer, to, b)
			}))
		}
		for _, kind := range []uint16{
			0, 0x0600, unix.ETH_P_ARP, unix.ETH_P_8021Q, unix.ETH_P_8021AD, unix.ETH_P_MPLS_UC, 0x6558, 0x894f,
		} {
			broken = append(broken, a.crafted(fmt.Sprintf("ethertype %#x", kind), func(payload []byte) []byte {
				b := inner(payload)
				binary.BigEndian.PutUint16(b[8+12:], kind)
				return datagram(outer, to, b)
			}))
		}
		// A length that is too short for the frame, but includes all headers, means padding.
		for _, length := range [][]uint16{{0, 1, 7, 8, 19, 20, 27, 0xffff}, {0, 1, 7, 0xffff}}[family] {
			broken = append(broken, a.crafted(fmt.Sprint("inner length ", length), func(payload []byte) []byte {
				b := inner(payload)
				binary.BigEndian.PutUint16(b[8+14+[]int{2, 4}[family]:], length)
				return datagram(outer, to, b)
			}))
		}
		a.fireCounted(t, fmt.Sprint("broken packets to ", at), a.wire, a.macs[0], broken, false)
		whole := a.crafted("whole", func(payload []byte) []byte { return datagram(outer, to, inner(payload)) })
		whole.heard = true
		a.fire(t, "a whole one", a.wire, a.macs[0], []shot{whole})
	}
	t.Logf("%d packets", a.sent)
}

// TestNodesPlantNoFragmentsForOthers sends first fragments from a malicious node and later fragments with the address
// of another node's pod, and vice versa.
func TestNodesPlantNoFragmentsForOthers(t *testing.T) {
	a := newArena(t, "overlay")
	liar, honest := newWire(t, a.nodes[2].Netns()), newWire(t, a.nodes[1].Netns())
	for family, at := range a.attacked.Addresses() {
		from, to := a.pods[1].Addresses()[family], a.pods[0].Addresses()[family]
		fragment := func(sender int, id uint16, part int) func([]byte) []byte {
			outer := netip.AddrPortFrom(a.nodes[sender].Addresses()[family], 40000)
			return func(payload []byte) []byte {
				half := append(payload, make([]byte, 8-len(payload)%8)...)
				inner := fragmented(from7(from), to7(to), slices.Concat(half, half), 8+len(half), id)
				return datagram(outer, netip.AddrPortFrom(at, tunnelPort), a.tunnelled(a.ids[1], inner[part]))
			}
		}
		var planted, later, first, forged []shot
		for id := range uint16(100) {
			planted = append(planted, a.crafted("first fragment of a liar", fragment(2, id, 0)))
			later = append(later, a.crafted("later fragment without a first", fragment(1, id, 1)))
			f := a.crafted("first fragment of the pod's node", fragment(1, 1000+id, 0))
			f.heard = true
			first = append(first, f)
			forged = append(forged, a.crafted("later fragment of a liar", fragment(2, 1000+id, 1)))
		}
		a.fire(t, "planted", liar, a.macs[0], planted)
		a.fire(t, "later fragments meet nothing planted", honest, a.macs[0], later)
		a.fire(t, "first fragments", honest, a.macs[0], first)
		a.fire(t, "forged later fragments", liar, a.macs[0], forged)
	}
	t.Logf("%d packets", a.sent)
}

// TestPlainPacketsUnderPodAddressesStayOutside sends unencapsulated packets with every address in the pod ranges as
// their source, from the link between the nodes and from a node, to the pod and the host. In overlay mode all are
// dropped. In native mode the network between the nodes is trusted, but only for pods of other nodes.
func TestPlainPacketsUnderPodAddressesStayOutside(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			a := newArena(t, mode)
			targets := slices.Concat(a.pods[0].Addresses(), a.attacked.Addresses(), a.attacked.overlay())
			var shots []shot
			for _, c := range a.claims() {
				if c.of < 0 || slices.Contains(a.nodes[c.of].Addresses(), c.address) {
					continue // nodes and the outside may send unencapsulated packets
				}
				for _, to := range targets {
					if to.Is4() != c.address.Is4() {
						continue
					}
					s := a.crafted(fmt.Sprintf("plain: %s %s to %s", c.what, c.address, to), func(payload []byte) []byte {
						return datagram(from7(c.address), to7(to), payload)
					})
					s.heard = mode == "native" && c.of != 0
					shots = append(shots, s)
					if s.heard {
						continue
					}
					for part := range 2 {
						shots = append(shots, a.crafted(fmt.Sprintf("plain fragment %d: %s to %s", part, c.what, to),
							func(payload []byte) []byte {
								return fragmented(from7(c.address), to7(to), payload, 8, uint16(a.sent))[part]
							}))
					}
				}
			}
			a.fire(t, "outsider", a.wire, a.macs[0], shots)
			a.fire(t, "node", newWire(t, a.nodes[2].Netns()), a.macs[0], shots)
			t.Logf("%d packets", 2*a.sent)
		})
	}
}

// TestEstablishedFlowsTakeNothingFromOthers: two pods of different nodes exchange packets. Packets with the same
// addresses and ports from a third node or from outside are not received.
func TestEstablishedFlowsTakeNothingFromOthers(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			a := newArena(t, mode)
			for family, at := range a.attacked.Addresses() {
				from, to := a.pods[1].Addresses()[family], a.pods[0].Addresses()[family]
				c, err := a.pods[1].ListenPacket(from7(from))
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				servicetest.EventuallyNil(t, "the flow is there", func() error {
					if _, err := c.WriteToUDPAddrPort([]byte("ask"), to7(to)); err != nil {
						return err
					}
					_ = c.SetReadDeadline(time.Now().Add(time.Second))
					_, _, err := c.ReadFromUDPAddrPort(make([]byte, 10))
					return err
				})
				var tunnelled7, plain []shot
				for _, vni := range a.vnis() {
					tunnelled7 = append(tunnelled7, a.crafted(fmt.Sprint("of a flow, VNI ", vni), func(payload []byte) []byte {
						outer := netip.AddrPortFrom(a.nodes[2].Addresses()[family], 40000)
						return datagram(outer, netip.AddrPortFrom(at, tunnelPort),
							a.tunnelled(vni, datagram(from7(from), to7(to), payload)))
					}))
				}
				for range 20 {
					s := a.crafted("of a flow, plain", func(payload []byte) []byte { return datagram(from7(from), to7(to), payload) })
					s.heard = mode == "native" // the network between the nodes is trusted
					plain = append(plain, s)
				}
				// without a tunnel, no counter counts packets to its port
				a.fireCounted(t, "tunnelled", newWire(t, a.nodes[2].Netns()), a.macs[0], tunnelled7, mode == "overlay")
				a.fire(t, "plain", a.wire, a.macs[0], plain)
			}
			t.Logf("%d packets", a.sent)
		})
	}
}

// TestFloodAtTheTunnelStopsNoExchange floods the tunnel port from outside for some seconds while pods of two nodes
// exchange packets.
func TestFloodAtTheTunnelStopsNoExchange(t *testing.T) {
	a := newArena(t, "overlay")
	seconds := 3 * time.Second
	if allFaults() {
		seconds = 60 * time.Second
	}
	f, err := openFlow(t.Context(), a.pods[1], a.pods[0], a.pods[0].IPv4)
	defer f.close()
	if err != nil {
		t.Fatal(err)
	}
	before := a.attacked.drops(t)["unknown-node"]
	var sent atomic.Uint64
	ended := make(chan error, 1)
	s := a.crafted("flood", func(payload []byte) []byte {
		outer := netip.AddrPortFrom(a.outside.IPv4, 40000)
		return datagram(outer, netip.AddrPortFrom(a.attacked.Addresses()[0], tunnelPort), a.forgedInside(0, payload))
	})
	end := time.Now().Add(seconds)
	go func() {
		for time.Now().Before(end) {
			for range 100 {
				if err := a.wire.send(a.macs[0], s.packet); err != nil {
					ended <- err
					return
				}
				sent.Add(1)
			}
		}
		ended <- nil
	}()
	asked, tries := 0, 0
	for ; time.Now().Before(end); asked++ {
		n, err := a.ask(a.pods[1], a.pods[0].Addresses()[asked%2])
		tries += n
		if err != nil {
			t.Fatalf("during a flood, after %d exchanges: %v", asked, err)
		}
		if err := f.speak(); err != nil {
			t.Fatalf("during a flood, a connection: %v", err)
		}
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if err := pod.ExchangeUDP(servicetest.Context(t), a.pods[1], a.pods[0], a.pods[0].IPv6, []byte("x")); err != nil {
		t.Error(err)
	}
	for who := range a.ears.take() {
		t.Errorf("heard by %s", who)
	}
	counted := a.attacked.drops(t)["unknown-node"] - before
	t.Logf("%d packets in %s, %d counted; %d exchanges took %d questions", sent.Load(), seconds, counted, asked, tries)
	if asked < 10 || counted < 1000 {
		t.Errorf("%d exchanges and %d counted packets, want some", asked, counted)
	}
}
