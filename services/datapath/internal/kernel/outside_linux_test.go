// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/service/translation"
)

// outsideAddrs returns the outsider's addresses of both families.
func (f *fabric) outsideAddrs() []netip.Addr {
	return []netip.Addr{f.outside, netip.MustParseAddr("2001:db8::99")}
}

// routeFromOutside routes the outsider's packets for an address to a node.
func (f *fabric) routeFromOutside(t *testing.T, to netip.Addr, n *fabricNode) {
	t.Helper()
	via := n.addr4
	if to.Is6() {
		via = n.addr6
	}
	inNetns(t, f.outsider, func() {
		if err := netlink.RouteReplace(&netlink.Route{Dst: ipNet(to), Gw: via.AsSlice()}); err != nil {
			t.Errorf("route to %v: %v", to, err)
		}
	})
}

// askInPieces sends a UDP request that is larger than a packet, repeatedly until the ends know the path MTU:
// only the sender can fragment IPv6.
func (f *fabric) askInPieces(t *testing.T, to netip.AddrPort) (says string) {
	t.Helper()
	var u *net.UDPConn
	inNetns(t, f.outsider, func() {
		var err error
		if u, err = net.ListenUDP("udp", nil); err != nil {
			t.Errorf("open a socket: %v", err)
		}
	})
	if u == nil {
		t.FailNow()
	}
	defer u.Close()
	sent, b := bytes.Repeat([]byte("fragment"), 700), make([]byte, 65536)
	servicetest.Eventually(t, "an answer in pieces", func() bool {
		must(t, "deadline", u.SetDeadline(time.Now().Add(200*time.Millisecond)))
		_, err := u.WriteToUDPAddrPort(sent, to)
		must(t, "send to "+to.String(), err)
		n, from, err := u.ReadFromUDPAddrPort(b)
		if err != nil {
			return false
		}
		if from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port()); from != to {
			t.Errorf("%v answers for %v", from, to)
		}
		var echoed string
		if says, echoed, _ = strings.Cut(string(b[:n]), "\n"); echoed != string(sent) {
			t.Errorf("%v: %d bytes came back of %d", to, len(echoed), len(sent))
		}
		return true
	})
	return says
}

// TestKernelOutsideReachesLocalBackends: node ports and load balancer addresses forward outside clients to a
// local pod, which sees the client's address; answers of any size come from the requested address.
func TestKernelOutsideReachesLocalBackends(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		for i, local := range f.a.pod.Addrs() {
			at := netip.AddrPortFrom(local, 8080)
			tell(t, f.a.pod.ns, at)
			vip := serviceAddr(local, 1)
			f.routeFromOutside(t, vip.Addr(), f.a)
			n.lead(vip, feAddress, at)
			nodePort := netip.AddrPortFrom([]netip.Addr{f.a.addr4, f.a.addr6}[i], 30080)
			n.lead(nodePort, feNode, at)
			// in the range of ports for answers from backends on other nodes
			low := netip.AddrPortFrom(nodePort.Addr(), 25080)
			n.lead(low, feNode, at)
			f.askInPieces(t, vip)
			f.askInPieces(t, nodePort)
			before := n.counters(t)
			for _, asked := range []netip.AddrPort{vip, nodePort, low} {
				client := f.outsideAddrs()[i]
				wantServed(t, "tcp", askTCP(t, f.outsider, asked, 1<<20), at, client)
				wantServed(t, "udp", askUDP(t, f.outsider, asked, 64), at, client)
				wantServed(t, "fragments", f.askInPieces(t, asked), at, client)
			}
			wantNoDropsSince(t, n.runner, before)
			if got := f.a.gained(t, before)[cell{event.ForwardedFromStack, event.Ingress}]; got == 0 {
				t.Error("no packet from the stack reached the pod")
			}
		}
	})
}

