// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hello

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"math/big"
	"net"
	"sync"
	"testing"
	"time"
)

func certificate(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Unix(1<<36, 0), DNSNames: []string{"a.example"}}
	b, err := x509.CreateCertificate(rand.Reader, c, c, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{b}, PrivateKey: key}
}

// through passes a connection through Reader and Second. It returns the ClientHello, and how Second ended.
func through(t *testing.T, client, server net.Conn) (h *Hello, done func() (bool, error)) {
	t.Helper()
	var r Reader
	buffer := make([]byte, 4096)
	for h == nil {
		n, err := client.Read(buffer)
		if err != nil {
			t.Fatal(err)
		}
		if h, err = r.Add(buffer[:n]); err != nil {
			t.Fatal(err)
		}
	}
	second := NewSecond(h)
	var mu sync.Mutex
	var ended bool
	var failed error
	set := func(done bool, err error) bool {
		mu.Lock()
		defer mu.Unlock()
		ended = ended || done
		if err != nil {
			failed = err
		}
		return err == nil
	}
	if rest := r.Bytes()[h.Length:]; len(rest) > 0 {
		set(second.Client(rest))
	}
	go pump(client, server, func(b []byte) bool { return set(second.Client(b)) })
	go pump(server, client, func(b []byte) bool { return set(second.Server(b), nil) })
	if _, err := server.Write(r.Bytes()); err != nil {
		t.Fatal(err)
	}
	return h, func() (bool, error) {
		mu.Lock()
		defer mu.Unlock()
		return ended, failed
	}
}

// pump copies bytes that look accepts.
func pump(from, to net.Conn, look func([]byte) bool) {
	defer to.Close()
	b := make([]byte, 4096)
	for {
		n, err := from.Read(b)
		if err != nil || !look(b[:n]) {
			return
		}
		if _, err := to.Write(b[:n]); err != nil {
			return
		}
	}
}

func TestGenuineHandshakesPass(t *testing.T) {
	cert := certificate(t)
	for _, c := range []struct {
		about  string
		client *tls.Config
		server *tls.Config
		retry  bool
	}{
		{"TLS 1.3", &tls.Config{}, &tls.Config{}, false},
		{"a retry", &tls.Config{}, &tls.Config{CurvePreferences: []tls.CurveID{tls.CurveP384}}, true},
		{"TLS 1.2", &tls.Config{}, &tls.Config{MaxVersion: tls.VersionTLS12}, false}, //nolint:gosec // servers of TLS 1.2
	} {
		t.Run(c.about, func(t *testing.T) {
			sessions := tls.NewLRUClientSessionCache(4)
			server := c.server
			server.Certificates = []tls.Certificate{cert}
			resumed := false
			for range 20 { // most of them continue the session of the first
				clientEnd, a := net.Pipe()
				b, serverEnd := net.Pipe()
				cc := c.client.Clone()
				cc.ServerName, cc.InsecureSkipVerify, cc.ClientSessionCache = "a.example", true, sessions
				retried := make(chan bool, 1)
				go func() {
					conn := tls.Server(serverEnd, server)
					defer conn.Close()
					err := conn.Handshake()
					retried <- conn.ConnectionState().HelloRetryRequest
					if err == nil {
						_, _ = conn.Write([]byte("x"))
					}
				}()
				conn := tls.Client(clientEnd, cc)
				read := make(chan error, 1)
				go func() {
					_, err := conn.Read(make([]byte, 1))
					read <- err
				}()
				h, done := through(t, a, b)
				if err := <-read; err != nil || h.ServerName != "a.example" {
					t.Fatalf("%v, %+v", err, h)
				}
				if ended, err := done(); !ended || err != nil {
					t.Errorf("ended %v, %v", ended, err)
				}
				resumed = resumed || conn.ConnectionState().DidResume
				if got := <-retried; got != c.retry {
					t.Errorf("retried %v", got)
				}
				_ = conn.Close()
				for _, end := range []net.Conn{a, b, clientEnd, serverEnd} {
					_ = end.Close()
				}
			}
			if !resumed {
				t.Error("no session was continued")
			}
		})
	}
}
