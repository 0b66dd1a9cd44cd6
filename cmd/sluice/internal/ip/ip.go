// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package ip shows the identity and the node that an address belongs to.
package ip

import (
	"context"
	"fmt"
	"io"
	"net/netip"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	numbers "github.com/sluice-net/sluice/model/identity"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
)

// Command is `ip`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("ip", "Show the identity and the node of an address", &cobra.Command{
		Use:   "get ADDRESS",
		Short: "Show the identity and the node of an address, and its refused mappings",
		Args:  invocation.Args(1, "an address"),
		RunE: func(cmd *cobra.Command, a []string) error {
			address, err := netip.ParseAddr(a[0])
			if err != nil || address.Zone() != "" {
				return invocation.Usagef("%q is not an address", a[0])
			}
			return printOne(cmd.Context(), inv, address.Unmap())
		},
	})
}

func printOne(ctx context.Context, inv *invocation.Invocation, a netip.Addr) error {
	resp, err := invocation.Ask(ctx, inv, invocation.Cluster, identityv1.ClusterServiceClient.GetIPMapping,
		&identityv1.GetIPMappingRequest{Address: a.String()})
	if err != nil {
		return err
	}
	labels := map[uint32][]string{}
	// of returns the JSON object of a mapping, with the labels of its identity.
	of := func(m *identityv1.IPMapping) (message.Object, error) {
		known, err := labelsOf(ctx, inv, m.GetIdentity())
		labels[m.GetIdentity()] = known
		return message.Of(m, message.Fact{Key: "labels", Value: known}), err
	}
	facts := []message.Fact{{Key: "address", Value: a.String()}}
	if resp.GetMapping() != nil {
		m, err := of(resp.GetMapping())
		if err != nil {
			return err
		}
		facts = append(facts, message.Fact{Key: "mapping", Value: m})
	}
	refused := make([]message.Object, len(resp.GetRefused()))
	for i, r := range resp.GetRefused() {
		m, err := of(r.GetMapping())
		if err != nil {
			return err
		}
		refused[i] = message.Of(r, message.Fact{Key: "mapping", Value: m})
	}
	facts = append(facts, message.Fact{Key: "refused", Value: refused})
	return inv.Show(message.Of(resp, facts...), func(w io.Writer) { table(w, a, resp, labels) })
}

// labelsOf returns the labels of an identity; empty if this node does not know the identity yet.
func labelsOf(ctx context.Context, inv *invocation.Invocation, number uint32) ([]string, error) {
	resp, err := invocation.Ask(ctx, inv, invocation.Identity, identityv1.IdentityServiceClient.GetIdentity,
		&identityv1.GetIdentityRequest{Number: number})
	if status.Code(err) == codes.NotFound {
		return []string{}, nil
	}
	return workload.LabelTexts(resp.GetIdentity().GetLabels()), err
}

func table(w io.Writer, a netip.Addr, r *identityv1.GetIPMappingResponse, labels map[uint32][]string) {
	identityText := func(m *identityv1.IPMapping) string {
		return workload.IdentityText(m.GetIdentity(), labels[m.GetIdentity()])
	}
	output.Row(w, "Address", a)
	if m := r.GetMapping(); m != nil {
		output.Row(w, "Identity", identityText(m))
		output.Row(w, "Node", m.GetNode())
	} else if r.GetRange() != "" {
		output.Row(w, "Identity", fmt.Sprintf("none: packets have %d, unknown-in-cluster", numbers.UnknownInCluster))
	} else { // refused mappings have no effect
		output.Row(w, "Identity", "none: packets have the identity of the world")
	}
	if r.GetRange() == "" {
		output.Row(w, "Range", "none of a node")
	} else {
		output.Row(w, "Range", fmt.Sprintf("%s of node %s", r.GetRange(), r.GetRangeNode()))
	}
	if len(r.GetRefused()) == 0 {
		return
	}
	fmt.Fprintln(w)
	output.Table(w, []output.Column[*identityv1.RefusedMapping]{
		{Header: "REFUSED FROM", Cell: func(r *identityv1.RefusedMapping) any { return r.GetMapping().GetNode() }},
		{Header: "IDENTITY", Cell: func(r *identityv1.RefusedMapping) any { return identityText(r.GetMapping()) }},
		{Header: "REASON", Cell: func(r *identityv1.RefusedMapping) any { return r.GetReason() }},
	}, r.GetRefused())
}