// TestKernelOutsideServesTheHostsOfOtherNodes: requests of another node's host arrive outside the tunnel, with
// its device address as source, which the pod sees.
func TestKernelOutsideServesTheHostsOfOtherNodes(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		for i, local := range f.a.pod.Addrs() {
			at := netip.AddrPortFrom(local, 8080)
			tell(t, f.a.pod.ns, at)
			nodePort := netip.AddrPortFrom([]netip.Addr{f.a.addr4, f.a.addr6}[i], 30080)
			n.lead(nodePort, feNode, at)
			client := []netip.Addr{f.b.addr4, f.b.addr6}[i]
			before := n.counters(t)
			wantServed(t, "tcp", askTCP(t, f.b.ns, nodePort, 1<<20), at, client)
			wantServed(t, "udp", askUDP(t, f.b.ns, nodePort, 64), at, client)
			wantNoDropsSince(t, n.runner, before)
		}
		setPolicy(t, f.a.k, f.a.pod.Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny})
		before := f.a.counters(t)
		inNetns(t, f.b.ns, func() {
			to := netip.AddrPortFrom(f.a.addr4, 30080).String()
			if c, err := net.DialTimeout("tcp", to, time.Second); err == nil {
				c.Close()
				t.Error("a pod answers although its policy denies all ingress")
			}
		})
		if got := f.a.gained(t, before)[cell{event.PolicyDenied, event.Ingress}]; got == 0 {
			t.Errorf("%v, want what the pod's policy denies", f.a.gained(t, before))
		}
	})
}

// TestKernelOutsideReachesBackendsElsewhere: outside clients reach pods and the host of another node, and
// sockets of the local node. A backend on another node sees an address of this node as source, a local socket
// sees the client. The other node's policy evaluates the world.
func TestKernelOutsideReachesBackendsElsewhere(t *testing.T) {
	eachUnderlay(t, func(t *testing.T, f *fabric, routing Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		for i, pod := range f.b.pod.Addrs() {
			own := []netip.Addr{f.a.addr4, f.a.addr6}[i]
			toPod := own
			if routing == RoutingOverlay {
				toPod = []netip.Addr{f.a.over4, f.a.over6}[i]
			}
			for j, c := range []struct {
				what   string
				in     netns.NsHandle
				at     netip.Addr
				source netip.Addr // source that the backend sees
			}{
				{"pod", f.b.pod.ns, pod, toPod},
				{"host", f.b.ns, []netip.Addr{f.b.addr4, f.b.addr6}[i], own},
				{"own", f.a.ns, own, f.outsideAddrs()[i]},
			} {
				at := netip.AddrPortFrom(c.at, 9000+uint16(j))
				tell(t, c.in, at)
				vip := serviceAddr(pod, byte(20+j))
				f.routeFromOutside(t, vip.Addr(), f.a)
				n.lead(vip, feAddress, at)
				nodePort := netip.AddrPortFrom(own, 30080+uint16(j))
				n.lead(nodePort, feNode, at)
				f.askInPieces(t, vip)
				f.askInPieces(t, nodePort)
				before, beforeB := n.counters(t), f.b.counters(t)
				for _, asked := range []netip.AddrPort{vip, nodePort} {
					wantServed(t, c.what+" by tcp", askTCP(t, f.outsider, asked, 1<<20), at, c.source)
					wantServed(t, c.what+" by udp", askUDP(t, f.outsider, asked, 64), at, c.source)
					wantServed(t, c.what+" in fragments", f.askInPieces(t, asked), at, c.source)
				}
				wantNoDrops(t, "a", f.a.gained(t, before))
				wantNoDrops(t, "b", f.b.gained(t, beforeB))
			}
		}
	})
}

// wantServed checks that a server of tell reports its own address and the expected client.
func wantServed(t *testing.T, what, says string, at netip.AddrPort, source netip.Addr) {
	t.Helper()
	server, client, _ := strings.Cut(says, " to ")
	from, err := netip.ParseAddrPort(client)
	if err != nil || server != at.String() || from.Addr().Unmap() != source {
		t.Errorf("%s: %q answers, want %v to %v", what, says, at, source)
	}
}

// fromOutside sends packets to a node from the machine outside of the cluster.
func (f *fabric) fromOutside(t *testing.T, to *fabricNode, packets ...[]byte) {
	t.Helper()
	inNetns(t, f.outsider, func() {
		l, err := netlink.LinkByName("up0")
		if err != nil {
			t.Errorf("find up0: %v", err)
			return
		}
		var frames [][]byte
		for _, p := range packets {
			ethertype := uint16(etherIPv4)
			if p[0]>>4 == 6 {
				ethertype = etherIPv6
			}
			dst, src := [6]byte(to.uplink.Attrs().HardwareAddr), [6]byte(l.Attrs().HardwareAddr)
			frames = append(frames, frame(dst, src, ethertype, p))
		}
		sendRaw(t, "up0", frames...)
	})
}

