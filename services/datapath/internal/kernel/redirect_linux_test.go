// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/proxymap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// dnsPort is the port that the tables of these tests redirect.
const dnsPort = 53

// Tables that redirect UDP at dnsPort to the DNS proxy, and allow everything else.
const (
	namesOf7    = nodetable.ID(60) // set 7
	namesOf8    = nodetable.ID(61) // set 8
	namesOfAll  = nodetable.ID(62) // set 9, passes without the proxy
	namesOfNone = nodetable.ID(63) // set 0
	noNames     = nodetable.ID(64) // UDP at dnsPort is denied
)

// passesAway is SL_RULE_PASSES_AWAY.
const passesAway = 1 << 16

// putNames writes these tables.
func putNames(t testing.TB, k *Kernel) {
	t.Helper()
	for id, flags := range map[nodetable.ID]uint32{
		namesOf7: 7, namesOf8: 8, namesOfAll: 9 | passesAway, namesOfNone: passesAway,
	} {
		redirecting(t, k, id, flags)
	}
	rawTable{
		id: noNames, rules: []uint8{actAllow, actDeny},
		classes: []map[uint32]uint32{{
			17<<16 | dnsPort - 1: rules(noAdmin, 1), 17<<16 | dnsPort: rules(noAdmin, 2), lastHi: rules(noAdmin, 1),
		}},
	}.put(t, k)
}

func redirecting(t testing.TB, k *Kernel, id nodetable.ID, flags uint32) {
	t.Helper()
	redirectingTo(t, policytable.ProxyDNS, k, id, flags)
}

func redirectingTo(t testing.TB, kind policytable.Proxy, k *Kernel, id nodetable.ID, flags uint32) {
	t.Helper()
	rawTable{
		id: id, rules: []uint8{actAllow, actRedirect},
		classes: []map[uint32]uint32{{
			6<<16 | dnsPort - 1: rules(noAdmin, 1), 6<<16 | dnsPort: rules(noAdmin, 2),
			17<<16 | dnsPort - 1: rules(noAdmin, 1), 17<<16 | dnsPort: rules(noAdmin, 2), lastHi: rules(noAdmin, 1),
		}},
	}.put(t, k)
	update(t, k, bpf.MapsMapSlRule, uint32(id)*16+1, bpf.MapsSlRule{
		Action: actRedirect, Redirect: uint16(kind), Flags: flags,
	})
}

// names makes a pod's egress policy one of these tables.
func names(t testing.TB, k *Kernel, p *pod, id nodetable.ID) {
	t.Helper()
	setPolicy(t, k, p.Slot, endpointmap.Policy{Egress: id, Ingress: nodetable.Allow})
}

// beat writes the heartbeat of the DNS proxy.
func beat(t testing.TB, k *Kernel, ago time.Duration) {
	t.Helper()
	beatOf(t, policytable.ProxyDNS, k, ago)
}

func beatOf(t testing.TB, kind policytable.Proxy, k *Kernel, ago time.Duration) {
	t.Helper()
	var now unix.Timespec
	must(t, "read the clock", unix.ClockGettime(unix.CLOCK_MONOTONIC, &now))
	name := bpf.MapsMapSlProxyBeat
	if kind == policytable.ProxyHTTP {
		name = bpf.MapsMapSlHttpBeat
	}
	at := pin.Word(k.Pins.Memory(name), int(proxymap.HeartbeatOffset(kind)))
	atomic.StoreUint64(at, uint64(now.Nano())-uint64(ago))
}

// tap is a TAP device with a proxy that sends every packet on.
type tap struct {
	k      *Kernel
	file   *os.File
	link   netlink.Link
	mu     sync.Mutex
	frames [][]byte // received
	hold   bool     // keep packets instead of sending them on
}

