// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package attach

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/kit/leaktest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// datapath simulates sluice-datapath with a listener.
type datapath struct {
	t *testing.T
	l *net.UnixListener
}

func listen(t *testing.T, path string) *datapath {
	t.Helper()
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	return &datapath{t, l}
}

func (d *datapath) accept() *net.UnixConn {
	d.t.Helper()
	if err := d.l.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		d.t.Fatal(err)
	}
	conn, err := d.l.AcceptUnix()
	if err != nil {
		d.t.Fatal(err)
	}
	return conn
}

// memory returns shared memory for a heartbeat.
func memory(t *testing.T) int {
	t.Helper()
	fd, err := unix.MemfdCreate("beat", unix.MFD_CLOEXEC)
	if err == nil {
		err = unix.Ftruncate(fd, 3*4096)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func beatOf(t *testing.T, fd int, offset int64) uint64 {
	t.Helper()
	b := make([]byte, 8)
	if _, err := unix.Pread(fd, b, offset); err != nil {
		t.Fatal(err)
	}
	return binary.NativeEndian.Uint64(b)
}

func message(change func(m *datapathv1.ProxyAttachment)) []byte {
	m := &datapathv1.ProxyAttachment{Proxy: netv1.Proxy_PROXY_DNS, TapDevice: "sldns0", TapMtu: 1500, HeartbeatOffset: 16}
	if change != nil {
		change(m)
	}
	b, err := proto.Marshal(m)
	if err != nil {
		panic(err)
	}
	return b
}

// send sends a message with a queue and the memory of a heartbeat. It returns the other end of the queue.
func (d *datapath) send(conn *net.UnixConn, b []byte, beat int, more ...int) int {
	d.t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		d.t.Fatal(err)
	}
	if _, _, err := conn.WriteMsgUnix(b, unix.UnixRights(append([]int{fds[0], beat}, more...)...), nil); err != nil {
		d.t.Fatal(err)
	}
	unix.Close(fds[0])
	return fds[1]
}

// queue is a queue that is not served.
type queue struct {
	fd    int
	ended chan struct{}
}

func (q *queue) Ended() <-chan struct{} { return q.ended }
func (q *queue) Err() error             { return errors.New("no device") }

// user takes queues.
type user struct {
	mu     sync.Mutex
	err    error // guarded by mu
	queues chan *queue
}

func (u *user) use(fd int) (Queue, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.err != nil {
		return nil, errors.Join(u.err, unix.Close(fd))
	}
	q := &queue{fd, make(chan struct{})}
	u.queues <- q
	return q, nil
}

func start(t *testing.T, path string) (*Attachment, *user) {
	t.Helper()
	u := &user{queues: make(chan *queue, 1)}
	a := New(Options{Proxy: netv1.Proxy_PROXY_DNS, Socket: path, Use: u.use, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
		if a.beat.now != nil {
			t.Error("the memory of the heartbeat is still mapped")
		}
	})
	return a, u
}

func until(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for began := time.Now(); !condition(); time.Sleep(time.Millisecond) {
		if time.Since(began) > time.Minute {
			t.Fatalf("%s did not happen", what)
		}
	}
}

func TestQueueAndHeartbeatOutliveTheConnection(t *testing.T) {
	path := filepath.Join(t.TempDir(), "proxy.sock")
	a, u := start(t, path) // the datapath starts later
	if a.Err() == nil {
		t.Error("attached without a datapath")
	}
	d := listen(t, path)
	conn := d.accept()
	first := memory(t)
	other := d.send(conn, message(nil), first)
	q := <-u.queues
	if _, err := unix.Write(q.fd, []byte("frame")); err != nil {
		t.Error(err)
	}
	b := make([]byte, 10)
	if n, err := unix.Read(other, b); err != nil || string(b[:n]) != "frame" {
		t.Errorf("the queue: %q, %v", b[:n], err)
	}
	beats := func(fd int, offset int64) func() bool {
		before := beatOf(t, fd, offset)
		return func() bool { return beatOf(t, fd, offset) > before }
	}
	until(t, "a heartbeat", beats(first, 16))
	until(t, "an attachment", func() bool { return a.Err() == nil })
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil || beatOf(t, first, 16) > uint64(now.Nano()) {
		t.Errorf("%v; the heartbeat is later than now", err)
	}
	conn.Close()
	until(t, "the end", func() bool { return a.Err() != nil })
	until(t, "a heartbeat without a connection", beats(first, 16))
	unix.Close(other)

	conn = d.accept() // connects again
	second := memory(t)
	other = d.send(conn, message(func(m *datapathv1.ProxyAttachment) { m.HeartbeatOffset = 4096 + 8 }), second)
	next := <-u.queues
	until(t, "a heartbeat in the new memory", beats(second, 4096+8))
	last := beatOf(t, first, 16)
	until(t, "another heartbeat", beats(second, 4096+8))
	if beatOf(t, first, 16) != last {
		t.Error("the former memory still gets a heartbeat")
	}
	unix.Close(q.fd)

	close(next.ended) // the device was removed
	if n, err := conn.Read(b); n != 0 || err == nil {
		t.Errorf("%d, %v: want the end of the connection", n, err)
	}
	conn.Close()
	unix.Close(next.fd)
	unix.Close(other)
	d.accept().Close()
	d.l.Close()
}

// TestProxyWithoutAQueue: it receives the memory of its heartbeat only, and stays attached while the connection lasts.
func TestProxyWithoutAQueue(t *testing.T) {
	path := filepath.Join(t.TempDir(), "proxy.sock")
	d := listen(t, path)
	defer d.l.Close()
	a := New(Options{Proxy: netv1.Proxy_PROXY_HTTP, Socket: path, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	b := message(func(m *datapathv1.ProxyAttachment) {
		m.Proxy, m.TapDevice, m.TapMtu, m.HeartbeatOffset = netv1.Proxy_PROXY_HTTP, "", 0, 0
	})
	beat := memory(t)
	conn := d.accept()
	unix.Close(d.send(conn, b, beat)) // with a queue
	conn.Close()
	until(t, "a refusal", func() bool { return strings.Contains(a.Err().Error(), "2 descriptors, not 1") })

	conn = d.accept()
	if _, _, err := conn.WriteMsgUnix(b, unix.UnixRights(beat), nil); err != nil {
		t.Fatal(err)
	}
	until(t, "an attachment", func() bool { return a.Err() == nil })
	until(t, "a heartbeat", func() bool { return beatOf(t, beat, 0) > 0 })
	conn.Close()
	until(t, "the end", func() bool { return a.Err() != nil })
	d.accept().Close()
}

func TestWrongAttachmentsAreRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "proxy.sock")
	d := listen(t, path)
	defer d.l.Close()
	a, u := start(t, path)
	beat := memory(t)
	for want, send := range map[string]func(conn *net.UnixConn){
		"refused the connection": func(*net.UnixConn) {},
		"not for PROXY_DNS": func(conn *net.UnixConn) {
			unix.Close(d.send(conn, message(func(m *datapathv1.ProxyAttachment) { m.Proxy = netv1.Proxy_PROXY_HTTP }), beat))
		},
		"3 descriptors, not 2":        func(conn *net.UnixConn) { unix.Close(d.send(conn, message(nil), beat, beat)) },
		"offset of the heartbeat, 65": func(conn *net.UnixConn) { unix.Close(d.send(conn, odd(), beat)) },
		"heartbeat, 70000": func(conn *net.UnixConn) {
			unix.Close(d.send(conn, message(func(m *datapathv1.ProxyAttachment) { m.HeartbeatOffset = 70000 }), beat))
		},
		"proto": func(conn *net.UnixConn) { unix.Close(d.send(conn, []byte("\xff\xff"), beat)) },
		"map the memory": func(conn *net.UnixConn) {
			unix.Close(d.send(conn, message(nil), socket(t)))
		},
	} {
		conn := d.accept()
		send(conn)
		conn.Close()
		until(t, want, func() bool { return strings.Contains(a.Err().Error(), want) })
	}
	u.mu.Lock()
	u.err = errors.New("no readers")
	u.mu.Unlock()
	conn := d.accept()
	unix.Close(d.send(conn, message(nil), beat))
	until(t, "no readers", func() bool { return strings.Contains(a.Err().Error(), "no readers") })
	conn.Close()
	if len(u.queues) != 0 {
		t.Error("a queue is used")
	}
}

func odd() []byte {
	return message(func(m *datapathv1.ProxyAttachment) { m.HeartbeatOffset = 65 })
}

// socket returns a descriptor that cannot be mapped.
func socket(t *testing.T) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}
