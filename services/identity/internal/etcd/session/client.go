// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package session connects a node to etcd.
package session

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
)

// Client says how to reach etcd.
type Client struct {
	// Endpoints are all http://host:port, all https://host:port or all
	// unix:///absolute/path.
	Endpoints []string
	// Files in PEM form, for https. CA is required there; Cert and Key, for
	// clients that etcd wants to know, come together.
	CA, Cert, Key string
	// ServerName is what the server's certificate must say; the endpoint's
	// host if empty.
	ServerName string
	Username   string // with Password, if etcd authenticates by them
	Password   string
}

// Check reads nothing; it says what is wrong with the combination.
func (c Client) Check() error {
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
		errs = append(errs, errors.New("cert and key come together"))
	}
	if (c.Username == "") != (c.Password == "") {
		errs = append(errs, errors.New("username and password come together"))
	}
	return errors.Join(errs...)
}

func (c Client) tls() (*tls.Config, error) {
	if c.CA == "" {
		return nil, nil
	}
	pem, err := os.ReadFile(c.CA)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s: no certificate in it", c.CA)
	}
	t := &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool, ServerName: c.ServerName}
	if c.Cert != "" {
		// Read at every handshake, so that renewed files need no restart.
		load := func() (*tls.Certificate, error) {
			cert, err := tls.LoadX509KeyPair(c.Cert, c.Key)
			return &cert, err
		}
		if _, err := load(); err != nil {
			return nil, err
		}
		t.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return load() }
	}
	return t, nil
}

// Dial returns a client that connects when it is first used.
func (c Client) Dial() (*clientv3.Client, error) {
	if err := c.Check(); err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	t, err := c.tls()
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	client, err := clientv3.New(clientv3.Config{
		Endpoints:            c.Endpoints,
		TLS:                  t,
		Username:             c.Username,
		Password:             c.Password,
		DialKeepAliveTime:    10 * time.Second,
		DialKeepAliveTimeout: 3 * time.Second,
		PermitWithoutStream:  true,
		DialOptions:          dialOptions(),
		// Its retries would be logged for every attempt; failures come back as
		// errors and are logged by who handles them.
		Logger: zap.NewNop(),
	})
	if err != nil {
		return nil, fmt.Errorf("etcd: %w", err)
	}
	return client, nil
}

// dialOptions make a lost connection come back within seconds: gRPC's own
// pauses grow to two minutes.
func dialOptions() []grpc.DialOption {
	return []grpc.DialOption{grpc.WithConnectParams(grpc.ConnectParams{
		Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
		MinConnectTimeout: 2 * time.Second,
	})}
}
