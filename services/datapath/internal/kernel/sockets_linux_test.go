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
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/slotmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/sockets"
	"github.com/sluice-net/sluice/services/datapath/internal/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/netns/netnstest"
)

// Numbers of service_abi.h, which are macros there.
const (
	protoTCP, protoUDP       = unix.IPPROTO_TCP, unix.IPPROTO_UDP
	feAddress, feNode        = 0, 1
	beActive, beGone         = 1, 2
	frontDrop, frontSources  = 0x1, 0x2
	socketPeers              = 4
	affinityMembers          = 1024
	memberPlaces, frontWords = 262144, 32
)

// socketNode is a namespace whose sockets are translated, with backends on its
// loopback device. Services have no route: what is not translated is unreachable.
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

// newSocketNode makes a node whose one namespace is that of a slot.
func newSocketNode(t *testing.T, slot slotmap.Slot) *socketNode {
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

// own gives the namespace addresses.
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

// serve runs a backend, by TCP and UDP, that says its address to whoever asks.
func serve(t testing.TB, ns *netns.Namespace, at netip.AddrPort) {
	t.Helper()
	own(t, ns, at.Addr())
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

// backend writes where the backend of a number is.
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
	must(t, "write a backend", k.Pins.Map(bpf.MapsMapSlBe6).Put(number, &bpf.MapsSlBe6{Word: word, Addr: at.Addr().As16()}))
}

// members writes a list, and returns the word that names it.
func putMembers(t testing.TB, k *Kernel, base uint32, backends ...uint32) (list uint64) {
	t.Helper()
	for i, b := range backends {
		must(t, "write a member", k.Pins.Map(bpf.MapsMapSlMember).Put(base+uint32(i), uint64(b)))
	}
	return uint64(base) | uint64(len(backends))<<24
}

func putFront(t testing.TB, k *Kernel, number uint32, f bpf.MapsSlFront) {
	t.Helper()
	must(t, "write a front", k.Pins.Map(bpf.MapsMapSlFront).Put(number, &f))
}

// frontend makes an address lead to a front for the node's own sockets.
func putFrontend(t testing.TB, k *Kernel, at netip.AddrPort, proto, kind uint8, front uint32) {
	t.Helper()
	fe := &bpf.MapsSlFe{Inside: front}
	if at.Addr().Is4() {
		a := at.Addr().As4()
		key := &bpf.MapsSlFeKey4{Addr: binary.NativeEndian.Uint32(a[:]), Port: at.Port(), Proto: proto, Kind: kind}
		must(t, "write a frontend", k.Pins.Map(bpf.MapsMapSlFe4).Update(key, fe, ebpf.UpdateNoExist))
		return
	}
	key := &bpf.MapsSlFeKey6{Addr: at.Addr().As16(), Port: at.Port(), Proto: proto, Kind: kind}
	must(t, "write a frontend", k.Pins.Map(bpf.MapsMapSlFe6).Update(key, fe, ebpf.UpdateNoExist))
}

// service is a TCP and a UDP frontend of one front with backends.
func (n *socketNode) service(front uint32, at netip.AddrPort, f bpf.MapsSlFront, backends ...uint32) {
	n.Helper()
	f.List |= putMembers(n, n.k, front*affinityMembers*2, backends...)
	putFront(n, n.k, front, f)
	putFrontend(n, n.k, at, protoTCP, feAddress, front)
	putFrontend(n, n.k, at, protoUDP, feAddress, front)
}

func sockaddr(domain int, at netip.AddrPort) unix.Sockaddr {
	if domain == unix.AF_INET {
		return &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()} // IPv4 mapped
}

// addrOf is an address as a system call told it; mapped ones are IPv6.
func addrOf(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

// way is a kind of socket that asks for a service.
type way struct {
	name   string
	domain int
	kind   int
}

var (
	tcp4  = way{"TCP over IPv4", unix.AF_INET, unix.SOCK_STREAM}
	tcp6  = way{"TCP over IPv6", unix.AF_INET6, unix.SOCK_STREAM}
	udp4  = way{"UDP over IPv4", unix.AF_INET, unix.SOCK_DGRAM}
	udp6  = way{"UDP over IPv6", unix.AF_INET6, unix.SOCK_DGRAM}
	tcp46 = way{"TCP over IPv4 in IPv6", unix.AF_INET6, unix.SOCK_STREAM}
	udp46 = way{"UDP over IPv4 in IPv6", unix.AF_INET6, unix.SOCK_DGRAM}
)

// shown is how a socket of the way shows an address.
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
		fd, err = unix.Socket(w.domain, w.kind|unix.SOCK_CLOEXEC, 0)
		return err
	}))
	patience := unix.NsecToTimeval(servicetest.Patience.Nanoseconds())
	must(t, "set a timeout", unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience))
	return fd
}

// answer is what a client learns by asking a service.
type answer struct {
	backend netip.AddrPort // that answered
	client  netip.AddrPort // as the backend saw it
	peer    netip.AddrPort // as the socket shows it
}

// ask connects and asks who is there.
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
	size, err := unix.Read(fd, b[:])
	if err != nil {
		return a, err
	}
	a.parse(t, b[:size])
	return a, nil
}

func (a *answer) parse(t testing.TB, said []byte) {
	t.Helper()
	backend, client, _ := strings.Cut(string(said), " to ")
	var err1, err2 error
	a.backend, err1 = netip.ParseAddrPort(backend)
	a.client, err2 = netip.ParseAddrPort(client)
	must(t, fmt.Sprintf("read the answer %q", said), errors.Join(err1, err2))
}

// send asks without a connection.
func (w way) send(fd int, at netip.AddrPort) error {
	return unix.Sendto(fd, []byte("who"), 0, sockaddr(w.domain, at))
}

// receive reads an answer and its source.
func (w way) receive(t testing.TB, fd int) (a answer) {
	t.Helper()
	var b [128]byte
	size, from, err := unix.Recvfrom(fd, b[:], 0)
	must(t, "receive", err)
	a.peer = addrOf(from)
	a.parse(t, b[:size])
	return a
}

// The socket reaches a backend and sees the service: getpeername of a connection,
// the source of what recvmsg returns without one.
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
		{udp4, vip4, backend4(1)},
		{udp46, vip4, backend4(1)},
		{udp6, vip6, backend6(1)},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := c.ask(t, n.ns, c.service)
			if err != nil || got.backend != c.backend || got.peer != c.shown(c.service) {
				t.Errorf("connected: %+v, %v, want backend %v, peer %v", got, err, c.backend, c.shown(c.service))
			}
			// the backend itself is no service
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
			// what the socket asks after that as a connection of its own
			got, err = c.askBy(t, fd, c.backend)
			if err != nil || got.peer != c.shown(c.backend) {
				t.Errorf("connected to the backend after that: %+v, %v, want peer %v", got, err, c.shown(c.backend))
			}
		})
	}
}

var _ = []any{atomic.AddInt32, slices.Max[[]int], pin.ErrFull, conntrack.MonotonicSeconds, frontDrop, frontSources, socketPeers, memberPlaces, frontWords, beGone, feNode}
