// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/policytable"
	namespace "github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/proxymap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/proxy/proxyns"
)

// relayed is a connection that a relay has accepted.
type relayed struct {
	client, server netip.AddrPort
	mark           int
}

// relay is a proxy that passes the bytes of TCP connections on.
type relay struct {
	t     *testing.T
	k     *Kernel
	kind  policytable.Proxy
	space *proxyns.Space
	use   proxyns.Use
	ctx   context.Context

	cancel context.CancelFunc

	mu  sync.Mutex
	all []relayed // guarded by mu
}

// newRelay makes the proxy namespace of the DNS proxy of a node, and serves its listeners.
func newRelay(t *testing.T, k *Kernel, ns netns.NsHandle) *relay {
	t.Helper()
	return newRelayOf(t, policytable.ProxyDNS, k, ns)
}

func newRelayOf(t *testing.T, kind policytable.Proxy, k *Kernel, ns netns.NsHandle) *relay {
	t.Helper()
	fd, err := unix.FcntlInt(uintptr(ns), unix.F_DUPFD_CLOEXEC, 0)
	must(t, "copy the descriptor of the node", err)
	home, err := namespace.FromFile(fd)
	must(t, "open the node", err)
	t.Cleanup(func() { home.Close() })
	r := &relay{t: t, k: k, kind: kind}
	loaded := func(d program.Devices) func() []*program.Program {
		return func() []*program.Program {
			list, err := k.Programs.Load(d)
			must(t, "load the programs", err)
			return list
		}
	}
	r.space, err = proxyns.Open(proxyns.Options{
		Home: home, Instance: "test", Kind: kind,
		Programs: loaded(program.Taps), Inside: loaded(program.ProxyNamespaces),
	})
	must(t, "open the proxy namespace", err)
	var running sync.WaitGroup
	ctx, cancel := context.WithCancel(context.Background())
	r.ctx, r.cancel = ctx, cancel
	t.Cleanup(func() {
		cancel()
		running.Wait()
		r.space.Close()
	})
	r.use, err = r.space.Ensure()
	must(t, "make the proxy namespace", err)
	if diffs, err := r.space.Check(); err != nil || len(diffs) > 0 {
		t.Errorf("differences of the proxy namespace: %v, %v", diffs, err)
	}
	r.attached(true)
	beatOf(t, kind, k, 0)
	for _, listener := range []int{r.use.Listen4, r.use.Listen6} {
		fd, err := unix.FcntlInt(uintptr(listener), unix.F_DUPFD_CLOEXEC, 0)
		must(t, "copy a listener", err)
		f := os.NewFile(uintptr(fd), "listener")
		l, err := net.FileListener(f)
		must(t, "use a listener", errors.Join(err, f.Close()))
		context.AfterFunc(ctx, func() { l.Close() })
		running.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				running.Go(func() { r.pass(c.(*net.TCPConn)) })
			}
		})
	}
	return r
}

// abandon ends the connections of the proxy, as the kernel does when the process is killed.
func (r *relay) abandon() { r.cancel() }

func (r *relay) attached(is bool) {
	r.t.Helper()
	must(r.t, "Set", r.k.Proxies.Set(proxymap.NamespaceOf(r.kind), proxymap.Proxy{Device: r.use.Device, Attached: is}))
}

// taken returns the connections since the last call.
func (r *relay) taken() []relayed {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := r.all
	r.all = nil
	return all
}

// pass connects to the server as the client, and passes bytes on.
func (r *relay) pass(c *net.TCPConn) {
	defer c.Close()
	defer context.AfterFunc(r.ctx, func() { c.Close() })()
	one := relayed{
		client: c.RemoteAddr().(*net.TCPAddr).AddrPort(), server: c.LocalAddr().(*net.TCPAddr).AddrPort(),
	}
	raw, err := c.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { one.mark, _ = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK) })
	}
	if err != nil {
		r.t.Errorf("read the mark: %v", err)
		return
	}
	r.mu.Lock()
	r.all = append(r.all, one)
	r.mu.Unlock()
	s, err := r.connect(one.client, one.server)
	if err != nil {
		r.t.Logf("connect %v to %v: %v", one.client, one.server, err)
		return
	}
	defer s.Close()
	defer context.AfterFunc(r.ctx, func() { s.Close() })()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(s, c)
		s.Close()
	}()
	_, _ = io.Copy(c, s)
	c.Close()
	<-done
}

