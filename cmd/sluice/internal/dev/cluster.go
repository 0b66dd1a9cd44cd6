// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package dev

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/devnode"
)

// shownCluster is the output of `dev up -o json` and `dev status -o json` for several nodes.
type shownCluster struct {
	Instance string `json:"instance"`
	Netns    string `json:"netns"` // of the bridge between the nodes
	// PolicyDir is the directory of the manifests that all nodes read.
	PolicyDir string         `json:"policyDir"`
	Etcd      []shownService `json:"etcd"`
	Nodes     []shownMember  `json:"nodes"`
}

type shownMember struct {
	Name      string   `json:"name"`
	Addresses []string `json:"addresses"`
	shownNode
}

func describeCluster(ctx context.Context, inv *invocation.Invocation, c *devnode.Cluster) (d shownCluster, err error) {
	nodes, err := c.Nodes()
	if err != nil {
		return d, err
	}
	ctx, cancel := context.WithTimeout(ctx, inv.Timeout)
	defer cancel()
	d = shownCluster{
		Instance: c.Instance(), Netns: c.Hub().Netns(), PolicyDir: c.Hub().PolicyDir(),
		Etcd: describeServices(ctx, c.Hub()), Nodes: []shownMember{},
	}
	for _, n := range nodes {
		m := shownMember{Name: n.Name(), shownNode: describe(ctx, inv, n)}
		for _, a := range n.Addresses() {
			m.Addresses = append(m.Addresses, a.String())
		}
		d.Nodes = append(d.Nodes, m)
	}
	return d, nil
}

func (d shownCluster) welcome(w io.Writer, took time.Duration) {
	fmt.Fprintf(w, "%d nodes of %s are up after %.1f s, with %s of etcd.\n\n", len(d.Nodes), d.Instance, took.Seconds(),
		members(len(d.Etcd)))
	output.Row(w, "INSTANCE", "NODE", "ADDRESSES", "PODS", "NETNS")
	for _, n := range d.Nodes {
		output.Row(w, n.Instance, n.Name, strings.Join(n.Addresses, ","), strings.Join(n.PodCIDRs, ","), n.Netns)
	}
	first := d.Nodes[0]
	fmt.Fprintf(w, `
Policies of all nodes  %[1]s

Look at them:
  %[4]s node list --instance %[2]s
  %[4]s status --instance %[2]s
  %[4]s dev status --instance %[3]s

Connect a network namespace to the first node as the pod default/pod1 with the label app=pod1:
  ip netns add pod1
  %[4]s dev connect pod1 pod1 app=pod1 --node 1 --instance %[3]s

Stop them:
  %[4]s dev down --instance %[3]s
`, d.PolicyDir, first.Instance, d.Instance, program())
}

func members(n int) string {
	if n == 1 {
		return "one member"
	}
	return fmt.Sprintf("%d members", n)
}

func printCluster(ctx context.Context, inv *invocation.Invocation, c *devnode.Cluster) error {
	d, err := describeCluster(ctx, inv, c)
	if err != nil {
		return err
	}
	if err := inv.Show(d, func(w io.Writer) {
		all := processes(d.Instance, d.Etcd)
		for _, n := range d.Nodes {
			all = append(all, processes(n.Instance, n.Services)...)
		}
		table(w, inv.Wide(), all)
	}); err != nil {
		return err
	}
	away := slices.ContainsFunc(d.Etcd, shownService.away)
	for _, n := range d.Nodes {
		away = away || slices.ContainsFunc(n.Services, shownService.away)
	}
	if away {
		return invocation.ErrNotReady
	}
	return nil
}
