// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/service/translation"
)

// nodePortElsewhere forwards a node port of a to the pod of b, and returns it.
func nodePortElsewhere(t *testing.T, f *fabric) netip.AddrPort {
	t.Helper()
	at := netip.AddrPortFrom(f.b.pod.IPv4, 8080)
	tell(t, f.b.pod.ns, at)
	nodePort := netip.AddrPortFrom(f.a.addr4, 30080)
	n := &serviceNode{T: t, runner: f.a.runner}
	n.lead(nodePort, feNode, at)
	return nodePort
}

// asOutside sends IPv4 packets to a from the outsider.
func (f *fabric) asOutside(t *testing.T, packets [][]byte) {
	t.Helper()
	inNetns(t, f.outsider, func() {
		l, err := netlink.LinkByName("up0")
		must(t, "find", err)
		dst, src := [6]byte(f.a.uplink.Attrs().HardwareAddr), [6]byte(l.Attrs().HardwareAddr)
		frames := make([][]byte, len(packets))
		for i := range packets {
			frames[i] = frame(dst, src, etherIPv4, packets[i])
		}
		sendRaw(t, "up0", frames...)
	})
}

// silent returns one of many addresses that do not answer.
func silent(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)})
}

// wantAllServed makes connections to b's pod, none of which may be refused.
func (f *fabric) wantAllServed(t *testing.T, what string, to netip.AddrPort, connections int) {
	t.Helper()
	before := f.a.counters(t)
	for i := range connections {
		c, err := dialIn(t, f.b.ns, "tcp", to)
		if err != nil {
			t.Errorf("%s: connection %d of %d: %v; %v", what, i, connections, err, f.a.gained(t, before))
			return
		}
		_, err = readLine(c)
		must(t, "read", err)
		c.Close()
	}
}

// TestKernelEndedConnectionsFreeTheirPorts: a node makes more short connections to a backend on another node
// than it has ports for it, without a collector, and then more with one.
func TestKernelEndedConnectionsFreeTheirPorts(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	nodePort := nodePortElsewhere(t, f)
	before := f.a.counters(t)
	connect := func(what string, connections int) {
		t.Helper()
		must(t, what, inNetnsErr(t, f.outsider, func() error {
			for i := range connections {
				c, err := net.DialTimeout("tcp", nodePort.String(), 5*time.Second)
				if err != nil {
					return fmt.Errorf("connection %d: %w; %v", i, err, f.a.gained(t, before))
				}
				_, _ = readLine(c)
				c.Close()
			}
			return nil
		}))
	}
	connect("without a collector", translation.Ports+translation.Ports/16)
	col, err := f.a.k.Connections.NewCollector(conntrack.CollectorOptions{})
	must(t, "make a collector", err)
	go func() { _ = col.Run(t.Context()) }()
	connect("with a collector", translation.Ports/4)
}

// TestKernelHalfOpenConnectionsGiveWay: endless SYNs from one sender, from 30 senders and from strangers take
// no port from a connection that was answered.
func TestKernelHalfOpenConnectionsGiveWay(t *testing.T) {
	for _, c := range []struct {
		name   string
		source func(f *fabric, i int) netip.Addr
	}{
		{"one sender", func(f *fabric, _ int) netip.Addr { return f.outside }},
		{"30 senders", func(_ *fabric, i int) netip.Addr { return silent(i % 30) }},
		{"strangers", func(_ *fabric, i int) netip.Addr { return silent(i) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFabric(t, RoutingOverlay, false)
			nodePort := nodePortElsewhere(t, f)
			kept, err := dialIn(t, f.b.ns, "tcp", nodePort)
			must(t, "connect", err)
			_, err = readLine(kept)
			must(t, "read", err)
			for round := range 4 {
				var packets [][]byte
				for i := range 8000 {
					at := round*8000 + i
					packets = append(packets, ip4Header{src: c.source(f, at), dst: f.a.addr4, proto: protoTCP}.with(
						tcp(uint16(1024+at), nodePort.Port(), flagSYN)))
				}
				f.asOutside(t, packets)
				f.wantAllServed(t, c.name, nodePort, 50)
			}
			_, err = kept.Write([]byte("on\n"))
			must(t, "write", err)
			if got, err := readLine(kept); err != nil || got != "on" {
				t.Errorf("an open connection: %q, %v", got, err)
			}
		})
	}
}