// newTap creates a TAP device on a node and attaches the proxy.
func newTap(t *testing.T, k *Kernel, node *netlink.Handle, ns netns.NsHandle) *tap {
	t.Helper()
	p := &tap{k: k}
	inNetns(t, ns, func() {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			t.Errorf("open /dev/net/tun: %v", err)
			return
		}
		ifr, err := unix.NewIfreq("sldnstest")
		must(t, "name", err)
		ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_MULTI_QUEUE)
		must(t, "create the TAP device", unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr))
		const without6 = "/proc/sys/net/ipv6/conf/sldnstest/disable_ipv6"
		must(t, "disable IPv6 of the device", os.WriteFile(without6, []byte("1"), 0))
		p.file = os.NewFile(uintptr(fd), "tap")
	})
	if p.file == nil {
		t.FailNow()
	}
	t.Cleanup(func() { p.file.Close() })
	var err error
	p.link, err = node.LinkByName("sldnstest")
	must(t, "find the TAP device", err)
	must(t, "length of the queue", node.LinkSetTxQLen(p.link, proxymap.QueueLength))
	must(t, "MTU", node.LinkSetMTU(p.link, 9000))
	attach(t, node, p.link, netlink.HANDLE_MIN_INGRESS, k.find(program.FromTap))
	must(t, "set the TAP device up", node.LinkSetUp(p.link))
	p.attached(t, true)
	beat(t, k, 0)
	go p.serve()
	return p
}

func (p *tap) attached(t testing.TB, is bool) {
	t.Helper()
	device := uint32(p.link.Attrs().Index)
	must(t, "Set", p.k.Proxies.Set(policytable.ProxyDNS, proxymap.Proxy{Device: device, Attached: is}))
}

func (p *tap) serve() {
	b := make([]byte, 65536)
	for {
		n, err := p.file.Read(b)
		if err != nil {
			return
		}
		p.mu.Lock()
		p.frames = append(p.frames, slices.Clone(b[:n]))
		hold := p.hold
		p.mu.Unlock()
		if !hold {
			_, _ = p.file.Write(b[:n])
		}
	}
}

// keep makes the proxy keep packets, or send them on.
func (p *tap) keep(on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hold = on
}

// taken returns the frames that the proxy has received since the last call.
func (p *tap) taken() [][]byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	frames := p.frames
	p.frames = nil
	return frames
}

// await returns the frames, once there are n.
func (p *tap) await(t *testing.T, n int) (frames [][]byte) {
	t.Helper()
	servicetest.Eventually(t, fmt.Sprintf("%d frames at the proxy", n), func() bool {
		frames = append(frames, p.taken()...)
		return len(frames) >= n
	})
	return frames
}

func (p *tap) write(t *testing.T, frames ...[]byte) {
	t.Helper()
	for _, b := range frames {
		_, err := p.file.Write(b)
		must(t, "write to the TAP device", err)
	}
}

// wantTag checks the tag of a frame.
func wantTag(t *testing.T, b []byte, set uint16, client endpointmap.ID, direction byte) {
	t.Helper()
	want := []byte{2, 1, byte(set >> 8), byte(set), byte(client >> 8), byte(client), 2, direction, 0, 0, 0, 0}
	if !bytes.Equal(b[:12], want) {
		t.Errorf("tag % x, want % x", b[:12], want)
	}
}

// redirected returns how many packets went to a proxy.
func redirected(gained map[cell]uint64) uint64 {
	return gained[cell{event.ForwardedToProxy, event.Egress}] + gained[cell{event.ForwardedToProxy, event.Ingress}]
}

// ends returns the addresses and ports of a frame with UDP, without extension headers.
func ends(b []byte) (src, dst netip.AddrPort) {
	port := binary.BigEndian.Uint16
	at, size, l4 := 26, 4, 34
	if binary.BigEndian.Uint16(b[12:]) == etherIPv6 {
		at, size, l4 = 22, 16, 54
	}
	s, _ := netip.AddrFromSlice(b[at : at+size])
	d, _ := netip.AddrFromSlice(b[at+size : at+2*size])
	return netip.AddrPortFrom(s, port(b[l4:])), netip.AddrPortFrom(d, port(b[l4+2:]))
}

