// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package session

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
)

func TestWrongClientIsNamed(t *testing.T) {
	for want, c := range map[string]Client{
		"at least one":      {},
		"endpoints[0]":      {Endpoints: []string{"localhost:2379"}},
		"endpoints[1]":      {Endpoints: []string{"http://a:1", "http://b"}},
		"same scheme":       {Endpoints: []string{"http://a:1", "unix:///x"}},
		"absolute":          {Endpoints: []string{"unix://x/y"}},
		"ca: is needed":     {Endpoints: []string{"https://a:1"}},
		"need https":        {Endpoints: []string{"http://a:1"}, CA: "/x"},
		"both or neither":   {Endpoints: []string{"https://a:1"}, CA: "/x", Cert: "/y"},
		"username and pass": {Endpoints: []string{"http://a:1"}, Username: "u"},
	} {
		if err := c.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error with %q", c, err, want)
		}
	}
}

func TestTLSFilesAreReadAndNamed(t *testing.T) {
	dir := t.TempDir()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Unix(0, 0), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	file := func(name, kind string, b []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	cert, keyFile := file("cert.pem", "CERTIFICATE", der), file("key.pem", "PRIVATE KEY", keyDER)
	c := Client{Endpoints: []string{"https://localhost:1"}, CA: cert, Cert: cert, Key: keyFile, ServerName: "etcd"}
	cfg, err := c.tls()
	if err != nil || cfg.ServerName != "etcd" || cfg.RootCAs == nil || cfg.InsecureSkipVerify {
		t.Fatalf("tls: %+v, %v", cfg, err)
	}
	if got, err := cfg.GetClientCertificate(nil); err != nil || !bytes.Equal(got.Certificate[0], der) {
		t.Errorf("client certificate: %v, %v", got, err)
	}
	none := filepath.Join(dir, "none.pem")
	for want, bad := range map[string]Client{
		"etcd.ca: open " + none:                               {CA: none},
		"etcd.ca: " + keyFile:                                 {CA: keyFile},
		"etcd.cert: open " + none:                             {CA: cert, Cert: none, Key: keyFile},
		"etcd.key: open " + none:                              {CA: cert, Cert: cert, Key: none},
		"etcd.cert and etcd.key: " + cert + " and " + cert:    {CA: cert, Cert: cert, Key: cert},
		"etcd.cert and etcd.key: " + keyFile + " and " + cert: {CA: cert, Cert: keyFile, Key: cert},
	} {
		bad.Endpoints = c.Endpoints
		client, _, err := bad.dial()
		if err == nil {
			client.Close()
			t.Errorf("%+v is accepted", bad)
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want an error with %q", bad, err, want)
		}
	}
}

// TestServerNameReplacesTheEndpointsHost: gRPC passes the host of the endpoint to the handshake, and that name wins over
// the one in the configuration of TLS.
func TestServerNameReplacesTheEndpointsHost(t *testing.T) {
	named, plain := etcdtest.StartTLSAs(t, "etcd.example"), etcdtest.StartTLS(t)
	for _, c := range []struct {
		what   string
		server *etcdtest.TLS
		name   string
		reason string // why the handshake fails; empty if it succeeds
	}{
		{"the name in the certificate", named, "etcd.example", ""},
		{"another name", named, "other.example", "is valid for etcd.example, not other.example"},
		{"no name", named, "", "because it doesn't contain any IP SANs"},
		{"another name, and the host is in the certificate", plain, "other.example", "not valid for any names"},
		{"no name, and the host is in the certificate", plain, "", ""},
	} {
		t.Run(c.what, func(t *testing.T) {
			cert, key := c.server.Files("n1")
			client, last, err := Client{
				Endpoints: []string{c.server.Endpoint}, CA: c.server.CA, Cert: cert, Key: key, ServerName: c.name,
			}.dial()
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			if c.reason == "" {
				if _, err := client.Get(servicetest.Context(t), "x"); err != nil {
					t.Errorf("%v (%v)", err, last.failure())
				}
				return
			}
			go client.Get(t.Context(), "x") //nolint:errcheck // the handshake is what counts
			servicetest.Eventually(t, "a refusal because: "+c.reason, func() bool {
				err := last.failure() // also that gRPC cancelled a handshake, before it repeats it
				return err != nil && strings.Contains(err.Error(), c.reason)
			})
		})
	}
}