// connect opens a connection of the proxy namespace.
func (r *relay) connect(from, to netip.AddrPort) (net.Conn, error) {
	fds, err := r.space.Sockets(1, to.Addr().Is6())
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fds[0]), "socket")
	defer f.Close()
	sockaddr := func(a netip.AddrPort) unix.Sockaddr {
		if a.Addr().Is4() {
			return &unix.SockaddrInet4{Addr: a.Addr().As4(), Port: int(a.Port())}
		}
		return &unix.SockaddrInet6{Addr: a.Addr().As16(), Port: int(a.Port())}
	}
	if err := unix.Bind(fds[0], sockaddr(from)); err != nil {
		return nil, fmt.Errorf("bind: %w", err)
	}
	if err := unix.Connect(fds[0], sockaddr(to)); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return nil, fmt.Errorf("connect: %w", err)
	}
	poll := []unix.PollFd{{Fd: int32(fds[0]), Events: unix.POLLOUT}}
	if n, err := unix.Poll(poll, 500); err != nil || n == 0 {
		return nil, fmt.Errorf("connect: no answer: %w", err)
	}
	if code, err := unix.GetsockoptInt(fds[0], unix.SOL_SOCKET, unix.SO_ERROR); err != nil || code != 0 {
		return nil, errors.Join(err, unix.Errno(code))
	}
	return net.FileConn(f)
}

// dialPod opens a connection of a pod.
func dialPod(t *testing.T, p *pod, to netip.AddrPort) (c net.Conn, err error) {
	t.Helper()
	inNetns(t, p.ns, func() { c, err = net.DialTimeout("tcp", to.String(), 5*time.Second) })
	if err == nil {
		t.Cleanup(func() { c.Close() })
		must(t, "deadline", c.SetDeadline(time.Now().Add(servicetest.Patience)))
	}
	return c, err
}

// echoServer returns the bytes of its clients, and reports their addresses.
func echoServer(t *testing.T, ns netns.NsHandle, at netip.AddrPort) <-chan netip.AddrPort {
	t.Helper()
	var l net.Listener
	var err error
	inNetns(t, ns, func() { l, err = net.Listen("tcp", at.String()) })
	must(t, "listen at "+at.String(), err)
	clients := make(chan netip.AddrPort, 64)
	var mu sync.Mutex // guards open
	var open []net.Conn
	var done sync.WaitGroup
	t.Cleanup(func() {
		l.Close()
		mu.Lock()
		for _, c := range open {
			c.Close()
		}
		mu.Unlock()
		done.Wait()
	})
	done.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			open = append(open, c)
			mu.Unlock()
			clients <- c.RemoteAddr().(*net.TCPAddr).AddrPort()
			done.Go(func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			})
		}
	})
	return clients
}

func exchangeText(t *testing.T, c net.Conn, text string) {
	t.Helper()
	b := make([]byte, len(text))
	_, err := c.Write([]byte(text))
	if err == nil {
		_, err = io.ReadFull(c, b)
	}
	if err != nil || string(b) != text {
		t.Errorf("said %q: %q, %v", text, b, err)
	}
}

// serverAt is a place of a server.
type serverAt struct {
	what string
	ns   netns.NsHandle
	at   netip.Addr
}

// servers returns a place of each kind for servers of pods of node a. near is another pod of the node; family is an
// index of Addrs.
func (f *fabric) servers(near *pod, family int) []serverAt {
	return []serverAt{
		{"a pod of this node", near.ns, near.Addrs()[family]},
		{"a pod of another node", f.b.pod.ns, f.b.pod.Addrs()[family]},
		{"outside", f.outsider, f.outsideAddrs()[family]},
		{"the host", f.a.ns, []netip.Addr{f.a.addr4, f.a.addr6}[family]},
	}
}

