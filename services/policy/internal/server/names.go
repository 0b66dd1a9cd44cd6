// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/identity"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	words "github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/proto/wire/policywire"
	"github.com/sluice-net/sluice/services/policy/internal/names"
)

// ListNames implements the service.
func (s *Server) ListNames(
	req *policyv1.ListNamesRequest, stream grpc.ServerStreamingServer[policyv1.ListNamesResponse],
) error {
	f, err := nameFilter(req.GetPattern(), req.GetAddress())
	if err != nil {
		return statusOf(err)
	}
	list, err := s.Owner.Names().List(stream.Context(), f)
	if err != nil {
		return statusOf(err)
	}
	for i := range list {
		if err := stream.Send(&policyv1.ListNamesResponse{Name: learnedName(&list[i])}); err != nil {
			return err
		}
	}
	return nil
}

// ForgetNames implements the service.
func (s *Server) ForgetNames(
	ctx context.Context, req *policyv1.ForgetNamesRequest,
) (*policyv1.ForgetNamesResponse, error) {
	if req.GetPattern() == "" && req.GetAddress() == "" {
		return nil, statusOf(&failure.FieldError{Field: "pattern", Err: errNoFilter})
	}
	f, err := nameFilter(req.GetPattern(), req.GetAddress())
	if err != nil {
		return nil, statusOf(err)
	}
	f.Namespace = req.Namespace
	out, err := s.Owner.Names().Forget(ctx, f, req.GetValidateOnly())
	if err != nil {
		return nil, statusOf(err)
	}
	answer := &policyv1.ForgetNamesResponse{NameCount: uint32(len(out))}
	for _, n := range out {
		answer.AddressCount += uint32(len(n.Addrs))
	}
	return answer, nil
}

// errNoFilter is returned for a request without a filter, which would remove all names.
var errNoFilter = errors.New(`is required unless an address is given; "*" matches every name`)

func nameFilter(pattern, address string) (names.Filter, error) {
	f := names.Filter{Pattern: pattern}
	if address == "" {
		return f, nil
	}
	a, err := words.AddressOf(address)
	if err != nil {
		return f, &failure.FieldError{Field: "address", Err: err}
	}
	f.Address = a.Unmap()
	return f, nil
}

func learnedName(l *names.Used) *policyv1.LearnedName {
	out := &policyv1.LearnedName{Name: l.Key.Name(), OmittedUseCount: uint32(l.Omitted)}
	if namespace, limited := l.Key.Namespace(); limited {
		out.Namespace = &namespace
	}
	for _, a := range l.Addresses {
		out.Addresses = append(out.Addresses, &policyv1.LearnedAddress{
			Address: a.Addr.String(), ExpireTime: timestamppb.New(a.Expires), ForgetTime: timestamppb.New(a.Forget),
		})
	}
	for _, src := range l.By {
		out.UsedBy = append(out.UsedBy, policywire.Source(src))
	}
	return out
}

func asker(m *policyv1.NameAsker) names.Asker {
	if m == nil {
		return names.Asker{}
	}
	return names.Asker{
		Endpoint: m.GetEndpoint(), Tenant: m.GetTenant(), Namespace: m.Namespace, Identity: identity.Numeric(m.GetIdentity()),
	}
}