// TestKernelOutsideErrorsQuoteWhatWasSent: an ICMP error about a packet to a service reaches the sending
// socket, whose kernel compares the quoted packet: for a local pod, a pod of another node, and a host.
func TestKernelOutsideErrorsQuoteWhatWasSent(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		for i, own := range []netip.Addr{f.a.addr4, f.a.addr6} {
			for j, backend := range []netip.Addr{
				f.a.pod.Addrs()[i], f.b.pod.Addrs()[i], []netip.Addr{f.b.addr4, f.b.addr6}[i], own,
			} {
				nodePort := netip.AddrPortFrom(own, 30090+uint16(j))
				n.lead(nodePort, feNode, netip.AddrPortFrom(backend, 9))
				u, err := dialIn(t, f.outsider, "udp", nodePort)
				must(t, "open a socket", err)
				_, err = u.Write([]byte("anybody?"))
				must(t, "send", err)
				if _, err := u.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNREFUSED) {
					t.Errorf("%v for the closed port %v: %v, want %v", nodePort, backend, err, syscall.ECONNREFUSED)
				}
				if _, err := dialIn(t, f.outsider, "tcp", nodePort); !errors.Is(err, syscall.ECONNREFUSED) {
					t.Errorf("%v for %v by tcp: %v, want %v", nodePort, backend, err, syscall.ECONNREFUSED)
				}
			}
			// without a backend
			nodePort := netip.AddrPortFrom(own, 30099)
			n.lead(nodePort, feNode)
			for _, network := range []string{"tcp", "udp"} {
				c, err := dialIn(t, f.outsider, network, nodePort)
				if err == nil {
					_, _ = c.Write([]byte("anybody?"))
					_, err = c.Read(make([]byte, 1))
				}
				if !errors.Is(err, syscall.ECONNREFUSED) {
					t.Errorf("%s to a service without backends: %v, want %v", network, err, syscall.ECONNREFUSED)
				}
			}
		}
	})
}

// TestKernelOutsideForgedSourcesReachNoBackend: outside senders with the address of a pod or of the node reach
// no backend, and no service forwards to the tunnel port.
func TestKernelOutsideForgedSourcesReachNoBackend(t *testing.T) {
	eachUnderlay(t, func(t *testing.T, f *fabric, routing Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		nodePort := netip.AddrPortFrom(f.a.addr4, 30080)
		n.lead(nodePort, feNode, netip.AddrPortFrom(f.a.pod.IPv4, 8080))
		away := netip.AddrPortFrom(f.a.addr4, 30081)
		n.lead(away, feNode, netip.AddrPortFrom(f.b.pod.IPv4, 8080))
		tunnel := netip.AddrPortFrom(f.a.addr4, 30082)
		n.lead(tunnel, feNode, netip.AddrPortFrom(f.b.addr4, 4789))
		packet := func(src netip.Addr, to netip.AddrPort) []byte {
			return ip4Header{src: src, dst: to.Addr(), proto: protoUDP}.with(udp(1000, to.Port()))
		}
		for _, c := range []struct {
			what string
			src  netip.Addr
			to   netip.AddrPort
			want event.Reason
		}{
			{"a pod of the node", f.a.pod.IPv4, nodePort, event.SpoofedIP},
			{"an unassigned address of the node", netip.MustParseAddr("10.244.1.77"), nodePort, event.SpoofedIP},
			{"the node", f.a.over4, nodePort, event.SpoofedIP},
			{"the node, to another", f.a.addr4, away, event.SpoofedIP},
			{"a pod of the other node", f.b.pod.IPv4, nodePort, event.SpoofedNode},
			{"a pod of the other node, to itself", f.b.pod.IPv4, away, event.SpoofedNode},
			{"the other node, by its overlay address", f.b.over4, nodePort, event.SpoofedNode},
			{"the outsider, to a tunnel", f.outside, tunnel, event.TunnelPort},
		} {
			if routing == RoutingNative && c.want == event.SpoofedNode {
				continue // native routing accepts it from the network: see routing.md
			}
			before := f.a.counters(t)
			f.fromOutside(t, f.a, packet(c.src, c.to))
			servicetest.Eventually(t, c.what, func() bool { return len(f.a.gained(t, before)) > 0 })
			if got := f.a.gained(t, before)[cell{c.want, event.Ingress}]; got != 1 {
				t.Errorf("%s: %v, want one %v", c.what, f.a.gained(t, before), c.want)
			}
		}
		must(t, "list", n.k.Translations.Each(func(tr translation.Translation) error {
			if tr.Source.Addr() != f.outside {
				t.Errorf("a forged source has a translation: %v", tr)
			}
			return nil
		}))
	})
}

