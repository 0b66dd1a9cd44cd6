// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package authority

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"testing"
	"time"
)

func clock(at time.Time) func() time.Time { return func() time.Time { return at } }

func request(t *testing.T, name string) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader,
		&x509.CertificateRequest{Subject: pkix.Name{CommonName: name}, DNSNames: []string{ServerName(1)}}, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func TestNodesCertificateIsOfTheNameThatTheStoreGives(t *testing.T) {
	a, err := New(time.Now)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := a.Sign("n1", "first", request(t, "root"))
	if err != nil {
		t.Fatal(err)
	}
	if cert.Subject.CommonName != "node:n1" || len(cert.DNSNames) != 0 {
		t.Errorf("the certificate is of %q with names %q", cert.Subject.CommonName, cert.DNSNames)
	}
	if Enrolment(cert) != "first" {
		t.Errorf("the certificate is of the enrolment %q", Enrolment(cert))
	}
	client := x509.VerifyOptions{Roots: a.Nodes(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	if _, err := cert.Verify(client); err != nil {
		t.Errorf("as a client: %v", err)
	}
	if _, err := cert.Verify(x509.VerifyOptions{Roots: a.Nodes()}); err == nil {
		t.Error("a node's certificate passes for a server's")
	}
	client.Roots = pool(a.members.cert)
	if _, err := cert.Verify(client); err == nil {
		t.Error("a node's certificate passes for a member's")
	}
	client.Roots = a.Nodes()
	client.CurrentTime = time.Now().Add(NodeLifetime + time.Second)
	if _, err := cert.Verify(client); err == nil {
		t.Error("an expired certificate is valid")
	}
	client.CurrentTime = time.Now().Add(-time.Hour)
	if _, err := cert.Verify(client); err != nil {
		t.Errorf("on a machine whose clock is an hour behind: %v", err)
	}
	node, ok := Node(cert.Subject.CommonName)
	if !ok || node != "n1" {
		t.Errorf("the user is of the node %q, %v", node, ok)
	}
	if _, ok := Node("root"); ok {
		t.Error("etcd's administrator is a node")
	}
}

func TestMembersCertificateNamesItsEpoch(t *testing.T) {
	a, err := New(time.Now)
	if err != nil {
		t.Fatal(err)
	}
	server, err := a.Server("m", 2)
	if err != nil {
		t.Fatal(err)
	}
	for epoch, valid := range map[uint64]bool{1: false, 2: true, 3: false} {
		_, err := server.Leaf.Verify(x509.VerifyOptions{Roots: a.Nodes(), DNSName: ServerName(epoch)})
		if (err == nil) != valid {
			t.Errorf("epoch %d: %v", epoch, err)
		}
	}
	peer, err := a.PeerPEM("m")
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(peer, peer)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{Roots: pool(a.members.cert), DNSName: PeerName()}); err != nil {
		t.Errorf("a member's certificate for members: %v", err)
	}
}

func TestOnlyRequestsWithTheirPrivateKeyAreSigned(t *testing.T) {
	a, err := New(time.Now)
	if err != nil {
		t.Fatal(err)
	}
	good := request(t, "n1")
	forged := bytes.Clone(good)
	forged[len(forged)-1] ^= 1
	_, private, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	other, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, private)
	if err != nil {
		t.Fatal(err)
	}
	for what, r := range map[string][]byte{
		"nothing": nil, "cut": good[:50], "a forged signature": forged, "Ed25519": other,
	} {
		if _, err := a.Sign("n1", "first", r); !errors.Is(err, ErrRequest) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestAuthorityIsReadAsItWasWritten(t *testing.T) {
	a, err := New(clock(time.Unix(1_900_000_000, 0)))
	if err != nil {
		t.Fatal(err)
	}
	text, err := a.Encode()
	if err != nil {
		t.Fatal(err)
	}
	b, err := Decode(text, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	if a.Hash() != b.Hash() || !bytes.Equal(a.MembersPEM(), b.MembersPEM()) {
		t.Error("another CA was read")
	}
	half := len(text) / 2
	c, err := New(time.Now)
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := c.Encode()
	if err != nil {
		t.Fatal(err)
	}
	certEnd := bytes.Index(text, []byte("-----BEGIN PRIVATE KEY"))
	otherEnd := bytes.Index(foreign, []byte("-----BEGIN PRIVATE KEY"))
	mixed := append(bytes.Clone(foreign[:otherEnd]), text[certEnd:]...)
	for what, corrupt := range map[string][]byte{
		"nothing": nil, "half": text[:half], "text behind it": append(bytes.Clone(text), "x"...), "another CA's key": mixed,
	} {
		if _, err := Decode(corrupt, time.Now); err == nil {
			t.Errorf("%s is read", what)
		}
	}
}
