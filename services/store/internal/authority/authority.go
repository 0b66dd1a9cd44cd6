// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package authority issues the certificates of one store.
//
// It has two CAs. The CA of members signs the certificates that members present to each other; with such a certificate,
// everything can be changed. The CA of nodes signs the server certificates of members and the client certificates of
// nodes. So a node cannot act as a member: its certificate is of the wrong CA for the members' port, and has the wrong
// usage for a server.
package authority

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"strings"
	"time"
)

// Lifetimes of certificates.
const (
	NodeLifetime   = 24 * time.Hour
	memberLifetime = 7 * 24 * time.Hour
	caLifetime     = 20 * 365 * 24 * time.Hour
	// backdate is how far the clock of a machine may be behind the clock of the issuing member.
	backdate = 2 * time.Hour
)

// nodePrefix is the beginning of the common name of a node's certificate, and of etcd's user for the node. Without it,
// a node called root would be etcd's administrator.
const nodePrefix = "node:"

// User returns etcd's user, which is the common name of the certificate, for a node.
func User(node string) string { return nodePrefix + node }

// Node returns the node of a user; false if the user is no node.
func Node(user string) (string, bool) { return strings.CutPrefix(user, nodePrefix) }

// ServerName is the name in the certificates of the members for nodes. It contains the epoch, so that nodes that know
// the epoch of a restored snapshot refuse a member that still runs an earlier epoch.
func ServerName(epoch uint64) string { return fmt.Sprintf("epoch-%d.store.sluice", epoch) }

// peerName is the name in the certificates of members for each other.
const peerName = "member.store.sluice"

// PeerName returns the name that members expect in each other's certificates.
func PeerName() string { return peerName }

// ErrRequest is returned for a request that cannot be signed.
var ErrRequest = errors.New("invalid request for a certificate")

// pair is a CA.
type pair struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// Authority has the CAs of one store.
type Authority struct {
	nodes, members pair
	now            func() time.Time
}

// New makes the CAs of a new store.
func New(now func() time.Time) (*Authority, error) {
	a := &Authority{now: now}
	var err error
	if a.nodes, err = newCA("Sluice store, nodes", now()); err != nil {
		return nil, err
	}
	if a.members, err = newCA("Sluice store, members", now()); err != nil {
		return nil, err
	}
	return a, nil
}

func newCA(name string, now time.Time) (pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return pair{}, err
	}
	serial, err := serial()
	if err != nil {
		return pair{}, err
	}
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name},
		NotBefore: now.Add(-backdate), NotAfter: now.Add(caLifetime),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return pair{}, fmt.Errorf("make the CA %q: %w", name, err)
	}
	cert, err := x509.ParseCertificate(der)
	return pair{cert, key}, err
}

func serial() (*big.Int, error) { return rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127)) }

// The order of the blocks in the PEM form: certificate and key of the nodes' CA, then of the members' CA.
const (
	certBlock = "CERTIFICATE"
	keyBlock  = "PRIVATE KEY"
)

// Encode returns the CAs with their keys in PEM. It is secret.
func (a *Authority) Encode() ([]byte, error) {
	var out bytes.Buffer
	for _, p := range []pair{a.nodes, a.members} {
		key, err := x509.MarshalPKCS8PrivateKey(p.key)
		if err != nil {
			return nil, err
		}
		for _, b := range []*pem.Block{{Type: certBlock, Bytes: p.cert.Raw}, {Type: keyBlock, Bytes: key}} {
			if err := pem.Encode(&out, b); err != nil {
				return nil, err
			}
		}
	}
	return out.Bytes(), nil
}

// Decode reads what Encode wrote.
func Decode(text []byte, now func() time.Time) (*Authority, error) {
	a := &Authority{now: now}
	for _, p := range []*pair{&a.nodes, &a.members} {
		var cert, key *pem.Block
		cert, text = pem.Decode(text)
		key, text = pem.Decode(text)
		if cert == nil || key == nil || cert.Type != certBlock || key.Type != keyBlock {
			return nil, errors.New("the text is not two CA certificates, each followed by its key")
		}
		var err error
		if p.cert, err = x509.ParseCertificate(cert.Bytes); err != nil {
			return nil, err
		}
		parsed, err := x509.ParsePKCS8PrivateKey(key.Bytes)
		if err != nil {
			return nil, err
		}
		ec, ok := parsed.(*ecdsa.PrivateKey)
		if !ok || !ec.PublicKey.Equal(p.cert.PublicKey) || !p.cert.IsCA {
			return nil, fmt.Errorf("the key behind the certificate %q is not the key of this CA", p.cert.Subject.CommonName)
		}
		p.key = ec
	}
	if len(bytes.TrimSpace(text)) > 0 {
		return nil, errors.New("the text continues after the second key")
	}
	return a, nil
}

