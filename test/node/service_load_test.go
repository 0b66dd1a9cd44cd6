// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// A question consists of the round in which it was sent and a number. The answer adds the backend's number.
const (
	questionSize = 16
	answerSize   = questionSize + 1
)

// load runs clients of a service until stop is called.
type load struct {
	ledger  *ledger
	clients []pod.Pod
	ctx     context.Context // ends with the load
	cancel  context.CancelFunc
	working sync.WaitGroup // clients
	serving sync.WaitGroup // servers, which end after the clients
	servers []io.Closer
	once    sync.Once

	users []*user // used only by the test's goroutine

	mu     sync.Mutex
	errors []error

	connects, ended, lost, datagrams atomic.Uint64
}

// user is one client that sends questions repeatedly.
type user struct {
	what      string
	exchanged atomic.Uint64
}

// newLoad starts the servers of the backends.
func newLoad(t *testing.T, ledger *ledger, backends []pod.Pod, clients ...pod.Pod) *load {
	t.Helper()
	l := &load{ledger: ledger, clients: clients}
	l.ctx, l.cancel = context.WithCancel(t.Context())
	t.Cleanup(func() {
		l.stop()
		for _, err := range l.errors[:min(len(l.errors), 10)] {
			t.Error(err)
		}
		if len(l.errors) > 10 {
			t.Errorf("%d errors more", len(l.errors)-10)
		}
	})
	at := netip.AddrPortFrom(netip.IPv6Unspecified(), backendPort)
	for i, b := range backends {
		listener, err := b.Listen(at)
		if err != nil {
			t.Fatal(err)
		}
		l.servers = append(l.servers, listener)
		packets, err := b.ListenPacket(at)
		if err != nil {
			t.Fatal(err)
		}
		l.servers = append(l.servers, packets)
		l.serving.Go(func() { l.serveConnections(i, listener) })
		l.serving.Go(func() { l.serveDatagrams(i, packets) })
	}
	return l
}

// stop ends the load. It may be called again.
func (l *load) stop() {
	l.once.Do(func() {
		l.cancel()
		l.working.Wait()
		for _, s := range l.servers {
			_ = s.Close()
		}
		l.serving.Wait()
	})
}

func (l *load) String() string {
	var exchanged uint64
	for _, n := range l.progress() {
		exchanged += n
	}
	return fmt.Sprintf("%d exchanges of %d users, %d of them datagrams, %d lost; %d connections made; %d sockets ended",
		exchanged, len(l.users), l.datagrams.Load(), l.lost.Load(), l.connects.Load(), l.ended.Load())
}

func (l *load) fail(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.errors = append(l.errors, fmt.Errorf("round %d: "+format, append([]any{l.ledger.now()}, args...)...))
}

// use runs a client until the load ends.
func (l *load) use(what string, run func(*user)) {
	u := &user{what: what}
	l.users = append(l.users, u)
	l.working.Go(func() { run(u) })
}

// rest waits between two questions. It returns false when the load ends.
func (l *load) rest() bool {
	select {
	case <-l.ctx.Done():
		return false
	case <-time.After(time.Duration(100+rand.IntN(200)) * time.Millisecond):
		return true
	}
}

// wantProgress waits until every client has made two more exchanges.
func (l *load) wantProgress(t *testing.T, when string) {
	t.Helper()
	start := l.progress()
	servicetest.EventuallyNil(t, "every client exchanges data while "+when, func() error {
		l.mu.Lock()
		failed := len(l.errors)
		l.mu.Unlock()
		if failed > 0 {
			t.Fatalf("%d clients or backends have failed while %s", failed, when)
		}
		for i, now := range l.progress() {
			if now < start[i]+2 {
				return fmt.Errorf("%s has made only %d exchanges", l.users[i].what, now)
			}
		}
		return nil
	})
}

// progress returns each client's number of exchanges.
func (l *load) progress() []uint64 {
	all := make([]uint64, len(l.users))
	for i, u := range l.users {
		all[i] = u.exchanged.Load()
	}
	return all
}

