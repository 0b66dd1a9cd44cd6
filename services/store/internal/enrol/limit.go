// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package enrol

import (
	"net"
	"net/netip"
	"sync"

	"github.com/sluice-net/sluice/kit/rpc"
)

// perSource limits the open connections of one source address, or of one /64 of IPv6, so that one machine cannot use up
// all connections. Connections beyond the limit are closed at once.
type perSource struct {
	net.Listener
	most int

	mu   sync.Mutex
	open map[netip.Prefix]int // guarded by mu
}

func limitPerSource(l net.Listener, most int) *perSource {
	return &perSource{Listener: l, most: most, open: map[netip.Prefix]int{}}
}

// Accept implements net.Listener.
func (l *perSource) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		from := rpc.SourceOf(c.RemoteAddr())
		if l.take(from) {
			return &counted{Conn: c, give: sync.OnceFunc(func() { l.give(from) })}, nil
		}
		c.Close() //nolint:errcheck // refused
	}
}

func (l *perSource) take(from netip.Prefix) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open[from] >= l.most {
		return false
	}
	l.open[from]++
	return true
}

func (l *perSource) give(from netip.Prefix) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open[from]--; l.open[from] == 0 {
		delete(l.open, from)
	}
}

// counted is a connection that counts until it is closed.
type counted struct {
	net.Conn
	give func()
}

// Close implements net.Conn.
func (c *counted) Close() error {
	defer c.give()
	return c.Conn.Close()
}
