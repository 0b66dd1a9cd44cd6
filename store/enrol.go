// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	grpccredentials "google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	storev1 "github.com/sluice-net/sluice/proto/gen/sluice/store/v1"
)

// each is the timeout of a call to one member.
const each = 10 * time.Second

// Request is the key pair for which a node wants a certificate. A call that is repeated with it uses the token once.
type Request struct {
	key     *ecdsa.PrivateKey
	signing []byte
}

// NewRequest makes a key pair.
func NewRequest() (*Request, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{}, key)
	if err != nil {
		return nil, fmt.Errorf("request for a certificate: %w", err)
	}
	return &Request{key, der}, nil
}

// Enrol exchanges a join token for credentials of a node.
func Enrol(ctx context.Context, t Token, node string, r *Request) (Credentials, error) {
	var c Credentials
	err := call(ctx, t.Addresses, pinned(t.CA, 1), func(ctx context.Context, s storev1.EnrolServiceClient) error {
		resp, err := s.Enrol(ctx, &storev1.EnrolRequest{Secret: t.Secret, Node: node, SigningRequest: r.signing})
		if err != nil {
			return err
		}
		c, err = r.credentials(node, resp)
		return err
	})
	return c, err
}

// EnrolMember exchanges a join token for the data that a new member needs to start.
func EnrolMember(ctx context.Context, t Token, name, address string) (*storev1.EnrolMemberResponse, error) {
	var resp *storev1.EnrolMemberResponse
	err := call(ctx, t.Addresses, pinned(t.CA, 1), func(ctx context.Context, s storev1.EnrolServiceClient) (err error) {
		resp, err = s.EnrolMember(ctx, &storev1.EnrolMemberRequest{Secret: t.Secret, Name: name, PeerAddress: address})
		return err
	})
	return resp, err
}

// Renew exchanges credentials that are still valid for new ones.
func Renew(ctx context.Context, old Credentials) (Credentials, error) {
	r, err := NewRequest()
	if err != nil {
		return old, err
	}
	t, err := old.atLeast()
	if err != nil {
		return old, err
	}
	c := old
	err = call(ctx, old.Enrol, t, func(ctx context.Context, s storev1.EnrolServiceClient) error {
		resp, err := s.Enrol(ctx, &storev1.EnrolRequest{SigningRequest: r.signing})
		if err != nil {
			return err
		}
		c, err = r.credentials(old.Node, resp)
		return err
	})
	return c, err
}

// Locate asks where the members are, and returns the credentials with the present addresses and epoch. If members
// answer with different epochs, it uses the highest one.
func Locate(ctx context.Context, old Credentials) (Credentials, error) {
	t, err := old.atLeast()
	if err != nil {
		return old, err
	}
	c := old
	answered := false
	var errs []error
	for _, address := range old.Enrol {
		err := callOne(ctx, address, t, func(ctx context.Context, s storev1.EnrolServiceClient) error {
			m, err := s.ListMembers(ctx, &storev1.ListMembersRequest{})
			if err == nil && (!answered || m.GetEpoch() > c.Epoch) {
				err = c.at(m)
				answered = answered || err == nil
			}
			return err
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("sluice-store at %s: %w", address, err))
		}
	}
	if answered {
		return c, nil
	}
	return old, errors.Join(errs...)
}

// at sets the epoch and the addresses. It refuses a lower epoch.
func (c *Credentials) at(m *storev1.ListMembersResponse) error {
	if m.GetEpoch() < c.Epoch || len(m.GetClientAddresses()) == 0 || len(m.GetEnrolAddresses()) == 0 {
		return fmt.Errorf("a member answered with epoch %d and %d addresses; this node knows epoch %d",
			m.GetEpoch(), len(m.GetClientAddresses()), c.Epoch)
	}
	c.Epoch, c.Clients, c.Enrol = m.GetEpoch(), m.GetClientAddresses(), m.GetEnrolAddresses()
	return nil
}

func (r *Request) credentials(node string, resp *storev1.EnrolResponse) (Credentials, error) {
	key, err := x509.MarshalPKCS8PrivateKey(r.key)
	if err != nil {
		return Credentials{}, err
	}
	c := Credentials{
		Node: node, CA: encodePEM("CERTIFICATE", resp.GetCaCertificate()),
		Certificate: encodePEM("CERTIFICATE", resp.GetCertificate()), Key: encodePEM("PRIVATE KEY", key),
	}
	if err := c.at(resp.GetMembers()); err != nil {
		return Credentials{}, err
	}
	if _, err := c.TLS(); err != nil {
		return Credentials{}, err
	}
	return c, nil
}

// call calls the members in order, until one of them gives an answer other than that it is unavailable.
func call(ctx context.Context, addresses []string, t *tls.Config,
	do func(context.Context, storev1.EnrolServiceClient) error,
) error {
	var errs []error
	for _, address := range addresses {
		err := callOne(ctx, address, t, do)
		if err == nil {
			return nil
		}
		errs = append(errs, fmt.Errorf("sluice-store at %s: %w", address, err))
		if code := status.Code(err); code != codes.Unavailable && code != codes.DeadlineExceeded && code != codes.Unknown {
			break
		}
	}
	return errors.Join(errs...)
}

func callOne(ctx context.Context, address string, t *tls.Config,
	do func(context.Context, storev1.EnrolServiceClient) error,
) error {
	conn, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(grpccredentials.NewTLS(t.Clone())))
	if err != nil {
		return err
	}
	defer conn.Close() //nolint:errcheck // nothing was written
	ctx, cancel := context.WithTimeout(ctx, each)
	defer cancel()
	return do(ctx, storev1.NewEnrolServiceClient(conn))
}

// pinned accepts a server whose certificate was signed by the CA with a hash, for an epoch that is not too low.
func pinned(hash [sha256.Size]byte, least uint64) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection verifies, by the hash in the token
		VerifyConnection: func(s tls.ConnectionState) error {
			i := slices.IndexFunc(s.PeerCertificates, func(c *x509.Certificate) bool { return sha256.Sum256(c.Raw) == hash })
			if i < 0 {
				return errors.New("the server is not of the store that the join token was made by")
			}
			roots := x509.NewCertPool()
			roots.AddCert(s.PeerCertificates[i])
			return verify(s, roots, least)
		},
	}
}

// atLeast accepts members of the epoch that the node knows, and of later ones.
func (c Credentials) atLeast() (*tls.Config, error) {
	t, err := c.TLS()
	if err != nil {
		return nil, err
	}
	t.InsecureSkipVerify = true //nolint:gosec // VerifyConnection verifies
	t.VerifyConnection = func(s tls.ConnectionState) error { return verify(s, t.RootCAs, c.Epoch) }
	return t, nil
}

// verify checks the server's certificate: signed by a CA, for servers, and of an epoch that is not too low.
func verify(s tls.ConnectionState, roots *x509.CertPool, least uint64) error {
	leaf := s.PeerCertificates[0]
	if _, err := leaf.Verify(x509.VerifyOptions{Roots: roots}); err != nil {
		return err
	}
	if len(leaf.DNSNames) == 1 {
		if epoch, ok := epochOf(leaf.DNSNames[0]); ok && epoch >= least {
			return nil
		}
	}
	return fmt.Errorf("the server is a member in %q, and this node knows epoch %d", leaf.DNSNames, least)
}
