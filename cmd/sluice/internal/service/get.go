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
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
)

// maxBackends limits the number of backends of a list in tables.
const maxBackends = 8

// listText returns the backends of a list, and its draining backends.
func listText(l *lbv1.BackendList) string {
	text := backendTexts(l.GetBackends(), " (terminating)")
	switch {
	case text != "":
	case l.GetWhenEmpty() == lbv1.EmptyAction_EMPTY_ACTION_DROP:
		text = "none on this node: packets are dropped"
	default:
		text = "none: connections are refused"
	}
	leaving := slices.DeleteFunc(slices.Clone(l.GetDraining()), func(b *lbv1.Backend) bool { return !b.GetTerminating() })
	if len(leaving) > 0 {
		text += "; draining " + backendTexts(leaving, "")
	}
	return text
}

// backendTexts returns the backends, with a remark for terminating ones.
func backendTexts(bs []*lbv1.Backend, terminating string) string {
	var texts []string
	for i, b := range bs {
		if i == maxBackends {
			texts = append(texts, fmt.Sprintf("%d more", len(bs)-i))
			break
		}
		text := AddressText(b.GetAddress(), b.GetPort())
		if b.GetTerminating() {
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
		Short: "Show a service with its frontends and backends, and frontends that the kernel refused",
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
	s := r.GetService()
	return inv.Show(message.Of(s), func(w io.Writer) { describe(w, s) })
}

func describe(w io.Writer, s *lbv1.Service) {
	output.Row(w, "Service", title(s))
	output.Row(w, "Type", s.GetType())
	output.Row(w, "Addresses", strings.Join(s.GetAddresses(), ", "))
	output.Row(w, "Ports", portNames(s))
	output.Row(w, "Endpoints", fmt.Sprintf("%d of %d ready", s.GetReady(), s.GetEndpoints()))
	output.Row(w, "Affinity", affinity(s))
	if s.GetAlgorithm() != lbv1.Algorithm_ALGORITHM_UNSPECIFIED {
		output.Row(w, "Algorithm", output.Enum(s.GetAlgorithm(), "ALGORITHM_"))
	}
	if ranges := ranges(s); len(ranges) > 0 {
		output.Row(w, "Source ranges", strings.Join(ranges, ", "))
	}
	enforced := "enforced by the kernel"
	if !s.GetEnforced() {
		enforced = "not enforced by the kernel"
	}
	output.Row(w, "Revision", fmt.Sprintf("%d, %s", s.GetRevision(), enforced))
	output.Row(w, "Source", sourceText(s.GetSource(), s.GetManager(), s.GetOrigin()))
	output.Row(w, "Age", output.Since(output.When(s.GetUpdateTime())))
	if len(s.GetFrontends()) > 0 {
		fmt.Fprintln(w)
		output.Row(w, "FRONTEND", "KIND", "PORT", "FROM", "BACKENDS")
	}
	for _, f := range s.GetFrontends() {
		for i, side := range sides(f) {
			if i == 0 {
				output.Row(w, FrontendText(f.GetKey()), output.Enum(f.GetKind(), "FRONTEND_KIND_"), f.GetPortName(), side.from,
					side.backends)
			} else {
				fmt.Fprintf(w, "\t\t\t%s\t%s\n", side.from, output.Printable(side.backends))
			}
		}
	}
	if len(s.GetNotes()) > 0 {
		fmt.Fprintln(w)
	}
	for _, note := range s.GetNotes() {
		fmt.Fprintln(w, "Note: "+output.Printable(note))
	}
}

type side struct{ from, backends string }

// sides returns the backends of a frontend for connections from this node (inside) and for connections from elsewhere
// (outside).
func sides(f *lbv1.Frontend) []side {
	in, out := f.GetInside(), f.GetOutside()
	switch {
	case in == nil && out == nil:
		return []side{{"nowhere", ""}}
	case in == nil:
		return []side{{"outside", listText(out)}}
	case out == nil:
		return []side{{"everywhere", listText(in)}}
	}
	return []side{{"inside", listText(in)}, {"outside", listText(out)}}
}

// portNames returns "http 80/TCP, 443:30443/TCP".
func portNames(s *lbv1.Service) string {
	texts := make([]string, len(s.GetPorts()))
	for i, p := range s.GetPorts() {
		texts[i] = strings.TrimSpace(p.GetName() + " " + portText(p))
	}
	return strings.Join(texts, ", ")
}

// affinity describes the session affinity, which is the same for all frontends of a service.
func affinity(s *lbv1.Service) string {
	for _, f := range s.GetFrontends() {
		if f.GetAffinitySeconds() > 0 {
			return fmt.Sprintf("a client keeps its backend if it returns within %s",
				time.Duration(f.GetAffinitySeconds())*time.Second)
		}
	}
	return "none"
}

// ranges returns the source ranges: the clients that may use the load balancer addresses.
func ranges(s *lbv1.Service) []string {
	for _, f := range s.GetFrontends() {
		if len(f.GetSourceRanges()) > 0 {
			return f.GetSourceRanges()
		}
	}
	return nil
}