// serveConnections answers the questions of each connection.
func (l *load) serveConnections(number int, listener *net.TCPListener) {
	for {
		c, err := listener.AcceptTCP()
		if err != nil {
			return // the listener was closed
		}
		l.serving.Go(func() {
			defer c.Close()
			message := make([]byte, answerSize)
			message[questionSize] = byte(number)
			for {
				if _, err := io.ReadFull(c, message[:questionSize]); err != nil {
					// A client closes its connection only between questions.
					if !errors.Is(err, io.EOF) {
						l.fail("connection from %s to backend %d: %w", c.RemoteAddr(), number, err)
					}
					return
				}
				if _, err := c.Write(message); err != nil {
					l.fail("connection from %s to backend %d: %w", c.RemoteAddr(), number, err)
					return
				}
			}
		})
	}
}

// serveDatagrams answers questions. None may have been sent after the removal of the backend was acknowledged as
// ended.
func (l *load) serveDatagrams(number int, c *net.UDPConn) {
	message := make([]byte, answerSize)
	for {
		size, sender, err := c.ReadFromUDPAddrPort(message)
		if err != nil {
			return // the socket was closed
		}
		if size != questionSize {
			l.fail("backend %d: a datagram of %d bytes from %s", number, size, sender)
			continue
		}
		l.datagrams.Add(1)
		if round := int64(binary.BigEndian.Uint64(message)); !l.ledger.allowed(round, number) {
			l.fail("a datagram of round %d from %s reached backend %d, which was removed (now %d)", round, sender, number,
				l.ledger.now())
		}
		message[questionSize] = byte(number)
		_, _ = c.WriteToUDPAddrPort(message, sender)
	}
}

// pair returns the client and the service address of the i-th user, alternating between clients and families.
func (l *load) pair(i int) (from pod.Pod, to netip.AddrPort) {
	return l.clients[i%len(l.clients)], netip.AddrPortFrom(serviceAddresses[i/len(l.clients)%2], servicePort)
}

// connect connects to the service and sends the first question.
func (l *load) connect(from pod.Pod, to netip.AddrPort) (c *net.TCPConn, backend int, err error) {
	ctx, cancel := context.WithTimeout(l.ctx, patience)
	defer cancel()
	since := l.ledger.now()
	if c, err = from.Dial(ctx, to); err != nil {
		return nil, 0, err
	}
	if backend, err = l.question(c, 0); err == nil && !l.ledger.allowed(since, backend) {
		err = fmt.Errorf("connected to backend %d, which was removed before round %d", backend, since)
	}
	if err == nil && c.RemoteAddr().String() != to.String() {
		err = fmt.Errorf("the socket says %s", c.RemoteAddr())
	}
	if err != nil {
		_ = c.Close()
		return nil, 0, err
	}
	l.connects.Add(1)
	return c, backend, nil
}

// question sends a question over a connection, and returns the number of the answering backend.
func (l *load) question(c *net.TCPConn, number uint64) (backend int, err error) {
	message := make([]byte, answerSize)
	binary.BigEndian.PutUint64(message, uint64(l.ledger.now()))
	binary.BigEndian.PutUint64(message[8:], number)
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return 0, err
	}
	if _, err := c.Write(message[:questionSize]); err != nil {
		return 0, err
	}
	if _, err := io.ReadFull(c, message); err != nil {
		return 0, err
	}
	if got := binary.BigEndian.Uint64(message[8:]); got != number {
		return 0, fmt.Errorf("question %d got the answer to %d", number, got)
	}
	return int(message[questionSize]), nil
}

// converse opens connections that stay open until the load ends.
func (l *load) converse(t *testing.T, connections int) {
	t.Helper()
	for i := range connections {
		from, to := l.pair(i)
		c, backend, err := l.connect(from, to)
		if err != nil {
			t.Fatalf("%s connects to %s: %v", from.Name, to, err)
		}
		what := fmt.Sprintf("connection %d of %s to backend %d", i, from.Name, backend)
		l.use(what, func(u *user) {
			defer c.Close()
			for l.rest() {
				got, err := l.question(c, u.exchanged.Load())
				if err == nil && got != backend {
					err = fmt.Errorf("backend %d answers", got)
				}
				if err != nil {
					l.fail("%s after %d exchanges: %w", what, u.exchanged.Load(), err)
					return
				}
				u.exchanged.Add(1)
			}
		})
	}
}