// TestKernelOutsideClaimsSurviveEviction: connections to a backend on another node continue while all
// translations, and the connections' entries, are deleted again and again: the node's port stays the same, and
// no connection is reset.
func TestKernelOutsideClaimsSurviveEviction(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		at := netip.AddrPortFrom(f.b.pod.IPv4, 8080)
		tell(t, f.b.pod.ns, at)
		nodePort := netip.AddrPortFrom(f.a.addr4, 30080)
		n.lead(nodePort, feNode, at)
		var conns []net.Conn
		for range 20 {
			c, err := dialIn(t, f.outsider, "tcp", nodePort)
			must(t, "connect", err)
			_, err = readLine(c)
			must(t, "read", err)
			conns = append(conns, c)
		}
		claims := func() map[netip.AddrPort]netip.AddrPort {
			m := map[netip.AddrPort]netip.AddrPort{}
			must(t, "list", n.k.Translations.Each(func(tr translation.Translation) error {
				if tr.Answer && tr.Protocol == protoTCP {
					m[tr.Backend] = tr.Asked
				}
				return nil
			}))
			return m
		}
		before := claims()
		if len(before) != len(conns) {
			t.Fatalf("%d claims for %d connections", len(before), len(conns))
		}
		for round := range 6 {
			for _, name := range []string{bpf.MapsMapSlXl4, bpf.MapsMapSlCt4} {
				if name == bpf.MapsMapSlCt4 && round%2 == 0 {
					continue
				}
				m := n.k.Pins.Map(name)
				key := make([]byte, m.KeySize())
				for m.NextKey(nil, key) == nil {
					must(t, "delete", m.Delete(key))
				}
			}
			for i, c := range conns {
				sent := fmt.Sprintf("round %d connection %d\n", round, i)
				_, err := c.Write([]byte(sent))
				must(t, "write", err)
				if got, err := readLine(c); err != nil || got+"\n" != sent {
					t.Fatalf("%q came back, %v, want %q", got, err, sent)
				}
			}
			if after := claims(); !maps.Equal(before, after) {
				t.Errorf("round %d: the claims are %v, were %v", round, after, before)
			}
		}
	})
}

// readLine reads to the end of a line.
func readLine(c net.Conn) (string, error) {
	var line []byte
	for b := make([]byte, 1); ; {
		if _, err := c.Read(b); err != nil {
			return string(line), err
		}
		if b[0] == '\n' {
			return string(line), nil
		}
		line = append(line, b[0])
	}
}

// holdPorts opens sockets in a namespace that listen at all source ports for backends on other nodes, or, for
// UDP, are connected to one. release closes them.
func holdPorts(t *testing.T, ns netns.NsHandle, network string, to netip.AddrPort) (release func()) {
	t.Helper()
	const first, ports = 20000, 10000
	var held []io.Closer
	release = func() {
		for _, c := range held {
			c.Close()
		}
		held = nil
	}
	t.Cleanup(func() { release() })
	inNetns(t, ns, func() {
		for port := first; port < first+ports; port++ {
			var c io.Closer
			var err error
			if to.IsValid() {
				c, err = net.DialUDP(network, &net.UDPAddr{Port: port}, net.UDPAddrFromAddrPort(to))
			} else if network == "udp" {
				c, err = net.ListenUDP(network, &net.UDPAddr{Port: port})
			} else {
				c, err = net.ListenTCP(network, &net.TCPAddr{Port: port})
			}
			if err != nil {
				t.Errorf("hold port %d: %v", port, err)
				return
			}
			held = append(held, c)
		}
	})
	return release
}

// wantRefused sends a request from outside, which must be refused at its first packet and counted under a
// reason where it would have left for the backend.
func (f *fabric) wantRefused(t *testing.T, network string, asked netip.AddrPort, reason event.Reason) {
	t.Helper()
	before := f.a.counters(t)
	c, err := dialIn(t, f.outsider, network, asked)
	if err == nil {
		_, _ = c.Write([]byte("anybody?"))
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		t.Fatalf("%s to %v: %v, want %v", network, asked, err, syscall.ECONNREFUSED)
	}
	if got := f.a.gained(t, before); got[cell{reason, event.Egress}] != 1 {
		t.Errorf("%s to %v: counted %v, want one %v", network, asked, got, reason)
	}
}