// listenRaw returns a function that returns the next IP packet to a UDP port that a device of a namespace receives.
func listenRaw(t *testing.T, ns netns.NsHandle, dev string, port uint16) func() []byte {
	t.Helper()
	fd := -1
	inNetns(t, ns, func() {
		link, err := net.InterfaceByName(dev)
		must(t, "find "+dev, err)
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		must(t, "packet socket", err)
		proto := binary.NativeEndian.Uint16([]byte{0, unix.ETH_P_ALL})
		must(t, "bind", unix.Bind(fd, &unix.SockaddrLinklayer{Ifindex: link.Index, Protocol: proto}))
		timeout := unix.NsecToTimeval(int64(servicetest.Patience))
		must(t, "timeout", unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout))
	})
	t.Cleanup(func() { unix.Close(fd) })
	return func() []byte {
		t.Helper()
		b := make([]byte, 65536)
		for {
			n, _, err := unix.Recvfrom(fd, b, 0)
			must(t, "receive a frame", err)
			switch kind := binary.BigEndian.Uint16(b[12:]); {
			case n < 42, kind == etherIPv6 && n < 62, kind != etherIPv4 && kind != etherIPv6:
				continue
			}
			if _, dst := ends(b[:n]); dst.Port() == port {
				return slices.Clone(b[14:n])
			}
		}
	}
}

// withoutHops clears the hop limit of an IP packet, and the checksum that covers it.
func withoutHops(b []byte) []byte {
	b = slices.Clone(b)
	if b[0]>>4 == 6 {
		b[7] = 0
		return b
	}
	b[8], b[10], b[11] = 0, 0, 0
	return b
}

// TestKernelHeldPacketIsReleasedBitForBit: a query goes to the proxy with the client's tag and from there to the
// server, wherever that is, and so does the answer in the other direction. Only the hop limit differs from what the
// sender has sent.
func TestKernelHeldPacketIsReleasedBitForBit(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		client := f.a.pod
		near := f.a.newPod(t, 20)
		putNames(t, f.a.k)
		names(t, f.a.k, client, namesOf7)
		proxy := newTap(t, f.a.k, f.a.h, f.a.ns)
		for i, addr := range client.Addrs() {
			f.routeFromOutside(t, addr, f.a)
			for _, c := range []struct {
				what string
				ns   netns.NsHandle
				dev  string
				at   netip.Addr
			}{
				{"a pod of this node", near.ns, "eth0", near.Addrs()[i]},
				{"a pod of another node", f.b.pod.ns, "eth0", f.b.pod.Addrs()[i]},
				{"outside", f.outsider, "up0", f.outsideAddrs()[i]},
				{"the host", f.a.ns, "", []netip.Addr{f.a.addr4, f.a.addr6}[i]},
			} {
				t.Run(c.what+" "+addr.String(), func(t *testing.T) {
					server := netip.AddrPortFrom(c.at, dnsPort)
					tell(t, c.ns, server)
					arrived := func() []byte { return nil }
					if c.dev != "" {
						arrived = listenRaw(t, c.ns, c.dev, dnsPort)
					}
					before := f.a.counters(t)
					proxy.taken()
					askUDP(t, client.ns, server, 64)
					frames := proxy.await(t, 2)
					if len(frames) != 2 {
						t.Fatalf("%d frames at the proxy, want a query and an answer", len(frames))
					}
					wantTag(t, frames[0], 7, client.Slot, 1)
					wantTag(t, frames[1], 7, client.Slot, 2)
					if src, dst := ends(frames[0]); src.Addr() != addr || dst != server {
						t.Errorf("query %v to %v, want %v to %v", src, dst, addr, server)
					}
					if src, dst := ends(frames[1]); src != server || dst.Addr() != addr {
						t.Errorf("answer %v to %v, want %v to %v", src, dst, server, addr)
					}
					if got := arrived(); got != nil && !bytes.Equal(withoutHops(got), withoutHops(frames[0][14:])) {
						t.Errorf("the server received\n% x, the proxy has sent\n% x", got, frames[0][14:])
					}
					gained := f.a.gained(t, before)
					wantNoDrops(t, "a", gained)
					if n := redirected(gained); n != 2 {
						t.Errorf("forwarded-to-proxy counted %d times, want 2: %v", n, gained)
					}
				})
			}
			// other traffic does not pass the proxy
			tell(t, near.ns, netip.AddrPortFrom(near.Addrs()[i], 80))
			askUDP(t, client.ns, netip.AddrPortFrom(near.Addrs()[i], 80), 64)
			if frames := proxy.taken(); len(frames) != 0 {
				t.Errorf("%d frames of other connections at the proxy", len(frames))
			}
		}
	})
}

