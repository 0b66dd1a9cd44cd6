// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package listeners

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/servicetest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// store is a running store.
type store struct {
	*Store
	t    *testing.T
	path string
	stop func()
}

func start(t *testing.T, o StoreOptions) *store {
	t.Helper()
	dir, err := os.MkdirTemp("", "listeners")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	s := &store{t: t, path: filepath.Join(dir, "listeners.sock")}
	if o.Users == nil {
		o.Users = []uint32{uint32(os.Getuid())}
	}
	o.Listen = func() (net.Listener, error) { return rpc.Listen(s.path, rpc.ListenOptions{Packets: true}) }
	s.Store = NewStore(o)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	servicetest.EventuallyNil(t, "the socket is there", func() error { _, err := os.Stat(s.path); return err })
	s.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	t.Cleanup(s.stop)
	return s
}

func (s *store) connect() (*Client, []*net.TCPListener) {
	s.t.Helper()
	c, kept, err := Connect(s.t.Context(), s.path)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() {
		c.Close()
		for _, l := range kept {
			l.Close()
		}
	})
	return c, kept
}

func listen(t *testing.T, address string) *net.TCPListener {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l.(*net.TCPListener)
}

// answer accepts one connection, and sends text to it.
func answer(t *testing.T, l *net.TCPListener, text string) {
	t.Helper()
	c, err := l.Accept()
	if err == nil {
		_, err = io.WriteString(c, text)
		err = errors.Join(err, c.Close())
	}
	if err != nil {
		t.Error(err)
	}
}

func dial(t *testing.T, l *net.TCPListener) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func reads(t *testing.T, c net.Conn, want string) {
	t.Helper()
	if b, err := io.ReadAll(c); err != nil || string(b) != want {
		t.Errorf("the connection has %q, %v; want %q", b, err, want)
	}
}

// refused fails unless connections to an address are refused.
func refused(t *testing.T, l *net.TCPListener) {
	t.Helper()
	c, err := net.Dial("tcp", l.Addr().String())
	if err == nil {
		c.Close()
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("connection to %v: %v, want that it is refused", l.Addr(), err)
	}
}

// TestConnectionsWaitForTheNextProcess: while no process has the listener, connections succeed, and the next process
// answers them.
func TestConnectionsWaitForTheNextProcess(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::1]:0", ":0"} {
		s := start(t, StoreOptions{})
		c, kept := s.connect()
		l := listen(t, address)
		if err := c.Keep(l); err != nil || len(kept) != 0 {
			t.Fatal(err, kept)
		}
		c.Close()
		l.Close()
		waiting := dial(t, l)
		again, kept := s.connect()
		if len(kept) != 1 || kept[0].Addr().String() != l.Addr().String() {
			t.Fatalf("%s: listeners %v, want %v", address, kept, l.Addr())
		}
		answer(t, kept[0], "next")
		reads(t, waiting, "next")
		if err := errors.Join(again.Drop(kept[0]), again.Drop(kept[0]), kept[0].Close()); err != nil {
			t.Error(err)
		}
		refused(t, l)
		if n := s.Len(); n != 0 {
			t.Errorf("%d listeners are kept after the last one was dropped", n)
		}
	}
}

// TestTheProcessThatConnectsLastIsTheClient: it gets the sockets, and an earlier process can no longer change them.
func TestTheProcessThatConnectsLastIsTheClient(t *testing.T) {
	s := start(t, StoreOptions{})
	first, _ := s.connect()
	l := listen(t, "127.0.0.1:0")
	if err := first.Keep(l); err != nil {
		t.Fatal(err)
	}
	second, kept := s.connect()
	<-first.Ended()
	if err := first.Drop(l); err == nil {
		t.Error("an earlier client has dropped a listener")
	}
	if err := second.Keep(kept[0]); err != nil || s.Len() != 1 { // the same one again
		t.Errorf("%v, %d listeners, want one", err, s.Len())
	}
}

