// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/bounds"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/proxymap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// neighbours are a pod that uses up the limits of the programs, and a pod that goes on. Strangers outside use up the
// limits of the outside, while another client outside goes on.
type neighbours struct {
	*serviceNode
	f                   *fabric
	greedy, quiet, here *pod
	collector           *conntrack.Collector
	events              *event.Reader
	// Services: with a backend on this and on the other node, with none, and with session affinity.
	vip, away, none      netip.AddrPort
	port, awayPort, shut netip.AddrPort // node ports
	sticky               []netip.AddrPort
	stickyPort           netip.AddrPort
	stream               net.Conn // of the quiet pod
}

func newNeighbours(t *testing.T) *neighbours {
	t.Helper()
	f := newFabric(t, RoutingNative, false)
	n := &neighbours{serviceNode: &serviceNode{T: t, runner: f.a.runner}, f: f, quiet: f.a.pod}
	n.greedy, n.here = f.a.newPod(t, 30), f.a.newPod(t, 31)
	here, there := netip.AddrPortFrom(n.here.IPv4, 8080), netip.AddrPortFrom(f.b.pod.IPv4, 8080)
	tell(t, n.here.ns, here)
	tell(t, f.b.pod.ns, there)
	service := func(last byte, backends ...netip.AddrPort) netip.AddrPort {
		at := serviceAddr(n.here.IPv4, last)
		n.lead(at, feAddress, backends...)
		return at
	}
	nodePort := func(number uint16, backends ...netip.AddrPort) netip.AddrPort {
		at := netip.AddrPortFrom(f.a.addr4, number)
		n.lead(at, feNode, backends...)
		return at
	}
	keep := func(at netip.AddrPort) netip.AddrPort {
		for _, number := range []uint32{n.front, n.front + outsideFronts} {
			var front bpf.MapsSlFront
			must(t, "read a front", n.k.Pins.Map(bpf.MapsMapSlFront).Lookup(number, &front))
			front.Timeout, front.Group = 10800, uint16(n.front)
			putFront(t, n.k, number, front)
		}
		return at
	}
	n.vip, n.away, n.none = service(1, here), service(2, there), service(3)
	n.port, n.awayPort, n.shut = nodePort(30080, here), nodePort(30081, there), nodePort(30082)
	for i := range byte(8) {
		n.sticky = append(n.sticky, keep(service(10+i, here)))
	}
	n.stickyPort = keep(nodePort(30083, here))
	var err error
	n.collector, err = n.k.Connections.NewCollector(conntrack.CollectorOptions{})
	must(t, "make a collector", err)
	collect(t, n.collector) // from now on, endpoints have budgets
	n.events, err = n.k.Events.Read()
	must(t, "Events", err)
	t.Cleanup(func() { n.events.Close() })
	n.stream, err = dialIn(t, n.quiet.ns, "tcp", n.vip)
	must(t, "connect", err)
	_, err = readLine(n.stream)
	must(t, "read", err)
	return n
}

// served checks that the neighbours are served: connections, requests over UDP, answers and events.
func (n *neighbours) served(t *testing.T) {
	t.Helper()
	must(t, "deadline", n.stream.SetDeadline(time.Now().Add(servicetest.Patience)))
	_, err := n.stream.Write([]byte("on\n"))
	must(t, "write", err)
	if got, err := readLine(n.stream); err != nil || got != "on" {
		t.Errorf("the open connection of the pod: %q, %v", got, err)
	}
	direct := netip.AddrPortFrom(n.here.IPv4, 8080)
	for _, to := range []netip.AddrPort{n.vip, n.away, n.sticky[0], direct} {
		askTCP(t, n.quiet.ns, to, 64)
		askUDP(t, n.quiet.ns, to, 64)
	}
	for _, to := range []netip.AddrPort{n.port, n.awayPort, n.stickyPort} {
		askTCP(t, n.f.outsider, to, 64)
		askUDP(t, n.f.outsider, to, 64)
	}
	// a datagram in fragments
	askUDP(t, n.quiet.ns, n.vip, 4000)
	inNetns(t, n.f.a.ns, func() {
		if !n.answers(n.quiet, n.none) {
			t.Error("a datagram of the pod to a Service without backends was not answered")
		}
		n.send(n.quiet, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, n.f.a.number, 250}), 9), protoUDP, udp(9, 9))
	})
	told := false
	for _, e := range drain(t, n.events) {
		told = told || e.Type == event.PacketDropped && e.Source.Addr() == n.quiet.IPv4 && e.Destination.Port() == 9
	}
	if !told {
		t.Error("a drop of the pod has sent no event")
	}
}

