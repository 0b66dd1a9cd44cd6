// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
	"github.com/sluice-net/sluice/services/datapath/internal/service/sockets"
)

// Constants of service_abi.h, where they are macros.
const (
	protoTCP, protoUDP         = unix.IPPROTO_TCP, unix.IPPROTO_UDP
	feAddress, feNode, feAlone = 0, 1, 2
	beActive, beGone           = 1, 2
	frontDrop, frontSources    = 0x1, 0x2
	socketPeers                = 4
	affinityMembers            = 1024
	frontBytes                 = 32
)

// socketNode is a namespace whose sockets are translated, with backends on its loopback device. Service
// addresses have no route, so untranslated calls fail.
type socketNode struct {
	*testing.T
	k      *Kernel
	ns     *netns.Namespace
	cookie uint64
}

func socketOptions(t testing.TB, dir string) Options {
	t.Helper()
	o := testOptions(dir)
	o.Services = true
	o.Sockets = &sockets.Options{Cgroup: kerneltest.NewCgroup(t), Subtree: true}
	return o
}

// newSocketNode creates a node whose only namespace belongs to the endpoint ID.
func newSocketNode(t *testing.T, slot endpointmap.ID) *socketNode {
	t.Helper()
	k := openKernel(t, socketOptions(t, kerneltest.NewBPFFS(t)))
	must(t, "attach", k.Sockets.Attach())
	t.Cleanup(func() { must(t, "detach", sockets.Detach(k.opened.Dir)) })
	n := &socketNode{T: t, k: k, ns: netnstest.New(t)}
	n.cookie = cookieOf(t, n.ns)
	must(t, "set the namespace", k.Namespaces.Set(sockets.Namespace{Cookie: n.cookie, Slot: slot}))
	return n
}

func cookieOf(t testing.TB, ns *netns.Namespace) uint64 {
	t.Helper()
	cookie, err := ns.Cookie()
	must(t, "read the cookie", err)
	return cookie
}

func backend4(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 99, 0, byte(i)}), uint16(8000+i))
}

func backend6(i int) netip.AddrPort {
	a := netip.MustParseAddr("fd00:99::").As16()
	a[15] = byte(i)
	return netip.AddrPortFrom(netip.AddrFrom16(a), uint16(8000+i))
}

var (
	vip4 = netip.MustParseAddrPort("10.96.0.1:80")
	vip6 = netip.MustParseAddrPort("[fd00:96::1]:80")
)

// own adds addresses to the namespace.
func own(t testing.TB, ns *netns.Namespace, addrs ...netip.Addr) {
	t.Helper()
	must(t, "add addresses", ns.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		for _, a := range addrs {
			if err := netlink.AddrAdd(lo, &netlink.Addr{IPNet: ipNet(a), Flags: unix.IFA_F_NODAD}); err != nil {
				return fmt.Errorf("%v: %w", a, err)
			}
		}
		return nil
	}))
}

// serve runs a backend that sends its address to every client, over TCP and UDP.
func serve(t testing.TB, ns *netns.Namespace, at netip.AddrPort) {
	t.Helper()
	own(t, ns, at.Addr())
	if at.Addr().Is6() {
		must(t, "wait for the address", ns.Do(func() error {
			h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
			if err == nil {
				defer h.Close()
				receives(t, h, at.Addr())
			}
			return err
		}))
	}
	var l net.Listener
	var u *net.UDPConn
	must(t, "listen", ns.Do(func() (err error) {
		if l, err = net.Listen("tcp", at.String()); err != nil {
			return err
		}
		u, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		return err
	}))
	var running sync.WaitGroup
	t.Cleanup(func() {
		l.Close()
		u.Close()
		running.Wait()
	})
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, at.String()+" to "+c.RemoteAddr().String())
			c.Close()
		}
	})
	running.Go(func() {
		var b [64]byte
		for {
			_, from, err := u.ReadFromUDPAddrPort(b[:])
			if err != nil {
				return
			}
			_, _ = u.WriteToUDPAddrPort([]byte(at.String()+" to "+from.String()), from)
		}
	})
}

// backend writes the address of a backend.
func (n *socketNode) backend(number uint32, at netip.AddrPort, state, gen uint8) {
	n.Helper()
	putBackend(n, n.k, number, at, state, gen)
}

func putBackend(t testing.TB, k *Kernel, number uint32, at netip.AddrPort, state, gen uint8) {
	t.Helper()
	word := uint64(at.Port())<<32 | uint64(state)<<48 | uint64(gen)<<56
	if at.Addr().Is4() {
		a := at.Addr().As4()
		must(t, "write a backend", k.Pins.Map(bpf.MapsMapSlBe4).Put(number, word|uint64(binary.NativeEndian.Uint32(a[:]))))
		return
	}
	must(
		t,
		"write a backend",
		k.Pins.Map(bpf.MapsMapSlBe6).Put(number, &bpf.MapsSlBe6{Word: word, Addr: at.Addr().As16()}),
	)
}

// putMembers writes a list, and returns the word that describes it.
func putMembers(t testing.TB, k *Kernel, base uint32, backends ...uint32) (list uint64) {
	t.Helper()
	for i, b := range backends {
		must(t, "write a member", k.Pins.Map(bpf.MapsMapSlMember).Put(base+uint32(i), uint64(b)|uint64(b)*7919<<32))
	}
	return uint64(base) | uint64(len(backends))<<24
}

func putFront(t testing.TB, k *Kernel, number uint32, f bpf.MapsSlFront) {
	t.Helper()
	must(t, "write a front", k.Pins.Map(bpf.MapsMapSlFront).Put(number, &f))
}

// putFrontend adds a frontend for local sockets at an address.
func putFrontend(t testing.TB, k *Kernel, at netip.AddrPort, proto, kind uint8, front uint32) {
	t.Helper()
	putFronts(t, k, at, proto, kind, bpf.MapsSlFe{Inside: front})
}