// TestKernelRedirectedConnectionKeepsItsFiveTuple: a TCP connection ends at the proxy, which opens another one to the
// server, wherever that is. Server and proxy see the client's own address and port, and the mark names the set.
func TestKernelRedirectedConnectionKeepsItsFiveTuple(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		client := f.a.pod
		near := f.a.newPod(t, 20)
		putNames(t, f.a.k)
		names(t, f.a.k, client, namesOf7)
		proxy := newRelay(t, f.a.k, f.a.ns)
		for i, addr := range client.Addrs() {
			f.routeFromOutside(t, addr, f.a)
			for _, c := range f.servers(near, i) {
				t.Run(c.what+" "+addr.String(), func(t *testing.T) {
					server := netip.AddrPortFrom(c.at, dnsPort)
					clients := echoServer(t, c.ns, server)
					before := f.a.counters(t)
					proxy.taken()
					conn, err := dialPod(t, client, server)
					must(t, "connect", err)
					exchangeText(t, conn, "hello")
					own := conn.LocalAddr().(*net.TCPAddr).AddrPort()
					if got := <-clients; got != own {
						t.Errorf("the server sees %v, want %v", got, own)
					}
					want := relayed{own, server, int(client.Slot)<<16 | 7}
					if all := proxy.taken(); len(all) != 1 || all[0] != want {
						t.Errorf("the proxy has accepted %v, want %v", all, want)
					}
					large := make([]byte, 300_000)
					go func() { _, _ = conn.Write(large) }()
					if _, err := io.ReadFull(conn, make([]byte, len(large))); err != nil {
						t.Errorf("receive %d bytes: %v", len(large), err)
					}
					wantNoDrops(t, "a", f.a.gained(t, before))
				})
			}
			// other connections do not pass the proxy
			other := netip.AddrPortFrom(near.Addrs()[i], 80)
			echoServer(t, near.ns, other)
			conn, err := dialPod(t, client, other)
			must(t, "connect to another port", err)
			exchangeText(t, conn, "hello")
			if all := proxy.taken(); len(all) != 0 {
				t.Errorf("the proxy has accepted %v", all)
			}
		}
	})
}

// TestKernelOnlyRedirectedConnectionsLeaveTheProxyNamespace: the proxy opens no connection of its own.
func TestKernelOnlyRedirectedConnectionsLeaveTheProxyNamespace(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		client, near := f.a.pod, f.a.newPod(t, 20)
		putNames(t, f.a.k)
		names(t, f.a.k, client, namesOf7)
		proxy := newRelay(t, f.a.k, f.a.ns)
		hosts, at := []netip.Addr{f.a.addr4, f.a.addr6}, netip.AddrPortFrom
		for i, own := range client.Addrs() {
			for what, c := range map[string]struct{ from, to netip.AddrPort }{
				"another port of a pod":        {at(own, 2000), at(near.Addrs()[i], 80)},
				"a server that rules name":     {at(own, 2001), at(near.Addrs()[i], dnsPort)},
				"the client itself":            {at(near.Addrs()[i], dnsPort), at(own, 2002)},
				"the host":                     {at(own, 2003), at(hosts[i], dnsPort)},
				"another node, as an outsider": {at(f.outsideAddrs()[i], 2004), at(f.b.pod.Addrs()[i], dnsPort)},
			} {
				before := f.a.counters(t)
				if conn, err := proxy.connect(c.from, c.to); err == nil {
					conn.Close()
					t.Errorf("%s: the proxy has connected %v to %v", what, c.from, c.to)
				}
				if gained := f.a.gained(t, before); gained[cell{event.ProxyForged, event.Ingress}] == 0 {
					t.Errorf("%s: not counted as forged: %v", what, gained)
				}
			}
		}
	})
}