// TestKernelOutsideTakesNoPortOfTheHost: sockets of the node that listen at, or are bound to, all source ports
// for backends on other nodes do not affect outside clients. If they are connected to the backend, a client is
// refused immediately; the same while the node has no source address. Then it is served.
func TestKernelOutsideTakesNoPortOfTheHost(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		var asked, backends []netip.AddrPort
		for i, own := range []netip.Addr{f.a.addr4, f.a.addr6} {
			// through the tunnel, if there is one, and through the uplink
			for j, backend := range []netip.Addr{f.b.pod.Addrs()[i], []netip.Addr{f.b.addr4, f.b.addr6}[i]} {
				at := netip.AddrPortFrom(backend, 8080)
				tell(t, []netns.NsHandle{f.b.pod.ns, f.b.ns}[j], at)
				vip := serviceAddr(backend, byte(1+j))
				f.routeFromOutside(t, vip.Addr(), f.a)
				n.lead(vip, feAddress, at)
				nodePort := netip.AddrPortFrom(own, 30080+uint16(j))
				n.lead(nodePort, feNode, at)
				asked, backends = append(asked, vip, nodePort), append(backends, at)
			}
		}
		local, err := n.k.Nodes.Local()
		must(t, "read the local node", err)
		without := local
		without.Sources = [4]uint16{}
		for _, network := range []string{"tcp", "udp"} {
			release := holdPorts(t, f.a.ns, network, netip.AddrPort{})
			for _, a := range asked {
				askUDP(t, f.outsider, a, 64)
				askTCP(t, f.outsider, a, 64)
			}
			release()
			must(t, "take the addresses away", n.k.Nodes.SetLocal(without))
			for i, a := range asked {
				f.wantRefused(t, network, a, event.NATNoSource)
				s := f.a.explainTo(t, protoTCP, f.outsideAddrs()[i/4], a).Service
				if s == nil || len(s.Backends) != 1 || s.Backends[0].Explanation.Reason != event.NATNoSource {
					t.Errorf("Explain of %v: %+v, want %v", a, s, event.NATNoSource)
				}
			}
			must(t, "give them back", n.k.Nodes.SetLocal(local))
		}
		for i, at := range backends {
			release := holdPorts(t, f.a.ns, "udp", at)
			for _, a := range asked[2*i : 2*i+2] {
				f.wantRefused(t, "udp", a, event.NATExhausted)
			}
			release()
		}
		for _, a := range asked {
			askUDP(t, f.outsider, a, 64)
			askTCP(t, f.outsider, a, 64)
		}
	})
}

// TestKernelOutsideRefusalsHaveABudget: however fast an outside client sends while no port is free, a CPU sends
// no more answers per second than its limit.
func TestKernelOutsideRefusalsHaveABudget(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		at, asked := netip.AddrPortFrom(f.b.pod.IPv6, 8080), netip.AddrPortFrom(f.a.addr6, 30080)
		n.lead(asked, feNode, at)
		local, err := n.k.Nodes.Local()
		must(t, "read the local node", err)
		local.Sources = [4]uint16{}
		must(t, "take the addresses away", n.k.Nodes.SetLocal(local))
		f.wantRefused(t, "udp", asked, event.NATNoSource)
		const flood, rate = 20_000, 1000
		one := ip6(f.outsideAddrs()[1], asked.Addr(), protoUDP, udp(40000, asked.Port()))
		before, told := f.a.counters(t), f.toldUnreachable(t)
		began := time.Now()
		f.fromOutside(t, f.a, slices.Repeat([][]byte{one}, flood)...)
		var dropped uint64
		servicetest.Eventually(t, "the flood to be counted", func() bool {
			was := dropped
			dropped = f.a.gained(t, before)[cell{event.NATNoSource, event.Egress}]
			return dropped > flood/2 && dropped == was
		})
		told = f.toldUnreachable(t) - told
		seconds := uint64(time.Since(began)/time.Second) + 2 // including the ones that have just begun
		t.Logf("%d of %d packets answered in %v", told, dropped, time.Since(began))
		if limit := rate * seconds * uint64(runtime.NumCPU()); told == 0 || told > limit {
			t.Errorf("%d of %d packets were answered, want <= %d", told, dropped, limit)
		}
	})
}