// putFronts writes a frontend with its inside and outside fronts.
func putFronts(t testing.TB, k *Kernel, at netip.AddrPort, proto, kind uint8, fe bpf.MapsSlFe) {
	t.Helper()
	if at.Addr().Is4() {
		a := at.Addr().As4()
		key := &bpf.MapsSlFeKey4{Addr: binary.NativeEndian.Uint32(a[:]), Port: at.Port(), Proto: proto, Kind: kind}
		must(t, "write a frontend", k.Pins.Map(bpf.MapsMapSlFe4).Update(key, &fe, ebpf.UpdateNoExist))
		return
	}
	key := &bpf.MapsSlFeKey6{Addr: at.Addr().As16(), Port: at.Port(), Proto: proto, Kind: kind}
	must(t, "write a frontend", k.Pins.Map(bpf.MapsMapSlFe6).Update(key, &fe, ebpf.UpdateNoExist))
}

// service adds a TCP and a UDP frontend with one front and its backends.
func (n *socketNode) service(front uint32, at netip.AddrPort, f bpf.MapsSlFront, backends ...uint32) {
	n.Helper()
	f.List |= putMembers(n, n.k, front*64, backends...)
	putFront(n, n.k, front, f)
	putFrontend(n, n.k, at, protoTCP, feAddress, front)
	putFrontend(n, n.k, at, protoUDP, feAddress, front)
}

func sockaddr(domain int, at netip.AddrPort) unix.Sockaddr {
	if domain == unix.AF_INET {
		return &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()} // IPv4-mapped
}

// addrOf converts an address from a system call; mapped addresses stay IPv6.
func addrOf(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

// way is a kind of socket that uses a service.
type way struct {
	name   string
	domain int
	kind   int
	proto  int // 0: the default of the kind
}

var (
	tcp4  = way{name: "TCP over IPv4", domain: unix.AF_INET, kind: unix.SOCK_STREAM}
	tcp6  = way{name: "TCP over IPv6", domain: unix.AF_INET6, kind: unix.SOCK_STREAM}
	udp4  = way{name: "UDP over IPv4", domain: unix.AF_INET, kind: unix.SOCK_DGRAM}
	udp6  = way{name: "UDP over IPv6", domain: unix.AF_INET6, kind: unix.SOCK_DGRAM}
	tcp46 = way{name: "TCP over IPv4 in IPv6", domain: unix.AF_INET6, kind: unix.SOCK_STREAM}
	udp46 = way{name: "UDP over IPv4 in IPv6", domain: unix.AF_INET6, kind: unix.SOCK_DGRAM}
)

// shown returns how a socket of this kind shows an address.
func (w way) shown(at netip.AddrPort) netip.AddrPort {
	if w.domain == unix.AF_INET6 {
		return netip.AddrPortFrom(netip.AddrFrom16(at.Addr().As16()), at.Port())
	}
	return at
}

// open opens a socket in a namespace.
func (w way) open(t testing.TB, ns *netns.Namespace) int {
	t.Helper()
	var fd int
	must(t, "open a socket", ns.Do(func() (err error) {
		fd, err = unix.Socket(w.domain, w.kind|unix.SOCK_CLOEXEC, w.proto)
		return err
	}))
	patience := unix.NsecToTimeval(servicetest.Patience.Nanoseconds())
	must(t, "set a timeout", unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience))
	return fd
}

// answer contains what a client learns from a request to a service.
type answer struct {
	backend netip.AddrPort // that answered
	client  netip.AddrPort // as the backend saw it
	peer    netip.AddrPort // as the socket shows it
}

// ask connects and sends a request.
func (w way) ask(t testing.TB, ns *netns.Namespace, at netip.AddrPort) (a answer, err error) {
	t.Helper()
	fd := w.open(t, ns)
	defer unix.Close(fd)
	return w.askBy(t, fd, at)
}

func (w way) askBy(t testing.TB, fd int, at netip.AddrPort) (a answer, err error) {
	t.Helper()
	if err := unix.Connect(fd, sockaddr(w.domain, at)); err != nil {
		return a, err
	}
	peer, err := unix.Getpeername(fd)
	must(t, "getpeername", err)
	a.peer = addrOf(peer)
	if w.kind == unix.SOCK_DGRAM {
		if _, err := unix.Write(fd, []byte("who")); err != nil {
			return a, err
		}
	}
	var b [128]byte
	size, err := uninterrupted(func() (int, error) { return unix.Read(fd, b[:]) })
	if err != nil {
		return a, err
	}
	a.parse(t, b[:size])
	return a, nil
}

