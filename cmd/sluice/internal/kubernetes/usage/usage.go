// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package usage shows what tenants have of the shared limits on the nodes of a cluster.
package usage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/cmd/sluice/internal/shares"
)

// Command is `kubernetes shares`.
func Command(inv *invocation.Invocation, client *kubectl.Client) *cobra.Command {
	var exceeded bool
	cmd := &cobra.Command{
		Use:   "shares [TENANT]",
		Short: "Show what tenants ask for and have of the limits that they share, on every node",
		Long: `Show what tenants ask for and have of the limits that they share, on every node.
Nodes with the same figures share a row; objects of the API server are divided alike on
all nodes. See ` + "`sluice shares --help`" + ` for the columns.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if exceeded {
				args = append(args, "--exceeded")
			}
			return run(cmd.Context(), inv, client, args)
		},
	}
	cmd.Flags().BoolVar(&exceeded, "exceeded", false, "only tenants that ask for more than they have")
	return cmd
}

// nodes is what `kubernetes shares -o json` prints.
type nodes struct {
	Items []*node `json:"items"`
}

// node has the answer of one node.
type node struct {
	Name   string          `json:"node"`
	Limits []*shares.Limit `json:"limits"`
	Error  string          `json:"error,omitempty"`
}

func run(ctx context.Context, inv *invocation.Invocation, client *kubectl.Client, args []string) error {
	cluster, err := client.Cluster(ctx)
	if err != nil {
		return err
	}
	all := nodes{Items: make([]*node, len(cluster.Nodes))}
	client.Each(cluster.Nodes, func(i int, n kubectl.Node) {
		all.Items[i] = &node{Name: n.Name, Limits: []*shares.Limit{}}
		if err := all.Items[i].ask(ctx, client, n, args); err != nil {
			all.Items[i].Error = err.Error()
		}
	})
	if ctx.Err() != nil {
		return ctx.Err()
	}
	all.Items = slices.DeleteFunc(all.Items, func(n *node) bool { return n.Error == noPod })
	errs := []error{inv.Show(all, all.table)}
	for _, n := range all.Items {
		if n.Error != "" {
			errs = append(errs, fmt.Errorf("%s: %s", n.Name, n.Error))
		}
	}
	return errors.Join(errs...)
}

// noPod is the error of a node that no pod of Sluice is wanted on.
const noPod = "no pod of Sluice is wanted on the node"

func (s *node) ask(ctx context.Context, client *kubectl.Client, n kubectl.Node, args []string) error {
	switch {
	case n.Pod == nil && !n.Selected:
		return errors.New(noPod)
	case n.Pod == nil:
		return errors.New("no pod of Sluice is on the node")
	}
	if _, err := n.Container(); err != nil {
		return err
	}
	out, err := client.Sluice(ctx, n, append([]string{
		"shares", "--output=json", "--timeout=" + client.Timeout().String(),
	}, args...)...)
	return s.read(out, err)
}

// read takes what the node printed; it may be a part beside an error.
func (s *node) read(out []byte, err error) error {
	if len(out) == 0 {
		return err
	}
	var answer struct{ Items []*shares.Limit }
	if jerr := json.Unmarshal(out, &answer); jerr != nil {
		return errors.Join(err, fmt.Errorf("the answer is not that of `sluice shares`: %w", jerr))
	}
	s.Limits = answer.Items
	return err
}

// mostNamed is how many nodes of a row are named.
const mostNamed = 3

func (n nodes) table(w io.Writer) {
	n.rows(w, shares.Columns, (*shares.Limit).Rows, true)
	n.rows(w, shares.EndpointColumns, (*shares.Limit).EndpointRows, false)
}

// rows prints one table; only if it has rows, unless always is set.
func (n nodes) rows(w io.Writer, columns []any, of func(*shares.Limit) [][]any, always bool) {
	var rows [][]any
	names := make(map[string][]string)
	answered := 0
	for _, x := range n.Items {
		if x.Error == "" || len(x.Limits) > 0 {
			answered++
		}
		for _, l := range x.Limits {
			for _, row := range of(l) {
				key := fmt.Sprintf("%q", row)
				if names[key] == nil {
					rows = append(rows, row)
				}
				names[key] = append(names[key], x.Name)
			}
		}
	}
	slices.SortStableFunc(rows, func(a, b []any) int {
		return strings.Compare(fmt.Sprint(a[0]), fmt.Sprint(b[0]))
	})
	if !always {
		if len(rows) == 0 {
			return
		}
		fmt.Fprintln(w)
	}
	output.Row(w, slices.Concat(columns, []any{"NODES"})...)
	for _, row := range rows {
		who := names[fmt.Sprintf("%q", row)]
		text := "all"
		switch {
		case len(who) == answered:
		case len(who) > mostNamed:
			text = fmt.Sprintf("%s, %d more", strings.Join(who[:mostNamed], ", "), len(who)-mostNamed)
		default:
			text = strings.Join(who, ", ")
		}
		output.Row(w, slices.Concat(row, []any{text})...)
	}
}
