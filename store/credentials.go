// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"time"

	"google.golang.org/grpc/credentials"

	"github.com/sluice-net/sluice/kit/durable"
)

// Credentials of a node for the store, and the addresses of the members.
type Credentials struct {
	Node        string   `json:"node"`
	Epoch       uint64   `json:"epoch"`
	Clients     []string `json:"clients"` // addresses of etcd, as IP:port
	Enrol       []string `json:"enrol"`   // addresses of EnrolService, as IP:port
	CA          string   `json:"ca"`      // PEM
	Certificate string   `json:"certificate"`
	Key         string   `json:"key"` // secret
}

// File is the name of the credentials in a directory.
const File = "store.json"

var schema = durable.Schema{Name: "sluice.store.credentials.v1", Version: 1}

// fileLimit is the maximum size of the file, larger than any Credentials.
const fileLimit = 64 << 10

// Load reads the credentials from a directory.
func Load(dir string) (Credentials, error) {
	var c Credentials
	if err := durable.Load(filepath.Join(dir, File), fileLimit, schema, &c); err != nil {
		return Credentials{}, fmt.Errorf("credentials of the store: %w (sluice store join writes them)", err)
	}
	if c.Node == "" || c.Epoch == 0 || len(c.Clients) == 0 || len(c.Enrol) == 0 {
		return Credentials{}, fmt.Errorf("credentials of the store: %s lacks the node, the epoch or addresses; "+
			"join again", filepath.Join(dir, File))
	}
	return c, nil
}

// Save replaces the credentials in a directory atomically, so that certificate and key always match.
func (c Credentials) Save(dir string) error {
	return durable.Save(filepath.Join(dir, File), schema, c, durable.SyncAll)
}

// Pair returns the client certificate with its key.
func (c Credentials) Pair() (tls.Certificate, error) {
	pair, err := tls.X509KeyPair([]byte(c.Certificate), []byte(c.Key))
	if err != nil {
		return pair, fmt.Errorf("certificate of the node %s: %w; join again", c.Node, err)
	}
	return pair, nil
}

// Roots returns the CA.
func (c Credentials) Roots() (*x509.CertPool, error) {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM([]byte(c.CA)) {
		return nil, errors.New("CA of the store: no certificate in PEM; join again")
	}
	return roots, nil
}

// Validity returns from when to when the certificate is valid.
func (c Credentials) Validity() (from, to time.Time, err error) {
	pair, err := c.Pair()
	if err != nil {
		return from, to, err
	}
	return pair.Leaf.NotBefore, pair.Leaf.NotAfter, nil
}

// ErrNone is returned by a node that has no credentials yet.
var ErrNone = errors.New("this node has no credentials for sluice-store yet")

// TLS returns the configuration of a connection to a member.
func (c Credentials) TLS() (*tls.Config, error) {
	if c.Epoch == 0 {
		return nil, ErrNone
	}
	pair, err := c.Pair()
	if err != nil {
		return nil, err
	}
	roots, err := c.Roots()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion: tls.VersionTLS13, RootCAs: roots, ServerName: ServerName(c.Epoch),
		// Present the certificate also to a server that asks for other authorities, so that the refusal names the
		// reason.
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &pair, nil },
	}, nil
}

// Endpoints returns the addresses of etcd in the form of etcd's client.
func (c Credentials) Endpoints() []string {
	if len(c.Clients) == 0 {
		return []string{"https://127.0.0.1:1"} // etcd's client requires an endpoint; nothing listens on this one
	}
	var all []string
	for _, a := range c.Clients {
		all = append(all, "https://"+a)
	}
	return all
}

func encodePEM(kind string, der []byte) string {
	return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
}

// Transport returns the credentials of gRPC connections to members. The credentials of gRPC itself would check the
// server's address instead of the name in the TLS configuration.
func (c Credentials) Transport() (credentials.TransportCredentials, error) {
	t, err := c.TLS()
	if err != nil {
		return nil, err
	}
	return named{credentials.NewTLS(t), t.ServerName}, nil
}

type named struct {
	credentials.TransportCredentials
	name string
}

// ClientHandshake implements credentials.TransportCredentials.
func (n named) ClientHandshake(
	ctx context.Context, _ string, conn net.Conn,
) (net.Conn, credentials.AuthInfo, error) {
	return n.TransportCredentials.ClientHandshake(ctx, n.name, conn)
}

// Clone implements credentials.TransportCredentials.
func (n named) Clone() credentials.TransportCredentials {
	return named{n.TransportCredentials.Clone(), n.name}
}
