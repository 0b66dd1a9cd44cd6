// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package server implements the API of sluice-dns on top of a table of names.
package server

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/rpc"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/model/dnsname"
	dnsv1 "github.com/sluice-net/sluice/proto/gen/sluice/dns/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/dns/internal/names"
	"github.com/sluice-net/sluice/services/dns/internal/rules"
)

// maxLists is the maximum number of concurrent listings, because each holds a copy of the list.
const maxLists = 4

// Options describe a Server. All fields are required.
type Options struct {
	Table   *names.Table
	Rules   *rules.Rules
	Now     func() time.Time
	Process wire.Process
}

// Server implements the API.
type Server struct {
	dnsv1.UnimplementedDNSServiceServer
	o Options
}

// New returns a Server.
func New(o Options) *Server { return &Server{o: o} }

// Register adds the services.
func (s *Server) Register(r grpc.ServiceRegistrar) {
	dnsv1.RegisterDNSServiceServer(r, s)
	statusv1.RegisterProcessServiceServer(r, s.o.Process)
}

// Methods returns who may call which method.
func Methods() rpc.Methods {
	return rpc.Methods{
		statusv1.ProcessService_GetConfig_FullMethodName:   {Access: rpc.Group()},
		statusv1.ProcessService_SetLogLevel_FullMethodName: {Access: rpc.Root()},
		dnsv1.DNSService_ListNames_FullMethodName: {
			Access: rpc.Group(), Limit: rpc.Limit{InFlight: maxLists, Waiting: 4 * maxLists},
		},
		dnsv1.DNSService_ExplainName_FullMethodName: {Access: rpc.Group(), Limit: rpc.Limit{InFlight: 8, Waiting: 64}},
		dnsv1.DNSService_DeleteNames_FullMethodName: {Access: rpc.Root(), Limit: rpc.Limit{InFlight: 1, Waiting: 16}},
	}
}

// ListNames implements the service.
func (s *Server) ListNames(
	req *dnsv1.ListNamesRequest, stream grpc.ServerStreamingServer[dnsv1.ListNamesResponse],
) error {
	match, address, err := filter(req.GetPattern(), req.GetAddress())
	if err != nil {
		return err
	}
	for _, n := range s.o.Table.List(match, address, s.o.Now()) {
		if err := stream.Send(&dnsv1.ListNamesResponse{Name: fromName(n)}); err != nil {
			return err
		}
	}
	return nil
}

// ExplainName implements the service.
func (s *Server) ExplainName(_ context.Context, req *dnsv1.ExplainNameRequest) (*dnsv1.ExplainNameResponse, error) {
	if _, err := dnsname.Name(req.GetName()); err != nil {
		return nil, invalid("name", err)
	}
	name := dnsname.Canonical(req.GetName())
	allow, refuse := s.o.Rules.Matching(name)
	same := func(text string) bool { return dnsname.Learned(text).Name() == name }
	out := &dnsv1.ExplainNameResponse{
		Name:             joined(name, s.o.Table.List(same, netip.Addr{}, s.o.Now())),
		RefusingSetCount: uint32(len(refuse)), Wanted: s.o.Rules.Wants(name), //nolint:gosec // 65,535
	}
	for _, number := range allow {
		out.AllowingSets = append(out.AllowingSets, uint32(number))
	}
	for _, r := range s.o.Table.Refusals(name) {
		out.Refused = append(out.Refused, &dnsv1.RefusedAddress{
			Address: r.Addr.String(), Reason: reasons[r.Reason], Asker: fromAsker(r.Asker), Time: timestamppb.New(r.Time),
		})
	}
	return out, nil
}

// DeleteNames implements the service.
func (s *Server) DeleteNames(_ context.Context, req *dnsv1.DeleteNamesRequest) (*dnsv1.DeleteNamesResponse, error) {
	if req.GetPattern() == "" && req.GetAddress() == "" {
		return nil, invalid("pattern", errNoFilter)
	}
	match, address, err := filter(req.GetPattern(), req.GetAddress())
	if err != nil {
		return nil, err
	}
	remove := s.o.Table.Delete
	if req.GetValidateOnly() {
		remove = s.o.Table.Would
	}
	gone := remove(match, address, s.o.Now())
	different := make(map[string]bool)
	for _, p := range gone {
		different[dnsname.Learned(p.Name).Name()] = true
	}
	return &dnsv1.DeleteNamesResponse{
		NameCount: uint32(len(different)), AddressCount: uint32(len(gone)), //nolint:gosec // limited by the table
	}, nil
}

