// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package service

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
)

func listCommand(inv *invocation.Invocation) *cobra.Command {
	var (
		namespace, address string
		all                bool
	)
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List services with their state, and what was refused",
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
	f.StringVar(&address, "address", "", "only services that are reached at this address")
	f.BoolVar(&all, "all", false, "also services without an address, such as headless ones")
	return cmd
}

// state is what is shown of one service.
type state struct {
	Namespace string        `json:"namespace"`
	Name      string        `json:"name"`
	Type      string        `json:"type"`
	Addresses []string      `json:"addresses"`
	Ports     []servicePort `json:"ports"`
	Ready     uint32        `json:"ready"`
	Endpoints uint32        `json:"endpoints"`
	Enforced  bool          `json:"enforced"`
	Algorithm string        `json:"algorithm,omitempty"`
	Notes     []string      `json:"notes,omitempty"`
	Source    string        `json:"source"`
	Manager   string        `json:"manager,omitempty"`
	Origin    string        `json:"origin,omitempty"`
	Revision  uint64        `json:"revision"`
	Updated   *time.Time    `json:"updateTime,omitempty"`
	Frontends []frontend    `json:"frontends,omitempty"`
}

type servicePort struct {
	Name     string `json:"name,omitempty"`
	Protocol string `json:"protocol"`
	Port     uint32 `json:"port"`
	NodePort uint32 `json:"nodePort,omitempty"`
}

// refused is an object or a file that is not in force as it was last given.
type refused struct {
	Kind      string `json:"kind,omitempty"` // empty: a file as a whole
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name,omitempty"`
	Source    string `json:"source"`
	Origin    string `json:"origin,omitempty"`
	Error     string `json:"error"`
}

// listing is what `service list -o json` prints.
type listing struct {
	Revision uint64    `json:"revision,omitempty"` // unset in an empty list
	Services []state   `json:"items"`
	Refused  []refused `json:"refused"`
}

func stateOf(s *lbv1.Service) state {
	out := state{
		Namespace: s.GetNamespace(), Name: s.GetName(), Type: s.GetType(),
		Addresses: append([]string{}, s.GetAddresses()...), Ports: []servicePort{},
		Ready: s.GetReady(), Endpoints: s.GetEndpoints(), Enforced: s.GetEnforced(), Notes: s.GetNotes(),
		Source: s.GetSource(), Manager: s.GetManager(), Origin: s.GetOrigin(), Revision: s.GetRevision(),
		Updated: output.When(s.GetUpdateTime()), Algorithm: algorithm(s.GetAlgorithm()),
	}
	for _, p := range s.GetPorts() {
		out.Ports = append(out.Ports, servicePort{
			p.GetName(), output.Enum(p.GetProtocol(), "PROTOCOL_"), p.GetPort(), p.GetNodePort(),
		})
	}
	for _, f := range s.GetFrontends() {
		out.Frontends = append(out.Frontends, frontendOf(f))
	}
	return out
}

func (s state) title() string { return s.Namespace + "/" + s.Name }

// portsText is "80/TCP,443:30443/TCP", as kubectl writes it.
func (s state) portsText() string {
	texts := make([]string, 0, len(s.Ports))
	for _, p := range s.Ports {
		text := fmt.Sprint(p.Port)
		if p.NodePort != 0 {
			text += fmt.Sprintf(":%d", p.NodePort)
		}
		texts = append(texts, text+"/"+strings.ToUpper(p.Protocol))
	}
	return strings.Join(texts, ",")
}

func (s state) source() string { return sourceText(s.Source, s.Manager, s.Origin) }

func sourceText(source, manager, origin string) string {
	switch {
	case origin != "":
		return source + ":" + origin
	case manager != "":
		return source + ":" + manager
	}
	return source
}

// reachable reports whether anything can lead to the service by an address.
func (s state) reachable() bool {
	for _, p := range s.Ports {
		if p.NodePort != 0 {
			return true
		}
	}
	return len(s.Addresses) > 0
}

func list(ctx context.Context, inv *invocation.Invocation, req *lbv1.ListServicesRequest) (listing, error) {
	all := listing{Services: []state{}, Refused: []refused{}}
	err := invocation.Each(ctx, inv, invocation.LoadBalancer, client.ListServices, req,
		func(m *lbv1.ListServicesResponse) {
			all.Revision = m.GetRevision()
			if s := m.GetService(); s != nil {
				all.Services = append(all.Services, stateOf(s))
			}
			if r := m.GetRefused(); r != nil {
				all.Refused = append(all.Refused, refused{
					r.GetKey().GetKind(), r.GetKey().GetNamespace(), r.GetKey().GetName(), r.GetSource(), r.GetOrigin(), r.GetError(),
				})
			}
		})
	return all, err
}

func printList(ctx context.Context, inv *invocation.Invocation, req *lbv1.ListServicesRequest, everything bool) error {
	all, err := list(ctx, inv, req)
	if err != nil {
		return err
	}
	hidden := 0
	if !everything {
		shown := []state{}
		for _, s := range all.Services {
			if s.reachable() {
				shown = append(shown, s)
			} else {
				hidden++
			}
		}
		all.Services = shown
	}
	return inv.Show(all, func(w io.Writer) { all.table(w, hidden) })
}

func (l listing) table(w io.Writer, hidden int) {
	output.Row(w, "NAMESPACE", "NAME", "TYPE", "ADDRESSES", "PORTS", "READY", "ENFORCED", "AGE", "SOURCE")
	for _, s := range l.Services {
		output.Row(w, s.Namespace, s.Name, s.Type, strings.Join(s.Addresses, ","), s.portsText(),
			fmt.Sprintf("%d/%d", s.Ready, s.Endpoints), yesNo(s.Enforced), output.Since(s.Updated), s.source())
	}
	first := true
	line := func(text string) {
		if first {
			fmt.Fprintln(w)
			first = false
		}
		fmt.Fprintln(w, output.Printable(text))
	}
	for _, s := range l.Services {
		for _, note := range s.Notes {
			line(s.title() + ": " + note)
		}
	}
	for _, r := range l.Refused {
		what := keyText(&lbv1.ObjectKey{Kind: r.Kind, Namespace: r.Namespace, Name: r.Name})
		if what == "" {
			what = sourceText(r.Source, "", r.Origin)
		}
		line(what + " is not in force as it was given: " + r.Error)
	}
	if hidden > 0 {
		line(fmt.Sprintf("Services without an address that are not shown: %d; see --all.", hidden))
	}
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}
