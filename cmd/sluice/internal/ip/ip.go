// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package ip shows what the cluster knows of an address.
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
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	numbers "github.com/sluice-net/sluice/model/identity"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
)

// Command is `ip`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("ip", "Show what the cluster knows of an address", &cobra.Command{
		Use:   "get ADDRESS",
		Short: "Show the identity of an address, its node, and mappings of it that do not count",
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

// mapping is the identity that a node says an address has.
type mapping struct {
	Identity uint32   `json:"identity"`
	Labels   []string `json:"labels"`
	Node     string   `json:"node,omitempty"` // empty for an address outside the nodes
	Reason   string   `json:"reason,omitempty"`
}

// knowledge is what `ip get -o json` prints.
type knowledge struct {
	Address string `json:"address"`
	// Mapping is the one that counts; nil if none does.
	Mapping   *mapping  `json:"mapping,omitempty"`
	Range     string    `json:"range,omitempty"`
	RangeNode string    `json:"rangeNode,omitempty"`
	Refused   []mapping `json:"refused"`
}

func printOne(ctx context.Context, inv *invocation.Invocation, a netip.Addr) error {
	resp, err := invocation.Ask(ctx, inv, invocation.Cluster, identityv1.ClusterServiceClient.GetIPMapping,
		&identityv1.GetIPMappingRequest{Address: a.String()})
	if err != nil {
		return err
	}
	k := knowledge{Address: a.String(), Range: resp.GetRange(), RangeNode: resp.GetRangeNode(), Refused: []mapping{}}
	if m := resp.GetMapping(); m != nil {
		shown, err := shown(ctx, inv, m, "")
		if err != nil {
			return err
		}
		k.Mapping = &shown
	}
	for _, r := range resp.GetRefused() {
		shown, err := shown(ctx, inv, r.GetMapping(), r.GetReason())
		if err != nil {
			return err
		}
		k.Refused = append(k.Refused, shown)
	}
	return inv.Show(k, k.table)
}

// shown adds the labels of the identity. One that this node does not know yet has none.
func shown(ctx context.Context, inv *invocation.Invocation, m *identityv1.IPMapping, reason string) (mapping, error) {
	s := mapping{Identity: m.GetIdentity(), Labels: []string{}, Node: m.GetNode(), Reason: reason}
	resp, err := invocation.Ask(ctx, inv, invocation.Identity, identityv1.IdentityServiceClient.GetIdentity,
		&identityv1.GetIdentityRequest{Number: m.GetIdentity()})
	switch {
	case err == nil:
		s.Labels = workload.LabelTexts(resp.GetIdentity().GetLabels())
	case status.Code(err) != codes.NotFound:
		return s, err
	}
	return s, nil
}

func (k knowledge) table(w io.Writer) {
	output.Row(w, "Address", k.Address)
	if m := k.Mapping; m != nil {
		output.Row(w, "Identity", workload.IdentityText(m.Identity, m.Labels))
		output.Row(w, "Node", m.Node)
	} else if k.Range != "" {
		output.Row(w, "Identity", fmt.Sprintf("none: packets have %d, unknown-in-cluster", numbers.UnknownInCluster))
	} else { // mappings that do not count change nothing
		output.Row(w, "Identity", "none: packets have the identity of the world")
	}
	if k.Range == "" {
		output.Row(w, "Range", "none of a node")
	} else {
		output.Row(w, "Range", fmt.Sprintf("%s of node %s", k.Range, k.RangeNode))
	}
	if len(k.Refused) == 0 {
		return
	}
	fmt.Fprintln(w)
	output.Row(w, "REFUSED FROM", "IDENTITY", "REASON")
	for _, r := range k.Refused {
		output.Row(w, r.Node, workload.IdentityText(r.Identity, r.Labels), r.Reason)
	}
}
