// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/leaktest"
	storev1 "github.com/sluice-net/sluice/proto/gen/sluice/store/v1"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// authority is the CA of a store.
type authority struct {
	t    *testing.T
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{t: t, key: key}
	a.cert = a.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "CA"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, &key.PublicKey)
	return a
}

func (a *authority) sign(c *x509.Certificate, key any) *x509.Certificate {
	a.t.Helper()
	c.SerialNumber, c.NotBefore, c.NotAfter = big.NewInt(1), time.Now().Add(-time.Minute), time.Now().Add(24*time.Hour)
	parent := a.cert
	if parent == nil {
		parent = c
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, key, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return cert
}

func (a *authority) hash() [sha256.Size]byte { return sha256.Sum256(a.cert.Raw) }

// server returns the certificate of a member.
func (a *authority) server(epoch uint64, usage x509.ExtKeyUsage) tls.Certificate {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	cert := a.sign(&x509.Certificate{
		DNSNames: []string{ServerName(epoch)}, ExtKeyUsage: []x509.ExtKeyUsage{usage},
	}, &key.PublicKey)
	return tls.Certificate{Certificate: [][]byte{cert.Raw, a.cert.Raw}, PrivateKey: key}
}

// fakeMember answers like the EnrolService of a member.
type fakeMember struct {
	storev1.UnimplementedEnrolServiceServer
	a       *authority
	address string

	mu    sync.Mutex
	list  *storev1.ListMembersResponse // guarded by mu
	err   error                        // guarded by mu; error with which calls are answered
	only  string                       // guarded by mu; only this call fails with err; empty: all calls
	calls []string                     // guarded by mu; secrets, "renew" and "list"
}

// startMember serves until the test ends.
func startMember(t *testing.T, a *authority, epoch uint64, cert tls.Certificate) *fakeMember {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	m := &fakeMember{a: a, address: l.Addr().String()}
	m.list = &storev1.ListMembersResponse{
		Epoch: epoch, ClientAddresses: []string{"192.0.2.1:23790"}, EnrolAddresses: []string{m.address},
	}
	s := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequestClientCert,
	})))
	storev1.RegisterEnrolServiceServer(s, m)
	go s.Serve(l) //nolint:errcheck // until Stop
	t.Cleanup(s.Stop)
	return m
}

func newMember(t *testing.T, a *authority, epoch uint64) *fakeMember {
	t.Helper()
	return startMember(t, a, epoch, a.server(epoch, x509.ExtKeyUsageServerAuth))
}

func (m *fakeMember) called(what string) (*storev1.ListMembersResponse, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls = append(m.calls, what)
	if m.only != "" && m.only != what {
		return m.list, nil
	}
	return m.list, m.err
}

func (m *fakeMember) fails(err error) { m.refuses("", err) }

// refuses has one kind of calls fail.
func (m *fakeMember) refuses(what string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.only, m.err = what, err
}

func (m *fakeMember) seen() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]string(nil), m.calls...)
}

// Enrol implements the service.
func (m *fakeMember) Enrol(_ context.Context, r *storev1.EnrolRequest) (*storev1.EnrolResponse, error) {
	what := cmp.Or(r.GetSecret(), r.GetAccountToken(), "renew")
	list, err := m.called(what)
	if err != nil {
		return nil, err
	}
	request, err := x509.ParseCertificateRequest(r.GetSigningRequest())
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	cert := m.a.sign(&x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, request.PublicKey)
	return &storev1.EnrolResponse{
		Certificate: cert.Raw, ExpiryTime: timestamppb.New(cert.NotAfter), CaCertificate: m.a.cert.Raw, Members: list,
	}, nil
}

// ListMembers implements the service.
func (m *fakeMember) ListMembers(context.Context, *storev1.ListMembersRequest) (*storev1.ListMembersResponse, error) {
	return m.called("list")
}

// withCA returns a certificate that is sent with the CA certificate of another store.
func withCA(c tls.Certificate, other *authority) tls.Certificate {
	c.Certificate[1] = other.cert.Raw
	return c
}
