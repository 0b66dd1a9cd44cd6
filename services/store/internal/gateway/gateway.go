// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package gateway serves etcd's API to clients and decides the user of each: on the unix socket by the peer's user ID,
// over TCP by a certificate of the store. etcd's roles decide what each may do. A node may only make the calls that it
// needs: etcd itself would allow it to compact the history, for example.
package gateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"go.etcd.io/etcd/server/v3/etcdserver"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3rpc"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/store/internal/access"
	"github.com/sluice-net/sluice/services/store/internal/authority"
	"github.com/sluice-net/sluice/services/store/internal/member"
)

// Options of a Gateway.
type Options struct {
	Etcd *etcdserver.EtcdServer
	// LocalNode is the node on this machine; the user LocalUser acts as this node on the unix socket. On that socket,
	// root is etcd's administrator.
	LocalNode string
	LocalUser uint32
	// Certificate returns this member's present certificate.
	Certificate func() *tls.Certificate
	Nodes       *x509.CertPool // CA of nodes
	// Check returns an error for a node whose certificate, of this enrolment, is not accepted. It wraps access.ErrRefused
	// if the certificate is refused; after another error, open connections stay.
	Check func(ctx context.Context, node, enrolment string) error
	Now   func() time.Time
	Log   *slog.Logger
}

// Limits of connections over TCP after their handshake. A node needs a few.
const (
	maxConnections = 4096
	maxOfNode      = 64
)

// Gateway is a server for etcd's clients.
type Gateway struct {
	o      Options
	server *grpc.Server

	mu    sync.Mutex
	conns map[*conn]bool // guarded by mu; connections of nodes over TCP
}

// New returns a Gateway. etcd must already require a user for every request.
func New(o Options) *Gateway {
	g := &Gateway{o: o, conns: map[*conn]bool{}}
	g.server = v3rpc.Server(o.Etcd, nil, g.unary,
		grpc.Creds(&handshaker{g}),
		grpc.ChainStreamInterceptor(g.stream),
		grpc.ConnectionTimeout(10*time.Second),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}),
	)
	return g
}

// Serve serves a listener until Stop.
func (g *Gateway) Serve(l net.Listener) error { return g.server.Serve(l) }

// Stop ends all connections.
func (g *Gateway) Stop() { g.server.Stop() }

// sweepEvery is how long a connection may stay open after its certificate has expired, or was revoked on another
// member.
const sweepEvery = 2 * time.Second

// Sweep closes connections whose certificate has expired or is no longer accepted, until ctx ends.
func (g *Gateway) Sweep(ctx context.Context) error {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			g.sweep(ctx)
		case <-ctx.Done():
			return nil
		}
	}
}

func (g *Gateway) sweep(ctx context.Context) {
	g.mu.Lock()
	all := make([]*conn, 0, len(g.conns))
	for c := range g.conns {
		all = append(all, c)
	}
	g.mu.Unlock()
	now := g.o.Now()
	for _, c := range all {
		var why error
		if now.After(c.cert.NotAfter) {
			why = errors.New("its certificate has expired")
		} else if err := g.o.Check(ctx, c.node, authority.Enrolment(c.cert)); errors.Is(err, access.ErrRefused) {
			why = err // another error does not mean that the certificate is refused
		}
		if why != nil {
			g.o.Log.Info("closing the connection of a node", "node", c.node, "from", c.RemoteAddr(), "because", why)
			c.Close() //nolint:errcheck // the node notices
		}
	}
}

// conn is a connection of a node over TCP.
type conn struct {
	net.Conn
	g    *Gateway
	node string
	cert *x509.Certificate
}

// Close implements net.Conn.
func (c *conn) Close() error {
	c.g.mu.Lock()
	delete(c.g.conns, c)
	c.g.mu.Unlock()
	return c.Conn.Close()
}

// handshaker implements credentials.TransportCredentials for both kinds of connections.
type handshaker struct{ g *Gateway }

// ServerHandshake implements credentials.TransportCredentials.
func (h *handshaker) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, info, err := h.g.handshake(raw)
	if err != nil {
		raw.Close() //nolint:errcheck // the error of the handshake is the one to report
		h.g.o.Log.Info("a client was refused", "from", raw.RemoteAddr().String(), log.Err(err))
	}
	return c, info, err
}

