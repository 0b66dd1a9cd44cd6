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
