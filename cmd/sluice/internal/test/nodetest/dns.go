// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetest

import (
	"context"
	"sync"

	"github.com/sluice-net/sluice/model/dnsname"
	dnsv1 "github.com/sluice-net/sluice/proto/gen/sluice/dns/v1"
)

// DNS is a fake sluice-dns.
type DNS struct {
	dnsv1.UnimplementedDNSServiceServer
	Explanation *dnsv1.ExplainNameResponse // nil: the name is unknown
	DeleteError error

	Mu      sync.Mutex
	Deleted *dnsv1.DeleteNamesRequest // the last; guarded by Mu
}

// ExplainName implements the service.
func (f *DNS) ExplainName(_ context.Context, r *dnsv1.ExplainNameRequest) (*dnsv1.ExplainNameResponse, error) {
	if f.Explanation == nil {
		return &dnsv1.ExplainNameResponse{Name: &dnsv1.TaughtName{Name: dnsname.Canonical(r.GetName())}}, nil
	}
	return f.Explanation, nil
}

// DeleteNames implements the service.
func (f *DNS) DeleteNames(_ context.Context, r *dnsv1.DeleteNamesRequest) (*dnsv1.DeleteNamesResponse, error) {
	f.Mu.Lock()
	defer f.Mu.Unlock()
	f.Deleted = r
	return &dnsv1.DeleteNamesResponse{}, f.DeleteError
}
