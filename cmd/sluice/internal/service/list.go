// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package service

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
)

func listCommand(inv *invocation.Invocation) *cobra.Command {
	var (
		namespace, address string
		all                bool
	)
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List services with their state, and refused objects",
		Args:  invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if address != "" {
				if a, err := netip.ParseAddr(address); err != nil || a.Zone() != "" {
					return invocation.Usagef("--address: %q is not an address", address)
				}
			}
			return printList(cmd.Context(), inv, &lbv1.ListServicesRequest{Namespace: namespace, Address: address}, all)
		},
	}
	f := cmd.Flags()
	f.StringVarP(&namespace, "namespace", "n", "", "only this namespace")
	f.StringVar(&address, "address", "", "only services with this address")
	f.BoolVar(&all, "all", false, "also services without an address, such as headless services")
	return cmd
}

// columns are the columns of `service list`.
var columns = []output.Column[*lbv1.Service]{
	{Header: "NAMESPACE", Cell: func(s *lbv1.Service) any { return s.GetNamespace() }},
	{Header: "NAME", Cell: func(s *lbv1.Service) any { return s.GetName() }},
	{Header: "TYPE", Cell: func(s *lbv1.Service) any { return s.GetType() }},
	{Header: "ADDRESSES", Cell: func(s *lbv1.Service) any { return strings.Join(s.GetAddresses(), ",") }},
	{Header: "PORTS", Cell: func(s *lbv1.Service) any { return portsText(s) }},
	{Header: "READY", Cell: func(s *lbv1.Service) any { return fmt.Sprintf("%d/%d", s.GetReady(), s.GetEndpoints()) }},
	{Header: "ENFORCED", Cell: func(s *lbv1.Service) any { return yesNo(s.GetEnforced()) }},
	{Header: "AGE", Cell: func(s *lbv1.Service) any { return output.Since(output.When(s.GetUpdateTime())) }},
	{Header: "SOURCE", Cell: func(s *lbv1.Service) any {
		return sourceText(s.GetSource(), s.GetManager(), s.GetOrigin())
	}},
}

func title(s *lbv1.Service) string { return s.GetNamespace() + "/" + s.GetName() }

// portsText returns "80/TCP,443:30443/TCP", as kubectl prints it.
func portsText(s *lbv1.Service) string {
	texts := make([]string, len(s.GetPorts()))
	for i, p := range s.GetPorts() {
		texts[i] = portText(p)
	}
	return strings.Join(texts, ",")
}

func portText(p *lbv1.ServicePort) string {
	text := PortText(p.GetPort(), p.GetProtocol())
	if p.GetNodePort() == 0 {
		return text
	}
	port, protocol, _ := strings.Cut(text, "/")
	return fmt.Sprintf("%s:%d/%s", port, p.GetNodePort(), protocol)
}

func sourceText(source, manager, origin string) string {
	switch {
	case origin != "":
		return source + ":" + origin
	case manager != "":
		return source + ":" + manager
	}
	return source
}

// reachable reports whether the service has an address or a node port.
func reachable(s *lbv1.Service) bool {
	return len(s.GetAddresses()) > 0 ||
		slices.ContainsFunc(s.GetPorts(), func(p *lbv1.ServicePort) bool { return p.GetNodePort() != 0 })
}

func printList(ctx context.Context, inv *invocation.Invocation, req *lbv1.ListServicesRequest, everything bool) error {
	var (
		services []*lbv1.Service
		refused  []*lbv1.RefusedObject
		revision any // nil in an empty list
	)
	hidden := 0
	err := invocation.Each(ctx, inv, invocation.LoadBalancer, client.ListServices, req,
		func(m *lbv1.ListServicesResponse) {
			revision = m.GetRevision()
			switch s := m.GetService(); {
			case s == nil:
			case everything || reachable(s):
				services = append(services, s)
			default:
				hidden++
			}
			if r := m.GetRefused(); r != nil {
				refused = append(refused, r)
			}
		})
	if err != nil {
		return err
	}
	return inv.Show(message.Join(
		message.Fact{Key: "items", Value: message.List(services)},
		message.Fact{Key: "refused", Value: message.List(refused)},
		message.Fact{Key: "revision", Value: revision},
	), func(w io.Writer) { table(w, services, refused, hidden) })
}

func table(w io.Writer, services []*lbv1.Service, refused []*lbv1.RefusedObject, hidden int) {
	output.Table(w, columns, services)
	first := true
	line := func(text string) {
		if first {
			fmt.Fprintln(w)
			first = false
		}
		fmt.Fprintln(w, output.Printable(text))
	}
	for _, s := range services {
		for _, note := range s.GetNotes() {
			line(title(s) + ": " + note)
		}
	}
	for _, r := range refused {
		what := keyText(r.GetKey())
		if what == "" {
			what = sourceText(r.GetSource(), "", r.GetOrigin())
		}
		line(what + " is not accepted as given: " + r.GetError())
	}
	if hidden > 0 {
		line(fmt.Sprintf("Services without an address, shown with --all: %d.", hidden))
	}
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