// uninterrupted repeats a call that a signal has interrupted: the Go runtime sends signals, and a call with a
// timeout is not restarted.
func uninterrupted(call func() (int, error)) (n int, err error) {
	for {
		if n, err = call(); !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}

func (a *answer) parse(t testing.TB, said []byte) {
	t.Helper()
	backend, client, _ := strings.Cut(string(said), " to ")
	var err1, err2 error
	a.backend, err1 = netip.ParseAddrPort(backend)
	a.client, err2 = netip.ParseAddrPort(client)
	must(t, fmt.Sprintf("read the answer %q", said), errors.Join(err1, err2))
}

// send sends a request without a connection.
func (w way) send(fd int, at netip.AddrPort) error {
	return unix.Sendto(fd, []byte("who"), 0, sockaddr(w.domain, at))
}

// receive reads an answer and its source.
func (w way) receive(t testing.TB, fd int) (a answer) {
	t.Helper()
	var b [128]byte
	var from unix.Sockaddr
	size, err := uninterrupted(func() (size int, err error) {
		size, from, err = unix.Recvfrom(fd, b[:], 0)
		return size, err
	})
	must(t, "receive", err)
	a.peer = addrOf(from)
	a.parse(t, b[:size])
	return a
}

// TestKernelSocketsReachABackendAndSeeTheService: connected sockets see the service with getpeername,
// unconnected ones as source of recvmsg.
func TestKernelSocketsReachABackendAndSeeTheService(t *testing.T) {
	n := newSocketNode(t, 1)
	serve(t, n.ns, backend4(1))
	serve(t, n.ns, backend6(1))
	n.backend(1, backend4(1), beActive, 0)
	n.backend(1, backend6(1), beActive, 0)
	n.service(1, vip4, bpf.MapsSlFront{}, 1)
	putFrontend(t, n.k, vip6, protoTCP, feAddress, 1)
	putFrontend(t, n.k, vip6, protoUDP, feAddress, 1)

	for _, c := range []struct {
		way
		service, backend netip.AddrPort
	}{
		{tcp4, vip4, backend4(1)},
		{tcp46, vip4, backend4(1)},
		{tcp6, vip6, backend6(1)},
		{way{"MPTCP over IPv4", unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_MPTCP}, vip4, backend4(1)},
		{way{"MPTCP over IPv4 in IPv6", unix.AF_INET6, unix.SOCK_STREAM, unix.IPPROTO_MPTCP}, vip4, backend4(1)},
		{way{"MPTCP over IPv6", unix.AF_INET6, unix.SOCK_STREAM, unix.IPPROTO_MPTCP}, vip6, backend6(1)},
		{udp4, vip4, backend4(1)},
		{udp46, vip4, backend4(1)},
		{udp6, vip6, backend6(1)},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := c.ask(t, n.ns, c.service)
			if err != nil || got.backend != c.backend || got.peer != c.shown(c.service) {
				t.Errorf("connected: %+v, %v, want backend %v, peer %v", got, err, c.backend, c.shown(c.service))
			}
			// the backend's address itself is not a service
			if got, err := c.ask(t, n.ns, c.backend); err != nil || got.peer != c.shown(c.backend) {
				t.Errorf("connected to the backend: %+v, %v, want peer %v", got, err, c.shown(c.backend))
			}
			if c.kind != unix.SOCK_DGRAM {
				return
			}
			fd := c.open(t, n.ns)
			defer unix.Close(fd)
			must(t, "send", c.send(fd, c.service))
			if got := c.receive(t, fd); got.backend != c.backend || got.peer != c.shown(c.service) {
				t.Errorf("not connected: %+v, want backend %v, source %v", got, c.backend, c.shown(c.service))
			}
			// the socket's later, direct connection
			got, err = c.askBy(t, fd, c.backend)
			if err != nil || got.peer != c.shown(c.backend) {
				t.Errorf("connected to the backend after that: %+v, %v, want peer %v", got, err, c.shown(c.backend))
			}
		})
	}
}

// newNodeWithServices adds one Service more than a socket remembers peers, each with a backend of its own;
// backends maps each backend to its Service.
func newNodeWithServices(t *testing.T, w way) (
	n *socketNode, services []netip.AddrPort, backends map[netip.AddrPort]netip.AddrPort,
) {
	t.Helper()
	n, backends = newSocketNode(t, 1), map[netip.AddrPort]netip.AddrPort{}
	for i := 1; i <= socketPeers+1; i++ {
		b, s := backend4(i), netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 0, byte(i)}), 53)
		if w == udp6 {
			a := vip6.Addr().As16()
			a[15] = byte(i)
			b, s = backend6(i), netip.AddrPortFrom(netip.AddrFrom16(a), 53)
		}
		serve(t, n.ns, b)
		n.backend(uint32(i), b, beActive, 0)
		n.service(uint32(i), s, bpf.MapsSlFront{}, uint32(i))
		backends[b] = s
		services = append(services, s)
	}
	return n, services, backends
}

// TestKernelConnectedUDPSocketShowsItsService: getpeername on a connected UDP socket returns its service, also after
// datagrams to more services than a socket remembers, and to another service with the same backend.
func TestKernelConnectedUDPSocketShowsItsService(t *testing.T) {
	for _, w := range []way{udp4, udp46, udp6} {
		t.Run(w.name, func(t *testing.T) {
			n, services, _ := newNodeWithServices(t, w)
			fd := w.open(t, n.ns)
			defer unix.Close(fd)
			_, err := w.askBy(t, fd, services[0])
			must(t, "connect", err)
			other := netip.AddrPortFrom(services[0].Addr(), services[0].Port()+1)
			n.service(20, other, bpf.MapsSlFront{}, 1)
			for _, s := range append(services[1:], other) {
				must(t, "send", w.send(fd, s))
			}
			peer, err := unix.Getpeername(fd)
			must(t, "getpeername", err)
			if got := addrOf(peer); got != w.shown(services[0]) {
				t.Errorf("the peer is %v, want %v", got, w.shown(services[0]))
			}
			if _, err := unix.Write(fd, []byte("who")); err != nil {
				t.Fatal(err)
			}
			if got := w.receive(t, fd); got.peer != w.shown(services[0]) {
				t.Errorf("the answer comes from %v, want %v", got.peer, w.shown(services[0]))
			}
		})
	}
}

// TestKernelUDPSocketRemembersFourPeers: the last four backends of unconnected calls. A fifth replaces the
// first, whose answers then show the backend's address.
func TestKernelUDPSocketRemembersFourPeers(t *testing.T) {
	for _, w := range []way{udp4, udp46, udp6} {
		t.Run(w.name, func(t *testing.T) {
			n, services, backends := newNodeWithServices(t, w)
			fd := w.open(t, n.ns)
			defer unix.Close(fd)
			ask := func(services []netip.AddrPort, forgotten netip.AddrPort) {
				t.Helper()
				for _, s := range services {
					must(t, "send", w.send(fd, s))
				}
				for range services {
					got := w.receive(t, fd)
					want := backends[got.backend]
					if want == forgotten {
						want = got.backend
					}
					if got.peer != w.shown(want) {
						t.Errorf("answer of %v comes from %v, want %v", got.backend, got.peer, w.shown(want))
					}
				}
			}
			ask(services[:socketPeers], netip.AddrPort{})
			ask(services, services[0])
		})
	}
}

