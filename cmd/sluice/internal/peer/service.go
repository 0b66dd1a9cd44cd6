// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package peer

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/ports"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// maxBackends limits the number of backends in an error message.
const maxBackends = 8

// RefuseService returns an error if the kernel would translate the destination because it is an address of a Service.
// Policies see the backends, so a verdict on the address of the Service would be meaningless.
func RefuseService(ctx context.Context, inv *invocation.Invocation, conn Connection) error {
	to, ok := conn.To.Address(conn.V6)
	if !ok || !ports.HasPorts(conn.Protocol) || conn.To.Owner != nil {
		return nil
	}
	if from, ok := conn.From.Address(conn.V6); ok {
		r, err := invocation.Ask(ctx, inv, invocation.Observer, datapathv1.ObserverServiceClient.Explain,
			&datapathv1.ExplainRequest{
				SourceAddress: from.String(), DestinationAddress: to.String(), Protocol: netv1.Protocol(conn.Protocol),
				DestinationPort: conn.Port,
			})
		switch {
		case status.Code(err) == codes.NotFound: // neither end is on this node
		case err != nil:
			return fmt.Errorf("cannot find out whether %s is an address of a Service: %w", to, err)
		default:
			return refusal(conn, to, r.GetService())
		}
	}
	return refuseFrontend(ctx, inv, conn, to)
}

// refusal returns the error for a destination that the kernel would translate.
func refusal(conn Connection, to netip.Addr, s *datapathv1.ExplainedService) error {
	backends := make([]string, 0, len(s.GetBackends()))
	for _, b := range s.GetBackends() {
		backends = append(backends, net.JoinHostPort(b.GetAddress(), strconv.FormatUint(uint64(b.GetPort()), 10)))
	}
	switch {
	case s == nil, s.GetOutcome() == datapathv1.ServiceOutcome_SERVICE_OUTCOME_NOT_TRANSLATED:
		return nil
	case s.GetOutcome() == datapathv1.ServiceOutcome_SERVICE_OUTCOME_NO_PORT:
		return noPort(conn, to)
	}
	return serviceError(conn, to, s.GetService(), backends, int(s.GetBackendCount()))
}

// refuseFrontend returns an error if the destination is a frontend of this node.
func refuseFrontend(ctx context.Context, inv *invocation.Invocation, conn Connection, to netip.Addr) (refused error) {
	others := false // the address has a frontend at another port
	err := invocation.Each(ctx, inv, invocation.Datapath, datapathv1.DatapathServiceClient.ListFrontends,
		&datapathv1.ListFrontendsRequest{}, func(m *datapathv1.ListFrontendsResponse) {
			f := m.GetFrontend()
			if a, err := netip.ParseAddr(f.GetAddress()); err != nil || a != to || refused != nil {
				return
			}
			if f.GetPort() != conn.Port || uint32(f.GetProtocol()) != conn.Protocol {
				others = true
				return
			}
			list := f.GetInside()
			if list == nil {
				list = f.GetOutside()
			}
			var backends []string
			for _, b := range list.GetBackends() {
				backends = append(backends, net.JoinHostPort(b.GetAddress(), strconv.FormatUint(uint64(b.GetPort()), 10)))
			}
			refused = serviceError(conn, to, f.GetService(), backends, len(backends))
		})
	switch {
	case err != nil:
		return fmt.Errorf("cannot find out whether %s is an address of a Service: %w", to, err)
	case refused == nil && others && conn.To.Identity == 0:
		return noPort(conn, to)
	}
	return refused
}

func noPort(conn Connection, to netip.Addr) error {
	return fmt.Errorf("%s is an address of a Service that does not serve %s: the connection is refused before policies "+
		"are evaluated", to, ports.ServiceText(conn.Protocol, conn.Port))
}

func serviceError(conn Connection, to netip.Addr, service string, backends []string, count int) error {
	name, _, _ := strings.Cut(service, ":")
	if name == "" {
		name = "with a name that is not known yet"
	}
	text := fmt.Sprintf("%s, %s, is an address of Service %s, and policies see its backends", to,
		ports.ServiceText(conn.Protocol, conn.Port), name)
	if len(backends) == 0 {
		return fmt.Errorf("%s, but it has none; `sluice explain` shows what happens to the connection", text)
	}
	shown := backends[:min(len(backends), maxBackends)]
	more := ""
	if n := max(count, len(backends)) - len(shown); n > 0 {
		more = fmt.Sprintf(" and %d more", n)
	}
	return fmt.Errorf("%s: give one of the backends (%s%s), or use `sluice explain`", text, strings.Join(shown, ", "),
		more)
}
