// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package socketend

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"reflect"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/socketlist"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

// patience limits every wait for an event that must happen.
const patience = 10 * time.Second

// IDs of backends. The generation is 0 in the translations.
const (
	active  = 1
	removed = 2
)

// theFront is the front of the translations.
const theFront = 7

// world is the storage of sockets, and two namespaces of the node.
type world struct {
	t       *testing.T
	storage *ebpf.Map
	list    *socketlist.List
	known   []*netns.Namespace
}

func newWorld(t *testing.T) *world {
	kerneltest.RequireRoot(t)
	spec, err := bpf.LoadMaps()
	if err != nil {
		t.Fatal(err)
	}
	storage, err := ebpf.NewMap(spec.Maps[bpf.MapsMapSlSk])
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { storage.Close() })
	list, err := socketlist.Open(storage)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { list.Close() })
	return &world{t: t, storage: storage, list: list, known: []*netns.Namespace{netnstest.New(t), netnstest.New(t)}}
}

func (w *world) ender() *Ender {
	return New(Options{
		Sockets: w.list,
		Each: func(_ context.Context, fn func(*netns.Namespace) error) error {
			var errs []error
			for _, ns := range w.known {
				errs = append(errs, fn(ns))
			}
			return errors.Join(errs...)
		},
		Keeps: func(front uint32, _ bool, number uint32, generation uint8) bool {
			return front == theFront && number == active && generation == 0
		},
	})
}

// connect opens a socket in a namespace, connects it to an address of the loopback device there, and sets the backend
// in its storage, as the programs would.
func (w *world) connect(ns *netns.Namespace, network, to string, backend uint32) net.Conn {
	w.t.Helper()
	var conn net.Conn
	if err := ns.Do(func() error {
		var dialer net.Dialer
		var err error
		conn, err = dialer.DialContext(w.t.Context(), network, to)
		return err
	}); err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { conn.Close() })
	w.remember(conn.(syscall.Conn), backend, 0, true)
	return conn
}

func (w *world) remember(conn syscall.Conn, backend uint32, generation uint8, connected bool) {
	w.t.Helper()
	w.rememberBy(conn, theFront, backend, generation, connected)
}

func (w *world) rememberBy(conn syscall.Conn, front, backend uint32, generation uint8, connected bool) {
	w.t.Helper()
	raw, err := conn.SyscallConn()
	if err != nil {
		w.t.Fatal(err)
	}
	var failed error
	if err := raw.Control(func(fd uintptr) {
		s := bpf.MapsSlSock{}
		if s.Cookie, failed = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE); failed != nil {
			return
		}
		if connected {
			s.Connected = 1
		}
		p := &s.Peer[0]
		p.Family, p.Front, p.Backend, p.Gen = 4, front, backend, generation
		failed = w.storage.Put(uint32(fd), &s)
	}); err != nil || failed != nil {
		w.t.Fatal(err, failed)
	}
}

// serve answers in a namespace at an address and returns the address.
func (w *world) serve(ns *netns.Namespace, network, at string) string {
	w.t.Helper()
	var addr net.Addr
	if err := ns.Do(func() error {
		var listen net.ListenConfig
		if network == "tcp" {
			l, err := listen.Listen(w.t.Context(), network, at)
			if err != nil {
				return err
			}
			w.t.Cleanup(func() { l.Close() })
			addr = l.Addr()
			return nil
		}
		c, err := listen.ListenPacket(w.t.Context(), network, at)
		if err != nil {
			return err
		}
		w.t.Cleanup(func() { c.Close() })
		go echo(c)
		addr = c.LocalAddr()
		return nil
	}); err != nil {
		w.t.Fatal(err)
	}
	return addr.String()
}

func echo(c net.PacketConn) {
	buf := make([]byte, 64)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return
		}
		if _, err := c.WriteTo(buf[:n], from); err != nil {
			return
		}
	}
}

// answers returns an error if a connected UDP socket gets no answer.
func answers(c net.Conn) error {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	if _, err := c.Write([]byte("ping")); err != nil {
		return err
	}
	_, err := c.Read(make([]byte, 64))
	return err
}

