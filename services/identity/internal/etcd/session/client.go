// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package session connects a node to etcd.
package session

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"

	"github.com/sluice-net/sluice/store"
)

// Client has the settings of connections to etcd.
type Client struct {
	// Endpoints are all http://host:port, all https://host:port or all
	// unix:///absolute/path.
	Endpoints []string
	// Paths of PEM files for https. Each new connection reads the files again. https requires CA. Cert and Key are for
	// an etcd that authenticates its clients by certificates; either both are set or neither.
	CA, Cert, Key string
	// ServerName is the name that the server's certificate must have; if empty, the endpoint's host.
	ServerName string
	Username   string // used with Password, if etcd authenticates clients by user name
	Password   string
	// Store has the credentials of sluice-store and the addresses of its members; nil for another etcd. The fields
	// above are then not used.
	Store *store.Renewer
}

// Check returns an error for a wrong combination of settings. It reads no files.
func (c Client) Check() error {
	if c.Store != nil {
		return nil
	}
	if len(c.Endpoints) == 0 {
		return errors.New("endpoints: at least one is needed")
	}
	var errs []error
	schemes := map[string]bool{}
	for i, e := range c.Endpoints {
		u, err := url.Parse(e)
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("endpoints[%d]: %w", i, err))
			continue
		case u.Scheme == "unix":
			if u.Host != "" || !filepath.IsAbs(u.Path) {
				errs = append(errs, fmt.Errorf("endpoints[%d]: %q: a socket is given as unix:///absolute/path", i, e))
			}
		case u.Scheme == "http" || u.Scheme == "https":
			if u.Host == "" || u.Port() == "" || strings.Trim(u.Path, "/") != "" || u.User != nil {
				errs = append(errs, fmt.Errorf("endpoints[%d]: %q: want %s://host:port", i, e, u.Scheme))
			}
		default:
			errs = append(errs, fmt.Errorf("endpoints[%d]: %q: want http://, https:// or unix://", i, e))
		}
		schemes[u.Scheme] = true
	}
	if len(schemes) > 1 {
		errs = append(errs, errors.New("endpoints: all need the same scheme"))
	}
	switch tls := schemes["https"]; {
	case tls && c.CA == "":
		errs = append(errs, errors.New("ca: is needed for https endpoints"))
	case !tls && (c.CA != "" || c.Cert != "" || c.Key != "" || c.ServerName != ""):
		errs = append(errs, errors.New("ca, cert, key and serverName need https endpoints"))
	}
	if (c.Cert == "") != (c.Key == "") {
		errs = append(errs, errors.New("cert and key: set both or neither"))
	}
	if (c.Username == "") != (c.Password == "") {
		errs = append(errs, errors.New("username and password: set both or neither"))
	}
	return errors.Join(errs...)
}

// tls reads the files and returns the configuration of one handshake. Its errors name the setting and the file.
func (c Client) tls() (*tls.Config, error) {
	if c.Store != nil {
		return c.Store.Current().TLS()
	}
	pem, err := os.ReadFile(c.CA)
	if err != nil {
		return nil, fmt.Errorf("etcd.ca: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("etcd.ca: %s: no PEM certificate in the file", c.CA)
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool, ServerName: c.ServerName}
	if c.Cert == "" {
		return t, nil
	}
	certPEM, err := os.ReadFile(c.Cert)
	if err != nil {
		return nil, fmt.Errorf("etcd.cert: %w", err)
	}
	keyPEM, err := os.ReadFile(c.Key)
	if err != nil {
		return nil, fmt.Errorf("etcd.key: %w", err)
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		return nil, fmt.Errorf("etcd.cert and etcd.key: %s and %s: %w", c.Cert, c.Key, err)
	}
	// Present the certificate also to a server that asks for other authorities, so that the server's refusal tells the
	// reason.
	t.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil }
	return t, nil
}