// TestKernelEachKindOfProxyHasItsConnections: a rule sends connections to one kind of proxy, and the other one may send
// nothing in them. If a rule for the other kind takes effect, the connection ends, and the next one goes there.
func TestKernelEachKindOfProxyHasItsConnections(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		client, near := f.a.pod, f.a.newPod(t, 20)
		putNames(t, f.a.k)
		const toHTTP = nodetable.ID(65)
		redirectingTo(t, policytable.ProxyHTTP, f.a.k, toHTTP, 7)
		kinds := map[policytable.Proxy]nodetable.ID{policytable.ProxyDNS: namesOf7, policytable.ProxyHTTP: toHTTP}
		proxies := map[policytable.Proxy]*relay{}
		for kind := range kinds {
			proxies[kind] = newRelayOf(t, kind, f.a.k, f.a.ns)
		}
		other := map[policytable.Proxy]policytable.Proxy{
			policytable.ProxyDNS: policytable.ProxyHTTP, policytable.ProxyHTTP: policytable.ProxyDNS,
		}
		for i := range client.Addrs() {
			f.routeFromOutside(t, client.Addrs()[i], f.a)
			for _, place := range f.servers(near, i) {
				server := netip.AddrPortFrom(place.at, dnsPort)
				clients := echoServer(t, place.ns, server)
				for kind, table := range kinds {
					names(t, f.a.k, client, table)
					conn, err := dialPod(t, client, server)
					must(t, "connect", err)
					exchangeText(t, conn, "hello")
					from := <-clients
					if own, others := proxies[kind].taken(), proxies[other[kind]].taken(); len(own) != 1 || len(others) != 0 {
						t.Errorf("%s, %s: accepted %v, the other kind %v", place.what, kind, own, others)
					}
					before := f.a.counters(t)
					if c, err := proxies[other[kind]].connect(from, server); err == nil {
						c.Close()
						t.Errorf("%s: the proxy for %s has a connection of %s", place.what, other[kind], kind)
					}
					if gained := f.a.gained(t, before); gained[cell{event.ProxyForged, event.Ingress}] == 0 {
						t.Errorf("%s, %s: not counted as forged: %v", place.what, kind, gained)
					}
					exchangeText(t, conn, "still there")

					names(t, f.a.k, client, kinds[other[kind]])
					if _, err := conn.Write([]byte("another kind")); err == nil {
						_, err = conn.Read(make([]byte, 1))
						if !errors.Is(err, unix.ECONNRESET) {
							t.Errorf("%s, %s: after a change to the other kind: %v, want a reset", place.what, kind, err)
						}
					}
					again, err := dialPod(t, client, server)
					must(t, "connect again", err)
					exchangeText(t, again, "by the other proxy")
					<-clients
					proxies[kind].taken()
					proxies[other[kind]].taken()
				}
			}
		}
	})
}

// TestKernelChangedSetResetsTheConnection: a connection does not keep the set with which it began.
func TestKernelChangedSetResetsTheConnection(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		client, near := f.a.pod, f.a.newPod(t, 20)
		putNames(t, f.a.k)
		proxy := newRelay(t, f.a.k, f.a.ns)
		for i := range client.Addrs() {
			server := netip.AddrPortFrom(near.Addrs()[i], dnsPort)
			clients := echoServer(t, near.ns, server)
			names(t, f.a.k, client, namesOf7)
			conn, err := dialPod(t, client, server)
			must(t, "connect", err)
			exchangeText(t, conn, "hello")
			<-clients
			names(t, f.a.k, client, namesOf8)
			_, _ = conn.Write([]byte("more"))
			if n, err := conn.Read(make([]byte, 10)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("read %d bytes, %v, want a reset", n, err)
			}
			proxy.taken()
			again, err := dialPod(t, client, server)
			must(t, "connect again", err)
			exchangeText(t, again, "hello")
			if all := proxy.taken(); len(all) != 1 || all[0].mark != int(client.Slot)<<16|8 {
				t.Errorf("the proxy has accepted %v, want set 8", all)
			}
		}
	})
}

// TestKernelConnectionStaysWithTheProxyUntilItEnds: a policy that no longer redirects a connection leaves it with the
// proxy, because the server knows only the proxy's sequence numbers. New connections bypass the proxy.
func TestKernelConnectionStaysWithTheProxyUntilItEnds(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		client, near := f.a.pod, f.a.newPod(t, 20)
		putNames(t, f.a.k)
		proxy := newRelay(t, f.a.k, f.a.ns)
		for i, addr := range client.Addrs() {
			f.routeFromOutside(t, addr, f.a)
			for _, c := range []struct {
				what string
				ns   netns.NsHandle
				at   netip.Addr
			}{
				{"a pod of this node", near.ns, near.Addrs()[i]},
				{"a pod of another node", f.b.pod.ns, f.b.pod.Addrs()[i]},
				{"outside", f.outsider, f.outsideAddrs()[i]},
				{"the host", f.a.ns, []netip.Addr{f.a.addr4, f.a.addr6}[i]},
			} {
				t.Run(c.what+" "+addr.String(), func(t *testing.T) {
					server := netip.AddrPortFrom(c.at, dnsPort)
					clients := echoServer(t, c.ns, server)
					names(t, f.a.k, client, namesOf7)
					conn, err := dialPod(t, client, server)
					must(t, "connect", err)
					exchangeText(t, conn, "hello")
					<-clients
					proxy.taken()

					names(t, f.a.k, client, nodetable.Allow)
					before := f.a.counters(t)
					exchangeText(t, conn, "still there")
					large := make([]byte, 300_000)
					go func() { _, _ = conn.Write(large) }()
					if _, err := io.ReadFull(conn, make([]byte, len(large))); err != nil {
						t.Errorf("receive %d bytes: %v", len(large), err)
					}
					wantNoDrops(t, "a", f.a.gained(t, before))

					again, err := dialPod(t, client, server)
					must(t, "connect without a redirect", err)
					exchangeText(t, again, "directly")
					if all := proxy.taken(); len(all) != 0 {
						t.Errorf("the proxy has accepted %v, although no rule redirects", all)
					}
				})
			}
		}
	})
}