// TestKernelConnectedUDPIsEndedWhenItsBackendIsRemoved proves INV-99: such sockets are ended in every namespace of the
// node and in both families. Sockets of an active backend, unconnected sockets, TCP sockets, and sockets in foreign
// namespaces are not ended.
func TestKernelConnectedUDPIsEndedWhenItsBackendIsRemoved(t *testing.T) {
	w := newWorld(t)
	foreign := netnstest.New(t)
	type named struct {
		what string
		conn net.Conn
	}
	var stale, alive []named
	for i, ns := range w.known {
		for _, at := range []string{"127.0.0.1:0", "[::1]:0"} {
			to := w.serve(ns, "udp", at)
			for backend, list := range map[uint32]*[]named{active: &alive, removed: &stale} {
				what := fmt.Sprintf("backend %d at %s in namespace %d", backend, to, i)
				*list = append(*list, named{what, w.connect(ns, "udp", to, backend)})
			}
		}
	}
	elsewhere := w.serve(foreign, "udp", "127.0.0.1:0")
	alive = append(alive, named{"of another namespace", w.connect(foreign, "udp", elsewhere, removed)})
	// The ID is the same, but the generation is not.
	again := w.connect(w.known[0], "udp", w.serve(w.known[0], "udp", "127.0.0.1:0"), active)
	w.remember(again.(syscall.Conn), active, 1, true)
	stale = append(stale, named{"of an earlier generation", again})
	tcp := w.connect(w.known[0], "tcp", w.serve(w.known[0], "tcp", "127.0.0.1:0"), removed)
	var unconnected net.PacketConn
	if err := w.known[0].Do(func() (err error) {
		unconnected, err = (&net.ListenConfig{}).ListenPacket(t.Context(), "udp", "127.0.0.1:0")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer unconnected.Close()
	w.remember(unconnected.(*net.UDPConn), removed, 0, false)

	waits := make(chan error)
	go func() {
		_, err := stale[0].conn.Read(make([]byte, 64))
		waits <- err
	}()
	e := w.ender()
	if err := e.End(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case err := <-waits:
		if !errors.Is(err, unix.ECONNABORTED) {
			t.Errorf("a waiting call returns %v, want %v", err, unix.ECONNABORTED)
		}
	case <-time.After(patience):
		t.Error("a waiting call does not return")
	}
	for _, s := range stale[1:] {
		if err := answers(s.conn); !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.EDESTADDRREQ) {
			t.Errorf("%s: %v, want the socket ended", s.what, err)
		}
	}
	for _, s := range alive {
		if err := answers(s.conn); err != nil {
			t.Errorf("%s: %v, want an answer", s.what, err)
		}
	}
	if _, err := tcp.Write([]byte("x")); err != nil {
		t.Errorf("of TCP: %v", err)
	}
	if n := e.Ended(); n != uint64(len(stale)) {
		t.Errorf("%d ended, want %d", n, len(stale))
	}
	// Ended sockets are not ended again.
	if err := e.End(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := e.Ended(); n != uint64(len(stale)) {
		t.Errorf("%d ended after another pass, want %d", n, len(stale))
	}
}

// TestKernelSocketsWithTheSameEndsAreNotEnded: a socket that sends to a removed backend has the same local and remote
// address as others: a socket in another namespace of the node, one in a foreign namespace, and one in the same
// namespace that shares the port and whose Service keeps the backend. The others must not be ended. The kernel finds a
// socket by its addresses, and returns the one that was opened last. Therefore the socket is ended at the latest in the
// pass after its twin is closed.
func TestKernelSocketsWithTheSameEndsAreNotEnded(t *testing.T) {
	w := newWorld(t)
	const keeps = theFront + 1
	foreign := netnstest.New(t)
	const local, remote = "127.0.0.1:30001", "127.0.0.1:30002"
	open := func(ns *netns.Namespace, front uint32) net.Conn {
		t.Helper()
		conn := twin(t, ns, local, remote)
		w.rememberBy(conn.(syscall.Conn), front, removed, 0, true)
		return conn
	}
	ender := New(Options{
		Sockets: w.list,
		Each: func(_ context.Context, fn func(*netns.Namespace) error) error {
			return errors.Join(fn(w.known[0]), fn(w.known[1]))
		},
		Keeps: func(front uint32, _ bool, _ uint32, _ uint8) bool { return front == keeps },
	})
	ended := func(c net.Conn) bool {
		t.Helper()
		raw, err := c.(syscall.Conn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var peer error
		if err := raw.Control(func(fd uintptr) { _, peer = unix.Getpeername(int(fd)) }); err != nil {
			t.Fatal(err)
		}
		return errors.Is(peer, unix.ENOTCONN)
	}
	for _, first := range []bool{true, false} {
		var stale, twin net.Conn
		if first {
			stale, twin = open(w.known[0], theFront), open(w.known[0], keeps)
		} else {
			twin, stale = open(w.known[0], keeps), open(w.known[0], theFront)
		}
		others := map[string]net.Conn{
			"in another namespace of the node": open(w.known[1], keeps),
			"in a foreign namespace":           open(foreign, theFront),
			"by another Service":               twin,
		}
		if err := ender.End(t.Context()); err != nil {
			t.Fatal(err)
		}
		for what, c := range others {
			if ended(c) {
				t.Errorf("opened first %t: the socket %s is ended", first, what)
			}
			c.Close()
		}
		// a socket that the kernel did not find because of its twin is found by the next pass
		if err := ender.End(t.Context()); err != nil {
			t.Fatal(err)
		}
		if !ended(stale) {
			t.Errorf("opened first %t: the socket to the removed backend is not ended", first)
		}
		stale.Close()
	}
}

// TestKernelSocketsThatShareAPortAreAllEnded: several UDP sockets share a local port (SO_REUSEPORT) and are connected
// to the same removed backend. A lookup in the kernel finds only one of them at a time; one pass must end all of them.
func TestKernelSocketsThatShareAPortAreAllEnded(t *testing.T) {
	w := newWorld(t)
	const all = 5
	for range all {
		w.rememberBy(twin(t, w.known[0], "127.0.0.1:30001", "127.0.0.1:30002").(syscall.Conn), theFront, removed, 0, true)
	}
	e := w.ender()
	if err := e.End(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := e.Ended(); n != all {
		t.Errorf("%d of %d sockets with the same ends are ended", n, all)
	}
}

// twin opens a UDP socket that shares its port, and connects it.
func twin(t *testing.T, ns *netns.Namespace, local, remote string) net.Conn {
	t.Helper()
	dialer := net.Dialer{
		LocalAddr: net.UDPAddrFromAddrPort(netip.MustParseAddrPort(local)),
		Control: func(_, _ string, c syscall.RawConn) error {
			var failed error
			err := c.Control(func(fd uintptr) {
				failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
			})
			return errors.Join(err, failed)
		},
	}
	var conn net.Conn
	if err := ns.Do(func() (err error) {
		conn, err = dialer.DialContext(t.Context(), "udp", remote)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// TestKernelMappedAndBoundSocketsAreEnded tests IPv4 on an IPv6 socket, and a socket that is bound to a device.
func TestKernelMappedAndBoundSocketsAreEnded(t *testing.T) {
	w := newWorld(t)
	ns := w.known[0]
	to := netip.MustParseAddrPort(w.serve(ns, "udp", "127.0.0.1:0"))
	var mapped, bound net.Conn
	open := func(family int, prepare func(fd int) error) net.Conn {
		t.Helper()
		var conn net.Conn
		if err := ns.Do(func() error {
			fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
			if err != nil {
				return err
			}
			if err := prepare(fd); err != nil {
				return errors.Join(err, unix.Close(fd))
			}
			f := os.NewFile(uintptr(fd), "socket")
			defer f.Close()
			conn, err = net.FileConn(f)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	mapped = open(unix.AF_INET6, func(fd int) error {
		return unix.Connect(fd, &unix.SockaddrInet6{Addr: netip.AddrFrom16(to.Addr().As16()).As16(), Port: int(to.Port())})
	})
	bound = open(unix.AF_INET, func(fd int) error {
		return errors.Join(
			unix.BindToDevice(fd, "lo"),
			unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}),
		)
	})
	for what, c := range map[string]net.Conn{"mapped": mapped, "bound": bound} {
		if err := answers(c); err != nil {
			t.Fatalf("%s, before: %v", what, err)
		}
		w.remember(c.(syscall.Conn), removed, 0, true)
	}
	if err := w.ender().End(t.Context()); err != nil {
		t.Fatal(err)
	}
	for what, c := range map[string]net.Conn{"mapped": mapped, "bound": bound} {
		if err := answers(c); !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.EDESTADDRREQ) {
			t.Errorf("%s: %v, want the socket ended", what, err)
		}
	}
}

// TestKernelManySocketsAreEnded tests a list that the kernel sends in many messages.
func TestKernelManySocketsAreEnded(t *testing.T) {
	w := newWorld(t)
	const n = 3000
	to := w.serve(w.known[0], "udp", "127.0.0.1:0")
	for range n {
		w.connect(w.known[0], "udp", to, removed)
	}
	e := w.ender()
	began := time.Now()
	if err := e.End(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d sockets ended in %v", n, time.Since(began))
	if got := e.Ended(); got != n {
		t.Errorf("%d ended, want %d", got, n)
	}
}

// TestKernelConnectedUDPSocketsNameNumbers: IDs are referenced by sockets in every namespace of the node until these
// are ended or closed. Sockets that End ignores reference nothing.
func TestKernelConnectedUDPSocketsNameNumbers(t *testing.T) {
	w := newWorld(t)
	e, elsewhere := w.ender(), netnstest.New(t)
	want := func(when string, front bool, backends ...uint32) {
		t.Helper()
		want := servicemap.NoNumbers()
		for _, b := range backends {
			want.Name(theFront, false, b)
		}
		if !front {
			clear(want.Fronts)
		}
		if got, err := e.Named(t.Context()); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: referenced are %+v, %v, want %+v", when, got, err, want)
		}
	}
	want("without sockets", false)
	w.connect(w.known[0], "tcp", w.serve(w.known[0], "tcp", "127.0.0.1:0"), 3)
	w.connect(elsewhere, "udp", w.serve(elsewhere, "udp", "127.0.0.1:0"), 4)
	asks := w.connect(w.known[0], "udp", w.serve(w.known[0], "udp", "127.0.0.1:0"), 5)
	w.remember(asks.(syscall.Conn), 5, 0, false)
	want("by sockets that are not ended", false)

	first := w.connect(w.known[0], "udp", w.serve(w.known[0], "udp", "127.0.0.1:0"), active)
	w.connect(w.known[1], "udp", w.serve(w.known[1], "udp", "[::1]:0"), removed)
	want("by two sockets", true, active, removed)
	if err := e.End(t.Context()); err != nil || e.Ended() != 1 {
		t.Fatalf("%d sockets ended, %v, want one", e.Ended(), err)
	}
	want("by the one that was not ended", true, active)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	want("once it is closed", false)
}

// TestKernelSocketsThatCannotBeEndedKeepFewNumbers: a process keeps its sockets from being ended by twins, which have
// the same addresses and no Service. Few of the IDs of removed backends stay in use by them.
func TestKernelSocketsThatCannotBeEndedKeepFewNumbers(t *testing.T) {
	const sockets, firstBackend = mostMissed + 50, 1000
	w := newWorld(t)
	e := w.ender()
	var twins []net.Conn
	for i := range sockets {
		local, remote := fmt.Sprintf("127.0.0.1:%d", 31000+i), "127.0.0.1:30002"
		stale := twin(t, w.known[0], local, remote)
		w.rememberBy(stale.(syscall.Conn), theFront, uint32(firstBackend+i), 0, true)
		twins = append(twins, twin(t, w.known[0], local, remote))
	}
	other := w.connect(w.known[1], "udp", w.serve(w.known[1], "udp", "127.0.0.1:0"), active)
	defer other.Close()
	named := func() int {
		t.Helper()
		n, err := e.Named(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := n.Backends[0][active]; !ok {
			t.Error("the ID of the other namespace's socket is free")
		}
		return len(n.Backends[0]) - 1
	}
	if got := named(); got != sockets {
		t.Errorf("before the sockets are ended, they keep %d IDs, want %d", got, sockets)
	}
	if err := e.End(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := named(); got != mostMissed {
		t.Errorf("sockets that cannot be ended keep %d IDs, want %d", got, mostMissed)
	}
	for _, c := range twins {
		c.Close()
	}
	if err := e.End(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := named(); got != 0 || e.Ended() != sockets {
		t.Errorf("without twins, %d IDs are in use, and %d sockets were ended, want 0 and %d", got, e.Ended(), sockets)
	}
}

// TestKernelEndStopsWithItsContext tests that End returns the context's error.
func TestKernelEndStopsWithItsContext(t *testing.T) {
	w := newWorld(t)
	w.connect(w.known[0], "udp", w.serve(w.known[0], "udp", "127.0.0.1:0"), removed)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := w.ender().End(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("%v, want %v", err, context.Canceled)
	}
}