// NodeCA returns the certificate of the nodes' CA in DER, by which nodes verify members.
func (a *Authority) NodeCA() []byte { return a.nodes.cert.Raw }

// Hash returns the SHA-256 of NodeCA, by which a join token names it.
func (a *Authority) Hash() [sha256.Size]byte { return sha256.Sum256(a.nodes.cert.Raw) }

// Nodes returns the pool of the nodes' CA.
func (a *Authority) Nodes() *x509.CertPool { return pool(a.nodes.cert) }

func pool(c *x509.Certificate) *x509.CertPool {
	p := x509.NewCertPool()
	p.AddCert(c)
	return p
}

// MembersPEM returns the certificate of the members' CA in PEM.
func (a *Authority) MembersPEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: certBlock, Bytes: a.members.cert.Raw})
}

// Sign issues the client certificate of a node for the public key of a PKCS #10 request. It only uses the key in the
// request. The enrolment distinguishes a machine from a later one with its name.
func (a *Authority) Sign(node, enrolment string, request []byte) (*x509.Certificate, error) {
	key, err := Key(request)
	if err != nil {
		return nil, err
	}
	return a.issue(a.nodes, &x509.Certificate{
		Subject:     pkix.Name{CommonName: User(node), OrganizationalUnit: []string{enrolment}},
		NotAfter:    a.now().Add(NodeLifetime),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, key)
}

// Enrolment returns the enrolment in a node's certificate.
func Enrolment(c *x509.Certificate) string {
	if len(c.Subject.OrganizationalUnit) != 1 {
		return ""
	}
	return c.Subject.OrganizationalUnit[0]
}

// Key returns the public key of a PKCS #10 request that was signed with the private key.
func Key(request []byte) (*ecdsa.PublicKey, error) {
	r, err := x509.ParseCertificateRequest(request)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	if err := r.CheckSignature(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrRequest, err)
	}
	key, ok := r.PublicKey.(*ecdsa.PublicKey)
	if !ok || key.Curve != elliptic.P256() {
		return nil, fmt.Errorf("%w: the key is not an ECDSA key on the curve P-256", ErrRequest)
	}
	return key, nil
}

func (a *Authority) issue(ca pair, c *x509.Certificate, key *ecdsa.PublicKey) (*x509.Certificate, error) {
	var err error
	if c.SerialNumber, err = serial(); err != nil {
		return nil, err
	}
	c.NotBefore, c.BasicConstraintsValid, c.KeyUsage = a.now().Add(-backdate), true, x509.KeyUsageDigitalSignature
	der, err := x509.CreateCertificate(rand.Reader, c, ca.cert, key, ca.key)
	if err != nil {
		return nil, fmt.Errorf("issue the certificate of %s: %w", c.Subject.CommonName, err)
	}
	return x509.ParseCertificate(der)
}

// Server returns a certificate of a member for its servers, followed by the certificate of the CA: a machine that joins
// only knows the CA's hash.
func (a *Authority) Server(member string, epoch uint64) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	cert, err := a.issue(a.nodes, &x509.Certificate{
		Subject: pkix.Name{CommonName: "member:" + member}, NotAfter: a.now().Add(memberLifetime),
		DNSNames: []string{ServerName(epoch)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, &key.PublicKey)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{cert.Raw, a.nodes.cert.Raw}, PrivateKey: key, Leaf: cert}, nil
}

// PeerPEM returns a certificate of a member for the other members, with its key, in PEM.
func (a *Authority) PeerPEM(member string) ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	cert, err := a.issue(a.members, &x509.Certificate{
		Subject: pkix.Name{CommonName: "member:" + member}, NotAfter: a.now().Add(memberLifetime),
		DNSNames:    []string{peerName},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, &key.PublicKey)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return append(pem.EncodeToMemory(&pem.Block{Type: certBlock, Bytes: cert.Raw}),
		pem.EncodeToMemory(&pem.Block{Type: keyBlock, Bytes: der})...), nil
}