// errNoFilter is returned for a request without a filter, which would remove all names.
var errNoFilter = errors.New(`is required unless an address is given; "*" matches every name`)

// filter returns a function that reports whether the text of a name in the table matches.
func filter(pattern, address string) (match func(text string) bool, addr netip.Addr, err error) {
	match = func(string) bool { return true }
	if pattern != "" {
		p, err := dnsname.Parse(pattern)
		if err != nil {
			return nil, addr, invalid("pattern", err)
		}
		// The pattern that matches every name also matches names with unusual characters, which wildcards do not
		// match.
		if !p.Every() {
			match = func(text string) bool { return p.Matches(dnsname.Learned(text).Name()) }
		}
	}
	if address != "" {
		if addr, err = wire.AddressOf(address); err != nil {
			return nil, addr, invalid("address", err)
		}
		addr = addr.Unmap()
	}
	return match, addr, nil
}

// invalid returns the status for a request with a mistake in a field.
func invalid(field string, err error) error {
	return rpcerr.New(codes.InvalidArgument, rpcerr.InvalidMessage, fmt.Errorf("%s: %w", field, err),
		rpcerr.Field(field, err.Error()))
}

var reasons = map[names.Reason]dnsv1.RefusalReason{
	names.Special:        dnsv1.RefusalReason_REFUSAL_REASON_SPECIAL_ADDRESS,
	names.Cluster:        dnsv1.RefusalReason_REFUSAL_REASON_CLUSTER_ADDRESS,
	names.Configured:     dnsv1.RefusalReason_REFUSAL_REASON_CONFIGURED,
	names.NameFull:       dnsv1.RefusalReason_REFUSAL_REASON_NAME_FULL,
	names.NamesShare:     dnsv1.RefusalReason_REFUSAL_REASON_NAMES_SHARE,
	names.AddressesShare: dnsv1.RefusalReason_REFUSAL_REASON_ADDRESSES_SHARE,
	names.Server:         dnsv1.RefusalReason_REFUSAL_REASON_SERVER,
	names.NotSelected:    dnsv1.RefusalReason_REFUSAL_REASON_NOT_SELECTED,
	names.NotEnforced:    dnsv1.RefusalReason_REFUSAL_REASON_NOT_ENFORCED,
}

// joined returns all addresses of a name that any namespace has learned.
func joined(name string, list []names.Name) *dnsv1.TaughtName {
	out := &dnsv1.TaughtName{Name: name}
	for _, n := range list {
		one := fromName(n)
		if out.Asker == nil {
			out.Chain, out.Asker = one.GetChain(), one.GetAsker()
		}
		out.Addresses = append(out.Addresses, one.GetAddresses()...)
	}
	slices.SortStableFunc(out.GetAddresses(), func(a, b *dnsv1.TaughtAddress) int {
		x, _ := netip.ParseAddr(a.GetAddress())
		y, _ := netip.ParseAddr(b.GetAddress())
		return x.Compare(y)
	})
	out.Addresses = slices.CompactFunc(out.GetAddresses(), func(a, b *dnsv1.TaughtAddress) bool {
		return a.GetAddress() == b.GetAddress()
	})
	if len(list) == 1 {
		namespace, _ := dnsname.Learned(list[0].Name).Namespace()
		out.Namespace = namespace
	}
	return out
}

func fromName(n names.Name) *dnsv1.TaughtName {
	key := dnsname.Learned(n.Name)
	namespace, _ := key.Namespace()
	out := &dnsv1.TaughtName{Name: key.Name(), Namespace: namespace, Chain: n.Chain, Asker: fromAsker(n.Payer)}
	for _, e := range n.Entries {
		a := &dnsv1.TaughtAddress{
			Address: e.Addr.String(), ExpireTime: timestamppb.New(e.Expires), Asker: fromAsker(e.Payer),
		}
		if !e.Enforced.IsZero() {
			a.EnforceTime = timestamppb.New(e.Enforced)
		}
		out.Addresses = append(out.Addresses, a)
	}
	return out
}

func fromAsker(a names.Asker) *dnsv1.Asker {
	if a.Endpoint == 0 {
		return nil
	}
	return &dnsv1.Asker{EndpointIndex: a.Endpoint, Tenant: a.Tenant}
}
