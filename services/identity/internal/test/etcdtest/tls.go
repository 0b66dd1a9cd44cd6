// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcdtest

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// TLS is an etcd of one member that asks clients for a certificate. The common
// name of a certificate is the user.
type TLS struct {
	*Server
	CA string // file with the certificate that signed all others

	dir     string
	name    string // name in the server's certificate, if it is not the address
	ca      *x509.Certificate
	caKey   *ecdsa.PrivateKey
	serials int64
}

// StartTLS starts an empty etcd that requires TLS and ends with the test.
func StartTLS(t testing.TB) *TLS {
	t.Helper()
	return startTLS(t, "")
}

// StartTLSAs is like StartTLS, but etcd's certificate has a name instead of the address.
func StartTLSAs(t testing.TB, name string) *TLS {
	t.Helper()
	return startTLS(t, name)
}

func startTLS(t testing.TB, name string) *TLS {
	t.Helper()
	s := &TLS{Server: &Server{t: t}, dir: t.TempDir(), name: name}
	s.newAuthority()
	cert, keyFile := s.Files("etcd")
	m := &Member{t: t, data: filepath.Join(s.dir, "data"), Endpoint: "https://127.0.0.1:0"}
	m.args = []string{
		"--data-dir", m.data, "--listen", m.Endpoint, "--die-with-parent",
		"--cert", cert, "--key", keyFile, "--client-ca", s.CA,
	}
	s.Members = []*Member{m}
	t.Cleanup(s.Down)
	s.Up()
	s.Endpoint, s.endpoints = m.Endpoint, []string{m.Endpoint}
	m.args[3] = m.Endpoint // use the same port at the next start
	return s
}

// newAuthority creates a certificate authority in the file CA; it signs all later certificates.
func (s *TLS) newAuthority() {
	s.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		s.t.Fatal(err)
	}
	s.serials++
	s.caKey = key
	s.ca = &x509.Certificate{
		SerialNumber: big.NewInt(s.serials), Subject: pkix.Name{CommonName: fmt.Sprint("authority ", s.serials)},
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, s.ca, s.ca, &key.PublicKey, key)
	if err != nil {
		s.t.Fatal(err)
	}
	s.CA = s.write("ca.pem", "CERTIFICATE", der)
}

// Rotate restarts etcd with another authority and new certificates; the former ones are no longer valid.
func (s *TLS) Rotate() {
	s.t.Helper()
	s.Down()
	s.newAuthority()
	s.Files("etcd")
	s.Up()
}

// Files creates a certificate of a user and its key, and returns their files.
func (s *TLS) Files(user string) (cert, key string) {
	s.t.Helper()
	pair, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		s.t.Fatal(err)
	}
	s.serials++
	template := &x509.Certificate{
		SerialNumber: big.NewInt(s.serials), Subject: pkix.Name{CommonName: user}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth},
	}
	if user == "etcd" && s.name != "" {
		template.IPAddresses, template.DNSNames = nil, []string{s.name}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, s.ca, &pair.PublicKey, s.caKey)
	if err != nil {
		s.t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(pair)
	if err != nil {
		s.t.Fatal(err)
	}
	return s.write(user+".pem", "CERTIFICATE", der), s.write(user+".key", "PRIVATE KEY", keyDER)
}

func (s *TLS) write(name, kind string, b []byte) string {
	path := filepath.Join(s.dir, name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}), 0o600); err != nil {
		s.t.Fatal(err)
	}
	return path
}

// As returns a client of a user, which is closed after the test.
func (s *TLS) As(user string) *clientv3.Client {
	s.t.Helper()
	pair, err := tls.LoadX509KeyPair(s.Files(user))
	if err != nil {
		s.t.Fatal(err)
	}
	roots := x509.NewCertPool()
	pem, err := os.ReadFile(s.CA)
	if err != nil || !roots.AppendCertsFromPEM(pem) {
		s.t.Fatal(err)
	}
	c, err := clientv3.New(clientv3.Config{
		Endpoints: s.endpoints, Logger: zap.NewNop(),
		TLS: &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots},
	})
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { c.Close() })
	return c
}
