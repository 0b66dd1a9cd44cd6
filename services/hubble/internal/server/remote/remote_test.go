// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package remote

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/hubble/internal/api/observer"
	"github.com/sluice-net/sluice/services/hubble/internal/test/authority"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// bench is a running server.
type bench struct {
	*Server
	t     testing.TB
	ca    *authority.CA
	files Files
}

// open is a service whose calls wait for their clients, or panic.
type open struct {
	observer.UnimplementedObserverServer
}

func (open) GetFlows(
	_ *observer.GetFlowsRequest, stream grpc.ServerStreamingServer[observer.GetFlowsResponse],
) error {
	if err := stream.Send(&observer.GetFlowsResponse{}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return stream.Context().Err()
}

func (open) GetNodes(context.Context, *observer.GetNodesRequest) (*observer.GetNodesResponse, error) {
	panic("a fault")
}

func newBench(t testing.TB) *bench {
	t.Helper()
	return newBenchWith(t, 0)
}

// newBenchWith starts a server with a time limit for handshakes; 0 means the usual limit.
func newBenchWith(t testing.TB, handshake time.Duration) *bench {
	t.Helper()
	dir := t.TempDir()
	b := &bench{t: t, ca: authority.New(t), files: Files{
		Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"), ClientCA: filepath.Join(dir, "ca.crt"),
	}}
	b.install(b.ca, "node-1")
	var err error
	b.Server, err = Listen(Options{
		Address: "127.0.0.1:0", Files: b.files, Healthy: []string{""}, Log: log.Discard(), handshake: handshake,
		Register: func(r grpc.ServiceRegistrar) { observer.RegisterObserverServer(r, open{}) },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- b.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return b
}

// install writes the files with a certificate of the server for a name.
func (b *bench) install(ca *authority.CA, name string) {
	b.t.Helper()
	certificate, key := ca.Sign(name)
	for file, content := range map[string][]byte{b.files.Cert: certificate, b.files.Key: key, b.files.ClientCA: ca.PEM} {
		next := file + ".next"
		if err := os.WriteFile(next, content, 0o600); err != nil {
			b.t.Fatal(err)
		}
		if err := os.Rename(next, file); err != nil {
			b.t.Fatal(err)
		}
	}
}

func (b *bench) dial(c *tls.Config) *grpc.ClientConn {
	b.t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+b.Address(), grpc.WithTransportCredentials(credentials.NewTLS(c)))
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// check makes a call of the health service.
func (b *bench) check(c *tls.Config) error {
	b.t.Helper()
	conn := b.dial(c)
	_, err := grpc_health_v1.NewHealthClient(conn).Check(b.t.Context(), &grpc_health_v1.HealthCheckRequest{})
	return err
}

func TestOnlyClientsWithACertificateOfTheCAAreServed(t *testing.T) {
	b := newBench(t)
	if err := b.check(b.ca.Client("reader", "node-1")); err != nil {
		t.Errorf("a client of the CA: %v", err)
	}
	none := b.ca.Client("reader", "node-1")
	none.Certificates = nil
	other := authority.New(t).Client("reader", "node-1")
	other.RootCAs = b.ca.Pool()
	for name, c := range map[string]*tls.Config{
		"no certificate": none, "of another CA": other, "for another server": b.ca.Client("reader", "node-2"),
	} {
		if err := b.check(c); status.Code(err) != codes.Unavailable {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := b.check(b.ca.Client("tenant.shop.sluice", "node-1")); err != nil {
		t.Errorf("a certificate of a tenant: %v", err)
	}
	err := b.check(b.ca.Client("tenants.shop.sluice", "node-1"))
	if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "tenants.shop.sluice") {
		t.Errorf("a certificate with a mistake in the name: %v", err)
	}
}

// TestCertificatesAreReadAgain: new connections use new files. If new files cannot be used, the former certificate
// stays in use.
func TestCertificatesAreReadAgain(t *testing.T) {
	b := newBench(t)
	before := b.ca
	next := authority.New(t)
	b.install(next, "node-1")
	if err := b.check(next.Client("reader", "node-1")); err != nil {
		t.Errorf("a client of the new CA: %v", err)
	}
	if err := b.check(before.Client("reader", "node-1")); err == nil {
		t.Error("a client of the former CA is served")
	}
	for _, file := range []string{b.files.Cert, b.files.ClientCA} {
		if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := b.check(next.Client("reader", "node-1")); err != nil {
			t.Errorf("with a corrupt %s: %v", filepath.Base(file), err)
		}
	}
	if err := os.Remove(b.files.Key); err != nil {
		t.Fatal(err)
	}
	if err := b.check(next.Client("reader", "node-1")); err != nil {
		t.Errorf("without a key: %v", err)
	}
	if _, err := Listen(Options{Address: "127.0.0.1:0", Files: b.files, Log: log.Discard()}); err == nil {
		t.Error("a server starts with these files")
	}
}

// TestCallsOverTCPAreBounded: clients that do not read their answers occupy at most the maximum number of calls. A
// panic in a handler ends only its call.
func TestCallsOverTCPAreBounded(t *testing.T) {
	b := newBench(t)
	client := observer.NewObserverClient(b.dial(b.ca.Client("reader", "node-1")))
	if _, err := client.GetNodes(t.Context(), &observer.GetNodesRequest{}); status.Code(err) != codes.Internal {
		t.Errorf("a handler that panics: %v", err)
	}
	for range maxCalls {
		stream, err := client.GetFlows(t.Context(), &observer.GetFlowsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Recv(); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.check(b.ca.Client("reader", "node-1")); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("beyond the bound: %v", err)
	}
}

// TestTenantsLeaveCallsToOthers: the calls of one tenant, and of all tenants together, are limited. Other clients can
// still make calls.
func TestTenantsLeaveCallsToOthers(t *testing.T) {
	b := newBench(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	open := func(ctx context.Context, name string, calls int, want codes.Code) {
		t.Helper()
		client := observer.NewObserverClient(b.dial(b.ca.Client(name, "node-1")))
		for i := range calls {
			stream, err := client.GetFlows(ctx, &observer.GetFlowsRequest{})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := stream.Recv(); status.Code(err) != want {
				t.Errorf("call %d of %s: %v, want %s", i, name, err, want)
			}
		}
	}
	first, end := context.WithCancel(ctx)
	open(first, "tenant.a.sluice", maxTenant, codes.OK)
	open(ctx, "tenant.a.sluice", 1, codes.ResourceExhausted)
	for i := range maxTenants/maxTenant - 1 {
		open(ctx, fmt.Sprintf("tenant.b%d.sluice", i), maxTenant, codes.OK)
	}
	open(ctx, "tenant.c.sluice", 1, codes.ResourceExhausted)
	open(ctx, "relay", maxCalls-maxTenants, codes.OK)
	open(ctx, "relay", 1, codes.ResourceExhausted)
	end()
	for b.check(b.ca.Client("tenant.c.sluice", "node-1")) != nil { // wait for the end of the first tenant's calls
		if t.Context().Err() != nil {
			t.Fatal("the calls of a tenant that ended count still")
		}
	}
}

// TestTenantsLeaveConnectionsToOthers: the connections of one tenant, and of all tenants together, are limited. Other
// clients can still connect.
func TestTenantsLeaveConnectionsToOthers(t *testing.T) {
	b := newBench(t)
	open := func(name string, count int, want codes.Code) (conns []*grpc.ClientConn) {
		t.Helper()
		for i := range count {
			conn := b.dial(b.ca.Client(name, "node-1"))
			_, err := grpc_health_v1.NewHealthClient(conn).Check(t.Context(), &grpc_health_v1.HealthCheckRequest{})
			if status.Code(err) != want {
				t.Fatalf("connection %d of %s: %v, want %s", i, name, err, want)
			}
			if want == codes.Unavailable { // gRPC would retry it
				_ = conn.Close()
			}
			conns = append(conns, conn)
		}
		return conns
	}
	first := open("tenant.a.sluice", maxTenantConns, codes.OK)
	open("tenant.a.sluice", 1, codes.Unavailable)
	for i := range maxTenantsConns/maxTenantConns - 1 {
		open(fmt.Sprintf("tenant.b%d.sluice", i), maxTenantConns, codes.OK)
	}
	open("tenant.c.sluice", 1, codes.Unavailable)
	open("relay", maxConns-maxTenantsConns, codes.OK)
	open("relay", 1, codes.Unavailable)
	for _, conn := range first {
		_ = conn.Close()
	}
	for b.check(b.ca.Client("tenant.c.sluice", "node-1")) != nil { // wait until the server has noticed
		if t.Context().Err() != nil {
			t.Fatal("the connections of a tenant that ended count still")
		}
	}
}

// silent opens a connection that sends nothing.
func (b *bench) silent() net.Conn {
	b.t.Helper()
	conn, err := net.Dial("tcp", b.Address())
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// ends waits until the server has closed a connection.
func (b *bench) ends(conn net.Conn) {
	b.t.Helper()
	if err := conn.SetReadDeadline(time.Now().Add(time.Minute)); err != nil { // keeps a failing test from hanging
		b.t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err == nil || os.IsTimeout(err) {
		b.t.Fatalf("a connection that sends nothing stays: %v", err)
	}
}

// TestSilentConnectionsDisplaceNoOther: silent connections of one address occupy all handshakes. Each new client
// displaces the oldest of them.
func TestSilentConnectionsDisplaceNoOther(t *testing.T) {
	b := newBenchWith(t, time.Hour)
	var all []net.Conn
	for range maxHandshakes + 1 {
		all = append(all, b.silent())
	}
	b.ends(all[0])
	conn, err := grpc.NewClient("passthrough:///"+b.Address(),
		grpc.WithTransportCredentials(credentials.NewTLS(b.ca.Client("relay", "node-1"))),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}
			return d.DialContext(ctx, "tcp", address)
		}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	client := grpc_health_v1.NewHealthClient(conn)
	if _, err := client.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{}); err != nil {
		t.Errorf("a client of another address: %v", err)
	}
	b.ends(all[1])
	b.silent()
	b.silent()
	b.ends(all[2]) // the first client has finished its handshake, which left one place
}

// TestHandshakeEnds: the server closes a silent connection after a time.
func TestHandshakeEnds(t *testing.T) {
	b := newBenchWith(t, time.Millisecond)
	b.ends(b.silent())
}