// flood runs a program count times on the packets that build returns, from the greedy pod.
func (n *neighbours) flood(count int, to netip.AddrPort, proto byte, build func(i int) []byte) {
	n.Helper()
	inNetns(n.T, n.f.a.ns, func() {
		for i := range count {
			n.send(n.greedy, to, proto, build(i))
		}
	})
}

// strange sends count packets from strangers to a node port with a backend on this node.
func (n *neighbours) strange(count int, to netip.AddrPort, proto byte, build func(i int) []byte) {
	n.Helper()
	n.fromOutside(count, func(i int) []byte {
		return ip4Header{src: forged(i), dst: to.Addr(), proto: proto}.with(build(i))
	})
}

// refused checks that the limit has refused the greedy pod something.
func (n *neighbours) refused(t *testing.T, of bound.Bound) {
	t.Helper()
	if n.k.Bounds.Refusals(of, n.greedy.Slot) == 0 {
		t.Errorf("%v has refused the pod nothing", of)
	}
}

// exhaustions use up the limits of the programs, by the names of the limits.
var exhaustions = map[string]func(t *testing.T, n *neighbours){
	"connections of pods": func(t *testing.T, n *neighbours) {
		to := netip.AddrPortFrom(n.here.IPv4, 9)
		n.flood(120_000, to, protoUDP, func(i int) []byte { return udp(uint16(i), uint16(9+i>>16)) })
		n.refused(t, bound.Connections4)
		n.served(t)
		// the pod needs connections for what follows
		later, err := n.k.Connections.NewCollector(conntrack.CollectorOptions{
			Now: func() uint32 { return conntrack.MonotonicSeconds() + 31 },
		})
		must(t, "make a collector", err)
		collect(t, later)
	},
	"connections from outside": func(_ *testing.T, n *neighbours) {
		n.strange(20_000, n.port, protoTCP, func(int) []byte { return tcp(1000, n.port.Port(), flagSYN) })
		n.strange(20_000, n.port, protoUDP, func(int) []byte { return udp(1000, n.port.Port()) })
	},
	"NAT ports of the node to one backend on another node": func(_ *testing.T, n *neighbours) {
		for i := range 12_000 {
			for proto, payload := range map[byte][]byte{
				protoTCP: tcp(1000, n.awayPort.Port(), flagSYN), protoUDP: udp(1000, n.awayPort.Port()),
			} {
				n.throughUplink(ip4Header{src: forged(i), dst: n.awayPort.Addr(), proto: proto}.with(payload))
			}
		}
	},
	"counted senders to backends elsewhere": func(t *testing.T, n *neighbours) {
		m, i := n.k.Pins.Map(bpf.MapsMapSlShare), uint32(0)
		var err error
		for ; err == nil; i++ {
			key := bpf.MapsSlShareKey{Port: 8080, Proto: protoTCP, Family: 4, Sender: i + 1}
			err = m.Put(&key, &bpf.MapsSlShare{Ports: 65})
		}
		if i < m.MaxEntries()/2 {
			t.Errorf("the map has no capacity after %d senders: %v", i, err)
		}
	},
	"translations of packets of pods to Services": func(t *testing.T, n *neighbours) {
		n.flood(15_000, n.vip, protoTCP, func(i int) []byte { return tcp(uint16(1000+i), n.vip.Port(), flagSYN) })
		n.refused(t, bound.Translations4)
	},
	"translations of packets from outside, and ports of the node": func(_ *testing.T, n *neighbours) {
		n.strange(34_000, n.port, protoUDP, func(int) []byte { return udp(2000, n.port.Port()) })
	},
	"copies of translations of connections from outside and of the host": func(t *testing.T, n *neighbours) {
		fromPod := n.k.program(program.FromPod)
		inNetns(t, n.f.a.ns, func() {
			for i := range 17_000 {
				n.fromOutside(1, func(int) []byte {
					h := ip4Header{src: forged(i), dst: n.port.Addr(), proto: protoUDP}
					return h.with(udp(3000, n.port.Port()))
				})
				answer := ip4Header{src: n.here.IPv4, dst: forged(i), proto: protoUDP}.with(udp(8080, 3000))
				in := frame(n.here.HostMAC, n.here.MAC, etherIPv4, answer)
				_, err := fromPod.Run(&ebpf.RunOptions{
					Data: in, DataOut: make([]byte, len(in)+256), Context: skbContext{Ifindex: n.here.Ifindex},
				})
				must(t, "run", err)
			}
		})
	},
	"fragmented datagrams of pods": func(t *testing.T, n *neighbours) {
		inNetns(t, n.f.a.ns, func() {
			for id := range 5000 {
				n.piece(n.greedy, n.here.IPv4, uint16(id), false)
			}
		})
		n.refused(t, bound.Fragments)
	},
	"fragmented datagrams from outside, from other nodes and from the host": func(_ *testing.T, n *neighbours) {
		n.fromOutside(10_000, func(i int) []byte {
			h := ip4Header{src: forged(i), dst: n.port.Addr(), proto: protoUDP, frag: 0x2000}
			b := h.with(append(udp(1000, n.port.Port()), make([]byte, 56)...))
			binary.BigEndian.PutUint16(b[4:], uint16(i))
			binary.BigEndian.PutUint16(b[10:], 0)
			binary.BigEndian.PutUint16(b[10:], checksum(b[:20]))
			return b
		})
	},
	"backends that pods keep by session affinity": func(t *testing.T, n *neighbours) {
		update(t, n.k, bpf.MapsMapSlBound, uint32(bound.Affinity4), bpf.MapsSlBound{Guarantee: 2, Common: 2})
		for i, at := range n.sticky {
			n.flood(1, at, protoUDP, func(int) []byte { return udp(uint16(20_000+i), at.Port()) })
		}
		n.refused(t, bound.Affinity4)
	},
	"backends that clients outside keep by session affinity": func(_ *testing.T, n *neighbours) {
		n.strange(10_000, n.stickyPort, protoUDP, func(int) []byte { return udp(1000, n.stickyPort.Port()) })
	},
	"records of TCP connections that policies terminated": func(t *testing.T, n *neighbours) {
		m := n.k.Pins.Map(bpf.MapsMapSlRevoked4)
		for i := range n.k.Bounds.Size(bound.Revoked4) {
			c := tuple(protoTCP, n.greedy.IPv4.String()+":1", "192.0.2.1:80")
			c.Responder = netip.AddrPortFrom(forged(i), 80)
			record := bpf.MapsSlRevoked{LastS: conntrack.MonotonicSeconds(), Flags: uint32(n.greedy.Slot) << 16}
			must(t, "fill the map", pin.InsertOnce(m, c.Key4(), record))
		}
		collect(t, n.collector)
	},
	"events that wait for the datapath": func(t *testing.T, n *neighbours) {
		n.flood(20_000, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 244, n.f.a.number, 250}), 9), protoUDP,
			func(int) []byte { return udp(9, 9) })
		n.refused(t, bound.Events)
	},
	"events in a second": func(t *testing.T, _ *neighbours) { TestKernelEventsOfManyEndpointsLeaveRoomForOthers(t) },
	"resets and ICMP errors that the eBPF programs send to pods": func(t *testing.T, n *neighbours) {
		n.flood(4000, n.none, protoUDP, func(int) []byte { return udp(1000, n.none.Port()) })
		n.refused(t, bound.Answers)
	},
	"resets and ICMP errors that the eBPF programs send to senders outside": func(_ *testing.T, n *neighbours) {
		n.strange(4000, n.shut, protoUDP, func(int) []byte { return udp(1000, n.shut.Port()) })
	},
	"ICMPv6 packet-too-big errors about unknown connections": func(t *testing.T, n *neighbours) {
		quoted := ip6(n.greedy.IPv6, world6, protoUDP, udp(1, 2))
		in := frame(n.greedy.MAC, n.greedy.HostMAC, etherIPv6, ip6(world6, n.greedy.IPv6, 58, icmp(2, 0, quoted...)))
		inNetns(t, n.f.a.ns, func() {
			_, err := n.k.program(program.ToPod).Run(&ebpf.RunOptions{
				Data: in, DataOut: make([]byte, len(in)+256), Repeat: 2000,
				Context: skbContext{Ifindex: n.greedy.Ifindex, IngressIfindex: 77},
			})
			must(t, "run", err)
		})
		n.refused(t, bound.TooBig)
	},
	"connections that wait for sluice-http": func(t *testing.T, n *neighbours) {
		const toHTTP = nodetable.ID(65)
		redirectingTo(t, policytable.ProxyHTTP, n.k, toHTTP, 7)
		must(t, "Set", n.k.Proxies.Set(policytable.ProxyHTTP, proxymap.Proxy{Device: otherDevice, Attached: true}))
		beatOf(t, policytable.ProxyHTTP, n.k, 0)
		for _, p := range []*pod{n.greedy, n.quiet} {
			names(t, n.k, p, toHTTP)
		}
		server := netip.AddrPortFrom(n.here.IPv4, dnsPort)
		n.flood(proxymap.QueueLength, server, protoTCP, func(int) []byte { return syn(4000, dnsPort) })
		before := n.counters(t)
		inNetns(t, n.f.a.ns, func() {
			n.send(n.greedy, server, protoTCP, syn(4000, dnsPort))
			n.send(n.quiet, server, protoTCP, syn(4000, dnsPort))
		})
		gained := n.f.a.gained(t, before)
		if dropped := gained[cell{event.ProxyBudget, event.Egress}]; dropped != 1 || redirected(gained) != 1 {
			t.Errorf("connections of the two pods: %v, want one dropped for the budget and one to the proxy", gained)
		}
		for _, p := range []*pod{n.greedy, n.quiet} {
			setPolicy(t, n.k, p.Slot, bothWays)
		}
	},
	"queue of packets to the DNS proxy": func(t *testing.T, n *neighbours) {
		putNames(t, n.k)
		must(t, "Set", n.k.Proxies.Set(policytable.ProxyDNS, proxymap.Proxy{Device: otherDevice, Attached: true}))
		beat(t, n.k, 0)
		for _, p := range []*pod{n.greedy, n.quiet} {
			names(t, n.k, p, namesOf7)
		}
		server := netip.AddrPortFrom(n.here.IPv4, dnsPort)
		n.flood(proxymap.QueueLength, server, protoUDP, func(int) []byte { return udp(4000, dnsPort) })
		before := n.counters(t)
		inNetns(t, n.f.a.ns, func() {
			n.send(n.greedy, server, protoUDP, udp(4000, dnsPort))
			n.send(n.quiet, server, protoUDP, udp(4000, dnsPort))
		})
		gained := n.f.a.gained(t, before)
		if dropped := gained[cell{event.ProxyBudget, event.Egress}]; dropped != 1 || redirected(gained) != 1 {
			t.Errorf("queries of the two pods: %v, want one dropped for the budget and one to the proxy", gained)
		}
		for _, p := range []*pod{n.greedy, n.quiet} {
			setPolicy(t, n.k, p.Slot, bothWays)
		}
	},
}

// TestKernelNeighboursOfExhaustedLimitsAreServed: a pod and strangers outside use up each limit of the programs in
// turn. Another pod and a client outside are served after each of them as before.
func TestKernelNeighboursOfExhaustedLimitsAreServed(t *testing.T) {
	n := newNeighbours(t)
	n.served(t)
	listed := make(map[string]bool)
	for _, b := range bounds.All {
		if len(b.In) == 0 {
			continue
		}
		listed[b.Name] = true
		t.Run(b.Name, func(t *testing.T) {
			exhaust := exhaustions[b.Name]
			if exhaust == nil {
				t.Fatal("model/bounds has this limit of the programs, and no function of this test uses it up")
			}
			exhaust(t, n)
			n.served(t)
		})
	}
	for name := range exhaustions {
		if !listed[name] {
			t.Errorf("%s is no limit of the programs in model/bounds", name)
		}
	}
}
