// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package service

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
)

// frontend is what is shown of one frontend.
type frontend struct {
	Address  string       `json:"address,omitempty"` // empty: every address of the node
	Port     uint32       `json:"port"`
	Protocol string       `json:"protocol"`
	Family   string       `json:"family,omitempty"` // of a frontend without an address
	Kind     string       `json:"kind"`
	PortName string       `json:"portName,omitempty"`
	Inside   *backendList `json:"inside,omitempty"`
	Outside  *backendList `json:"outside,omitempty"` // unset: as inside
	Affinity uint32       `json:"affinitySeconds,omitempty"`
	Ranges   []string     `json:"sourceRanges,omitempty"`

	text string
}

// backendList is where connections from one side lead.
type backendList struct {
	Backends  []backend `json:"backends"`
	Algorithm string    `json:"algorithm,omitempty"`
	WhenEmpty string    `json:"whenEmpty,omitempty"`
	Draining  []backend `json:"draining,omitempty"`
}

type backend struct {
	Address     string `json:"address"`
	Port        uint32 `json:"port"`
	Terminating bool   `json:"terminating,omitempty"`
}

func frontendOf(f *lbv1.Frontend) frontend {
	return frontend{
		Address: f.GetKey().GetAddress(), Port: f.GetKey().GetPort(),
		Protocol: output.Enum(f.GetKey().GetProtocol(), "PROTOCOL_"),
		Family:   output.Enum(f.GetKey().GetFamily(), "IP_FAMILY_"), Kind: output.Enum(f.GetKind(), "FRONTEND_KIND_"),
		PortName: f.GetPortName(), Inside: backendsOf(f.GetInside()), Outside: backendsOf(f.GetOutside()),
		Affinity: f.GetAffinitySeconds(), Ranges: f.GetSourceRanges(), text: FrontendText(f.GetKey()),
	}
}

func backendsOf(l *lbv1.BackendList) *backendList {
	if l == nil {
		return nil
	}
	out := &backendList{
		Backends: []backend{}, Algorithm: algorithm(l.GetAlgorithm()),
		WhenEmpty: output.Enum(l.GetWhenEmpty(), "EMPTY_ACTION_"),
	}
	for _, b := range l.GetBackends() {
		out.Backends = append(out.Backends, backend{b.GetAddress(), b.GetPort(), b.GetTerminating()})
	}
	for _, b := range l.GetDraining() {
		out.Draining = append(out.Draining, backend{b.GetAddress(), b.GetPort(), b.GetTerminating()})
	}
	return out
}

// algorithm is how a backend is chosen; empty: as by default.
func algorithm(a lbv1.Algorithm) string {
	if a == lbv1.Algorithm_ALGORITHM_UNSPECIFIED {
		return ""
	}
	return output.Enum(a, "ALGORITHM_")
}

// maxBackends is how many backends of a list are named to people.
const maxBackends = 8

// text names the backends, and those that terminate and get no new connections.
func (l *backendList) text() string {
	text := backendTexts(l.Backends, " (terminating)")
	switch {
	case text != "":
	case l.WhenEmpty == "drop":
		text = "none here: packets are dropped"
	default:
		text = "none: connections are refused"
	}
	leaving := slices.DeleteFunc(slices.Clone(l.Draining), func(b backend) bool { return !b.Terminating })
	if len(leaving) > 0 {
		text += "; draining " + backendTexts(leaving, "")
	}
	return text
}

