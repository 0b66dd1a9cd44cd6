// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package remote serves the API over TCP to clients with a certificate.
package remote

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/recovery"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/reflection"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/hubble/internal/server/reader"
)

// Limits for all clients together. A client that does not read its answers occupies a connection, a call and their
// memory.
const (
	maxCalls   = 32
	maxTenants = 24      // calls with certificates of tenants; the rest is reserved for the relay and operators
	maxTenant  = 8       // calls with certificates of one tenant
	maxRecv    = 1 << 20 // bytes of a request
)

// Files contains the names of PEM files. The files are read again when they change.
type Files struct{ Cert, Key, ClientCA string }

// Options describe a Server. All exported fields are required.
type Options struct {
	Address string // host:port
	Files   Files
	// Register adds the services.
	Register func(grpc.ServiceRegistrar)
	// Healthy contains the names that the health service knows.
	Healthy []string
	Log     *slog.Logger

	handshake time.Duration // time limit of a handshake; 0: handshakeTime
}

// Server serves over TCP.
type Server struct {
	grpc     *grpc.Server
	listener net.Listener

	mu       sync.Mutex
	calls    int                   // guarded by mu; running calls
	tenants  int                   // guarded by mu; calls with certificates of tenants
	byTenant map[shares.Tenant]int // guarded by mu
}

// Listen opens the port. It fails if the files cannot be used.
func Listen(o Options) (*Server, error) {
	certificates := &certificates{files: o.Files, log: o.Log}
	if _, err := certificates.load(); err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", o.Address)
	if err != nil {
		return nil, err
	}
	all := &conns{Listener: l, log: o.Log, byTenant: make(map[shares.Tenant]int)}
	s := &Server{listener: all, byTenant: make(map[shares.Tenant]int)}
	s.grpc = grpc.NewServer(
		grpc.Creds(admission{conns: all, TransportCredentials: credentials.NewTLS(&tls.Config{
			MinVersion: tls.VersionTLS13,
			GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
				return certificates.load()
			},
		})}),
		grpc.ChainUnaryInterceptor(recovery.UnaryServerInterceptor(recovered(o.Log)), s.unary),
		grpc.ChainStreamInterceptor(recovery.StreamServerInterceptor(recovered(o.Log)), s.stream),
		grpc.MaxRecvMsgSize(maxRecv), grpc.MaxConcurrentStreams(maxCalls), grpc.MaxHeaderListSize(16<<10),
		grpc.ConnectionTimeout(cmp.Or(o.handshake, handshakeTime)),
		grpc.KeepaliveParams(keepalive.ServerParameters{
			// MaxConnectionIdle closes the connection of a client that makes no calls.
			MaxConnectionIdle: time.Minute, Time: time.Minute, Timeout: 20 * time.Second,
		}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 10 * time.Second, PermitWithoutStream: true}),
	)
	o.Register(s.grpc)
	h := health.NewServer()
	for _, name := range o.Healthy {
		h.SetServingStatus(name, grpc_health_v1.HealthCheckResponse_SERVING)
	}
	grpc_health_v1.RegisterHealthServer(s.grpc, h)
	reflection.Register(s.grpc)
	return s, nil
}

