// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package cluster shows the nodes of the cluster and removes nodes from it.
package cluster

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
)

// Commands returns the subcommands of `node` for the nodes of the cluster.
func Commands(inv *invocation.Invocation) []*cobra.Command {
	var force, validate bool
	forget := &cobra.Command{
		Use:   "forget NAME",
		Short: "Remove from the cluster a node that will not come back",
		Long: `Remove the registration of a node and the addresses of its containers from the cluster, in
one step. For 15 minutes, the pod CIDRs of the node stay reserved for a node of the same
name. For a node that is alive, the command requires --force; the node then registers
again by itself. Run the command as root, on any node of the cluster.`,
		Args: invocation.Args(1, "the name of a node"),
		RunE: func(cmd *cobra.Command, a []string) error { return forget(cmd.Context(), inv, a[0], force, validate) },
	}
	forget.Flags().BoolVar(&force, "force", false, "forget the node even if it is alive")
	invocation.ValidateFlag(forget, &validate, "show what would be forgotten; forget nothing")
	return []*cobra.Command{
		{
			Use: "list", Short: "List the nodes of the cluster", Args: invocation.Args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return printList(cmd.Context(), inv) },
		},
		{
			Use: "get NAME", Short: "Show one node of the cluster", Args: invocation.Args(1, "the name of a node"),
			RunE: func(cmd *cobra.Command, a []string) error { return printOne(cmd.Context(), inv, a[0]) },
		},
		forget,
	}
}

// columns are the columns of `node list`.
var columns = []output.Column[*identityv1.ListNodesResponse]{
	{Header: "NODE", Cell: func(n *identityv1.ListNodesResponse) any {
		if n.GetLocal() {
			return n.GetNode().GetName() + " (this node)"
		}
		return n.GetNode().GetName()
	}},
	{Header: "STATE", Cell: func(n *identityv1.ListNodesResponse) any { return stateText(n) }},
	{Header: "ADDRESSES", Cell: func(n *identityv1.ListNodesResponse) any {
		return strings.Join(n.GetNode().GetUnderlay().GetAddresses(), ",")
	}},
	{Header: "POD CIDRS", Cell: func(n *identityv1.ListNodesResponse) any {
		return strings.Join(n.GetNode().GetPodRanges(), ",")
	}},
	{Header: "MAPPINGS", Cell: func(n *identityv1.ListNodesResponse) any { return n.GetMappingCount() }},
	{Header: "REFUSED", Wide: true, Cell: func(n *identityv1.ListNodesResponse) any { return refusalsText(n) }},
	{Header: "VERSION", Wide: true, Cell: func(n *identityv1.ListNodesResponse) any { return n.GetNode().GetVersion() }},
}

// stateText returns the state of a node; "unknown" if the service does not know it.
func stateText(n *identityv1.ListNodesResponse) string {
	return cmp.Or(output.Enum(n.GetState(), "NODE_STATE_"), "unknown")
}

// refusalsText returns how many mappings and CIDRs of a node are refused.
func refusalsText(n *identityv1.ListNodesResponse) string {
	text := fmt.Sprint(n.GetRefusedMappingCount())
	if ranges := n.GetNode().GetRefusedRanges(); len(ranges) > 0 {
		text += fmt.Sprintf(", %d ranges", len(ranges))
	}
	return text
}

func list(ctx context.Context, inv *invocation.Invocation) (all []*identityv1.ListNodesResponse, err error) {
	err = invocation.Each(ctx, inv, invocation.Cluster, identityv1.ClusterServiceClient.ListNodes,
		&identityv1.ListNodesRequest{}, func(m *identityv1.ListNodesResponse) { all = append(all, m) })
	return all, err
}

func printList(ctx context.Context, inv *invocation.Invocation) error {
	all, err := list(ctx, inv)
	if err != nil {
		return err
	}
	return inv.Show(message.List(all), func(w io.Writer) {
		output.FoldedTable(w, inv.Wide(), columns, all)
	})
}

func printOne(ctx context.Context, inv *invocation.Invocation, name string) error {
	all, err := list(ctx, inv)
	if err != nil {
		return err
	}
	for _, n := range all {
		if n.GetNode().GetName() == name {
			return inv.Show(message.Of(n), func(w io.Writer) { describe(w, n) })
		}
	}
	return invocation.NotFound("node", name, "node list")
}

func describe(w io.Writer, r *identityv1.ListNodesResponse) {
	n, u := r.GetNode(), r.GetNode().GetUnderlay()
	output.Row(w, "Node", n.GetName())
	output.Row(w, "This node", yesNo(r.GetLocal()))
	output.Row(w, "State", stateText(r))
	output.Row(w, "Addresses", strings.Join(u.GetAddresses(), " "))
	output.Row(w, "Overlay addresses", strings.Join(u.GetOverlayAddresses(), " "))
	output.Row(w, "Pod CIDRs", strings.Join(n.GetPodRanges(), " "))
	for _, r := range n.GetRefusedRanges() {
		output.Row(w, "Refused CIDR", fmt.Sprintf("%s: %s", r.GetPrefix(), r.GetReason()))
	}
	output.Row(w, "Routing mode", output.Enum(u.GetMode(), "ROUTING_MODE_"))
	output.Row(w, "Tunnel port", unset(u.GetTunnelPort()))
	output.Row(w, "MTU", unset(u.GetMtu()))
	output.Row(w, "Mappings", fmt.Sprintf("%d, %d refused", r.GetMappingCount(), r.GetRefusedMappingCount()))
	output.Row(w, "Version", n.GetVersion())
	output.Row(w, "Incarnation", n.GetIncarnation())
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// unset formats a number; 0 means that the node did not report one.
func unset(n uint32) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprint(n)
}

func forget(ctx context.Context, inv *invocation.Invocation, name string, force, validate bool) error {
	resp, err := invocation.Ask(ctx, inv, invocation.Cluster, identityv1.ClusterServiceClient.ForgetNode,
		&identityv1.ForgetNodeRequest{Name: name, Force: force, ValidateOnly: validate})
	if st := status.Convert(err); st.Code() == codes.FailedPrecondition && !force {
		said := st.Proto()
		said.Message += "\nIt would register again by itself; use --force to forget it anyway."
		return status.ErrorProto(said)
	}
	if err != nil {
		return invocation.OrNotFound(err, "node", name, "node list")
	}
	return inv.Show(message.Of(resp, message.Fact{Key: "validateOnly", Value: validate}), func(w io.Writer) {
		what := fmt.Sprintf("node %s with %d mappings", output.Printable(name), resp.GetMappingCount())
		if validate {
			fmt.Fprintf(w, "Nothing was changed: --dry-run. It would forget %s.\n", what)
			return
		}
		fmt.Fprintf(w, "Forgot %s.\n", what)
		if ranges := resp.GetNode().GetPodRanges(); len(ranges) > 0 {
			fmt.Fprintf(w, "For 15 minutes, only a node of this name can have %s.\n", strings.Join(ranges, " and "))
		}
	})
}