// TestKernelRefusedConnectIsECONNREFUSEDNeverEPERM: a call to a service without a backend fails like a call to
// a closed port (INV-100). EPERM, the result of a program's plain refusal, has made kernels with NFS mounts
// hang.
func TestKernelRefusedConnectIsECONNREFUSEDNeverEPERM(t *testing.T) {
	n := newSocketNode(t, 1)
	n.backend(1, backend4(1), beGone, 0)
	n.backend(1, backend6(1), beGone, 0)
	for front, c := range []struct {
		name     string
		flags    uint64
		backends []uint32
		want     error
	}{
		{"no backend", 0, nil, unix.ECONNREFUSED},
		{"no backend, drop", frontDrop, nil, unix.EHOSTUNREACH},
		{"the backend is gone", 0, []uint32{1}, unix.ECONNREFUSED},
		{"a number of no backend", 0, []uint32{2}, unix.ECONNREFUSED},
		{"only from some sources", frontSources, []uint32{1}, unix.EHOSTUNREACH},
	} {
		port := uint16(80 + front)
		f := bpf.MapsSlFront{List: c.flags << 48}
		n.service(uint32(front+1), netip.AddrPortFrom(vip4.Addr(), port), f, c.backends...)
		n.service(uint32(front+1), netip.AddrPortFrom(vip6.Addr(), port), f, c.backends...)
		for _, w := range []way{tcp4, tcp46, tcp6, udp4, udp46, udp6} {
			at := netip.AddrPortFrom(vip4.Addr(), port)
			if w == tcp6 || w == udp6 {
				at = netip.AddrPortFrom(vip6.Addr(), port)
			}
			t.Run(c.name+" "+w.name, func(t *testing.T) {
				fd := w.open(t, n.ns)
				defer unix.Close(fd)
				if w.kind == unix.SOCK_DGRAM {
					if err := w.send(fd, at); !errors.Is(err, c.want) {
						t.Errorf("send to %v: %v, want %v", at, err, c.want)
					}
				}
				if err := unix.Connect(fd, sockaddr(w.domain, at)); !errors.Is(err, c.want) {
					t.Errorf("connect to %v: %v, want %v", at, err, c.want)
				}
			})
		}
	}
}

// TestKernelSocketsOfTheNodeAreInNoSourceRangeButEverything: they have many addresses, or none, so a range that
// contains the unspecified address does not match them.
func TestKernelSocketsOfTheNodeAreInNoSourceRangeButEverything(t *testing.T) {
	n := newSocketNode(t, endpointmap.HostID)
	front := uint32(0)
	for _, c := range []struct {
		vip, backend netip.AddrPort
		ways         []way
	}{
		{vip4, backend4(1), []way{tcp4, udp4, tcp46, udp46}},
		{vip6, backend6(1), []way{tcp6, udp6}},
	} {
		n.backend(1, c.backend, beActive, 0)
		serve(t, n.ns, c.backend)
		for _, bits := range []int{c.vip.Addr().BitLen(), 8, 1, 0} {
			front++
			at := netip.AddrPortFrom(c.vip.Addr(), uint16(80+front))
			n.service(front, at, bpf.MapsSlFront{List: uint64(frontSources) << 48}, 1)
			source := netip.PrefixFrom(frontend.Unspecified(at.Addr()), bits)
			putSource(t, n.k, front, source)
			if ok, err := n.k.Services.MayAsk(front, source.Addr()); err != nil || ok != (bits == 0) {
				t.Errorf("sources %v: accepted %t, %v", source, ok, err)
			}
			for _, w := range c.ways {
				_, err := w.ask(t, n.ns, at)
				if bits == 0 && err != nil || bits > 0 && !errors.Is(err, unix.EHOSTUNREACH) {
					t.Errorf("%s, sources %v: %v", w.name, source, err)
				}
			}
		}
	}
}

// putSource adds a source range to a front.
func putSource(t testing.TB, k *Kernel, front uint32, p netip.Prefix) {
	t.Helper()
	bits := uint32(32 + p.Bits())
	if p.Addr().Is4() {
		key := &bpf.MapsSlSrcKey4{Bits: bits, Front: front, Addr: p.Addr().As4()}
		must(t, "write a source", k.Pins.Map(bpf.MapsMapSlSrc4).Put(key, uint32(1)))
		return
	}
	key := &bpf.MapsSlSrcKey6{Bits: bits, Front: front, Addr: p.Addr().As16()}
	must(t, "write a source", k.Pins.Map(bpf.MapsMapSlSrc6).Put(key, uint32(1)))
}

// TestKernelConnectToAPortWithoutAServiceIsRefused: a TCP connect to a virtual IP at a port without a service is
// refused at once. A UDP socket may connect to find out the route.
func TestKernelConnectToAPortWithoutAServiceIsRefused(t *testing.T) {
	n := newSocketNode(t, 1)
	for _, vip := range []netip.Addr{vip4.Addr(), vip6.Addr()} {
		putFronts(t, n.k, netip.AddrPortFrom(vip, 0), 0, feAlone, bpf.MapsSlFe{})
	}
	for _, w := range []way{tcp4, tcp46, tcp6, udp4, udp46, udp6} {
		at, other := netip.AddrPortFrom(vip4.Addr(), 81), netip.MustParseAddrPort("10.96.99.99:81")
		if w == tcp6 || w == udp6 {
			at, other = netip.AddrPortFrom(vip6.Addr(), 81), netip.MustParseAddrPort("[fd96:99::99]:81")
		}
		t.Run(w.name, func(t *testing.T) {
			fd := w.open(t, n.ns)
			defer unix.Close(fd)
			err := unix.Connect(fd, sockaddr(w.domain, at))
			if refused := errors.Is(err, unix.ECONNREFUSED); refused != (w.kind == unix.SOCK_STREAM) {
				t.Errorf("connect to %v: %v", at, err)
			}
			if err := unix.Connect(fd, sockaddr(w.domain, other)); errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("connect to %v, which is of no service: %v", other, err)
			}
		})
	}
}

// TestKernelRefusedSocketHealsWithTheNextCall: a refused call leaves no state, and the next call finds a
// backend that was added meanwhile.
func TestKernelRefusedSocketHealsWithTheNextCall(t *testing.T) {
	n := newSocketNode(t, 1)
	serve(t, n.ns, backend4(1))
	n.backend(1, backend4(1), beActive, 0)
	n.service(1, vip4, bpf.MapsSlFront{})
	fd := udp4.open(t, n.ns)
	defer unix.Close(fd)
	if err := udp4.send(fd, vip4); !errors.Is(err, unix.ECONNREFUSED) {
		t.Fatalf("send without a backend: %v", err)
	}
	putFront(t, n.k, 1, bpf.MapsSlFront{List: putMembers(t, n.k, 0, 1)})
	must(t, "send", udp4.send(fd, vip4))
	if got := udp4.receive(t, fd); got.backend != backend4(1) || got.peer != vip4 {
		t.Errorf("%+v, want backend %v, source %v", got, backend4(1), vip4)
	}
}

