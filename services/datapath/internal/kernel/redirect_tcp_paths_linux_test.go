// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// inside runs a function in the proxy namespace.
func (r *relay) inside(t *testing.T, f func()) {
	t.Helper()
	const socketNamespace = 0x894c // SIOCGSKNS
	fd, err := unix.IoctlRetInt(r.use.Listen4, socketNamespace)
	must(t, "open the proxy namespace", err)
	defer unix.Close(fd)
	inNetns(t, netns.NsHandle(fd), f)
}

// TestKernelMarkNamesTheRuleSets: the mark of an accepted socket has the set of its own connection and the endpoint ID
// of its client. With SYN cookies, the first ACK creates the socket, which has the same mark.
func TestKernelMarkNamesTheRuleSets(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	first, second, server := f.a.pod, f.a.newPod(t, 20), f.b.pod
	for _, addr := range second.Addrs() {
		f.b.says(t, netip.PrefixFrom(addr, addr.BitLen()), second.Identity, uint16(f.a.number))
	}
	putNames(t, f.a.k)
	names(t, f.a.k, first, namesOf7)
	names(t, f.a.k, second, namesOf8)
	proxy := newRelay(t, f.a.k, f.a.ns)
	for i, addr := range server.Addrs() {
		at := netip.AddrPortFrom(addr, dnsPort)
		clients := echoServer(t, server.ns, at)
		for _, cookies := range []string{"1", "2"} {
			proxy.inside(t, func() {
				must(t, "SYN cookies", os.WriteFile("/proc/sys/net/ipv4/tcp_syncookies", []byte(cookies), 0))
			})
			for _, c := range []struct {
				pod *pod
				set int
			}{{first, 7}, {second, 8}, {first, 7}} {
				t.Run(fmt.Sprintf("%s, set %d, cookies %s", addr, c.set, cookies), func(t *testing.T) {
					proxy.taken()
					conn, err := dialPod(t, c.pod, at)
					must(t, "connect", err)
					exchangeText(t, conn, "hello")
					<-clients
					want := relayed{conn.LocalAddr().(*net.TCPAddr).AddrPort(), at, int(c.pod.Slot)<<16 | c.set}
					if all := proxy.taken(); len(all) != 1 || all[0] != want || want.client.Addr() != c.pod.Addrs()[i] {
						t.Errorf("the proxy has accepted %v, want %v", all, want)
					}
				})
			}
		}
	}
}

// TestKernelRepliesReachTheProxyNamespace: replies that the program of the uplink decapsulates enter the proxy
// namespace, and so do replies to a pod whose device has a queue. A reply that bypassed the proxy would belong to no
// connection of the pod's stack. TestKernelRedirectedConnectionKeepsItsFiveTuple tests the other paths.
func TestKernelRepliesReachTheProxyNamespace(t *testing.T) {
	t.Run("from the underlay", func(t *testing.T) {
		f := newDirectFabric(t, func(*Options) {})
		f.wantReplies(t, f.a.pod, func() {
			_, received := f.a.throughDevice(t)
			f.exchangeThroughProxy(t, f.a.pod)
			if _, now := f.a.throughDevice(t); now != received {
				t.Errorf("the tunnel device of a has received %d packets", now-received)
			}
		})
	})
	t.Run("to a device with a queue", func(t *testing.T) {
		f := newFabric(t, RoutingOverlay, false)
		e := testEndpoint(0, 30)
		e.IPv4, e.IPv6 = netip.AddrFrom4([4]byte{10, 244, 1, 30}), netip.MustParseAddr("fd00:244:1::30")
		e.Deliver, e.MTU = endpointmap.DeliverRedirect, 1400
		client := newPodAt(t, f.a.k, f.a.h, "slqueue", e)
		f.b.says(t, netip.PrefixFrom(client.IPv4, 32), client.Identity, uint16(f.a.number))
		f.b.says(t, netip.PrefixFrom(client.IPv6, 128), client.Identity, uint16(f.a.number))
		f.wantReplies(t, client, func() { f.exchangeThroughProxy(t, client) })
	})
}

// wantReplies fails the test unless packets in both directions are redirected to a relay while exchange runs, and none
// is dropped.
func (f *fabric) wantReplies(t *testing.T, client *pod, exchange func()) {
	t.Helper()
	putNames(t, f.a.k)
	names(t, f.a.k, client, namesOf7)
	newRelay(t, f.a.k, f.a.ns)
	before := f.a.counters(t)
	exchange()
	gained := f.a.gained(t, before)
	wantNoDrops(t, "a", gained)
	for _, d := range []event.Direction{event.Egress, event.Ingress} {
		if gained[cell{event.ForwardedToProxy, d}] == 0 {
			t.Errorf("no packet in direction %v went to the proxy: %v", d, gained)
		}
	}
}