// TestKernelPortOfAProxiedConnectionIsUsedAgain: without the redirect, the next connection from the same port bypasses
// the proxy, although the entry belonged to a connection of the proxy before.
func TestKernelPortOfAProxiedConnectionIsUsedAgain(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	client, near := f.a.pod, f.a.newPod(t, 20)
	putNames(t, f.a.k)
	proxy := newRelay(t, f.a.k, f.a.ns)
	for i := range client.Addrs() {
		server := netip.AddrPortFrom(near.Addrs()[i], dnsPort)
		echoServer(t, near.ns, server)
		names(t, f.a.k, client, namesOf7)
		conn, err := dialPod(t, client, server)
		must(t, "connect", err)
		exchangeText(t, conn, "hello")
		names(t, f.a.k, client, nodetable.Allow)
		exchangeText(t, conn, "still there")
		proxy.taken()
		must(t, "end with a reset", conn.(*net.TCPConn).SetLinger(0))
		own := conn.LocalAddr().(*net.TCPAddr)
		conn.Close()
		var again net.Conn
		inNetns(t, client.ns, func() {
			d := net.Dialer{LocalAddr: own, Timeout: 5 * time.Second}
			again, err = d.Dial("tcp", server.String())
		})
		must(t, "connect from the same port", err)
		t.Cleanup(func() { again.Close() })
		must(t, "deadline", again.SetDeadline(time.Now().Add(servicetest.Patience)))
		exchangeText(t, again, "directly")
		if all := proxy.taken(); len(all) != 0 {
			t.Errorf("the proxy has accepted %v, although no rule redirects", all)
		}
	}
}

// TestKernelAuditModeLeavesConnectionsWithTheProxy: audit mode redirects nothing, but an open connection goes on.
func TestKernelAuditModeLeavesConnectionsWithTheProxy(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	client, near := f.a.pod, f.a.newPod(t, 20)
	putNames(t, f.a.k)
	names(t, f.a.k, client, namesOf7)
	proxy := newRelay(t, f.a.k, f.a.ns)
	for i := range client.Addrs() {
		server := netip.AddrPortFrom(near.Addrs()[i], dnsPort)
		clients := echoServer(t, near.ns, server)
		conn, err := dialPod(t, client, server)
		must(t, "connect", err)
		exchangeText(t, conn, "hello")
		<-clients
		proxy.taken()
		for _, on := range []bool{true, false} {
			must(t, "SetAudit", f.a.k.Endpoints.SetAudit(t.Context(), on, client.Slot))
			exchangeText(t, conn, "audit mode changes")
			if on {
				again, err := dialPod(t, client, server)
				must(t, "connect in audit mode", err)
				exchangeText(t, again, "directly")
				<-clients
			}
		}
		if all := proxy.taken(); len(all) != 0 {
			t.Errorf("the proxy has accepted %v in audit mode", all)
		}
	}
}

