// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package reader determines which flows the client of a call may see.
package reader

import (
	"context"
	"crypto/x509"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/model/shares"
)

// Reader is the client of a call. The zero value may see no flow.
type Reader struct {
	// All is set if the client may see the flows of all tenants.
	All bool
	// Tenant is the only tenant whose flows the client may see; the zero value without one.
	Tenant shares.Tenant
}

// Of returns the reader of a call. Clients of the unix socket may see all flows, because access to the socket is
// checked before. For clients over TLS, it depends on the certificate.
func Of(ctx context.Context) (Reader, error) {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return Reader{All: true}, nil
	}
	return OfInfo(p.AuthInfo)
}

// OfInfo returns the reader of a connection.
func OfInfo(info credentials.AuthInfo) (Reader, error) {
	t, ok := info.(credentials.TLSInfo)
	switch {
	case !ok:
		return Reader{All: true}, nil
	case len(t.State.VerifiedChains) == 0:
		return Reader{}, status.Error(codes.Unauthenticated, "the client has no verified certificate")
	}
	r, err := ofCertificate(t.State.VerifiedChains[0][0])
	if err != nil {
		return Reader{}, status.Error(codes.PermissionDenied, err.Error())
	}
	return r, nil
}

// domain is the suffix of the names that restrict a certificate to one tenant. A certificate with an invalid name in
// this domain is refused. Otherwise a mistake in the name would give access to the flows of all tenants.
const domain = ".sluice"

// ofCertificate returns the reader for a certificate. It considers every DNS name and the common name.
func ofCertificate(c *x509.Certificate) (Reader, error) {
	r := Reader{All: true}
	for _, name := range append(slices.Clone(c.DNSNames), c.Subject.CommonName) {
		name = strings.TrimRight(name, ".")
		if len(name) < len(domain) || !strings.EqualFold(name[len(name)-len(domain):], domain) {
			continue
		}
		tenant, ok := parse(name[:len(name)-len(domain)])
		switch {
		case !ok:
			return Reader{}, fmt.Errorf("the certificate is for %q; names that end in %s must be tenant.NAME%s or "+
				"namespace.NAME%s", name, domain, domain, domain)
		case !r.All && r.Tenant != tenant:
			return Reader{}, fmt.Errorf("the certificate is for %s and %s; use one certificate for each", r.Tenant, tenant)
		}
		r = Reader{Tenant: tenant}
	}
	return r, nil
}

// parse returns the tenant of a name in which the domain was removed.
func parse(text string) (shares.Tenant, bool) {
	kind, name, _ := strings.Cut(text, ".")
	if name == "" || strings.Contains(name, "*") {
		return shares.Tenant{}, false
	}
	switch strings.ToLower(kind) {
	case "tenant":
		return shares.Labelled(name), true
	case "namespace":
		return shares.Namespace(name), true
	}
	return shares.Tenant{}, false
}
