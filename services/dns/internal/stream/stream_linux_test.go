// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package stream

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/proxy/pods"
	"github.com/sluice-net/sluice/services/dns/internal/exchange"
	"github.com/sluice-net/sluice/services/dns/internal/names"
	"github.com/sluice-net/sluice/services/dns/internal/rules"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// services simulates sluice-policy and sluice-identity. The tests learn no addresses.
type services struct{}

func (services) Has(context.Context, netip.Addr) (bool, error) { return false, nil }
func (services) Learn(context.Context, names.Asker, string, []netip.Addr, time.Duration) error {
	return nil
}
func (services) Forget(context.Context, string, string, netip.Addr) error { return nil }

// world is a Server with listeners for some endpoints. There are no DNS servers, so allowed queries get no answer.
type world struct {
	*Server
	t     *testing.T
	rules *rules.Rules
	pods  *pods.Pods
	fds   []int // the listeners of open
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, rules: rules.New()}
	refusal, err := rules.NewRefusal(rules.Auto, []string{"cluster.local"})
	if err == nil {
		err = w.rules.Upsert(9, rules.Content{Names: []string{"*.example.com"}})
	}
	if err != nil {
		t.Fatal(err)
	}
	x := exchange.New(exchange.Options{
		Rules: w.rules, Table: names.New(names.Limits{Names: 10, Addresses: 10}, time.Now()), Enforcer: services{},
		Cluster: services{}, Refusal: refusal, HoldFor: time.Second, Now: time.Now,
	})
	w.pods = pods.New(shares.Settings{}, x.Leave)
	w.Server = New(Options{
		Exchange: x, Rules: w.rules, Pods: w.pods, Log: slog.New(slog.DiscardHandler),
		Take: func(ctx context.Context, _ bool) (int, error) {
			<-ctx.Done()
			return -1, ctx.Err()
		},
		Later: func(_ uint16, _ int, run func(context.Context), _ func()) { run(t.Context()) },
		Held:  func(time.Duration) {},
	})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return w
}

// listener returns the descriptor and the address of a listener. Its connections have the mark of an endpoint and a
// rule set.
func (w *world) listener(endpoint, set uint16) (int, netip.AddrPort) {
	w.t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err == nil {
		err = errors.Join(
			unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(endpoint)<<16|int(set)),
			unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 1024),
		)
	}
	if err != nil {
		w.t.Fatal(err)
	}
	at, err := unix.Getsockname(fd)
	if err != nil {
		w.t.Fatal(err)
	}
	return fd, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(at.(*unix.SockaddrInet4).Port))
}

// open listens for an endpoint with rule set 9.
func (w *world) open(endpoint uint16) netip.AddrPort {
	w.t.Helper()
	fd, at := w.listener(endpoint, 9)
	w.t.Cleanup(func() { unix.Close(fd) })
	w.fds = append(w.fds, fd)
	all := make([]int, 0, len(w.fds))
	for _, fd := range w.fds {
		own, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			w.t.Fatal(err)
		}
		all = append(all, own)
	}
	w.Listen(all)
	return at
}

func (w *world) dial(to netip.AddrPort) net.Conn {
	w.t.Helper()
	c, err := net.Dial("tcp", to.String())
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = c.Close() })
	if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		w.t.Fatal(err)
	}
	return c
}

func query(t *testing.T, name string) []byte {
	t.Helper()
	m := dnsmessage.Message{
		Header: dnsmessage.Header{ID: 5},
		Questions: []dnsmessage.Question{{
			Name: dnsmessage.MustNewName(name), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET,
		}},
	}
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)
}

func ask(t *testing.T, c net.Conn, name string) dnsmessage.Header {
	t.Helper()
	if _, err := c.Write(query(t, name)); err != nil {
		t.Fatal(err)
	}
	return answer(t, c)
}

func answer(t *testing.T, c net.Conn) dnsmessage.Header {
	t.Helper()
	var size [2]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, binary.BigEndian.Uint16(size[:]))
	if _, err := io.ReadFull(c, b); err != nil {
		t.Fatal(err)
	}
	var p dnsmessage.Parser
	h, err := p.Start(b)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// ends fails the test unless the connection ends.
func ends(t *testing.T, c net.Conn) {
	t.Helper()
	if n, err := c.Read(make([]byte, 1)); err == nil || isTimeout(err) {
		t.Errorf("read %d bytes, %v, want that the connection ends", n, err)
	}
}

func isTimeout(err error) bool {
	n, ok := errors.AsType[net.Error](err)
	return ok && n.Timeout()
}

func until(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for began := time.Now(); !condition(); time.Sleep(time.Millisecond) {
		if time.Since(began) > time.Minute {
			t.Fatalf("%s did not happen", what)
		}
	}
}