// ask starts users with connected and unconnected datagram sockets, and users that open a connection for each
// question.
func (l *load) ask(t *testing.T, connected, unconnected, connecting int) {
	t.Helper()
	for i := range connected {
		from, to := l.pair(i)
		l.use(fmt.Sprintf("connected UDP socket %d of %s", i, from.Name), func(u *user) {
			l.untilDone(u, func() error { return l.useConnected(u, from, to) })
		})
	}
	for i := range unconnected {
		from, to := l.pair(i)
		l.use(fmt.Sprintf("UDP socket %d of %s", i, from.Name), func(u *user) {
			l.untilDone(u, func() error { return l.useUnconnected(u, from, to) })
		})
	}
	for i := range connecting {
		from, to := l.pair(i)
		l.use(fmt.Sprintf("client %d of %s", i, from.Name), func(u *user) {
			l.untilDone(u, func() error {
				c, _, err := l.connect(from, to)
				if err != nil {
					return err
				}
				u.exchanged.Add(1)
				return c.Close()
			})
		})
	}
}

// untilDone repeats a user's exchange until the load ends or an exchange fails.
func (l *load) untilDone(u *user, do func() error) {
	for {
		err := do()
		if l.ctx.Err() != nil {
			return
		}
		if err != nil {
			l.fail("%s after %d exchanges: %w", u.what, u.exchanged.Load(), err)
			return
		}
		if !l.rest() {
			return
		}
	}
}

// answerTime is the time after which a datagram counts as lost, as in a resolver.
const answerTime = 2 * time.Second

// datagram sends a question as a datagram, and repeats it until an answer arrives.
func (l *load) datagram(c *net.UDPConn, number uint64, send func([]byte) error,
	receive func([]byte) (int, error),
) (backend int, since int64, err error) {
	message := make([]byte, 64)
	for {
		since = l.ledger.now()
		binary.BigEndian.PutUint64(message, uint64(since))
		binary.BigEndian.PutUint64(message[8:], number)
		if err := c.SetDeadline(time.Now().Add(answerTime)); err != nil {
			return 0, since, err
		}
		if err := send(message[:questionSize]); err != nil {
			return 0, since, err
		}
		for {
			size, err := receive(message)
			if errors.Is(err, os.ErrDeadlineExceeded) && l.ctx.Err() == nil {
				l.lost.Add(1)
				break
			}
			if err != nil {
				return 0, since, err
			}
			// Skip late answers to earlier questions.
			if size == answerSize && binary.BigEndian.Uint64(message[8:]) == number {
				return int(message[questionSize]), since, nil
			}
		}
	}
}

// useConnected uses a connected socket until the socket is ended because its backend was removed.
func (l *load) useConnected(u *user, from pod.Pod, to netip.AddrPort) error {
	since := l.ledger.now()
	c, err := from.DialUDP(to)
	if err != nil {
		return err
	}
	defer c.Close()
	backend := -1
	for {
		got, asked, err := l.datagram(c, u.exchanged.Load(), func(b []byte) error {
			_, err := c.Write(b)
			return err
		}, c.Read)
		switch {
		case errors.Is(err, unix.ECONNABORTED) || errors.Is(err, unix.EDESTADDRREQ):
			l.ended.Add(1)
			// The backend is unknown before the first answer.
			if backend >= 0 && l.ledger.stayed(since, backend) {
				return fmt.Errorf("ended, although backend %d was used in all rounds since %d: %w", backend, since, err)
			}
			return nil
		case err != nil:
			return err
		case backend >= 0 && got != backend:
			return fmt.Errorf("connected to backend %d, but %d answers", backend, got)
		}
		backend, since = got, asked
		u.exchanged.Add(1)
		if !l.rest() {
			return nil
		}
	}
}

// useUnconnected uses an unconnected socket, for which the datapath selects a backend for each datagram.
func (l *load) useUnconnected(u *user, from pod.Pod, to netip.AddrPort) error {
	unspecified := netip.IPv4Unspecified()
	if to.Addr().Is6() {
		unspecified = netip.IPv6Unspecified()
	}
	c, err := from.ListenPacket(netip.AddrPortFrom(unspecified, 0))
	if err != nil {
		return err
	}
	defer c.Close()
	for l.rest() {
		_, _, err := l.datagram(c, u.exchanged.Load(), func(b []byte) error {
			_, err := c.WriteToUDPAddrPort(b, to)
			return err
		}, func(b []byte) (int, error) {
			size, sender, err := c.ReadFromUDPAddrPort(b)
			if sender = netip.AddrPortFrom(sender.Addr().Unmap(), sender.Port()); err == nil && sender != to {
				err = fmt.Errorf("asked %s, and %s answers", to, sender)
			}
			return size, err
		})
		if err != nil {
			return err
		}
		u.exchanged.Add(1)
	}
	return nil
}
