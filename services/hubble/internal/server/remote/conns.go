// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package remote

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/hubble/internal/server/reader"
)

// Limits of connections. Before the end of its handshake, a client is unknown. Afterwards its certificate tells the
// tenant.
const (
	maxConns        = 64
	maxTenantsConns = 48 // with certificates of tenants; the rest is reserved for the relay and operators
	maxTenantConns  = 16 // with certificates of one tenant
	maxHandshakes   = 64
	handshakeTime   = 3 * time.Second
)

// conns contains the open connections. It is both the listener, which counts handshakes, and the credentials, which
// count clients.
type conns struct {
	net.Listener
	log *slog.Logger

	mu         sync.Mutex
	handshakes []*conn               // guarded by mu; oldest first
	clients    int                   // guarded by mu; connections after the handshake
	tenants    int                   // guarded by mu; clients with certificates of tenants
	byTenant   map[shares.Tenant]int // guarded by mu
	logged     time.Time             // guarded by mu; time at which a refused client was last logged
}

// conn is one connection.
type conn struct {
	net.Conn
	all    *conns
	source netip.Prefix   // the client's IPv4 address, or the IPv6 network that a client usually has
	client *reader.Reader // guarded by all.mu; nil before the end of the handshake
}

// Accept returns the next connection. Above maxHandshakes, it closes the oldest connection of the source that has the
// most handshakes. So a client with many silent connections displaces only its own connections.
func (s *conns) Accept() (net.Conn, error) {
	raw, err := s.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: raw, all: s, source: rpc.SourceOf(raw.RemoteAddr())}
	if oldest := s.begin(c); oldest != nil {
		oldest.Close() //nolint:errcheck,gosec // nothing was sent
	}
	return c, nil
}

// begin counts a handshake. It returns the connection that must be closed for it; nil if none.
func (s *conns) begin(c *conn) (oldest *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.handshakes = append(s.handshakes, c)
	if len(s.handshakes) <= maxHandshakes {
		return nil
	}
	bySource := make(map[netip.Prefix]int)
	for _, x := range s.handshakes {
		bySource[x.source]++
	}
	for _, x := range s.handshakes {
		if oldest == nil || bySource[x.source] > bySource[oldest.source] {
			oldest = x
		}
	}
	return oldest
}

// Close closes the connection, which then no longer counts.
func (c *conn) Close() error {
	c.all.leave(c)
	return c.Conn.Close()
}

// leave removes a handshake or a client from the counts. It may be called more than once, because connections are
// closed more than once.
func (s *conns) leave(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.handshakes = slices.DeleteFunc(s.handshakes, func(x *conn) bool { return x == c })
	if c.client == nil {
		return
	}
	r := *c.client
	c.client = nil
	s.clients--
	if r.All {
		return
	}
	s.tenants--
	if s.byTenant[r.Tenant]--; s.byTenant[r.Tenant] == 0 {
		delete(s.byTenant, r.Tenant)
	}
}

// admit counts a connection as a client and no longer as a handshake, unless there are too many clients.
func (s *conns) admit(c *conn, r reader.Reader) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !slices.Contains(s.handshakes, c) {
		return net.ErrClosed
	}
	var err error
	switch {
	case s.clients >= maxConns:
		err = fmt.Errorf("the maximum of %d connections is reached", maxConns)
	case !r.All && s.tenants >= maxTenantsConns:
		err = fmt.Errorf("the maximum of %d connections with certificates of tenants is reached", maxTenantsConns)
	case !r.All && s.byTenant[r.Tenant] >= maxTenantConns:
		err = fmt.Errorf("the maximum of %d connections with certificates of %s is reached", maxTenantConns, r.Tenant)
	}
	if err != nil {
		if now := time.Now(); now.Sub(s.logged) >= time.Minute {
			s.logged = now
			s.log.Warn("the connection of a client was closed; further closed connections are not logged for a minute",
				"client", c.RemoteAddr().String(), log.Err(err))
		}
		return err
	}
	s.handshakes = slices.DeleteFunc(s.handshakes, func(x *conn) bool { return x == c })
	c.client = &r
	s.clients++
	if !r.All {
		s.tenants++
		s.byTenant[r.Tenant]++
	}
	return nil
}

// admission performs TLS handshakes and admits clients.
type admission struct {
	credentials.TransportCredentials
	conns *conns
}

// errForeign is returned for a connection that conns did not accept.
var errForeign = errors.New("the connection is not one of this listener")

// ServerHandshake implements the interface. gRPC closes the connection if it fails.
func (a admission) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	secure, info, err := a.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	c, ok := raw.(*conn)
	if !ok {
		return nil, nil, errForeign
	}
	r, err := reader.OfInfo(info)
	if err != nil { // the connection is admitted, and each of its calls is refused with the reason
		r = reader.Reader{}
	}
	if err := a.conns.admit(c, r); err != nil {
		return nil, nil, err
	}
	return secure, info, nil
}

// Clone implements the interface.
func (a admission) Clone() credentials.TransportCredentials {
	return admission{a.TransportCredentials.Clone(), a.conns}
}