// TestKernelRepliesReachTheProxy: the program that decapsulates tunnel packets at the uplink redirects them, too, and
// so does the program of a pod whose packets pass the queue of its device.
func TestKernelRepliesReachTheProxy(t *testing.T) {
	f := newDirectFabric(t, func(*Options) {})
	client, server := f.a.pod, netip.AddrPortFrom(f.b.pod.IPv4, dnsPort)
	putNames(t, f.a.k)
	names(t, f.a.k, client, namesOf7)
	proxy := newTap(t, f.a.k, f.a.h, f.a.ns)
	tell(t, f.b.pod.ns, server)
	u, err := dialIn(t, client.ns, "udp", server)
	must(t, "open", err)
	const rounds = 5 // the first answer is received by the tunnel device
	before := f.a.counters(t)
	f.wantThroughDevice(t, "queries", func() {
		for range rounds {
			_, err := u.Write([]byte("query"))
			must(t, "send", err)
			_, err = u.Read(make([]byte, 100))
			must(t, "read", err)
		}
	}, 0, 1)
	gained := f.a.gained(t, before)
	wantNoDrops(t, "a", gained)
	if n := gained[cell{event.ForwardedToProxy, event.Ingress}]; n != rounds {
		t.Errorf("%d answers went to the proxy, want %d: %v", n, rounds, gained)
	}
	for i, b := range proxy.await(t, 2*rounds) {
		wantTag(t, b, 7, client.Slot, byte(1+i%2))
	}
}

// TestKernelHeldAnswerReachesAPodBehindAQueue: packets for a pod whose device has a queue leave by the device, where
// the answers of the proxy are recognised.
func TestKernelHeldAnswerReachesAPodBehindAQueue(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	e := testEndpoint(0, 30)
	e.IPv4, e.IPv6 = netip.AddrFrom4([4]byte{10, 244, 1, 30}), netip.MustParseAddr("fd00:244:1::30")
	e.Deliver, e.MTU = endpointmap.DeliverRedirect, 1400
	client := newPodAt(t, f.a.k, f.a.h, "slqueue", e)
	putNames(t, f.a.k)
	names(t, f.a.k, client, namesOf7)
	proxy := newTap(t, f.a.k, f.a.h, f.a.ns)
	for _, addr := range f.b.pod.Addrs() {
		f.b.says(t, netip.PrefixFrom(client.IPv4, 32), client.Identity, uint16(f.a.number))
		f.b.says(t, netip.PrefixFrom(client.IPv6, 128), client.Identity, uint16(f.a.number))
		server := netip.AddrPortFrom(addr, dnsPort)
		tell(t, f.b.pod.ns, server)
		before := f.a.counters(t)
		askUDP(t, client.ns, server, 64)
		proxy.await(t, 2)
		gained := f.a.gained(t, before)
		wantNoDrops(t, "a", gained)
		if gained[cell{event.ForwardedToPodDevice, event.Ingress}] != 1 {
			t.Errorf("%v, want one answer to the device", gained)
		}
	}
}

