// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package cluster shows the nodes that agree through one etcd, and has one of them forgotten.
package cluster

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
)

// Commands are those below `node` that are about the nodes of the cluster.
func Commands(inv *invocation.Invocation) []*cobra.Command {
	var force, validate bool
	forget := &cobra.Command{
		Use:   "forget NAME",
		Short: "Remove a node that does not come back from the cluster",
		Long: `Remove what a node said of itself and the addresses of its containers, in one step.
Its ranges stay reserved for a node of the same name for 15 minutes. A node that
is alive is refused without --force, and registers again by itself. It runs as
root, at any node of the cluster.`,
		Args: invocation.Args(1, "the name of a node"),
		RunE: func(cmd *cobra.Command, a []string) error { return forget(cmd.Context(), inv, a[0], force, validate) },
	}
	forget.Flags().BoolVar(&force, "force", false, "also if the node is alive")
	invocation.ValidateFlag(forget, &validate, "show what would be forgotten, but forget nothing")
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

// node is what is shown of one.
type node struct {
	Name             string         `json:"name"`
	Local            bool           `json:"local"` // it is the node that answers
	State            string         `json:"state"`
	Addresses        []string       `json:"addresses"`
	OverlayAddresses []string       `json:"overlayAddresses,omitempty"`
	PodCIDRs         []string       `json:"podCidrs"`
	Refused          []refusedRange `json:"refusedRanges,omitempty"`
	Mode             string         `json:"routingMode,omitempty"`
	TunnelPort       uint32         `json:"tunnelPort,omitempty"`
	MTU              uint32         `json:"mtu,omitempty"`
	Mappings         uint32         `json:"mappings"`
	RefusedMappings  uint32         `json:"refusedMappings"`
	Version          string         `json:"version,omitempty"`
	Incarnation      string         `json:"incarnation,omitempty"`
}

type refusedRange struct {
	CIDR   string `json:"cidr"`
	Holder string `json:"holder,omitempty"`
	Reason string `json:"reason"`
}

func shown(n *identityv1.Node) node {
	u := n.GetUnderlay()
	s := node{
		Name: n.GetName(), Addresses: append([]string{}, u.GetAddresses()...), OverlayAddresses: u.GetOverlayAddresses(),
		PodCIDRs: append([]string{}, n.GetPodRanges()...), Mode: output.Enum(u.GetMode(), "ROUTING_MODE_"),
		TunnelPort: u.GetTunnelPort(), MTU: u.GetMtu(), Version: n.GetVersion(), Incarnation: n.GetIncarnation(),
	}
	for _, r := range n.GetRefusedRanges() {
		s.Refused = append(s.Refused, refusedRange{r.GetPrefix(), r.GetHolder(), r.GetReason()})
	}
	return s
}

// list asks for every node.
func list(ctx context.Context, inv *invocation.Invocation) ([]node, error) {
	all := []node{}
	err := invocation.Each(ctx, inv, invocation.Cluster, identityv1.ClusterServiceClient.ListNodes,
		&identityv1.ListNodesRequest{}, func(m *identityv1.ListNodesResponse) {
			n := shown(m.GetNode())
			n.Local, n.State = m.GetLocal(), "unknown"
			if m.GetState() != identityv1.NodeState_NODE_STATE_UNSPECIFIED {
				n.State = output.Enum(m.GetState(), "NODE_STATE_")
			}
			n.Mappings, n.RefusedMappings = m.GetMappingCount(), m.GetRefusedMappingCount()
			all = append(all, n)
		})
	return all, err
}

func printList(ctx context.Context, inv *invocation.Invocation) error {
	all, err := list(ctx, inv)
	if err != nil {
		return err
	}
	return inv.Show(all, func(w io.Writer) {
		output.Row(w, "NODE", "STATE", "ADDRESSES", "POD CIDRS", "MAPPINGS", "REFUSED", "VERSION")
		for _, n := range all {
			name := n.Name
			if n.Local {
				name += " (this node)"
			}
			output.Row(w, name, n.State, strings.Join(n.Addresses, ","), strings.Join(n.PodCIDRs, ","), n.Mappings,
				n.refusals(), n.Version)
		}
	})
}

// refusals counts what of a node does not count, for a table.
func (n node) refusals() string {
	text := fmt.Sprint(n.RefusedMappings)
	if len(n.Refused) > 0 {
		text += fmt.Sprintf(", %d ranges", len(n.Refused))
	}
	return text
}

func printOne(ctx context.Context, inv *invocation.Invocation, name string) error {
	all, err := list(ctx, inv)
	if err != nil {
		return err
	}
	for _, n := range all {
		if n.Name == name {
			return inv.Show(n, n.table)
		}
	}
	return invocation.NotFound("node", name, "node list")
}

func (n node) table(w io.Writer) {
	output.Row(w, "Node", n.Name)
	output.Row(w, "This node", yesNo(n.Local))
	output.Row(w, "State", n.State)
	output.Row(w, "Addresses", strings.Join(n.Addresses, " "))
	output.Row(w, "Overlay addresses", strings.Join(n.OverlayAddresses, " "))
	output.Row(w, "Pod CIDRs", strings.Join(n.PodCIDRs, " "))
	for _, r := range n.Refused {
		output.Row(w, "Refused CIDR", fmt.Sprintf("%s: %s", r.CIDR, r.Reason))
	}
	output.Row(w, "Routing mode", n.Mode)
	output.Row(w, "Tunnel port", unset(n.TunnelPort))
	output.Row(w, "MTU", unset(n.MTU))
	output.Row(w, "Mappings", fmt.Sprintf("%d, %d refused", n.Mappings, n.RefusedMappings))
	output.Row(w, "Version", n.Version)
	output.Row(w, "Incarnation", n.Incarnation)
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// unset is empty for 0, which means that the node did not say it.
func unset(n uint32) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprint(n)
}

// forgotten is what `node forget` prints.
type forgotten struct {
	Node     string   `json:"node"`
	PodCIDRs []string `json:"podCidrs"`
	Mappings uint32   `json:"mappings"`
	// ValidateOnly: nothing was forgotten.
	ValidateOnly bool `json:"validateOnly,omitempty"`
}

func forget(ctx context.Context, inv *invocation.Invocation, name string, force, validate bool) error {
	resp, err := invocation.Ask(ctx, inv, invocation.Cluster, identityv1.ClusterServiceClient.ForgetNode,
		&identityv1.ForgetNodeRequest{Name: name, Force: force, ValidateOnly: validate})
	if st := status.Convert(err); st.Code() == codes.FailedPrecondition && !force {
		said := st.Proto()
		said.Message += "\nIt would register again by itself; --force forgets it all the same."
		return status.ErrorProto(said)
	}
	if err != nil {
		return invocation.OrNotFound(err, "node", name, "node list")
	}
	f := forgotten{
		Node: name, PodCIDRs: append([]string{}, resp.GetNode().GetPodRanges()...), Mappings: resp.GetMappingCount(),
		ValidateOnly: validate,
	}
	return inv.Show(f, func(w io.Writer) {
		what := fmt.Sprintf("node %s with %d mappings", output.Printable(name), f.Mappings)
		if validate {
			fmt.Fprintf(w, "Nothing was changed: --validate-only. It would forget %s.\n", what)
			return
		}
		fmt.Fprintf(w, "Forgot %s.\n", what)
		if len(f.PodCIDRs) > 0 {
			fmt.Fprintf(w, "For 15 minutes, only a node of this name can have %s.\n", strings.Join(f.PodCIDRs, " and "))
		}
	})
}