// TestKernelDatagramsOfOneSenderLeavePortsToOthers: a sender with requests from 28,000 ports, two from each,
// gets half of the ports to a backend, and others are still answered.
func TestKernelDatagramsOfOneSenderLeavePortsToOthers(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	nodePort := nodePortElsewhere(t, f)
	// requests that the flood has displaced from the server's queue are repeated
	ask := func(what string) {
		t.Helper()
		for range 40 {
			u, err := dialIn(t, f.b.ns, "udp", nodePort)
			must(t, "open a socket", err)
			servicetest.Eventually(t, "an answer "+what, func() bool {
				_, err := u.Write([]byte("hello"))
				must(t, "send", err)
				must(t, "deadline", u.SetReadDeadline(time.Now().Add(time.Second)))
				_, err = u.Read(make([]byte, 100))
				return err == nil
			})
			u.Close()
		}
	}
	for round := range 3 {
		var packets [][]byte
		for i := range 28_000 {
			one := ip4Header{src: f.outside, dst: f.a.addr4, proto: protoUDP}.with(udp(uint16(2000+i), nodePort.Port()))
			packets = append(packets, one, one)
		}
		f.asOutside(t, packets)
		ask("after the flood")
		if round == 1 {
			_, err := f.a.k.Translations.Collect(conntrack.MonotonicSeconds(), f.a.k.Connections, conntrack.DefaultTimeouts())
			must(t, "collect", err)
			ask("after a pass")
		}
	}
	held := 0
	must(t, "list", f.a.k.Translations.Each(func(tr translation.Translation) error {
		if tr.Answer && !tr.Copy && tr.Backend.Addr() == f.outside {
			held++
		}
		return nil
	}))
	if limit := translation.Ports * 6 / 10; held > limit {
		t.Errorf("one sender has %d of %d ports, more than %d", held, translation.Ports, limit)
	}
}

// listenOnly makes the kernel complete connections that no process accepts.
func listenOnly(t *testing.T, ns netns.NsHandle, at netip.AddrPort, backlog int) {
	t.Helper()
	inNetns(t, ns, func() {
		most := []byte(strconv.Itoa(backlog))
		for _, name := range []string{"core/somaxconn", "ipv4/tcp_max_syn_backlog"} {
			must(t, "allow a backlog", os.WriteFile("/proc/sys/net/"+name, most, 0))
		}
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		must(t, "open a socket", err)
		t.Cleanup(func() { _ = unix.Close(fd) })
		must(t, "bind", unix.Bind(fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}))
		must(t, "listen", unix.Listen(fd, backlog))
	})
}

// TestKernelOpenConnectionsOfOneSenderLeavePortsToOthers: a sender that answers and keeps its connections open
// is refused beyond its share, with that reason, and others are not.
func TestKernelOpenConnectionsOfOneSenderLeavePortsToOthers(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	// a server that does not accept, because the test may not open twice as many files
	at, nodePort := netip.AddrPortFrom(f.b.pod.IPv4, 8081), netip.AddrPortFrom(f.a.addr4, 30081)
	listenOnly(t, f.b.pod.ns, at, translation.Ports)
	n := &serviceNode{T: t, runner: f.a.runner}
	n.lead(nodePort, feNode, at)
	var conns []io.Closer
	t.Cleanup(func() {
		for _, c := range conns {
			c.Close()
		}
	})
	before := f.a.counters(t)
	refused := 0
	inNetns(t, f.outsider, func() {
		for range translation.Ports/2 + 1000 {
			c, err := net.DialTimeout("tcp", nodePort.String(), 5*time.Second)
			switch {
			case errors.Is(err, syscall.ECONNREFUSED):
				refused++
			case err != nil:
				t.Errorf("connect: %v", err)
				return
			default:
				conns = append(conns, c)
			}
		}
	})
	got := f.a.gained(t, before)
	if share := got[cell{event.NATShare, event.Egress}]; refused == 0 || share != uint64(refused) {
		t.Errorf("%d connections open, %d refused; %v", len(conns), refused, got)
	}
	if len(conns) < translation.Ports/2 {
		t.Errorf("%d connections are open, fewer than half of the ports", len(conns))
	}
	for range 100 {
		c, err := dialIn(t, f.b.ns, "tcp", nodePort)
		must(t, "connect from another sender", err)
		must(t, "close", c.Close())
	}
}

// TestKernelFlowWhosePortGaveWayTakesAnother: if another connection took the port of a silent UDP flow of an
// outside client, the flow gets another port and is answered.
func TestKernelFlowWhosePortGaveWayTakesAnother(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		for i, own := range []netip.Addr{f.a.addr4, f.a.addr6} {
			at, nodePort := netip.AddrPortFrom(f.b.pod.Addrs()[i], 8080), netip.AddrPortFrom(own, 30080)
			tell(t, f.b.pod.ns, at)
			n.lead(nodePort, feNode, at)
			flow := dialFrom(t, f.outsider, "udp", 4000, nodePort)
			for range 3 {
				wantAnswers(t, "the flow", flow, at)
				taken, copies := takeClaims(t, n.k, netip.AddrPortFrom(f.outsideAddrs()[i], 4000))
				if taken != 1 || copies != 1 {
					t.Fatalf("%d claims of the flow and %d copies of them, want one each", taken, copies)
				}
			}
			wantAnswers(t, "the flow in the end", flow, at)
			must(t, "close", flow.Close())
		}
	})
}