func TestKernelForeignNamespacesAreLeftAlone(t *testing.T) {
	n := newSocketNode(t, 1)
	foreign, leaves := netnstest.New(t), netnstest.New(t)
	must(t, "set", n.k.Namespaces.Set(sockets.Namespace{Cookie: cookieOf(t, leaves), Slot: 2, Leave: true}))
	for _, ns := range []*netns.Namespace{n.ns, foreign, leaves} {
		serve(t, ns, backend4(1))
		serve(t, ns, backend6(1))
	}
	n.backend(1, backend4(1), beActive, 0)
	n.backend(1, backend6(1), beActive, 0)
	n.service(1, vip4, bpf.MapsSlFront{}, 1)
	n.service(2, vip6, bpf.MapsSlFront{}, 1)
	all := map[string]*netns.Namespace{"known": n.ns, "unknown": foreign, "known, to be left": leaves}
	check := func(translated ...string) {
		t.Helper()
		for name, ns := range all {
			for _, w := range []way{tcp4, tcp46, tcp6, udp4, udp46, udp6} {
				at := vip4
				if w == tcp6 || w == udp6 {
					at = vip6
				}
				var want error = unix.ENETUNREACH
				if slices.Contains(translated, name) {
					want = nil
				}
				if got, err := w.ask(t, ns, at); !errors.Is(err, want) {
					t.Errorf("%s, %s: %+v, %v, want %v", name, w.name, got, err, want)
				}
				if w.kind != unix.SOCK_DGRAM {
					continue
				}
				fd := w.open(t, ns)
				if err := w.send(fd, at); !errors.Is(err, want) {
					t.Errorf("%s, %s without a connection: %v, want %v", name, w.name, err, want)
				}
				must(t, "close", unix.Close(fd))
			}
		}
	}
	check("known")

	// adopted by a process that translates sockets of all namespaces
	o := n.k.opened
	translateAll := *o.Sockets
	translateAll.TranslateAll = true
	o.Sockets = &translateAll
	k := openKernel(t, o)
	must(t, "attach", k.Sockets.Attach())
	// the adoption has removed them, because the test wrote them itself
	putFrontend(t, k, vip4, protoTCP, feAddress, 1)
	putFrontend(t, k, vip4, protoUDP, feAddress, 1)
	putFrontend(t, k, vip6, protoTCP, feAddress, 2)
	putFrontend(t, k, vip6, protoUDP, feAddress, 2)
	for front := range uint32(2) {
		putFront(t, k, front+1, bpf.MapsSlFront{List: putMembers(t, k, 64*(front+1), 1)})
	}
	putBackend(t, k, 1, backend4(1), beActive, 0)
	putBackend(t, k, 1, backend6(1), beActive, 0)
	check("known", "unknown")

	must(t, "delete", n.k.Namespaces.Remove(cookieOf(t, leaves), 2))
	check("known", "unknown", "known, to be left")
}

// TestKernelProcessReachesItselfThroughItsService: the connection is from an address of the process to the same
// address, and no packet leaves the namespace.
func TestKernelProcessReachesItselfThroughItsService(t *testing.T) {
	n := newSocketNode(t, 1)
	serve(t, n.ns, backend4(1))
	serve(t, n.ns, backend6(1))
	n.backend(1, backend4(1), beActive, 0)
	n.backend(1, backend6(1), beActive, 0)
	n.service(1, vip4, bpf.MapsSlFront{}, 1)
	n.service(2, vip6, bpf.MapsSlFront{}, 1)
	for _, c := range []struct {
		way
		service, self netip.AddrPort
	}{{tcp4, vip4, backend4(1)}, {tcp6, vip6, backend6(1)}, {udp4, vip4, backend4(1)}, {udp6, vip6, backend6(1)}} {
		t.Run(c.name, func(t *testing.T) {
			fd := c.open(t, n.ns)
			defer unix.Close(fd)
			must(t, "bind", unix.Bind(fd, sockaddr(c.domain, netip.AddrPortFrom(c.self.Addr(), 0))))
			got, err := c.askBy(t, fd, c.service)
			if err != nil || got.backend != c.self || got.client.Addr() != c.self.Addr() || got.peer != c.service {
				t.Errorf("%+v, %v, want backend %v, client %v, peer %v", got, err, c.self, c.self.Addr(), c.service)
			}
		})
	}
}

// spread counts which backends answer.
func (n *socketNode) spread(w way, at netip.AddrPort, times int) map[netip.AddrPort]int {
	n.Helper()
	counts := map[netip.AddrPort]int{}
	for range times {
		got, err := w.ask(n, n.ns, at)
		must(n, "ask", err)
		counts[got.backend]++
	}
	return counts
}