// TestKernelPodCannotSetTheProxyMark: a query with the mark by which packets of the proxy are recognised goes to the
// proxy like others.
func TestKernelPodCannotSetTheProxyMark(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	client, server := f.a.pod, netip.AddrPortFrom(f.b.pod.IPv4, dnsPort)
	putNames(t, f.a.k)
	names(t, f.a.k, client, namesOf7)
	proxy := newTap(t, f.a.k, f.a.h, f.a.ns)
	proxy.keep(true)
	u, err := dialIn(t, client.ns, "udp", server)
	must(t, "open", err)
	raw, err := u.(*net.UDPConn).SyscallConn()
	must(t, "socket", err)
	before := f.a.counters(t)
	for _, mark := range []int{0x400, 0x70400, 0x70200, 0x70900} {
		must(t, "socket", raw.Control(func(fd uintptr) {
			must(t, "SO_MARK", unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark))
		}))
		_, err = u.Write([]byte("query"))
		must(t, "send", err)
		proxy.await(t, 1)
	}
	if gained := f.a.gained(t, before); redirected(gained) != 4 || gained[cell{event.ForwardedOverlay, event.Egress}] != 0 {
		t.Errorf("%v, want all four queries at the proxy", gained)
	}
}

// TestKernelOnlyRedirectedConnectionsLeaveTheTap: whatever a proxy writes is dropped, unless it belongs to a
// connection that is redirected to it.
func TestKernelOnlyRedirectedConnectionsLeaveTheTap(t *testing.T) {
	bothFamilies(t, func(t *testing.T, v6 bool) {
		f := newFabric(t, RoutingOverlay, false)
		at := func(p *pod) netip.Addr {
			if v6 {
				return p.IPv6
			}
			return p.IPv4
		}
		host := f.a.addr4
		if v6 {
			host = f.a.addr6
		}
		client, near, remote := f.a.pod, f.a.newPod(t, 20), f.b.pod
		putNames(t, f.a.k)
		names(t, f.a.k, client, namesOf7)
		proxy := newTap(t, f.a.k, f.a.h, f.a.ns)
		proxy.keep(true)
		open := func(from *pod, sport uint16, to netip.Addr, dport uint16) {
			t.Helper()
			inNetns(t, from.ns, func() {
				local, remote := netip.AddrPortFrom(at(from), sport), netip.AddrPortFrom(to, dport)
				u, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(local), net.UDPAddrFromAddrPort(remote))
				must(t, "open", err)
				defer u.Close()
				_, err = u.Write([]byte("query"))
				must(t, "send", err)
			})
		}
		open(client, 4000, at(remote), dnsPort) // redirected
		open(client, 4001, at(near), dnsPort)   // redirected
		open(client, 4002, at(remote), 80)      // not redirected
		open(near, 4003, at(client), 4003)      // not redirected
		queries := proxy.await(t, 2)
		packet := func(src, dst netip.Addr, proto byte, payload []byte) []byte {
			tag := [6]byte{2, 1, 0, 7, 0, byte(client.Slot)}
			if v6 {
				return frame(tag, [6]byte{2, 1}, etherIPv6, ip6(src, dst, proto, payload))
			}
			return frame(tag, [6]byte{2, 1}, etherIPv4, ip4Header{src: src, dst: dst, proto: proto}.with(payload))
		}
		forged := map[string][]byte{
			"of an unknown connection":      packet(at(client), at(remote), 17, udp(4009, dnsPort)),
			"to another server":             packet(at(client), at(near), 17, udp(4000, dnsPort)),
			"of a direct connection":        packet(at(client), at(remote), 17, udp(4002, 80)),
			"answer of one":                 packet(at(remote), at(client), 17, udp(80, 4002)),
			"of a connection to the pod":    packet(at(client), at(near), 17, udp(4003, 4003)),
			"answer to another port":        packet(at(remote), at(client), 17, udp(dnsPort, 4009)),
			"swapped ports":                 packet(at(client), at(remote), 17, udp(dnsPort, 4000)),
			"of another pod":                packet(at(near), at(remote), 17, udp(4000, dnsPort)),
			"of the host":                   packet(host, at(remote), 17, udp(4000, dnsPort)),
			"answer of the host":            packet(host, at(client), 17, udp(dnsPort, 4000)),
			"to the host":                   packet(at(client), host, 17, udp(4000, dnsPort)),
			"TCP":                           packet(at(client), at(remote), 6, tcp(4000, dnsPort, flagSYN)),
			"no protocol with ports":        packet(at(client), at(remote), 99, udp(4000, dnsPort)),
			"an answer too big for the pod": packet(at(remote), at(client), 17, udp(dnsPort, 4000, make([]byte, 2000)...)),
			"ARP":                           frame([6]byte{2}, [6]byte{2}, 0x0806, make([]byte, 28)),
			"tagged":                        frame([6]byte{2}, [6]byte{2}, etherVLAN, []byte{0, 5}, queries[0][12:]),
			"cut":                           queries[0][:30],
		}
		before := f.a.counters(t)
		for _, b := range forged {
			proxy.write(t, b)
		}
		servicetest.Eventually(t, "every frame to be counted", func() bool {
			return f.a.gained(t, before)[cell{event.ProxyForged, event.Ingress}] >= uint64(len(forged))
		})
		gained := f.a.gained(t, before)
		for c, n := range gained {
			if c.reason != event.ProxyForged && !c.reason.Quiet() {
				t.Errorf("%d frames counted as %v: %v", n, c.reason, gained)
			}
		}
		if n := gained[cell{event.ProxyForged, event.Ingress}]; n != uint64(len(forged)) {
			for what, b := range forged {
				before := f.a.counters(t)
				proxy.write(t, b)
				if f.a.gained(t, before)[cell{event.ProxyForged, event.Ingress}] != 1 {
					t.Logf("%s: not forged", what)
				}
			}
			t.Errorf("%d frames counted as forged, want %d", n, len(forged))
		}
		// the queries pass, whatever their Ethernet addresses, until their connections are gone
		before = f.a.counters(t)
		for _, q := range queries {
			proxy.write(t, append(make([]byte, 12), q[12:]...))
		}
		servicetest.Eventually(t, "both queries to pass", func() bool {
			gained := f.a.gained(t, before)
			there, here := cell{event.ForwardedOverlay, event.Egress}, cell{event.ForwardedToPod, event.Egress}
			return gained[there] > 0 && gained[here] > 0
		})
		(&theatre{runner: f.a.runner}).forget(t)
		before = f.a.counters(t)
		proxy.write(t, queries...)
		servicetest.Eventually(t, "both queries to be dropped", func() bool {
			return f.a.gained(t, before)[cell{event.ProxyForged, event.Ingress}] == 2
		})
	})
}