// backendTexts names backends, with a remark at those that terminate.
func backendTexts(bs []backend, terminating string) string {
	var texts []string
	for i, b := range bs {
		if i == maxBackends {
			texts = append(texts, fmt.Sprintf("%d more", len(bs)-i))
			break
		}
		text := AddressText(b.Address, b.Port)
		if b.Terminating {
			text += terminating
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, ", ")
}

func getCommand(inv *invocation.Invocation) *cobra.Command {
	var namespace string
	cmd := &cobra.Command{
		Use:   "get [NAMESPACE/]NAME",
		Short: "Show a service: its frontends, where they lead, and what the kernel refused",
		Args:  invocation.Args(1, "the name of a service, such as shop/web"),
		RunE: func(cmd *cobra.Command, a []string) error {
			key, err := Named(a[0], namespace)
			if err != nil {
				return err
			}
			return printOne(cmd.Context(), inv, key)
		},
	}
	cmd.Flags().StringVarP(&namespace, "namespace", "n", "", "namespace, if the name has none (default \"default\")")
	return cmd
}

func printOne(ctx context.Context, inv *invocation.Invocation, key *lbv1.ServiceKey) error {
	request := &lbv1.GetServiceRequest{Namespace: key.GetNamespace(), Name: key.GetName()}
	r, err := invocation.Ask(ctx, inv, invocation.LoadBalancer, client.GetService, request)
	if status.Code(err) == codes.NotFound {
		return invocation.NotFound("service", key.GetNamespace()+"/"+key.GetName(), "service list --all")
	}
	if err != nil {
		return err
	}
	s := stateOf(r.GetService())
	return inv.Show(s, s.describe)
}

// describe writes everything about a service.
func (s state) describe(w io.Writer) {
	output.Row(w, "Service", s.title())
	output.Row(w, "Type", s.Type)
	output.Row(w, "Addresses", strings.Join(s.Addresses, ", "))
	output.Row(w, "Ports", s.portNames())
	output.Row(w, "Endpoints", fmt.Sprintf("%d of %d ready", s.Ready, s.Endpoints))
	output.Row(w, "Affinity", s.affinity())
	if s.Algorithm != "" {
		output.Row(w, "Algorithm", s.Algorithm)
	}
	if ranges := s.ranges(); len(ranges) > 0 {
		output.Row(w, "Source ranges", strings.Join(ranges, ", "))
	}
	enforced := "enforced by the kernel"
	if !s.Enforced {
		enforced = "not enforced by the kernel"
	}
	output.Row(w, "Revision", fmt.Sprintf("%d, %s", s.Revision, enforced))
	output.Row(w, "Source", s.source())
	output.Row(w, "Age", output.Since(s.Updated))
	if len(s.Frontends) > 0 {
		fmt.Fprintln(w)
		output.Row(w, "FRONTEND", "KIND", "PORT", "FROM", "BACKENDS")
	}
	for _, f := range s.Frontends {
		for i, side := range f.sides() {
			if i == 0 {
				output.Row(w, f.text, f.Kind, f.PortName, side.from, side.backends)
			} else {
				fmt.Fprintf(w, "\t\t\t%s\t%s\n", side.from, output.Printable(side.backends))
			}
		}
	}
	if len(s.Notes) > 0 {
		fmt.Fprintln(w)
	}
	for _, note := range s.Notes {
		fmt.Fprintln(w, "Note: "+output.Printable(note))
	}
}

type side struct{ from, backends string }

// sides are where connections of this node, and those from elsewhere, lead.
func (f frontend) sides() []side {
	switch {
	case f.Inside == nil && f.Outside == nil:
		return []side{{"nowhere", ""}}
	case f.Inside == nil:
		return []side{{"outside", f.Outside.text()}}
	case f.Outside == nil:
		return []side{{"everywhere", f.Inside.text()}}
	}
	return []side{{"inside", f.Inside.text()}, {"outside", f.Outside.text()}}
}

func (s state) portNames() string {
	texts := make([]string, 0, len(s.Ports))
	for i, text := range strings.Split(s.portsText(), ",") {
		if i < len(s.Ports) && s.Ports[i].Name != "" {
			text = s.Ports[i].Name + " " + text
		}
		texts = append(texts, text)
	}
	return strings.Join(texts, ", ")
}

// affinity says for how long a client keeps its backend; the same for all
// frontends of a service.
func (s state) affinity() string {
	for _, f := range s.Frontends {
		if f.Affinity > 0 {
			return fmt.Sprintf("a client keeps its backend if it returns within %s", time.Duration(f.Affinity)*time.Second)
		}
	}
	return "none"
}

// ranges are the clients that may use the load balancer's addresses.
func (s state) ranges() []string {
	for _, f := range s.Frontends {
		if len(f.Ranges) > 0 {
			return f.Ranges
		}
	}
	return nil
}