// toldUnreachable returns how many ICMPv6 unreachable errors the outsider has received.
func (f *fabric) toldUnreachable(t *testing.T) (n uint64) {
	t.Helper()
	inNetns(t, f.outsider, func() {
		b, err := os.ReadFile("/proc/thread-self/net/snmp6")
		if err != nil {
			t.Errorf("counters: %v", err)
		}
		_, text, _ := strings.Cut(string(b), "\nIcmp6InDestUnreachs")
		if _, err := fmt.Sscan(text, &n); err != nil {
			t.Errorf("counters: %v", err)
		}
	})
	return n
}

// TestKernelOutsideFloodLeavesOthersAlone: many more new clients than the translation maps hold use a service;
// existing connections to services continue.
func TestKernelOutsideFloodLeavesOthersAlone(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	local, away := netip.AddrPortFrom(f.a.pod.IPv4, 8080), netip.AddrPortFrom(f.b.pod.IPv4, 8080)
	tell(t, f.a.pod.ns, local)
	tell(t, f.b.pod.ns, away)
	ports := []netip.AddrPort{netip.AddrPortFrom(f.a.addr4, 30080), netip.AddrPortFrom(f.a.addr4, 30081)}
	n.lead(ports[0], feNode, local)
	n.lead(ports[1], feNode, away)
	vip := serviceAddr(local.Addr(), 1)
	n.lead(vip, feAddress, away)
	var conns []net.Conn
	for _, c := range []struct {
		from netns.NsHandle
		to   netip.AddrPort
	}{{f.outsider, ports[0]}, {f.outsider, ports[1]}, {f.a.pod.ns, vip}} {
		conn, err := dialIn(t, c.from, "tcp", c.to)
		must(t, "connect", err)
		_, err = readLine(conn)
		must(t, "read", err)
		conns = append(conns, conn)
	}
	prog, _ := n.k.program(program.FromUplink), 0
	header := [14]byte{12: 8}
	for i := range 100_000 {
		src := netip.AddrFrom4([4]byte{198, 18, byte(i >> 14), byte(i >> 6)})
		in := ip4Header{src: src, dst: f.a.addr4, proto: protoUDP}.with(udp(uint16(1000+i&0x3f), ports[i&1].Port()))
		_, err := prog.Run(&ebpf.RunOptions{Data: append(header[:], in...)})
		must(t, "run", err)
		if i%20_000 == 0 {
			for j, c := range conns {
				_, err := c.Write([]byte("on\n"))
				must(t, "write", err)
				if got, err := readLine(c); err != nil || got != "on" {
					t.Fatalf("connection %d after %d strangers: %q, %v", j, i, got, err)
				}
			}
		}
	}
}

// TestKernelClusterIPDoesNotAnswerOutside: packets from outside to a cluster IP are dropped, and not forwarded
// by the node's routes.
func TestKernelClusterIPDoesNotAnswerOutside(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		for _, local := range f.a.pod.Addrs() {
			at, vip := netip.AddrPortFrom(local, 8080), serviceAddr(local, 1)
			tell(t, f.a.pod.ns, at)
			front := n.lead(serviceAddr(local, 2), feAddress, at)
			putFronts(t, n.k, vip, protoUDP, feAddress, bpf.MapsSlFe{Inside: front, Outside: front})
			askUDP(t, f.b.pod.ns, at, 16) // a pod can use it
			f.routeFromOutside(t, vip.Addr(), f.a)
			before := f.a.counters(t)
			u, err := dialIn(t, f.outsider, "udp", vip)
			must(t, "open a socket", err)
			_, err = u.Write([]byte("x"))
			must(t, "send", err)
			servicetest.Eventually(t, "the drop", func() bool {
				return f.a.gained(t, before)[cell{event.ServiceInside, event.Ingress}] == 1
			})
		}
	})
}

// TestKernelPortWithoutAServiceIsDroppedOutside: packets to a virtual IP at a port without a service, or with
// another protocol, are not forwarded by the node's routes.
func TestKernelPortWithoutAServiceIsDroppedOutside(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		for i, local := range f.a.pod.Addrs() {
			at, vip := netip.AddrPortFrom(local, 8080), serviceAddr(local, 2)
			tell(t, f.a.pod.ns, at)
			n.lead(vip, feAddress, at)
			alone(t, n.k, vip.Addr())
			f.routeFromOutside(t, vip.Addr(), f.a)
			network, echo := "ip4:icmp", []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0}
			if local.Is6() {
				network, echo = "ip6:ipv6-icmp", []byte{128, 0, 0, 0, 0, 0, 0, 0}
			}
			before := f.a.counters(t)
			for network, to := range map[string]string{
				network: vip.Addr().String(), "udp": netip.AddrPortFrom(vip.Addr(), vip.Port()+1).String(),
			} {
				inNetns(t, f.outsider, func() {
					c, err := net.Dial(network, to)
					if err == nil {
						_, err = c.Write(echo)
						c.Close()
					}
					must(t, "send", err)
				})
			}
			servicetest.Eventually(t, "both drops", func() bool {
				return f.a.gained(t, before)[cell{event.NoServicePort, event.Ingress}] == 2
			})
			// neighbours may resolve the address
			wantServed(t, "the port that is there", askUDP(t, f.outsider, vip, 16), at, f.outsideAddrs()[i])
			// the node's own address is not a virtual IP
			own := []netip.Addr{f.a.addr4, f.a.addr6}[i]
			alone(t, n.k, own)
			tell(t, f.a.ns, netip.AddrPortFrom(own, 7777))
			askTCP(t, f.outsider, netip.AddrPortFrom(own, 7777), 16)
		}
	})
}