// recovered turns a panic of a handler into an error of its call.
func recovered(l *slog.Logger) recovery.Option {
	return recovery.WithRecoveryHandler(func(p any) error {
		l.Error("handler panicked", "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
		return status.Error(codes.Internal, "the handler panicked; the log of sluice-hubble has the stack")
	})
}

// Address returns the address of the port.
func (s *Server) Address() string { return s.listener.Addr().String() }

// Run serves until ctx ends. Then it ends open calls at once.
func (s *Server) Run(ctx context.Context) error {
	served := make(chan error, 1)
	go func() { served <- s.grpc.Serve(s.listener) }()
	select {
	case err := <-served:
		return fmt.Errorf("serve %s: %w", s.Address(), err)
	case <-ctx.Done():
		s.grpc.Stop()
		<-served
		return nil
	}
}

func (s *Server) unary(ctx context.Context, req any, _ *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	done, err := s.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	return next(ctx, req)
}

func (s *Server) stream(srv any, ss grpc.ServerStream, _ *grpc.StreamServerInfo, next grpc.StreamHandler) error {
	done, err := s.enter(ss.Context())
	if err != nil {
		return err
	}
	defer done()
	return next(srv, ss)
}

// enter admits a call of a client with a certificate.
func (s *Server) enter(ctx context.Context) (done func(), err error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return nil, status.Error(codes.Unauthenticated, "the client has no address")
	}
	if _, ok := p.AuthInfo.(credentials.TLSInfo); !ok {
		return nil, status.Error(codes.Unauthenticated, "the client does not use TLS")
	}
	r, err := reader.Of(ctx)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.calls >= maxCalls:
		return nil, status.Errorf(codes.ResourceExhausted,
			"%d calls over TCP are in progress; try again when one has ended", maxCalls)
	case !r.All && s.tenants >= maxTenants:
		return nil, status.Errorf(codes.ResourceExhausted,
			"%d calls with certificates of tenants are in progress; try again when one has ended", maxTenants)
	case !r.All && s.byTenant[r.Tenant] >= maxTenant:
		return nil, status.Errorf(codes.ResourceExhausted,
			"%d calls with certificates of %s are in progress; try again when one has ended", maxTenant, r.Tenant)
	}
	s.calls++
	if !r.All {
		s.tenants++
		s.byTenant[r.Tenant]++
	}
	return func() { s.leave(r) }, nil
}

// leave ends a call.
func (s *Server) leave(r reader.Reader) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls--
	if r.All {
		return
	}
	s.tenants--
	if s.byTenant[r.Tenant]--; s.byTenant[r.Tenant] == 0 {
		delete(s.byTenant, r.Tenant)
	}
}

// certificates contains the configuration from the files as they were last read.
type certificates struct {
	files Files
	log   *slog.Logger

	mu     sync.Mutex
	config *tls.Config    // guarded by mu
	read   [3]fs.FileInfo // guarded by mu; file information when config was read
	failed string         // guarded by mu; why the current files cannot be used
}

// load returns the configuration from the current files. If they cannot be used, it returns the last valid
// configuration.
func (c *certificates) load() (*tls.Config, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	var now [3]fs.FileInfo
	var errs []error
	for i, name := range []string{c.files.Cert, c.files.Key, c.files.ClientCA} {
		info, err := os.Stat(name)
		now[i] = info
		errs = append(errs, err)
	}
	err := errors.Join(errs...)
	if err == nil && c.config != nil && equal(now, c.read) {
		return c.config, nil
	}
	var config *tls.Config
	if err == nil {
		config, err = c.files.config()
	}
	switch {
	case err == nil:
		if c.config != nil {
			c.log.Info("certificates were read again")
		}
		c.config, c.read, c.failed = config, now, ""
	case c.config == nil:
		return nil, err
	case c.failed != err.Error():
		c.failed = err.Error()
		c.log.Error("the new certificates cannot be used; the former ones stay in use", log.Err(err))
	}
	return c.config, nil
}

func equal(a, b [3]fs.FileInfo) bool {
	for i := range a {
		if !os.SameFile(a[i], b[i]) || !a[i].ModTime().Equal(b[i].ModTime()) || a[i].Size() != b[i].Size() {
			return false
		}
	}
	return true
}

// config reads the files.
func (f Files) config() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, fmt.Errorf("certificate %s with key %s: %w", f.Cert, f.Key, err)
	}
	pem, err := os.ReadFile(f.ClientCA)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s has no certificate in PEM", f.ClientCA)
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{pair}, ClientCAs: pool,
		ClientAuth: tls.RequireAndVerifyClientCert, NextProtos: []string{"h2"},
	}, nil
}