func TestKernelAffinityKeepsAClientAtItsBackend(t *testing.T) {
	const clientSlot = 1
	for _, c := range []struct {
		way
		vip     netip.AddrPort
		backend func(int) netip.AddrPort
	}{{tcp4, vip4, backend4}, {udp6, vip6, backend6}} {
		t.Run(c.name, func(t *testing.T) {
			n := newSocketNode(t, clientSlot)
			e := publish(t, n.k, testEndpoint(77, 7))
			if e.Slot != clientSlot {
				t.Fatalf("slot %d, want %d", e.Slot, clientSlot)
			}
			var all []uint32
			for i := 1; i <= 8; i++ {
				serve(t, n.ns, c.backend(i))
				n.backend(uint32(i), c.backend(i), beActive, 0)
				all = append(all, uint32(i))
			}
			const timeout, group = 10, 5
			other := netip.AddrPortFrom(c.vip.Addr(), 443)
			n.service(1, c.vip, bpf.MapsSlFront{Timeout: timeout, Group: group}, all...)
			n.service(2, other, bpf.MapsSlFront{Timeout: timeout, Group: group}, all...)
			none := netip.AddrPortFrom(c.vip.Addr(), 444)
			n.service(3, none, bpf.MapsSlFront{}, all...)
			word := func() (w uint64) {
				t.Helper()
				must(t, "look up affinity", n.affinity(c.vip.Addr(), e, group, &w))
				return w
			}

			if got := n.spread(c.way, none, 64); len(got) < 2 {
				t.Errorf("without affinity: %v", got)
			}
			got := n.spread(c.way, c.vip, 32)
			if len(got) != 1 {
				t.Fatalf("with affinity: %v, want one backend", got)
			}
			kept := uint32(word() & 0xffffff)
			if got[c.backend(int(kept))] != 32 {
				t.Errorf("remembered %d, answered %v", kept, got)
			}
			if got := n.spread(c.way, other, 32); got[c.backend(int(kept))] != 32 {
				t.Errorf("another front of the group: %v, want backend %d", got, kept)
			}

			// remove the backend from the list
			rest := slices.DeleteFunc(slices.Clone(all), func(b uint32) bool { return b == kept })
			list := putMembers(t, n.k, 100, rest...)
			putFront(t, n.k, 1, bpf.MapsSlFront{List: list, Timeout: timeout, Group: group})
			got = n.spread(c.way, c.vip, 32)
			if len(got) != 1 || got[c.backend(int(kept))] != 0 {
				t.Errorf("after the backend left the list: %v, want another one", got)
			}

			// the number is reassigned to another backend
			kept = uint32(word() & 0xffffff)
			n.backend(kept, c.backend(int(kept)), beActive, 9)
			moved := false
			for range 40 {
				n.remember(c.vip.Addr(), e, group, uint64(kept)|uint64(conntrack.MonotonicSeconds())<<32)
				moved = moved || n.spread(c.way, c.vip, 1)[c.backend(int(kept))] == 0
			}
			if !moved {
				t.Errorf("a backend of another generation was kept")
			}
			n.remember(c.vip.Addr(), e, group, uint64(kept)|9<<24|uint64(conntrack.MonotonicSeconds())<<32)
			if got := n.spread(c.way, c.vip, 32); got[c.backend(int(kept))] != 32 {
				t.Errorf("of the same generation: %v, want backend %d", got, kept)
			}

			// too long ago
			moved = false
			for range 40 {
				n.remember(c.vip.Addr(), e, group, uint64(kept)|9<<24|uint64(conntrack.MonotonicSeconds()-timeout-2)<<32)
				moved = moved || n.spread(c.way, c.vip, 1)[c.backend(int(kept))] == 0
			}
			if !moved {
				t.Errorf("a backend was kept after the timeout")
			}
			n.remember(c.vip.Addr(), e, group, uint64(kept)|9<<24|uint64(conntrack.MonotonicSeconds()-timeout/2)<<32)
			n.spread(c.way, c.vip, 1)
			if now := conntrack.MonotonicSeconds(); now-uint32(word()>>32) > 2 {
				t.Errorf("last used at %d, now is %d", word()>>32, now)
			}

			// a list that is too long to be searched: selected by the hash of the client
			long := make([]uint32, affinityMembers+1)
			for i := range long {
				long[i] = all[i%len(all)]
			}
			list = putMembers(t, n.k, 10_000, long...)
			putFront(t, n.k, 1, bpf.MapsSlFront{List: list, Timeout: timeout, Group: group})
			if got := n.spread(c.way, c.vip, 32); len(got) != 1 {
				t.Errorf("of %d members: %v, want one backend", len(long), got)
			}
		})
	}
}

// affinity reads an endpoint's affinity entry.
func (n *socketNode) affinity(family netip.Addr, e endpointmap.Endpoint, group uint16, word *uint64) error {
	if family.Is4() {
		a := e.IPv4.As4()
		return n.k.Pins.Map(bpf.MapsMapSlPodAff4).
			Lookup(&bpf.MapsSlAffKey4{Client: binary.NativeEndian.Uint32(a[:]), Group: group}, word)
	}
	return n.k.Pins.Map(bpf.MapsMapSlPodAff6).Lookup(&bpf.MapsSlAffKey6{Client: e.IPv6.As16(), Group: group}, word)
}

// remember replaces the entry. No socket must use it meanwhile.
func (n *socketNode) remember(family netip.Addr, e endpointmap.Endpoint, group uint16, word uint64) {
	n.Helper()
	if family.Is4() {
		a := e.IPv4.As4()
		must(
			n,
			"remember",
			n.k.Pins.Map(bpf.MapsMapSlPodAff4).
				Put(&bpf.MapsSlAffKey4{Client: binary.NativeEndian.Uint32(a[:]), Group: group}, word),
		)
		return
	}
	must(n, "remember", n.k.Pins.Map(bpf.MapsMapSlPodAff6).Put(&bpf.MapsSlAffKey6{Client: e.IPv6.As16(), Group: group}, word))
}