// renewed are the credentials of a Client's connections. Each handshake reads the files again, so renewed files need no
// restart, even if another authority issued them. An existing connection keeps the certificate with which it began. A
// tls.Config alone would renew the client's certificate, but not RootCAs.
type renewed struct {
	credentials.TransportCredentials // for the methods that do not depend on the files
	client                           Client
	last                             *handshake
}

func (r renewed) ClientHandshake(
	ctx context.Context, authority string, conn net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	server := conn.RemoteAddr().String()
	t, err := r.client.tls()
	if err != nil {
		r.last.set(server, err)
		return nil, nil, err
	}
	if t.ServerName != "" {
		authority = t.ServerName // gRPC would overwrite the name with the host of the endpoint
	}
	secured, info, err := credentials.NewTLS(t).ClientHandshake(ctx, authority, conn)
	if err != nil {
		if r.client.Store != nil {
			r.client.Store.Failed()
		}
		r.last.set(server, err)
		return nil, nil, err
	}
	return &answering{Conn: secured, server: server, last: r.last}, info, nil
}

func (r renewed) Clone() credentials.TransportCredentials {
	return renewed{r.TransportCredentials.Clone(), r.client, r.last}
}

// handshake keeps the error of the last TLS handshake with etcd. The client retries by itself and then returns a
// deadline error, which does not mention the certificates.
type handshake struct {
	mu  sync.Mutex
	err error // guarded by mu; nil before the first one, and after a success
}

func (h *handshake) set(server string, err error) {
	if err != nil {
		err = fmt.Errorf("last TLS handshake with %s: %w", server, err)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.err = err
}

func (h *handshake) failure() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}

// answering is a connection until the first bytes from etcd arrive. With TLS 1.3, a server refuses a client's
// certificate only after the client has completed the handshake, so an alert may arrive instead.
type answering struct {
	net.Conn
	server string
	last   *handshake
	told   bool // set by the only reader of the connection
}

func (c *answering) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.told || n == 0 && err == nil {
		return n, err
	}
	c.told = true
	var refused *net.OpError
	switch {
	case n > 0:
		c.last.set(c.server, nil)
	case errors.As(err, &refused) && refused.Op == "remote error": // an alert of TLS
		c.last.set(c.server, fmt.Errorf("etcd refuses the connection: %w", err))
	}
	return n, err
}

// dial returns a client that connects when it is first used. It reads the files of TLS once, so that the process does
// not start with a missing or broken file. Later errors of the files appear in handshake.
func (c Client) dial() (*clientv3.Client, *handshake, error) {
	if err := c.Check(); err != nil {
		return nil, nil, fmt.Errorf("etcd: %w", err)
	}
	options, last := dialOptions(), &handshake{}
	var t *tls.Config
	endpoints := c.Endpoints
	if c.Store != nil {
		endpoints = c.Store.Current().Endpoints()
	}
	if c.CA != "" || c.Store != nil {
		var err error
		if t, err = c.tls(); errors.Is(err, store.ErrNone) {
			t = &tls.Config{MinVersion: tls.VersionTLS13} // handshakes fail until there are credentials
		} else if err != nil {
			return nil, nil, err
		}
		// These options replace the TLS options that the client sets itself, so they come last.
		options = append(options, grpc.WithTransportCredentials(renewed{credentials.NewTLS(t), c, last}))
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            endpoints,
		TLS:                  t,
		Username:             c.Username,
		Password:             c.Password,
		DialKeepAliveTime:    10 * time.Second,
		DialKeepAliveTimeout: 3 * time.Second,
		PermitWithoutStream:  true,
		DialOptions:          options,
		// The logger would log every retry. Errors are returned, and logged by the caller.
		Logger: zap.NewNop(),
	})
	if err != nil {
		return nil, nil, fmt.Errorf("etcd: %w", err)
	}
	return client, last, nil
}

// dialOptions returns options that restore a lost connection within seconds: gRPC's own pauses grow to two minutes.
func dialOptions() []grpc.DialOption {
	return []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
		Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
		MinConnectTimeout: 2 * time.Second,
	})}
}