// exchangeThroughProxy exchanges messages with a server on node b.
func (f *fabric) exchangeThroughProxy(t *testing.T, client *pod) {
	t.Helper()
	for _, addr := range f.b.pod.Addrs() {
		server := netip.AddrPortFrom(addr, dnsPort)
		echoServer(t, f.b.pod.ns, server)
		conn, err := dialPod(t, client, server)
		must(t, "connect", err)
		for range 20 {
			exchangeText(t, conn, "hello")
		}
	}
}

// TestKernelProxiedPacketPassesStrictReversePathFilter: what the proxy sends in a pod's name enters the node at the
// pod's device, so that a strict reverse path filter accepts it.
func TestKernelProxiedPacketPassesStrictReversePathFilter(t *testing.T) {
	for _, routing := range []Routing{RoutingOverlay, RoutingNative} {
		t.Run(fmt.Sprint(routing), func(t *testing.T) {
			f := newFabric(t, routing, false)
			client, near := f.a.pod, f.a.newPod(t, 20)
			putNames(t, f.a.k)
			names(t, f.a.k, client, namesOf7)
			proxy := newRelay(t, f.a.k, f.a.ns)
			f.routeFromOutside(t, client.IPv4, f.a)
			inNetns(t, f.a.ns, func() {
				const filter = "/proc/sys/net/ipv4/conf/all/rp_filter"
				must(t, "strict reverse path filter", os.WriteFile(filter, []byte("1"), 0))
			})
			for what, c := range map[string]struct {
				ns netns.NsHandle
				at netip.Addr
			}{
				"a pod of this node":    {near.ns, near.IPv4},
				"a pod of another node": {f.b.pod.ns, f.b.pod.IPv4},
				"outside":               {f.outsider, f.outsideAddrs()[0]},
				"the host":              {f.a.ns, f.a.addr4},
			} {
				t.Run(what, func(t *testing.T) {
					server := netip.AddrPortFrom(c.at, dnsPort)
					echoServer(t, c.ns, server)
					conn, err := dialPod(t, client, server)
					must(t, "connect", err)
					exchangeText(t, conn, "hello")
					if all := proxy.taken(); len(all) != 1 {
						t.Errorf("the proxy has accepted %v", all)
					}
				})
			}
		})
	}
}

// TestKernelRevokedPermissionEndsBothLegs: when a policy revokes the permission, the client's connection and the
// connection to the server end, whichever end sends next.
func TestKernelRevokedPermissionEndsBothLegs(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		client := f.a.pod
		putNames(t, f.a.k)
		newRelay(t, f.a.k, f.a.ns)
		for _, addr := range f.b.pod.Addrs() {
			names(t, f.a.k, client, namesOf7)
			server := netip.AddrPortFrom(addr, dnsPort)
			accepted := speakServer(t, f.b.pod.ns, server)
			conn, err := dialPod(t, client, server)
			must(t, "connect", err)
			_, err = conn.Write([]byte("hello"))
			must(t, "send", err)
			behind := <-accepted
			wantText(t, behind, "hello")
			_, err = behind.Write([]byte("answer"))
			must(t, "answer", err)
			wantText(t, conn, "answer")

			names(t, f.a.k, client, nodetable.Deny)
			before := f.a.counters(t)
			_, _ = conn.Write([]byte("more"))
			_, _ = behind.Write([]byte("more"))
			for what, c := range map[string]net.Conn{"client": conn, "server": behind} {
				must(t, "deadline", c.SetReadDeadline(time.Now().Add(500*time.Millisecond)))
				if n, err := c.Read(make([]byte, 10)); n > 0 {
					t.Errorf("the %s has received %d bytes, %v", what, n, err)
				}
			}
			gained := f.a.gained(t, before)
			if gained[cell{event.PolicyDenied, event.Egress}] == 0 || gained[cell{event.PolicyDenied, event.Ingress}] == 0 {
				t.Errorf("%s: %v, want denied segments of both ends", server, gained)
			}
		}
	})
}

func wantText(t *testing.T, c net.Conn, want string) {
	t.Helper()
	b := make([]byte, len(want))
	must(t, "deadline", c.SetReadDeadline(time.Now().Add(servicetest.Patience)))
	if n, err := c.Read(b); string(b[:n]) != want {
		t.Errorf("received %q, %v, want %q", b[:n], err, want)
	}
}