// TestKernelNodePortsAnswerAtOwnAddresses: sockets reach node ports at the node's addresses; only sockets of the host
// also reach them at loopback addresses. Calls to another node's node port are not translated.
func TestKernelNodePortsAnswerAtOwnAddresses(t *testing.T) {
	own4, own6 := netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")
	const port = 30080
	loopback4, loopback6 := netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()
	anyOf4, another4 := netip.MustParseAddr("127.8.9.10"), netip.MustParseAddr("192.0.2.11")
	another6 := netip.MustParseAddr("2001:db8::11")
	for _, c := range []struct {
		name        string
		slot        endpointmap.ID
		reached     []netip.Addr
		unreachable []netip.Addr // refused on a loopback device
	}{
		{
			"the node's", endpointmap.HostID,
			[]netip.Addr{own4, own6, loopback4, anyOf4, loopback6},
			[]netip.Addr{another4, another6},
		},
		{"an endpoint's", 1, []netip.Addr{own4, own6}, []netip.Addr{another4, another6, loopback4, anyOf4, loopback6}},
	} {
		t.Run(c.name, func(t *testing.T) {
			n := newSocketNode(t, c.slot)
			must(t, "SyncHostAddrs", n.k.Endpoints.SyncHostAddrs([]netip.Addr{own4, own6}))
			publish(t, n.k, a)
			serve(t, n.ns, backend4(1))
			serve(t, n.ns, backend6(1))
			n.backend(1, backend4(1), beActive, 0)
			n.backend(1, backend6(1), beActive, 0)
			putFront(t, n.k, 1, bpf.MapsSlFront{List: putMembers(t, n.k, 0, 1)})
			for _, proto := range []uint8{protoTCP, protoUDP} {
				putFrontend(t, n.k, netip.AddrPortFrom(netip.IPv4Unspecified(), port), proto, feNode, 1)
				putFrontend(t, n.k, netip.AddrPortFrom(netip.IPv6Unspecified(), port), proto, feNode, 1)
			}
			for _, addr := range slices.Concat(c.reached, c.unreachable) {
				at, ways := netip.AddrPortFrom(addr, port), []way{tcp4, tcp46, udp4, udp46}
				if addr.Is6() {
					ways = []way{tcp6, udp6}
				}
				for _, w := range ways {
					got, err := w.ask(t, n.ns, at)
					if !slices.Contains(c.reached, addr) {
						if !errors.Is(err, unix.ENETUNREACH) && !errors.Is(err, unix.ECONNREFUSED) {
							t.Errorf("%s to %v: %+v, %v, want an error", w.name, at, got, err)
						}
						continue
					}
					// the stack selects the source of a socket that has connected to a
					// loopback address
					if err != nil || got.peer != w.shown(at) || got.backend != backend4(1) && got.backend != backend6(1) {
						t.Errorf("%s to %v: %+v, %v, want a backend and peer %v", w.name, at, got, err, w.shown(at))
					}
				}
			}
		})
	}
}

// TestKernelConnectsLandInOneListWhileItFlips: while a list flips at full speed, each connection uses a member of the
// old list or of the new one. The surrounding words, which a mixture of both would select, refer to a backend that is
// in neither list (INV-96).
func TestKernelConnectsLandInOneListWhileItFlips(t *testing.T) {
	n := newSocketNode(t, 1)
	for i := 1; i <= 5; i++ {
		serve(t, n.ns, backend4(i))
		n.backend(uint32(i), backend4(i), beActive, 0)
	}
	const stranger = 5
	// one list has one member, the other has three members elsewhere
	places := []uint32{1, stranger, stranger, stranger, 2, 3, 4, stranger, stranger}
	putMembers(t, n.k, 0, places...)
	lists := []uint64{0 | 1<<24, 4 | 3<<24}
	putFront(t, n.k, 1, bpf.MapsSlFront{List: lists[0]})
	putFrontend(t, n.k, vip4, protoTCP, feAddress, 1)
	putFrontend(t, n.k, vip4, protoUDP, feAddress, 1)

	word := pin.Word(n.k.Pins.Memory(bpf.MapsMapSlFront), frontBytes)
	var done atomic.Bool
	var flips int
	var flipping sync.WaitGroup
	flipping.Go(func() {
		for ; !done.Load(); flips++ {
			atomic.StoreUint64(word, lists[flips%2])
		}
	})
	counts := map[netip.AddrPort]int{}
	for i := range 3000 {
		w := []way{tcp4, udp4}[i%2]
		got, err := w.ask(t, n.ns, vip4)
		if err != nil {
			t.Errorf("ask: %v", err)
			break
		}
		counts[got.backend]++
	}
	done.Store(true)
	flipping.Wait()
	if counts[backend4(stranger)] != 0 {
		t.Errorf("%d connections to a backend of no list: %v", counts[backend4(stranger)], counts)
	}
	if len(counts) != 4 {
		t.Errorf("backends reached in %d flips: %v, want all of both lists", flips, counts)
	}
}

// TestKernelSocketProgramsOutliveTheDatapath: the programs run while the datapath is down, are adopted by the
// next process, and replaced in place by another build or configuration.
func TestKernelSocketProgramsOutliveTheDatapath(t *testing.T) {
	o := socketOptions(t, kerneltest.NewBPFFS(t))
	ns := netnstest.New(t)
	serve(t, ns, backend4(1))
	works := func(want error) {
		t.Helper()
		ask := func() error {
			if got, err := tcp4.ask(t, ns, vip4); !errors.Is(err, want) {
				return fmt.Errorf("%+v, %w, want %w", got, err, want)
			}
			return nil
		}
		if want == nil { // without any untranslated call in between
			must(t, "ask", ask())
			return
		}
		// The kernel detaches a link shortly after its pin is removed.
		servicetest.EventuallyNil(t, "the programs are detached", ask)
	}
	start := func(o Options) (*Kernel, map[string][2]uint32) {
		t.Helper()
		k, err := Open(t.Context(), o)
		must(t, "open", err)
		must(t, "attach", k.Sockets.Attach())
		if differences, err := k.Sockets.Audit(); err != nil || len(differences) != 0 {
			t.Errorf("audit: %q, %v", differences, err)
		}
		return k, pinnedLinks(t, o.Dir)
	}
	k, first := start(o)
	if len(first) != 8 {
		t.Errorf("%d links are pinned, want 8", len(first))
	}
	must(t, "set", k.Namespaces.Set(sockets.Namespace{Cookie: cookieOf(t, ns), Slot: 1}))
	key := frontend.Key{Addr: vip4.Addr(), Port: vip4.Port(), Protocol: frontend.TCP}
	var tx frontendtx.Transaction
	tx.Upsert(&frontend.Frontend{
		Key: key, Kind: frontend.ClusterIP, Service: "shop/web:http",
		Inside: &frontend.List{Backends: []frontend.Backend{{AddrPort: backend4(1)}}},
	})
	_, err := k.Services.Apply(t.Context(), &tx)
	must(t, "apply", err)
	works(nil)
	must(t, "close", k.Close())
	works(nil)

	k, second := start(o)
	if !maps.Equal(first, second) {
		t.Errorf("links and programs after a restart: %v, before %v", second, first)
	}
	must(t, "attach again", k.Sockets.Attach())
	must(t, "close", k.Close())

	all := *o.Sockets
	all.TranslateAll = true
	changed := o
	changed.Sockets = &all
	k, third := start(changed)
	for hook, l := range third {
		if l[0] != first[hook][0] || l[1] == first[hook][1] {
			t.Errorf("%s: link %d runs program %d, before %d ran %d", hook, l[0], l[1], first[hook][0], first[hook][1])
		}
	}
	works(nil)

	// a removed link is reported and restored
	must(t, "remove a link", os.Remove(filepath.Join(o.Dir, "link_connect4")))
	differences, err := k.Sockets.Audit()
	if err != nil || len(differences) != 1 || !strings.Contains(differences[0], "link_connect4 is missing") {
		t.Errorf("audit: %q, %v, want the missing link", differences, err)
	}
	must(t, "repair", k.Sockets.Attach())
	if differences, err := k.Sockets.Audit(); err != nil || len(differences) != 0 {
		t.Errorf("audit after the repair: %q, %v", differences, err)
	}
	works(nil)
	must(t, "close", k.Close())

	// to another cgroup, which does not contain this process
	moved := *o.Sockets
	moved.Cgroup = filepath.Join(o.Sockets.Cgroup, "child")
	must(t, "make a cgroup", os.Mkdir(moved.Cgroup, 0o755))
	changed.Sockets = &moved
	k, _ = start(changed)
	works(unix.ENETUNREACH)
	must(t, "close", k.Close())
	must(t, "remove the cgroup", os.Remove(moved.Cgroup))
	k, _ = start(o) // its links were attached to a removed cgroup
	works(nil)
	must(t, "close", k.Close())

	// without Sockets no program is attached
	o.Sockets = nil
	k, err = Open(t.Context(), o)
	must(t, "open without sockets", err)
	works(unix.ENETUNREACH)
	if left := pinnedLinks(t, o.Dir); len(left) != 0 {
		t.Errorf("links left: %v", left)
	}
	must(t, "close", k.Close())
}