// TestTheStoreKeepsOnlyListeningTCPSockets and no more than it may.
func TestTheStoreKeepsOnlyListeningTCPSockets(t *testing.T) {
	s := start(t, StoreOptions{Most: 2})
	c, _ := s.connect()
	l := listen(t, "127.0.0.1:0")
	connected := dial(t, l)
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer accepted.Close()
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer udp.Close()
	other := listen(t, "127.0.0.1:0")
	for name, of := range map[string]any{"a connection": connected, "a UDP socket": udp, "another address": other} {
		raw, err := of.(interface {
			SyscallConn() (syscall.RawConn, error)
		}).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		var kind byte
		cerr := raw.Control(func(fd uintptr) { kind, err = c.request(message{kind: keep, addr: addrOf(l), fd: int(fd)}) })
		if errors.Join(cerr, err) != nil || kind != not {
			t.Errorf("%s: answer %q, %v", name, kind, errors.Join(cerr, err))
		}
	}
	if kind, err := c.request(message{kind: keep, addr: addrOf(l), fd: -1}); err != nil || kind != not {
		t.Errorf("no descriptor: answer %q, %v", kind, err)
	}
	for i, want := range []error{nil, nil, ErrFull} {
		if err := c.Keep(listen(t, "127.0.0.1:0")); !errors.Is(err, want) {
			t.Errorf("listener %d: %v, want %v", i, err, want)
		}
	}
	if n := s.Len(); n != 2 {
		t.Errorf("%d listeners are kept, want 2", n)
	}
}

// TestOtherUsersGetNoSockets also tests that their connections change nothing.
func TestOtherUsersGetNoSockets(t *testing.T) {
	s := start(t, StoreOptions{Users: []uint32{uint32(os.Getuid()) + 1}})
	if _, _, err := Connect(t.Context(), s.path); err == nil {
		t.Error("another user is connected")
	}
}

// TestSocketsOfAProcessThatDoesNotReturnAreClosed: the sockets of a connected process stay.
func TestSocketsOfAProcessThatDoesNotReturnAreClosed(t *testing.T) {
	s := start(t, StoreOptions{Keep: 40 * time.Millisecond})
	c, _ := s.connect()
	l := listen(t, "127.0.0.1:0")
	if err := c.Keep(l); err != nil {
		t.Fatal(err)
	}
	time.Sleep(3 * s.o.Keep) // the store looks several times
	if n := s.Len(); n != 1 {
		t.Errorf("%d listeners are kept for a client, want 1", n)
	}
	c.Close()
	l.Close()
	servicetest.Eventually(t, "the socket is closed", func() bool { return s.Len() == 0 })
	refused(t, l)
}

// TestAClientOutlivesTheStore: its listeners go on, and the next store keeps them.
func TestAClientOutlivesTheStore(t *testing.T) {
	s := start(t, StoreOptions{})
	c, _ := s.connect()
	l := listen(t, "127.0.0.1:0")
	if err := c.Keep(l); err != nil {
		t.Fatal(err)
	}
	s.stop()
	<-c.Ended()
	if err := c.Keep(l); err == nil {
		t.Error("a listener is kept although the store has ended")
	}
	if _, _, err := Connect(t.Context(), s.path); err == nil {
		t.Error("a store that has ended is connected")
	}
	waiting := dial(t, l)
	answer(t, l, "same")
	reads(t, waiting, "same")
}

// TestASilentStoreIsGivenUp: neither Connect nor a request waits longer than its timeout for a silent store.
func TestASilentStoreIsGivenUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	silent, err := net.Listen("unixpacket", path)
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	// On a busy machine, a shorter timeout can end before the connection exists that Accept below expects.
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, _, err := Connect(ctx, path); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("connecting: %v", err)
	}
	go func() {
		c, err := silent.Accept() // of the first connection
		if err == nil {
			c.Close()
			c, err = silent.Accept()
		}
		if err == nil {
			err = send(c.(packets), message{kind: ends, fd: -1})
		}
		if err != nil {
			t.Error(fmt.Errorf("greet: %w", err))
			return
		}
		t.Cleanup(func() { c.Close() })
	}()
	c, _, err := Connect(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Keep(listen(t, "127.0.0.1:0")); err == nil {
		t.Error("a listener is kept by a store that does not answer")
	}
	<-c.Ended()
}