// TestKernelPodsReachNodePortsOfOtherNodes: without masquerading, pods reach a node port of another node with
// their own address, through the tunnel or natively. A pod of that node sees the client, a backend on another
// node sees the node, and policy evaluates the client.
func TestKernelPodsReachNodePortsOfOtherNodes(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, routing Routing) {
		n := &serviceNode{T: t, runner: f.b.runner}
		other := f.a.newPod(t, 11)
		for i, local := range f.b.pod.Addrs() {
			own := []netip.Addr{f.b.addr4, f.b.addr6}[i]
			near, away := netip.AddrPortFrom(local, 8080), netip.AddrPortFrom(other.Addrs()[i], 8080)
			f.b.says(t, netip.PrefixFrom(away.Addr(), away.Addr().BitLen()), other.Identity, uint16(f.a.number))
			tell(t, f.b.pod.ns, near)
			tell(t, other.ns, away)
			n.lead(netip.AddrPortFrom(own, 30080), feNode, near)
			n.lead(netip.AddrPortFrom(own, 30081), feNode, away)
			seen := own
			if routing == RoutingOverlay {
				seen = []netip.Addr{f.b.over4, f.b.over6}[i]
			}
			for at, c := range map[netip.AddrPort]struct {
				backend netip.AddrPort
				source  netip.Addr
			}{
				netip.AddrPortFrom(own, 30080): {near, f.a.pod.Addrs()[i]},
				netip.AddrPortFrom(own, 30081): {away, seen},
			} {
				beforeA, beforeB := f.a.counters(t), f.b.counters(t)
				wantServed(t, "tcp", askTCP(t, f.a.pod.ns, at, 1<<10), c.backend, c.source)
				wantServed(t, "udp", askUDP(t, f.a.pod.ns, at, 64), c.backend, c.source)
				wantNoDrops(t, "a", f.a.gained(t, beforeA))
				wantNoDrops(t, "b", f.b.gained(t, beforeB))
			}
		}
	})
}

// throughUplink runs the programs of the uplink on an IPv4 packet that the node receives there and forwards. It
// returns the packet that leaves the node; nil: it was dropped or refused.
func (n *serviceNode) throughUplink(packet []byte) []byte {
	n.Helper()
	header := [14]byte{12: 8}
	data := append(header[:], packet...)
	for _, c := range []struct {
		program string
		ctx     skbContext
	}{
		{program.FromUplink, skbContext{}}, {program.ToUplink, skbContext{IngressIfindex: 77, Mark: markRemote}},
	} {
		opts := &ebpf.RunOptions{Data: data, DataOut: make([]byte, len(data)+256), Context: c.ctx}
		verdict, err := n.k.program(c.program).Run(opts)
		must(n.T, "run", err)
		if verdict == verdictShot || verdict == verdictRedirect {
			return nil
		}
		data = opts.DataOut
	}
	return data[len(header):]
}

const markRemote = 0x0300

// endsOf returns the source and destination of an IPv4 packet without options.
func endsOf(packet []byte) (src, dst netip.AddrPort) {
	port := func(at int) uint16 { return binary.BigEndian.Uint16(packet[at:]) }
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte(packet[12:])), port(20)),
		netip.AddrPortFrom(netip.AddrFrom4([4]byte(packet[16:])), port(22))
}

// transit lists the connections in transit.
func (n *serviceNode) transit() (all []conntrack.Connection) {
	n.Helper()
	must(n.T, "list", n.k.Connections.Each(func(cs []conntrack.Connection) error {
		for _, c := range cs {
			if c.Transit {
				all = append(all, c)
			}
		}
		return nil
	}))
	return all
}

