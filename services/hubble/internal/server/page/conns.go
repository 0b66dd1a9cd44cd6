// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package page

import (
	"context"
	"net"
	"sync"
)

// maxConns is the number of connections. Every process of the node can open connections, so a connection whose client
// has no token must not displace a call: at the limit, the oldest connection without a call is closed. maxCalls is
// smaller, so there always is one.
const maxConns = 64

// conns is a listener that limits the number of open connections.
type conns struct {
	net.Listener

	mu   sync.Mutex
	open []*conn // guarded by mu; the oldest first
}

// conn is a connection of a client.
type conn struct {
	net.Conn

	all   *conns
	calls int // guarded by all.mu; running calls with the token
}

func newConns(l net.Listener) *conns { return &conns{Listener: l} }

// Accept implements net.Listener.
func (c *conns) Accept() (net.Conn, error) {
	accepted, err := c.Listener.Accept()
	if err != nil {
		return nil, err
	}
	client := &conn{Conn: accepted, all: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.open) >= maxConns {
		for i, old := range c.open {
			if old.calls == 0 {
				c.open = append(c.open[:i], c.open[i+1:]...)
				_ = old.Conn.Close()
				break
			}
		}
	}
	c.open = append(c.open, client)
	return client, nil
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.all.mu.Lock()
	for i, other := range c.all.open {
		if other == c {
			c.all.open = append(c.all.open[:i], c.all.open[i+1:]...)
			break
		}
	}
	c.all.mu.Unlock()
	return c.Conn.Close()
}

// connKey is the key of the connection in the context of a request.
type connKey struct{}

func withConn(ctx context.Context, c net.Conn) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// use marks the connection of a request as used by a call, until the returned function is called.
func (c *conns) use(ctx context.Context) (done func()) {
	client, ok := ctx.Value(connKey{}).(*conn)
	if !ok {
		return func() {}
	}
	add := func(n int) {
		c.mu.Lock()
		defer c.mu.Unlock()
		client.calls += n
	}
	add(1)
	return func() { add(-1) }
}