// TestKernelHalfOpenConnectionsKeepNobodyFromTheProxy: a pod begins connections to the proxy from raw sockets, and
// completes none. Another pod connects meanwhile.
func TestKernelHalfOpenConnectionsKeepNobodyFromTheProxy(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	client, near, evil := f.a.pod, f.a.newPod(t, 20), f.a.newPod(t, 21)
	putNames(t, f.a.k)
	names(t, f.a.k, client, namesOf7)
	names(t, f.a.k, evil, namesOf8)
	proxy := newRelay(t, f.a.k, f.a.ns)
	server := netip.AddrPortFrom(near.IPv4, dnsPort)
	echoServer(t, near.ns, server)
	inNetns(t, evil.ns, func() { // its kernel would reset what it did not begin
		l, err := netlink.LinkByName("eth0")
		must(t, "find", err)
		must(t, "remove the address", netlink.AddrDel(l, &netlink.Addr{IPNet: ipNet(evil.IPv4)}))
	})
	for round := range 16 {
		frames := make([][]byte, 1024)
		for i := range frames {
			syn := segmentAt(uint16(1024+round*1024+i), dnsPort, flagSYN, uint32(i), 0)
			frames[i] = frame(evil.HostMAC, evil.MAC, etherIPv4, summed(evil.IPv4, near.IPv4, syn))
		}
		beat(t, f.a.k, 0) // the evil pod gets its share of a new window
		inNetns(t, evil.ns, func() { sendRaw(t, "eth0", frames...) })
		beat(t, f.a.k, 0)
		conn, err := dialPod(t, client, server)
		if err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		exchangeText(t, conn, "hello")
		conn.Close()
		for _, c := range proxy.taken() {
			if c.client.Addr() != client.IPv4 {
				t.Errorf("round %d: the proxy has accepted %v", round, c)
			}
		}
	}
}

// TestKernelConnectionEndsWithItsProxy: without the proxy, a connection that it had is reset, although the policy would
// let its segments pass to the server.
func TestKernelConnectionEndsWithItsProxy(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	client, near := f.a.pod, f.a.newPod(t, 20)
	putNames(t, f.a.k)
	server := netip.AddrPortFrom(near.IPv4, dnsPort)
	echoServer(t, near.ns, server)
	names(t, f.a.k, client, namesOfAll)
	proxy := newRelay(t, f.a.k, f.a.ns)
	conn, err := dialPod(t, client, server)
	must(t, "connect", err)
	exchangeText(t, conn, "hello")
	proxy.attached(false) // the rule now lets new connections pass
	exchangeText(t, conn, "still there")
	names(t, f.a.k, client, nodetable.Allow)
	proxy.abandon()
	_, _ = conn.Write([]byte("more"))
	if n, err := conn.Read(make([]byte, 10)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("read %d bytes, %v, want the end of the connection", n, err)
	}
}

// TestKernelConnectionsWhileTheProxyIsAway: without a lease, a rule that restricts names drops new connections, and a
// rule with the flag lets them pass to the server.
func TestKernelConnectionsWhileTheProxyIsAway(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	client, near := f.a.pod, f.a.newPod(t, 20)
	putNames(t, f.a.k)
	server := netip.AddrPortFrom(near.IPv4, dnsPort)
	clients := echoServer(t, near.ns, server)
	never := f.a.counters(t)
	names(t, f.a.k, client, namesOf7)
	if _, err := dialPod(t, client, server); err == nil {
		t.Error("connected without a proxy")
	}
	if gained := f.a.gained(t, never); gained[cell{event.NoProxy, event.Egress}] == 0 {
		t.Errorf("without a proxy: %v", gained)
	}
	proxy := newRelay(t, f.a.k, f.a.ns)
	proxy.attached(false)
	before := f.a.counters(t)
	if _, err := dialPod(t, client, server); err == nil {
		t.Error("connected while the proxy was unavailable")
	}
	if gained := f.a.gained(t, before); gained[cell{event.ProxyAway, event.Egress}] == 0 {
		t.Errorf("away: %v", gained)
	}
	names(t, f.a.k, client, namesOfAll)
	conn, err := dialPod(t, client, server)
	must(t, "connect under a rule for every name", err)
	exchangeText(t, conn, "hello")
	<-clients
	if all := proxy.taken(); len(all) != 0 {
		t.Errorf("the proxy has accepted %v", all)
	}
	proxy.attached(true)
	conn, err = dialPod(t, client, server)
	must(t, "connect after the proxy has come back", err)
	exchangeText(t, conn, "hello")
	if all := proxy.taken(); len(all) != 1 {
		t.Errorf("the proxy has accepted %v, want the new connection", all)
	}
}
