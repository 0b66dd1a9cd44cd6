// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package backend lists the backends of services.
package backend

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/service"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
)

// Command is `backend`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("backend", "Show the backends that services lead to", listCommand(inv))
}

// client is the load balancer's, for the calls of invocation.
type client = lbv1.LoadBalancerServiceClient

func listCommand(inv *invocation.Invocation) *cobra.Command {
	var of, namespace string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List each backend once, with its connections and the services and frontends that lead to it",
		Long: `List each backend once, with its connections and the services and frontends that lead to it.

CONNECTIONS are those of this node, whichever service they asked for, or none: TCP and SCTP from the end of the
handshake until the connection ends, UDP while the flow is remembered. They are "-" while sluice-datapath is away or
translates no services.`,
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
	cmd.Flags().StringVar(&of, "service", "", "only of this service, [NAMESPACE/]NAME")
	cmd.Flags().StringVarP(&namespace, "namespace", "n", "", "only of services of this namespace")
	return cmd
}

// backend is an address that answers for services.
type backend struct {
	Address  string `json:"address"`
	Port     uint32 `json:"port"`
	Protocol string `json:"protocol"`
	// State is "ready" or "terminating".
	State string `json:"state"`
	// Connections of this node; nil: they are not known.
	Connections *uint32  `json:"connections"`
	Services    []string `json:"services"`
	Frontends   []string `json:"frontends"`
}

// key of a backend. Each protocol has ports of its own.
type key struct {
	address  string
	port     uint32
	protocol netv1.Protocol
}

// collect adds the backends of a service.
func collect(all map[key]*backend, s *lbv1.Service) {
	for _, f := range s.GetFrontends() {
		// A list that is not set adds nothing.
		for _, b := range slices.Concat(f.GetInside().GetBackends(), f.GetOutside().GetBackends()) {
			k := key{b.GetAddress(), b.GetPort(), f.GetKey().GetProtocol()}
			one := all[k]
			if one == nil {
				one = &backend{
					Address: k.address, Port: k.port, Protocol: output.Enum(k.protocol, "PROTOCOL_"), State: "terminating",
				}
				all[k] = one
			}
			// One that terminates for a list that has no other may be ready nowhere else.
			if !b.GetTerminating() {
				one.State = "ready"
			}
			one.Services = add(one.Services, s.GetNamespace()+"/"+s.GetName())
			one.Frontends = add(one.Frontends, service.FrontendText(f.GetKey()))
		}
	}
}

func add(all []string, text string) []string {
	if slices.Contains(all, text) {
		return all
	}
	return append(all, text)
}

// count sets the connections of backends. They stay unknown if the datapath does not
// run, translates no services, or is of a version that does not count them.
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
		return fmt.Errorf("the connections of backends are not known: %w", err)
	}
	for k, b := range all {
		n := counts[k]
		b.Connections = &n
	}
	return nil
}

// connections are those of a backend for people.
func (b *backend) connections() string {
	if b.Connections == nil {
		return "-"
	}
	return strconv.FormatUint(uint64(*b.Connections), 10)
}

func compare(a, b *backend) int {
	x, _ := netip.ParseAddr(a.Address)
	y, _ := netip.ParseAddr(b.Address)
	return cmp.Or(x.Compare(y), cmp.Compare(a.Port, b.Port), cmp.Compare(a.Protocol, b.Protocol))
}

// maxFrontends is how many frontends of a backend are named to people.
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
	all := []*backend{}
	for _, b := range found {
		all = append(all, b)
	}
	slices.SortFunc(all, compare)
	shown := inv.Show(all, func(w io.Writer) {
		output.Row(w, "BACKEND", "STATE", "CONNECTIONS", "SERVICES", "FRONTENDS")
		for _, b := range all {
			output.Row(w, service.AddressText(b.Address, b.Port)+"/"+strings.ToUpper(b.Protocol), b.State,
				b.connections(), strings.Join(b.Services, ", "), some(b.Frontends))
		}
	})
	if shown != nil {
		return shown
	}
	return counted
}

// some names the first of many.
func some(all []string) string {
	if n := len(all); n > maxFrontends {
		all = append(slices.Clone(all[:maxFrontends]), fmt.Sprintf("%d more", n-maxFrontends))
	}
	return strings.Join(all, ", ")
}