// takeClaims assigns the ports of one client to another one, as if some seconds had passed, and returns how
// many claims and copies of claims there were.
func takeClaims(t *testing.T, k *Kernel, of netip.AddrPort) (taken, copies int) {
	t.Helper()
	var claims []translation.Translation
	must(t, "list", k.Translations.Each(func(x translation.Translation) error {
		if x.Answer && x.Backend == of {
			claims = append(claims, x)
		}
		return nil
	}))
	for _, x := range claims {
		if x.Copy {
			copies++
		} else {
			taken++
		}
		m, key, other := claimOf(x)
		var v bpf.MapsSlXl
		must(t, "read the claim", m(k).Lookup(key, &v))
		v.Addr, v.Port = other, 9999
		must(t, "write the claim", m(k).Put(key, &v))
		tuple := conntrack.Tuple{Initiator: x.Backend, Responder: x.Source, Protocol: x.Protocol, Transit: true}
		c, found, err := k.Connections.Lookup(tuple)
		if err != nil || !found {
			t.Fatalf("the entry of %v: found %t, %v", tuple, found, err)
		}
		ct, ctKey := k.Connections.Map(tuple)
		c.Value.LastS -= 2
		must(t, "age the entry", ct.Put(ctKey, &c.Value))
	}
	return taken, copies
}

// claimOf returns the map of a claim, its key, and the address of another client.
func claimOf(x translation.Translation) (m func(*Kernel) *ebpf.Map, key any, other [16]byte) {
	zone, in4, in6 := uint8(1), bpf.MapsMapSlXl4, bpf.MapsMapSlXl6
	if x.Copy {
		zone, in4, in6 = 3, bpf.MapsMapSlAnswers4, bpf.MapsMapSlAnswers6
	}
	if x.Source.Addr().Is4() {
		src, dst := x.Source.Addr().As4(), x.Asked.Addr().As4()
		copy(other[:], netip.AddrFrom4([4]byte{198, 51, 100, 99}).AsSlice())
		return func(k *Kernel) *ebpf.Map { return k.Pins.Map(in4) }, &bpf.MapsSlXlKey4{
			Src: binary.NativeEndian.Uint32(src[:]), Dst: binary.NativeEndian.Uint32(dst[:]),
			Sport: x.Source.Port(), Dport: x.Asked.Port(), Proto: x.Protocol, Zone: zone,
		}, other
	}
	other = netip.MustParseAddr("2001:db8:99::99").As16()
	return func(k *Kernel) *ebpf.Map { return k.Pins.Map(in6) }, &bpf.MapsSlXlKey6{
		Src: x.Source.Addr().As16(), Dst: x.Asked.Addr().As16(),
		Sport: x.Source.Port(), Dport: x.Asked.Port(), Proto: x.Protocol, Zone: zone,
	}, other
}

// TestKernelPortWhoseClaimWasEvictedIsNotFree: connections whose claims were evicted keep their ports, because
// their answer records still exist. Others get other ports.
func TestKernelPortWhoseClaimWasEvictedIsNotFree(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	nodePort := nodePortElsewhere(t, f)
	const connections = 300 // of 10,000 ports: nine others would otherwise take one of these
	connect := func() {
		for range connections {
			c, err := dialIn(t, f.outsider, "tcp", nodePort)
			must(t, "connect", err)
			t.Cleanup(func() { _ = c.Close() })
			_, err = readLine(c)
			must(t, "read", err)
		}
	}
	clients := func() map[uint16]netip.AddrPort {
		of := map[uint16]netip.AddrPort{}
		must(t, "list", f.a.k.Translations.Each(func(tr translation.Translation) error {
			if tr.Answer && tr.Copy {
				of[tr.Asked.Port()] = tr.Backend
			}
			return nil
		}))
		return of
	}
	connect()
	before := clients()
	if len(before) != connections {
		t.Fatalf("%d connections have %d ports", connections, len(before))
	}
	clearZone(t, f.a.k, 1)
	connect()
	after := clients()
	for port, client := range before {
		if after[port] != client {
			t.Errorf("port %d of %v now belongs to %v", port, client, after[port])
		}
	}
}