// pinnedLinks returns the links pinned in a directory, with their IDs and program IDs.
func pinnedLinks(t *testing.T, dir string) map[string][2]uint32 {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, "list pins", err)
	found := map[string][2]uint32{}
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "link_") {
			continue
		}
		l, err := link.LoadPinnedLink(filepath.Join(dir, e.Name()), nil)
		must(t, "open a link", err)
		info, err := l.Info()
		must(t, "look at a link", err)
		found[e.Name()] = [2]uint32{uint32(info.ID), uint32(info.Program)}
		must(t, "close a link", l.Close())
	}
	return found
}

func TestKernelCgroupThatCannotHoldPodsIsNamed(t *testing.T) {
	cgroup := kerneltest.NewCgroup(t)
	for _, c := range []struct {
		options sockets.Options
		want    error
		says    string
	}{
		{sockets.Options{Cgroup: filepath.Dir(cgroup)}, nil, ""},
		{sockets.Options{Cgroup: cgroup, Subtree: true}, nil, ""},
		{sockets.Options{Cgroup: cgroup}, sockets.ErrNotRoot, "services would not be translated"},
		{sockets.Options{Cgroup: t.TempDir()}, sockets.ErrNotCgroup2, "findmnt -t cgroup2"},
		{sockets.Options{Cgroup: filepath.Join(cgroup, "cgroup.procs"), Subtree: true}, sockets.ErrNotCgroup2, "a file"},
		{sockets.Options{Cgroup: filepath.Join(cgroup, "none")}, fs.ErrNotExist, "is mounted"},
		{sockets.Options{}, fs.ErrNotExist, "is mounted"},
	} {
		err := c.options.Check()
		if !errors.Is(err, c.want) || c.want != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v: %v, want %v, %q", c.options, err, c.want, c.says)
		}
	}
	o := testOptions(kerneltest.NewBPFFS(t))
	o.Sockets = &sockets.Options{Cgroup: cgroup, Subtree: true}
	if _, err := Open(t.Context(), o); !errors.Is(err, pin.ErrInvalid) {
		t.Errorf("sockets without services: %v, want pin.ErrInvalid", err)
	}
}

func TestKernelNamespacesAreWrittenOnce(t *testing.T) {
	o := testOptions(kerneltest.NewBPFFS(t))
	o.Services = true
	k := openKernel(t, o)
	a, b := sockets.Namespace{Cookie: 5, Slot: 1}, sockets.Namespace{Cookie: 3, Slot: endpointmap.HostID, Leave: true}
	set := func(ns ...sockets.Namespace) {
		t.Helper()
		for _, n := range ns {
			must(t, "set", k.Namespaces.Set(n))
		}
	}
	want := func(ns ...sockets.Namespace) {
		t.Helper()
		if got, err := k.Namespaces.List(); err != nil || !slices.Equal(got, ns) {
			t.Errorf("%+v, %v, want %+v", got, err, ns)
		}
	}
	want()
	set(a, b, a)
	want(b, a)
	a.Slot, a.Leave = 7, true
	set(a)
	want(b, a)
	must(t, "delete of another slot", k.Namespaces.Remove(b.Cookie, a.Slot))
	want(b, a)
	must(t, "delete", k.Namespaces.Remove(b.Cookie, b.Slot))
	must(t, "delete again", k.Namespaces.Remove(b.Cookie, b.Slot))
	want(a)
	for _, bad := range []sockets.Namespace{
		{}, {Cookie: 1, Slot: endpointmap.NoID}, {Cookie: 1, Slot: endpointmap.MaxEndpoints + 1},
	} {
		if err := k.Namespaces.Set(bad); !errors.Is(err, pin.ErrInvalid) {
			t.Errorf("set %+v: %v, want pin.ErrInvalid", bad, err)
		}
	}
	one, again, other := netnstest.New(t), netnstest.New(t), netnstest.New(t)
	if x, y := cookieOf(t, one), cookieOf(t, one); x == 0 || x != y || x == cookieOf(t, again) || x == cookieOf(t, other) {
		t.Errorf("cookies %d, %d, want one for each namespace", x, y)
	}
}
