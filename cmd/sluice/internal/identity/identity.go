// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package identity shows which numbers stand for which labels.
package identity

import (
	"cmp"
	"context"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/workload"
	numbers "github.com/sluice-net/sluice/model/identity"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
)

// Command is `identity`.
func Command(inv *invocation.Invocation) *cobra.Command {
	var all bool
	list := &cobra.Command{
		Use: "list", Short: "List the identities of the cluster and of this node", Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error { return printList(cmd.Context(), inv, all) },
	}
	list.Flags().BoolVar(&all, "all", false, "the reserved ones too")
	return invocation.Group("identity", "Show what numbers stand for which labels", list,
		&cobra.Command{
			Use: "get NUMBER", Short: "Show one identity and who holds it on this node", Args: invocation.Args(1, "a number"),
			RunE: func(cmd *cobra.Command, a []string) error { return printOne(cmd.Context(), inv, a[0]) },
		},
		&cobra.Command{
			Use:   "top-labels",
			Short: "Show which label keys make most identities",
			Long: `Show each label key with the number of its values and of the identities that have
it, most values first. A key whose values are nearly as many as its identities
gives each workload an identity of its own: exclude it by labels.exclude of
sluice-identity, unless policies select by it.`,
			Args: invocation.Args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return printTopLabels(cmd.Context(), inv) },
		},
	)
}

type identity struct {
	Number     uint32   `json:"number"`
	Scope      string   `json:"scope"`
	References uint32   `json:"references"`
	Labels     []string `json:"labels"`
	Holders    []string `json:"holders,omitempty"`
}

func shown(i *identityv1.Identity) identity {
	return identity{
		Number: i.GetNumber(), Scope: output.Enum(i.GetScope(), "SCOPE_"),
		Labels: workload.LabelTexts(i.GetLabels()),
	}
}

func printList(ctx context.Context, inv *invocation.Invocation, reserved bool) error {
	req := &identityv1.ListIdentitiesRequest{}
	if !reserved {
		req.Scopes = []identityv1.Scope{identityv1.Scope_SCOPE_CLUSTER, identityv1.Scope_SCOPE_NODE_LOCAL}
	}
	all := []identity{}
	call := identityv1.IdentityServiceClient.ListIdentities
	if err := invocation.Each(ctx, inv, invocation.Identity, call, req, func(m *identityv1.ListIdentitiesResponse) {
		i := shown(m.GetIdentity())
		i.References = m.GetReferenceCount()
		all = append(all, i)
	}); err != nil {
		return err
	}
	return inv.Show(all, func(w io.Writer) {
		output.Row(w, "IDENTITY", "SCOPE", "HELD BY", "LABELS")
		for _, i := range all {
			output.Row(w, i.Number, i.Scope, i.References, strings.Join(i.Labels, ","))
		}
	})
}

// labelKey is a key with how many identities it makes.
type labelKey struct {
	Key        string `json:"key"`
	Values     int    `json:"distinctValues"`
	Identities int    `json:"identities"`
}

func printTopLabels(ctx context.Context, inv *invocation.Invocation) error {
	req := &identityv1.ListIdentitiesRequest{
		Scopes: []identityv1.Scope{identityv1.Scope_SCOPE_CLUSTER, identityv1.Scope_SCOPE_NODE_LOCAL},
	}
	values, identities := map[string]map[string]struct{}{}, map[string]int{}
	call := identityv1.IdentityServiceClient.ListIdentities
	if err := invocation.Each(ctx, inv, invocation.Identity, call, req, func(m *identityv1.ListIdentitiesResponse) {
		for _, l := range m.GetIdentity().GetLabels() {
			key := l.GetSource() + ":" + l.GetKey()
			if values[key] == nil {
				values[key] = map[string]struct{}{}
			}
			values[key][l.GetValue()] = struct{}{}
			identities[key]++ // a label set has a key once
		}
	}); err != nil {
		return err
	}
	all := []labelKey{}
	for key, n := range identities {
		all = append(all, labelKey{key, len(values[key]), n})
	}
	slices.SortFunc(all, func(a, b labelKey) int {
		return cmp.Or(cmp.Compare(b.Values, a.Values), cmp.Compare(b.Identities, a.Identities), cmp.Compare(a.Key, b.Key))
	})
	return inv.Show(all, func(w io.Writer) {
		output.Row(w, "LABEL KEY", "VALUES", "IDENTITIES")
		for _, k := range all {
			output.Row(w, k.Key, k.Values, k.Identities)
		}
	})
}

func printOne(ctx context.Context, inv *invocation.Invocation, text string) error {
	number, err := strconv.ParseUint(text, 0, 32)
	if err != nil || number == 0 || number > uint64(numbers.Max) {
		return invocation.Usagef("%q is not an identity: want 1 to %d", text, numbers.Max)
	}
	resp, err := invocation.Ask(ctx, inv, invocation.Identity, identityv1.IdentityServiceClient.GetIdentity,
		&identityv1.GetIdentityRequest{Number: uint32(number)})
	if err != nil {
		return invocation.OrNotFound(err, "identity", text, "identity list --all")
	}
	i := shown(resp.GetIdentity())
	for _, e := range resp.GetEndpoints() {
		i.Holders = append(i.Holders, "endpoint:"+e.GetOwner().GetContainerId()+"/"+e.GetOwner().GetInterfaceName())
	}
	for _, r := range resp.GetReferences() {
		i.Holders = append(i.Holders, "reference:"+r)
	}
	i.References = uint32(len(i.Holders))
	return inv.Show(i, func(w io.Writer) {
		output.Row(w, "Identity", i.Number)
		output.Row(w, "Scope", i.Scope)
		output.Row(w, "Labels", strings.Join(i.Labels, " "))
		for _, h := range i.Holders {
			output.Row(w, "Held by", h)
		}
	})
}