// TestKernelReplyOfAServiceIsTranslatedBehindAProxy: the proxy sees the backend of a service in both directions. The
// client gets each answer from the service, also after further queries of the same connection.
func TestKernelReplyOfAServiceIsTranslatedBehindAProxy(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		client, near := f.a.pod, f.a.newPod(t, 20)
		putNames(t, f.a.k)
		names(t, f.a.k, client, namesOf7)
		proxy := newTap(t, f.a.k, f.a.h, f.a.ns)
		n := &serviceNode{T: t, runner: f.a.runner}
		for i, addr := range client.Addrs() {
			for j, c := range []struct {
				ns netns.NsHandle
				at netip.Addr
			}{
				{near.ns, near.Addrs()[i]},
				{f.b.pod.ns, f.b.pod.Addrs()[i]},
				{f.a.ns, []netip.Addr{f.a.addr4, f.a.addr6}[i]},
			} {
				backend, vip := netip.AddrPortFrom(c.at, dnsPort), serviceAddr(addr, byte(50+j))
				tell(t, c.ns, backend)
				n.lead(vip, feAddress, backend)
				before := f.a.counters(t)
				proxy.taken()
				u, err := dialIn(t, client.ns, "udp", vip)
				must(t, "open", err)
				for range 3 {
					_, err := u.Write([]byte("query"))
					must(t, "send", err)
					_, err = u.Read(make([]byte, 100))
					must(t, "read the answer of "+backend.String(), err)
					frames := proxy.await(t, 2)
					if _, dst := ends(frames[0]); dst != backend {
						t.Errorf("query to %v, want %v", dst, backend)
					}
					if src, _ := ends(frames[1]); src != backend {
						t.Errorf("answer from %v, want %v", src, backend)
					}
				}
				wantNoDrops(t, "a", f.a.gained(t, before))
			}
		}
	})
}

