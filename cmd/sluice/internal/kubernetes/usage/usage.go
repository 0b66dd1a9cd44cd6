// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package usage shows how tenants share the limits on the nodes of a cluster.
package usage

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

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
		Short: "Show how tenants share the limits of every node",
		Long: `Show the demand and the share of each tenant for each shared limit on every node. Nodes with
the same figures share a row; the shares of objects from the API server are the same on all
nodes. See ` + "`sluice shares --help`" + ` for the columns.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if exceeded {
				args = append(args, "--exceeded")
			}
			return run(cmd.Context(), inv, client, args)
		},
	}
	cmd.Flags().BoolVar(&exceeded, "exceeded", false, "only tenants that exceed their share")
	return cmd
}

// nodes is the output of `kubernetes shares -o json`.
type nodes struct {
	Items []*node `json:"items"`
}

// node is the answer of one node.
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
	once := &distinct{known: make(map[[sha256.Size]byte]*shares.Limit)}
	client.Each(cluster.Nodes, func(i int, n kubectl.Node) {
		all.Items[i] = &node{Name: n.Name, Limits: []*shares.Limit{}}
		if err := all.Items[i].ask(ctx, client, n, args, once); err != nil {
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

// distinct deduplicates limits, because thousands of nodes may have the same thousands of tenants.
type distinct struct {
	mu    sync.Mutex
	known map[[sha256.Size]byte]*shares.Limit // guarded by mu; by the hash of its JSON
}

// share replaces each limit by an equal one that is already stored.
func (d *distinct) share(limits []*shares.Limit) error {
	for i, l := range limits {
		text, err := json.Marshal(l)
		if err != nil {
			return err
		}
		sum := sha256.Sum256(text)
		d.mu.Lock()
		if d.known[sum] == nil {
			d.known[sum] = l
		}
		limits[i] = d.known[sum]
		d.mu.Unlock()
	}
	return nil
}

// noPod is the error of a node that the DaemonSet does not select.
const noPod = "the DaemonSet does not select the node"

func (s *node) ask(
	ctx context.Context, client *kubectl.Client, n kubectl.Node, args []string, once *distinct,
) error {
	switch {
	case n.Pod == nil && !n.Selected:
		return errors.New(noPod)
	case n.Pod == nil:
		return errors.New("the node has no pod of Sluice")
	}
	if _, err := n.Container(); err != nil {
		return err
	}
	out, err := client.Sluice(ctx, n, append([]string{
		"shares", "--output=json", "--timeout=" + client.Timeout().String(),
	}, args...)...)
	return errors.Join(s.read(out, err), once.share(s.Limits))
}

// read parses the output of the node, which may be partial if err is set.
func (s *node) read(out []byte, err error) error {
	if len(out) == 0 {
		return err
	}
	var answer struct{ Items []*shares.Limit }
	if jerr := json.Unmarshal(out, &answer); jerr != nil {
		return errors.Join(err, fmt.Errorf("the answer is not the output of `sluice shares`: %w", jerr))
	}
	s.Limits = answer.Items
	return err
}

// mostNamed limits the number of node names in a row.
const mostNamed = 3

// who is a set of nodes: their number, and the names of the first few.
type who struct {
	n     int
	named []string
}

func (w *who) add(n int, named ...string) {
	w.n += n
	w.named = append(w.named, named[:min(len(named), mostNamed-len(w.named))]...)
}

func (n nodes) table(w io.Writer) {
	n.rows(w, shares.Columns, (*shares.Limit).Rows, true)
	n.rows(w, shares.EndpointColumns, (*shares.Limit).EndpointRows, false)
}

// rows prints one table. It skips a table without rows unless always is set.
func (n nodes) rows(w io.Writer, columns []any, rowsOf func(*shares.Limit) [][]any, always bool) {
	var limits []*shares.Limit
	of := make(map[*shares.Limit]*who)
	answered := 0
	for _, x := range n.Items {
		if x.Error == "" || len(x.Limits) > 0 {
			answered++
		}
		for _, l := range x.Limits {
			if of[l] == nil {
				of[l] = &who{}
				limits = append(limits, l)
			}
			of[l].add(1, x.Name)
		}
	}
	type line struct {
		row   []any
		nodes who
	}
	var lines []*line
	by := make(map[string]*line)
	for _, l := range limits {
		for _, row := range rowsOf(l) {
			key := fmt.Sprintf("%q", row)
			if by[key] == nil {
				by[key] = &line{row: row}
				lines = append(lines, by[key])
			}
			by[key].nodes.add(of[l].n, of[l].named...)
		}
	}
	slices.SortStableFunc(lines, func(a, b *line) int {
		return strings.Compare(fmt.Sprint(a.row[0]), fmt.Sprint(b.row[0]))
	})
	if !always {
		if len(lines) == 0 {
			return
		}
		fmt.Fprintln(w)
	}
	output.Row(w, slices.Concat(columns, []any{"NODES"})...)
	for _, l := range lines {
		text := strings.Join(l.nodes.named, ", ")
		switch {
		case l.nodes.n == answered:
			text = "all"
		case l.nodes.n > mostNamed:
			text = fmt.Sprintf("%s, %d more", text, l.nodes.n-mostNamed)
		}
		output.Row(w, slices.Concat(l.row, []any{text})...)
	}
}