// TestKernelPacketsInTransitFitTheirConnection: packets that do not fit a connection in transit are dropped, and a SYN
// from the port of an ended connection begins another one. An ICMP error is translated only for the client that has
// sent the quoted packet.
func TestKernelPacketsInTransitFitTheirConnection(t *testing.T) {
	f := newFabric(t, RoutingNative, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	client, backend := netip.MustParseAddrPort("198.18.0.1:4000"), netip.MustParseAddrPort("198.18.0.2:8080")
	asked, back := netip.AddrPortFrom(f.a.addr4, 30080), netip.AddrPortFrom(f.a.addr4, 30081)
	n.lead(asked, feNode, backend)
	n.lead(back, feNode, client)
	send := func(what string, from, to netip.AddrPort, flags byte, want bool) {
		t.Helper()
		before := n.counters(t)
		segment := tcp(from.Port(), to.Port(), flags)
		out := n.throughUplink(ip4Header{src: from.Addr(), dst: to.Addr(), proto: protoTCP}.with(segment))
		if (out != nil) != want {
			t.Errorf("%s: passed %t, want %t; %v", what, out != nil, want, f.a.gained(t, before))
		}
		if got := f.a.gained(t, before)[cell{event.ConnectionInvalid, event.Ingress}]; (got == 1) == want {
			t.Errorf("%s: %v", what, f.a.gained(t, before))
		}
	}
	send("a SYN-ACK of no connection", client, asked, flagSYN|flagACK, false)
	if all := n.transit(); len(all) != 0 {
		t.Fatalf("the SYN-ACK has made %v", all)
	}
	send("a SYN", client, asked, flagSYN, true)
	send("a segment without flags", client, asked, 0, false)
	send("a segment in the other direction, by another Service", backend, back, flagACK, false)
	send("the SYN again", client, asked, flagSYN, true)
	created, err := n.k.Connections.Counters()
	must(t, "read the counters", err)
	for _, c := range n.transit() {
		m, key := n.k.Connections.Map(c.Tuple)
		c.Value.Flags |= uint32(conntrack.Reset)
		must(t, "end the connection", m.Put(key, &c.Value))
	}
	send("a SYN after the end", client, asked, flagSYN, true)
	all := n.transit()
	if len(all) != 1 || all[0].Flags&conntrack.Reset != 0 {
		t.Errorf("after the last SYN: %v, want one connection that has not ended", all)
	}
	if now, err := n.k.Connections.Counters(); err != nil || now.Created != created.Created+1 {
		t.Errorf("%d connections were made after the end, %v, want 1", now.Created-created.Created, err)
	}
	n.wantErrorsForTheirReceiver(t, client, asked, backend)
}

// wantErrorsForTheirReceiver checks that the quotation of an ICMP error is translated for the client that has sent the
// quoted packet, and for no other.
func (n *serviceNode) wantErrorsForTheirReceiver(t *testing.T, client, asked, backend netip.AddrPort) {
	t.Helper()
	other, router := netip.MustParseAddr("198.18.0.3"), netip.MustParseAddr("198.18.0.4")
	quoted := ip4Header{src: client.Addr(), dst: asked.Addr(), proto: protoTCP}.with(tcp(client.Port(), asked.Port(), flagSYN))
	if n.throughUplink(quoted) == nil {
		t.Fatal("the request did not pass")
	}
	sent := ip4Header{src: client.Addr(), dst: backend.Addr(), proto: protoTCP}.with(tcp(client.Port(), backend.Port(), flagSYN))
	for _, c := range []struct {
		to   netip.Addr
		want netip.AddrPort
	}{{client.Addr(), asked}, {other, backend}} {
		header := [14]byte{12: 8}
		data := append(header[:], ip4Header{src: router, dst: c.to, proto: 1}.with(icmp(3, 1, sent...))...)
		opts := &ebpf.RunOptions{
			Data: data, DataOut: make([]byte, len(data)+256), Context: skbContext{IngressIfindex: 77, Mark: markRemote},
		}
		verdict, err := n.k.program(program.ToUplink).Run(opts)
		must(t, "run", err)
		if _, got := endsOf(opts.DataOut[14+20+8:]); verdict == verdictShot || got != c.want {
			t.Errorf("to %v: verdict %d, the error quotes a packet to %v, want %v", c.to, verdict, got, c.want)
		}
	}
}