func TestRefusedNamesAreAnsweredOnTheConnection(t *testing.T) {
	w := newWorld(t)
	c := w.dial(w.open(7))
	for name, want := range map[string]dnsmessage.RCode{
		"other.test.": dnsmessage.RCodeRefused, "a.example.com.cluster.local.": dnsmessage.RCodeNameError,
	} {
		if h := ask(t, c, name); h.RCode != want || h.ID != 5 || !h.Response {
			t.Errorf("%s: %+v, want %v", name, h, want)
		}
	}
	// Send several queries at once, and one query in parts.
	all := append(query(t, "a.test."), query(t, "b.test.")...)
	for _, part := range [][]byte{all[:1], all[1:20], all[20:]} {
		if _, err := c.Write(part); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond) // lets the parts arrive one by one
	}
	for range 2 {
		if h := answer(t, c); h.RCode != dnsmessage.RCodeRefused {
			t.Errorf("%+v, want it refused", h)
		}
	}
	_ = c.Close()
	until(t, "the end of the connection", func() bool { return w.Len() == 0 && w.Counts.Client.Load() == 1 })
}

func TestQueryThatIsTooLongEndsItsConnection(t *testing.T) {
	w := newWorld(t)
	c := w.dial(w.open(7))
	if _, err := c.Write(binary.BigEndian.AppendUint16(nil, MaxQuery+1)); err != nil {
		t.Fatal(err)
	}
	ends(t, c)
	if n := w.Counts.Invalid.Load(); n != 1 {
		t.Errorf("counted %d times", n)
	}
}

func TestConnectionWithoutARuleSetIsRefused(t *testing.T) {
	w := newWorld(t)
	fd, at := w.listener(7, 0)
	w.Listen([]int{fd})
	if c, err := net.Dial("tcp", at.String()); err == nil { // the reset may arrive before Dial returns
		defer c.Close()
		ends(t, c)
	}
	until(t, "the refusal", func() bool { return w.Counts.Invalid.Load() == 1 })
}

// TestOldestConnectionOfThePodWithMostMakesRoom: a pod with many connections loses its own connections, and other
// pods lose none.
func TestOldestConnectionOfThePodWithMostMakesRoom(t *testing.T) {
	w := newWorld(t)
	victim := w.dial(w.open(8))
	ask(t, victim, "a.test.")
	at := w.open(7)
	var all []net.Conn
	for i := range MaxConnectionsPerPod + 10 {
		c := w.dial(at)
		ask(t, c, fmt.Sprintf("n%d.test.", i))
		all = append(all, c)
	}
	for _, c := range all[:10] {
		ends(t, c)
	}
	ask(t, all[10], "b.test.")
	ask(t, victim, "b.test.")
	until(t, "the end of the oldest ones", func() bool {
		return w.Len() == MaxConnectionsPerPod+1 && w.Counts.Share.Load() == 10
	})
}

// TestFormerListenerServesUntilItIsClosed: when a listener is replaced, its connections continue.
func TestFormerListenerServesUntilItIsClosed(t *testing.T) {
	w := newWorld(t)
	former := w.open(7)
	before := w.dial(former)
	ask(t, before, "a.test.")
	fd, at := w.listener(7, 9)
	w.Listen([]int{fd})
	ask(t, w.dial(at), "a.test.")
	ask(t, before, "b.test.")
}

// TestStopEndsConnections: a stopping process ends its connections without waiting for clients.
func TestStopEndsConnections(t *testing.T) {
	w := newWorld(t)
	silent := w.dial(w.open(7))
	ask(t, silent, "a.test.")
	waiting := w.dial(w.open(8))
	if _, err := waiting.Write(query(t, "a.example.com.")); err != nil { // waits for a socket
		t.Fatal(err)
	}
	until(t, "both connections", func() bool { return w.Len() == 2 })
	var stopped atomic.Bool
	go func() {
		w.stop()
		stopped.Store(true)
	}()
	ends(t, silent)
	ends(t, waiting)
	until(t, "the end of both connections", func() bool { return w.Len() == 0 && stopped.Load() })
}

func TestDeletedPodLosesItsConnections(t *testing.T) {
	w := newWorld(t)
	owner := workload.Owner{ContainerID: "container7", Interface: "eth0"}
	w.pods.Upsert(owner, pods.Endpoint{ID: 7, Namespace: "ns"})
	c := w.dial(w.open(7))
	ask(t, c, "a.test.")
	w.pods.Delete(owner)
	if _, err := c.Write(query(t, "b.test.")); err != nil {
		t.Fatal(err)
	}
	ends(t, c)
	if n := w.Counts.PodGone.Load(); n != 1 {
		t.Errorf("counted %d times", n)
	}
}

// TestConnectionWaitsForItsPod: after a start, a connection may arrive before sluice-datapath has reported its pod.
// It waits for the pod.
func TestConnectionWaitsForItsPod(t *testing.T) {
	w := newWorld(t)
	c := &conn{s: w.Server, ctx: t.Context(), pod: w.pods.Get(7)}
	c.Endpoint, c.Unknown = 7, true
	go w.pods.Upsert(workload.Owner{ContainerID: "c", Interface: "eth0"}, pods.Endpoint{ID: 7, Namespace: "shop"})
	c.identify()
	if c.Unknown || c.Asker.Namespace != "shop" || c.pod != w.pods.Get(7) {
		t.Errorf("unknown %t, asker %+v, want the pod of namespace shop", c.Unknown, c.Asker)
	}
}