// speakServer returns the connections to a server, which the test reads and writes.
func speakServer(t *testing.T, ns netns.NsHandle, at netip.AddrPort) <-chan net.Conn {
	t.Helper()
	var l net.Listener
	var err error
	inNetns(t, ns, func() { l, err = net.Listen("tcp", at.String()) })
	must(t, "listen at "+at.String(), err)
	accepted := make(chan net.Conn)
	stop := make(chan struct{})
	t.Cleanup(func() {
		l.Close()
		close(stop)
	})
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			select {
			case accepted <- c:
				t.Cleanup(func() { c.Close() })
			case <-stop:
				c.Close()
			}
		}
	}()
	return accepted
}

// TestEvictedEntryEndsNoIdleProxiedConnection: the entry of an idle connection is evicted from the map, or flushed. The
// connection goes on, whichever end speaks first.
func TestEvictedEntryEndsNoIdleProxiedConnection(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	client := f.a.pod
	putNames(t, f.a.k)
	names(t, f.a.k, client, namesOf7)
	proxy := newRelay(t, f.a.k, f.a.ns)
	for _, addr := range f.b.pod.Addrs() {
		server := netip.AddrPortFrom(addr, dnsPort)
		accepted := speakServer(t, f.b.pod.ns, server)
		conn, err := dialPod(t, client, server)
		must(t, "connect", err)
		_, err = conn.Write([]byte("hello"))
		must(t, "send", err)
		behind := <-accepted
		wantText(t, behind, "hello")
		for what, remove := range map[string]func(){
			"flushed": func() {
				if done := f.a.k.flush(t, conntrack.Filter{Ports: []uint16{dnsPort}}); done.Removed == 0 {
					t.Errorf("flushed %+v", done)
				}
			},
			"evicted": func() {
				f.a.evict(t, conn.LocalAddr().(*net.TCPAddr).AddrPort(), server)
			},
		} {
			for _, first := range []string{"client", "server"} {
				t.Run(fmt.Sprintf("%s, %s, %s first", addr, what, first), func(t *testing.T) {
					remove()
					from, to := conn, behind
					if first == "server" {
						from, to = behind, conn
					}
					for range 2 {
						_, err := from.Write([]byte("again"))
						must(t, "send", err)
						wantText(t, to, "again")
						from, to = to, from
					}
				})
			}
		}
		if all := proxy.taken(); len(all) != 1 {
			t.Errorf("the proxy has accepted %v, want one connection", all)
		}
	}
}

// TestEvictedEntryWhereverTheServerIs: the server of an idle connection speaks first after an eviction. Its segment
// reaches the proxy from each place, also if the policy of the client denies
// incoming connections.
func TestEvictedEntryWhereverTheServerIs(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		client := f.a.pod
		near := f.a.newPod(t, 20)
		putNames(t, f.a.k)
		newRelay(t, f.a.k, f.a.ns)
		setPolicy(t, f.a.k, client.Slot, endpointmap.Policy{Egress: namesOf7, Ingress: nodetable.Deny})
		for i, addr := range client.Addrs() {
			f.routeFromOutside(t, addr, f.a)
			for _, c := range f.servers(near, i) {
				t.Run(c.what+" "+addr.String(), func(t *testing.T) {
					server := netip.AddrPortFrom(c.at, dnsPort)
					accepted := speakServer(t, c.ns, server)
					conn, err := dialPod(t, client, server)
					must(t, "connect", err)
					_, err = conn.Write([]byte("hello"))
					must(t, "send", err)
					behind := <-accepted
					wantText(t, behind, "hello")
					f.a.evict(t, conn.LocalAddr().(*net.TCPAddr).AddrPort(), server)
					before := f.a.counters(t)
					_, err = behind.Write([]byte("answer"))
					must(t, "answer", err)
					wantText(t, conn, "answer")
					_, err = conn.Write([]byte("again"))
					must(t, "send", err)
					wantText(t, behind, "again")
					wantNoDrops(t, "a", f.a.gained(t, before))
				})
			}
		}
	})
}

// evict deletes the entry of a TCP connection, as the kernel does when the map is full.
func (n *fabricNode) evict(t *testing.T, from, to netip.AddrPort) {
	t.Helper()
	m, key := n.k.Connections.Map(conntrack.Tuple{Protocol: unix.IPPROTO_TCP, Initiator: from, Responder: to})
	var v bpf.MapsSlCt
	must(t, "find the entry", m.Lookup(key, &v))
	must(t, "evict the entry", m.Delete(key))
}
