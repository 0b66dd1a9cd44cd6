// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package reader

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
)

// TestCertificateDecidesWhatAReaderSees: a name in the domain restricts the reader to one tenant, in any spelling. A
// mistake in such a name gives no access at all.
func TestCertificateDecidesWhatAReaderSees(t *testing.T) {
	const refused = "refused"
	for _, c := range []struct {
		common string
		names  []string
		want   string
	}{
		{"", []string{"reader"}, "all"},
		{"operator", nil, "all"},
		{"", []string{"sluice.example.com", "tenant.shop.example"}, "all"},
		{"", []string{"tenant.shop.sluice"}, "tenant shop"},
		{"", []string{"namespace.shop.sluice"}, "namespace shop"},
		{"", []string{"tenant.Shop_1.sluice"}, "tenant Shop_1"},
		{"", []string{"tenant.a.b.sluice"}, "tenant a.b"},
		{"", []string{"reader", "tenant.shop.sluice"}, "tenant shop"},
		{"", []string{"tenant.shop.sluice", "reader"}, "tenant shop"},
		{"tenant.shop.sluice", []string{"reader"}, "tenant shop"},
		{"", []string{"TENANT.shop.Sluice."}, "tenant shop"},
		{"tenant.shop.sluice", []string{"tenant.shop.sluice"}, "tenant shop"},
		{"", []string{"tenant.shop.sluice", "tenant.data.sluice"}, refused},
		{"", []string{"tenant.shop.sluice", "namespace.shop.sluice"}, refused},
		{"tenant.data.sluice", []string{"tenant.shop.sluice"}, refused},
		{"", []string{"tenant.sluice"}, refused},
		{"", []string{"tenant..sluice"}, refused},
		{"", []string{".sluice"}, refused},
		{"", []string{"*.sluice"}, refused},
		{"", []string{"*.shop.sluice"}, refused},
		{"", []string{"tenant.*.sluice"}, refused},
		{"", []string{"tenants.shop.sluice"}, refused},
		{"", []string{"reader", "node-1.sluice"}, refused},
	} {
		ctx := peer.NewContext(context.Background(), &peer.Peer{AuthInfo: credentials.TLSInfo{State: tls.ConnectionState{
			VerifiedChains: [][]*x509.Certificate{{{Subject: pkix.Name{CommonName: c.common}, DNSNames: c.names}}},
		}}})
		r, err := Of(ctx)
		got := r.Tenant.String()
		switch {
		case status.Code(err) == codes.PermissionDenied:
			got = refused
		case err != nil:
			t.Fatal(err)
		case r.All:
			got = "all"
		}
		if got != c.want || err != nil && r != (Reader{}) {
			t.Errorf("common name %q, names %q: %s (%v), want %s", c.common, c.names, got, err, c.want)
		}
	}
}

// TestOnlyVerifiedCertificatesCount: a client whose certificate was not verified may see no flow.
func TestOnlyVerifiedCertificatesCount(t *testing.T) {
	ctx := peer.NewContext(context.Background(), &peer.Peer{AuthInfo: credentials.TLSInfo{State: tls.ConnectionState{
		PeerCertificates: []*x509.Certificate{{DNSNames: []string{"reader"}}},
	}}})
	if r, err := Of(ctx); status.Code(err) != codes.Unauthenticated || r != (Reader{}) {
		t.Errorf("%+v, %v", r, err)
	}
}