// TestKernelFragmentedAnswerPassesTheProxy: fragments follow their first fragment to the proxy, and past it, even if the
// server's pod has used up its guarantee of fragmented datagrams.
func TestKernelFragmentedAnswerPassesTheProxy(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		client, near := f.a.pod, f.a.newPod(t, 20)
		putNames(t, f.a.k)
		names(t, f.a.k, client, namesOf7)
		proxy := newTap(t, f.a.k, f.a.h, f.a.ns)
		guarantee := int(unsafe.Offsetof(bpf.MapsSlBound{}.Guarantee)) +
			int(bound.Fragments)*int(unsafe.Sizeof(bpf.MapsSlBound{}))
		atomic.StoreUint32(pin.Word32(f.a.k.Pins.Memory(bpf.MapsMapSlBound), guarantee), 1)
		for i, addr := range client.Addrs() {
			f.routeFromOutside(t, addr, f.a)
			for _, c := range []struct {
				ns netns.NsHandle
				at netip.Addr
			}{
				{near.ns, near.Addrs()[i]},
				{f.b.pod.ns, f.b.pod.Addrs()[i]},
				{f.outsider, f.outsideAddrs()[i]},
				{f.a.ns, []netip.Addr{f.a.addr4, f.a.addr6}[i]},
			} {
				server := netip.AddrPortFrom(c.at, dnsPort)
				answerUDP(t, c.ns, server)
				proxy.taken()
				wantBytes(t, "a large answer", client.ns, server, 5600)
				if frames := proxy.await(t, 5); len(frames) < 5 {
					t.Errorf("%v: %d frames at the proxy, want a query and at least 4 fragments", server, len(frames))
				}
			}
		}
	})
}

// TestKernelRevokedPermissionStopsHeldPackets: what a proxy holds is dropped, in both directions, once the policy does
// not allow the connection any more.
func TestKernelRevokedPermissionStopsHeldPackets(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	client := f.a.pod
	putNames(t, f.a.k)
	proxy := newTap(t, f.a.k, f.a.h, f.a.ns)
	for _, addr := range f.b.pod.Addrs() {
		server := netip.AddrPortFrom(addr, dnsPort)
		tell(t, f.b.pod.ns, server)
		for _, answer := range []bool{false, true} {
			names(t, f.a.k, client, namesOf7)
			proxy.keep(true)
			u, err := dialIn(t, client.ns, "udp", server)
			must(t, "open", err)
			_, err = u.Write([]byte("query"))
			must(t, "send", err)
			held := proxy.await(t, 1)
			direction := event.Egress
			if answer {
				proxy.write(t, held...)
				held, direction = proxy.await(t, 1), event.Ingress
				wantTag(t, held[0], 7, client.Slot, 2)
			}
			names(t, f.a.k, client, noNames)
			before := f.a.counters(t)
			proxy.write(t, held...)
			// the egress rule of the client denies both; the server has no known identity
			servicetest.Eventually(t, "the held packet to be dropped", func() bool {
				gained := f.a.gained(t, before)
				return gained[cell{event.IdentityUnknown, direction}] == 1
			})
			if frames := proxy.taken(); len(frames) != 0 {
				t.Errorf("%d frames came back to the proxy", len(frames))
			}
		}
	}
}
