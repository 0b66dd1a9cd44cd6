// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package backend lists the backends of services.
package backend

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/service"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// Command is `backend`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("backend", "Show the backends of services", listCommand(inv))
}

// client shortens the calls of package invocation.
type client = lbv1.LoadBalancerServiceClient

func listCommand(inv *invocation.Invocation) *cobra.Command {
	var of, namespace string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the backends with their connections, services and frontends",
		Long: `List each backend once, with its connections and all services and frontends that use it.

CONNECTIONS counts the connections of this node to the backend, through any service or
directly: TCP and SCTP from the end of the handshake until the connection ends, UDP while
the flow is tracked. It is "-" if sluice-datapath does not run or translates no services.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			req := &lbv1.ListServicesRequest{Namespace: namespace, WithFrontends: true}
			if of != "" {
				key, err := service.Named(of, namespace)
				if err != nil {
					return err
				}
				req.Namespace, req.Name = key.GetNamespace(), key.GetName()
			}
			return list(cmd.Context(), inv, req)
		},
	}
	cmd.Flags().StringVar(&of, "service", "", "only backends of this service, [NAMESPACE/]NAME")
	cmd.Flags().StringVarP(&namespace, "namespace", "n", "", "only backends of services in this namespace")
	return cmd
}

// backend is a backend of one or more services.
type backend struct {
	*datapathv1.BackendConnections

	// counted is true if the connections are known.
	counted bool
	// state is "ready" or "terminating".
	state               string
	services, frontends []string
}

// columns are the columns of `backend list`.
var columns = []output.Column[*backend]{
	{Header: "BACKEND", Cell: func(b *backend) any {
		return service.AddressText(b.GetAddress(), b.GetPort()) + "/" +
			strings.ToUpper(output.Enum(b.GetProtocol(), "PROTOCOL_"))
	}},
	{Header: "STATE", Cell: func(b *backend) any { return b.state }},
	{Header: "CONNECTIONS", Cell: func(b *backend) any {
		if !b.counted {
			return ""
		}
		return b.GetConnectionCount()
	}},
	{Header: "SERVICES", Cell: func(b *backend) any { return strings.Join(b.services, ", ") }},
	{Header: "FRONTENDS", Cell: func(b *backend) any { return some(b.frontends) }},
}

// MarshalJSON implements json.Marshaler. Unknown connections are absent.
func (b *backend) MarshalJSON() ([]byte, error) {
	count := message.Fact{Key: "connectionCount"}
	if b.counted {
		count.Value = b.GetConnectionCount()
	}
	return message.Of(b.BackendConnections, count, message.Fact{Key: "state", Value: b.state},
		message.Fact{Key: "services", Value: b.services}, message.Fact{Key: "frontends", Value: b.frontends}).MarshalJSON()
}

// key identifies a backend.
type key struct {
	address  string
	port     uint32
	protocol netv1.Protocol
}

// collect adds the backends of a service.
func collect(all map[key]*backend, s *lbv1.Service) {
	for _, f := range s.GetFrontends() {
		// Inside or Outside may be nil.
		for _, b := range slices.Concat(f.GetInside().GetBackends(), f.GetOutside().GetBackends()) {
			k := key{b.GetAddress(), b.GetPort(), f.GetKey().GetProtocol()}
			one := all[k]
			if one == nil {
				one = &backend{
					BackendConnections: &datapathv1.BackendConnections{Address: k.address, Port: k.port, Protocol: k.protocol},
					state:              "terminating",
				}
				all[k] = one
			}
			// A list uses its terminating backends only if it has no ready ones. A backend is ready if at
			// least one list has it as not terminating.
			if !b.GetTerminating() {
				one.state = "ready"
			}
			one.services = add(one.services, s.GetNamespace()+"/"+s.GetName())
			one.frontends = add(one.frontends, service.FrontendText(f.GetKey()))
		}
	}
}

func add(all []string, text string) []string {
	if slices.Contains(all, text) {
		return all
	}
	return append(all, text)
}

// count sets the connections of the backends. They stay unknown if the datapath does not run, does not translate
// services, or has a version that does not count connections.
func count(ctx context.Context, inv *invocation.Invocation, all map[key]*backend) error {
	counts := map[key]uint32{}
	err := invocation.Each(ctx, inv, invocation.Datapath, datapathv1.DatapathServiceClient.ListBackendConnections,
		&datapathv1.ListBackendConnectionsRequest{}, func(m *datapathv1.ListBackendConnectionsResponse) {
			b := m.GetBackend()
			counts[key{b.GetAddress(), b.GetPort(), b.GetProtocol()}] = b.GetConnectionCount()
		})
	switch status.Code(err) {
	case codes.OK:
	case codes.Unavailable, codes.FailedPrecondition, codes.Unimplemented:
		return nil
	default:
		return fmt.Errorf("cannot count the connections of backends: %w", err)
	}
	for k, b := range all {
		b.ConnectionCount, b.counted = counts[k], true
	}
	return nil
}

func compare(a, b *backend) int {
	x, _ := netip.ParseAddr(a.GetAddress())
	y, _ := netip.ParseAddr(b.GetAddress())
	return cmp.Or(x.Compare(y), cmp.Compare(a.GetPort(), b.GetPort()), cmp.Compare(a.GetProtocol(), b.GetProtocol()))
}

// maxFrontends limits the frontends of a backend in tables.
const maxFrontends = 4

func list(ctx context.Context, inv *invocation.Invocation, req *lbv1.ListServicesRequest) error {
	found, services := map[key]*backend{}, 0
	err := invocation.Each(ctx, inv, invocation.LoadBalancer, client.ListServices, req,
		func(m *lbv1.ListServicesResponse) {
			if s := m.GetService(); s != nil {
				collect(found, s)
				services++
			}
		})
	if err != nil {
		return err
	}
	if req.GetName() != "" && services == 0 {
		return invocation.NotFound("service", req.GetNamespace()+"/"+req.GetName(), "service list --all")
	}
	var counted error
	if len(found) > 0 {
		counted = count(ctx, inv, found)
	}
	all := slices.SortedFunc(maps.Values(found), compare)
	shown := inv.Show(all, func(w io.Writer) { output.FoldedTable(w, inv.Wide(), columns, all) })
	if shown != nil {
		return shown
	}
	return counted
}

// some joins the first elements, followed by the number of the omitted ones.
func some(all []string) string {
	if n := len(all); n > maxFrontends {
		all = append(slices.Clone(all[:maxFrontends]), fmt.Sprintf("%d more", n-maxFrontends))
	}
	return strings.Join(all, ", ")
}
