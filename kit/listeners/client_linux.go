// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package listeners

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"
)

// Client is a connection to a Store. Its methods may be called concurrently.
type Client struct {
	conn    packets
	answers chan byte
	ended   chan struct{}

	mu sync.Mutex // one request at a time
}

// ErrNotKept is returned by Keep if the store does not accept a listener.
var ErrNotKept = errors.New("the store does not keep this listener")

// Connect connects to the store at the path of its socket. It returns the listeners that the store has kept, which are
// also open in the store, until ctx ends.
func Connect(ctx context.Context, path string) (_ *Client, kept []*net.TCPListener, err error) {
	c, err := new(net.Dialer).DialContext(ctx, "unixpacket", path)
	if err != nil {
		return nil, nil, fmt.Errorf("connect to the store of listening sockets: %w", err)
	}
	conn := c.(packets) //nolint:forcetypeassert // the network says so
	defer func() {
		if err != nil {
			conn.Close()
			for _, l := range kept {
				l.Close()
			}
			kept = nil
		}
	}()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	for {
		m, err := receive(conn)
		if err != nil {
			return nil, kept, fmt.Errorf("receive listening sockets: %w", err)
		}
		if m.kind == ends {
			break
		}
		l, err := listener(m.fd)
		if err != nil {
			return nil, kept, fmt.Errorf("receive the listening socket %v: %w", m.addr, err)
		}
		kept = append(kept, l)
	}
	if !stop() {
		return nil, kept, ctx.Err()
	}
	client := &Client{conn: conn, answers: make(chan byte), ended: make(chan struct{})}
	go client.read()
	return client, kept, nil
}

// listener makes a listener of a descriptor, which it closes.
func listener(fd int) (*net.TCPListener, error) {
	if fd < 0 {
		return nil, errors.New("the message has no descriptor")
	}
	f := os.NewFile(uintptr(fd), "listener")
	defer f.Close()
	l, err := net.FileListener(f)
	if err != nil {
		return nil, err
	}
	tcp, ok := l.(*net.TCPListener)
	if !ok {
		return nil, errors.Join(errors.New("the descriptor is not a TCP socket"), l.Close())
	}
	return tcp, nil
}

// read passes answers to requests until the connection ends.
func (c *Client) read() {
	defer close(c.ended)
	for {
		m, err := receive(c.conn)
		if err != nil {
			return
		}
		closeFD(m.fd)
		select {
		case c.answers <- m.kind:
		case <-time.After(sendTimeout): // the caller has given up the request
			return
		}
	}
}

// Ended returns a channel that is closed when the connection has ended. The store may then have lost its sockets.
func (c *Client) Ended() <-chan struct{} { return c.ended }

// Close closes the connection. The store keeps its sockets for the next one.
func (c *Client) Close() error {
	err := c.conn.Close()
	<-c.ended
	return err
}

// Keep makes the store keep a listener. A listener with the same address is replaced.
func (c *Client) Keep(l *net.TCPListener) error {
	raw, err := l.SyscallConn()
	if err != nil {
		return err
	}
	var kind byte
	cerr := raw.Control(func(fd uintptr) {
		kind, err = c.request(message{kind: keep, addr: addrOf(l), fd: int(fd)}) //nolint:gosec // a descriptor is small
	})
	switch {
	case errors.Join(cerr, err) != nil:
		return fmt.Errorf("keep the listener %v: %w", l.Addr(), errors.Join(cerr, err))
	case kind == full:
		return ErrFull
	case kind != done:
		return fmt.Errorf("%w: %v", ErrNotKept, l.Addr())
	}
	return nil
}

// Drop makes the store close a listener. It is not an error if the store does not have it.
func (c *Client) Drop(l *net.TCPListener) error {
	if _, err := c.request(message{kind: drop, addr: addrOf(l), fd: -1}); err != nil {
		return fmt.Errorf("close the kept listener %v: %w", l.Addr(), err)
	}
	return nil
}

// request sends a request, and returns the answer. After an error, the connection is closed.
func (c *Client) request(m message) (byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := send(c.conn, m); err != nil {
		c.conn.Close()
		return 0, err
	}
	select {
	case kind := <-c.answers:
		return kind, nil
	case <-c.ended:
		return 0, net.ErrClosed
	case <-time.After(sendTimeout):
		c.conn.Close()
		return 0, os.ErrDeadlineExceeded
	}
}

func addrOf(l *net.TCPListener) netip.AddrPort {
	a := l.Addr().(*net.TCPAddr).AddrPort() //nolint:forcetypeassert // of a TCP listener
	return netip.AddrPortFrom(a.Addr().WithZone(""), a.Port())
}
