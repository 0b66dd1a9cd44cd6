// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package identity shows identities and their labels.
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
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
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
	list.Flags().BoolVar(&all, "all", false, "also list the reserved identities")
	return invocation.Group("identity", "Show identities and their label sets", list,
		&cobra.Command{
			Use: "get NUMBER", Short: "Show an identity and the endpoints of this node that use it",
			Args: invocation.Args(1, "a number"),
			RunE: func(cmd *cobra.Command, a []string) error { return printOne(cmd.Context(), inv, a[0]) },
		},
		&cobra.Command{
			Use:   "top-labels",
			Short: "Show which label keys create the most identities",
			Long: `Show each label key with the number of its values and the number of identities that have it,
most values first. If a key has nearly as many values as there are identities, almost every
workload gets a separate identity because of it. Exclude such a key with labels.exclude of
sluice-identity, unless policies select by it.`,
			Args: invocation.Args(0, ""),
			RunE: func(cmd *cobra.Command, _ []string) error { return printTopLabels(cmd.Context(), inv) },
		},
	)
}

// columns are the columns of `identity list`.
var columns = []output.Column[*identityv1.ListIdentitiesResponse]{
	{Header: "IDENTITY", Cell: func(r *identityv1.ListIdentitiesResponse) any { return r.GetIdentity().GetNumber() }},
	{Header: "SCOPE", Cell: func(r *identityv1.ListIdentitiesResponse) any { return scopeText(r.GetIdentity()) }},
	{Header: "HELD BY", Cell: func(r *identityv1.ListIdentitiesResponse) any { return r.GetReferenceCount() }},
	{Header: "LABELS", Cell: func(r *identityv1.ListIdentitiesResponse) any {
		return workload.Text(workload.LabelTexts(r.GetIdentity().GetLabels()))
	}},
	{Header: "ALL LABELS", Wide: true, Cell: func(r *identityv1.ListIdentitiesResponse) any {
		return strings.Join(workload.LabelTexts(r.GetIdentity().GetLabels()), ",")
	}},
}

func scopeText(i *identityv1.Identity) string { return output.Enum(i.GetScope(), "SCOPE_") }

// each calls f for the identities of the cluster and of this node, and for the reserved identities if reserved is
// set.
func each(ctx context.Context, inv *invocation.Invocation, reserved bool,
	f func(*identityv1.ListIdentitiesResponse),
) error {
	req := &identityv1.ListIdentitiesRequest{}
	if !reserved {
		req.Scopes = []identityv1.Scope{identityv1.Scope_SCOPE_CLUSTER, identityv1.Scope_SCOPE_NODE_LOCAL}
	}
	return invocation.Each(ctx, inv, invocation.Identity, identityv1.IdentityServiceClient.ListIdentities, req, f)
}

func printList(ctx context.Context, inv *invocation.Invocation, reserved bool) error {
	var all []*identityv1.ListIdentitiesResponse
	if err := each(ctx, inv, reserved, func(m *identityv1.ListIdentitiesResponse) { all = append(all, m) }); err != nil {
		return err
	}
	return inv.Show(message.List(all), func(w io.Writer) {
		output.FoldedTable(w, inv.Wide(), columns, all)
	})
}

// keyColumns are the columns of `identity top-labels`.
var keyColumns = []output.Column[labelKey]{
	{Header: "LABEL KEY", Cell: func(k labelKey) any { return k.Key }},
	{Header: "VALUES", Cell: func(k labelKey) any { return k.Values }},
	{Header: "IDENTITIES", Cell: func(k labelKey) any { return k.Identities }},
}

// labelKey is a label key with the number of identities that have it.
type labelKey struct {
	Key        string `json:"key"`
	Values     int    `json:"distinctValues"`
	Identities int    `json:"identities"`
}

func printTopLabels(ctx context.Context, inv *invocation.Invocation) error {
	values, identities := map[string]map[string]struct{}{}, map[string]int{}
	if err := each(ctx, inv, false, func(m *identityv1.ListIdentitiesResponse) {
		for _, l := range m.GetIdentity().GetLabels() {
			key := l.GetSource() + ":" + l.GetKey()
			if values[key] == nil {
				values[key] = map[string]struct{}{}
			}
			values[key][l.GetValue()] = struct{}{}
			identities[key]++ // a label set contains each key only once
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
	return inv.Show(all, func(w io.Writer) { output.Table(w, keyColumns, all) })
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
	i := resp.GetIdentity()
	return inv.Show(message.Of(resp), func(w io.Writer) {
		output.Row(w, "Identity", i.GetNumber())
		output.Row(w, "Scope", scopeText(i))
		output.Row(w, "Labels", strings.Join(workload.LabelTexts(i.GetLabels()), " "))
		for _, e := range resp.GetEndpoints() {
			output.Row(w, "Held by", "endpoint:"+e.GetOwner().GetContainerId()+"/"+e.GetOwner().GetInterfaceName())
		}
		for _, r := range resp.GetReferences() {
			output.Row(w, "Held by", "reference:"+r)
		}
	})
}