func (g *Gateway) handshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if local, ok := raw.(*net.UnixConn); ok {
		uid, err := peerUser(local)
		if err != nil {
			return nil, nil, err
		}
		switch uid {
		case 0:
			return raw, member.AuthInfo("root"), nil
		case g.o.LocalUser:
			return raw, member.AuthInfo(authority.User(g.o.LocalNode)), nil
		}
		return nil, nil, fmt.Errorf("uid %d may not connect: root and sluice-identity (uid %d) may", uid, g.o.LocalUser)
	}
	raw.SetDeadline(time.Now().Add(10 * time.Second)) //nolint:errcheck // fails for a closed connection only
	secured, info, err := credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: g.o.Nodes, Time: g.o.Now,
		GetCertificate:         func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return g.o.Certificate(), nil },
		SessionTicketsDisabled: true, // every connection must present a certificate
		// After this check the client still gets an alert of TLS.
		VerifyConnection: func(s tls.ConnectionState) error {
			node, enrolment, err := Node(s)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
			defer cancel()
			return g.o.Check(ctx, node, enrolment)
		},
	}).ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	raw.SetDeadline(time.Time{}) //nolint:errcheck // SetDeadline only fails for a closed connection
	leaf := info.(credentials.TLSInfo).State.VerifiedChains[0][0]
	node, _ := authority.Node(leaf.Subject.CommonName)
	c := &conn{Conn: secured, g: g, node: node, cert: leaf}
	g.mu.Lock()
	defer g.mu.Unlock()
	if err := g.full(node); err != nil {
		secured.Close() //nolint:errcheck // refused
		return nil, nil, err
	}
	g.conns[c] = true
	return c, info, nil
}

// full returns an error if a node may not have another connection. The caller holds mu. A compromised node must not use
// up the connections of other nodes.
func (g *Gateway) full(node string) error {
	if len(g.conns) >= maxConnections {
		return fmt.Errorf("the maximum of %d connections is reached", maxConnections)
	}
	own := 0
	for c := range g.conns {
		if c.node == node {
			own++
		}
	}
	if own >= maxOfNode {
		return fmt.Errorf("the node %s has reached the maximum of %d connections", node, own)
	}
	return nil
}

// Node returns the node and the enrolment of a verified certificate.
func Node(s tls.ConnectionState) (node, enrolment string, err error) {
	if len(s.VerifiedChains) == 0 {
		return "", "", errors.New("the client has no certificate of this store")
	}
	leaf := s.VerifiedChains[0][0]
	node, ok := authority.Node(leaf.Subject.CommonName)
	if !ok {
		return "", "", fmt.Errorf("the certificate is for %q, which is not a node", leaf.Subject.CommonName)
	}
	return node, authority.Enrolment(leaf), nil
}

func peerUser(c *net.UnixConn) (uid uint32, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, fmt.Errorf("ask the kernel for the client's user: %w", credErr)
	}
	return cred.Uid, nil
}

// ClientHandshake implements credentials.TransportCredentials.
func (h *handshaker) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("for servers only")
}

// Info implements credentials.TransportCredentials.
func (h *handshaker) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// Clone implements credentials.TransportCredentials.
func (h *handshaker) Clone() credentials.TransportCredentials { return h }

// OverrideServerName implements credentials.TransportCredentials.
func (h *handshaker) OverrideServerName(string) error { return nil }

// allowed are the calls that nodes may make.
var allowed = []string{
	"/etcdserverpb.KV/Range", "/etcdserverpb.KV/Put", "/etcdserverpb.KV/DeleteRange", "/etcdserverpb.KV/Txn",
	"/etcdserverpb.Watch/Watch",
	"/etcdserverpb.Lease/LeaseGrant", "/etcdserverpb.Lease/LeaseRevoke", "/etcdserverpb.Lease/LeaseKeepAlive",
	"/etcdserverpb.Lease/LeaseTimeToLive",
}

func authorise(ctx context.Context, method string) (user string, err error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return "", status.Error(codes.Unauthenticated, "the connection has no user")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	if !ok || len(info.State.VerifiedChains) == 0 {
		return "", status.Error(codes.Unauthenticated, "the connection has no user")
	}
	user = info.State.VerifiedChains[0][0].Subject.CommonName
	if user == "root" || slices.Contains(allowed, method) || strings.HasPrefix(method, "/grpc.health.v1.Health/") {
		return user, nil
	}
	return "", status.Errorf(codes.PermissionDenied, "%s may not call %s", user, method)
}

// unary is called around each call except streams.
func (g *Gateway) unary(
	ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler,
) (any, error) {
	if _, err := authorise(ctx, info.FullMethod); err != nil {
		return nil, err
	}
	resp, err := handle(ctx, req)
	// If users changed between the call and its turn, etcd did nothing, and the caller may still have the permission.
	for range 3 {
		if !errors.Is(err, rpctypes.ErrGRPCAuthOldRevision) {
			break
		}
		resp, err = handle(ctx, req)
	}
	return resp, err
}

func (g *Gateway) stream(srv any, s grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	if _, err := authorise(s.Context(), info.FullMethod); err != nil {
		return err
	}
	return handle(srv, s)
}
