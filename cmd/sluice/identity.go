// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"io"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
)

func (c *command) identityCommand() *cobra.Command {
	var all bool
	list := &cobra.Command{
		Use: "list", Short: "List the identities of the cluster and of this node", Args: args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error { return c.identityList(cmd.Context(), all) },
	}
	list.Flags().BoolVar(&all, "all", false, "the reserved ones too")
	return group("identity", "Show what numbers stand for which labels", list,
		&cobra.Command{
			Use: "get NUMBER", Short: "Show one identity and who holds it on this node", Args: args(1, "a number"),
			RunE: func(cmd *cobra.Command, a []string) error { return c.identityGet(cmd.Context(), a[0]) },
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

func identityOf(i *identityv1.Identity) identity {
	return identity{Number: i.GetNumber(), Scope: enum(i.GetScope(), "SCOPE_"), Labels: labelTexts(i.GetLabels())}
}

func (c *command) identityList(ctx context.Context, reserved bool) error {
	conn, err := c.dial("identity")
	if err != nil {
		return err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	req := &identityv1.ListIdentitiesRequest{}
	if !reserved {
		req.Scopes = []identityv1.Scope{identityv1.Scope_SCOPE_CLUSTER, identityv1.Scope_SCOPE_NODE_LOCAL}
	}
	stream, err := identityv1.NewIdentityServiceClient(conn).ListIdentities(ctx, req)
	if err != nil {
		return err
	}
	all := []identity{}
	if err := each(stream, func(m *identityv1.ListIdentitiesResponse) {
		i := identityOf(m.GetIdentity())
		i.References = m.GetReferenceCount()
		all = append(all, i)
	}); err != nil {
		return err
	}
	return c.show(all, func(w io.Writer) {
		row(w, "IDENTITY", "SCOPE", "HELD BY", "LABELS")
		for _, i := range all {
			row(w, i.Number, i.Scope, i.References, strings.Join(i.Labels, ","))
		}
	})
}

func (c *command) identityGet(ctx context.Context, text string) error {
	number, err := strconv.ParseUint(text, 0, 32)
	if err != nil || number == 0 || number > 0xFFFFFF {
		return usagef("%q is not an identity: want 1 to %d", text, 0xFFFFFF)
	}
	conn, err := c.dial("identity")
	if err != nil {
		return err
	}
	defer conn.Close()
	resp, err := identityv1.NewIdentityServiceClient(conn).GetIdentity(ctx, &identityv1.GetIdentityRequest{Number: uint32(number)})
	if err != nil {
		return err
	}
	i := identityOf(resp.GetIdentity())
	i.Holders = resp.GetReferences()
	i.References = uint32(len(i.Holders))
	return c.show(i, func(w io.Writer) {
		row(w, "Identity", i.Number)
		row(w, "Scope", i.Scope)
		row(w, "Labels", strings.Join(i.Labels, " "))
		for _, h := range i.Holders {
			row(w, "Held by", h)
		}
	})
}
