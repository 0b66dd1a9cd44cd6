// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package connectivity starts test pods in a cluster, and tests the connections between them with and without policies.
package connectivity

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
)

const (
	// attempt is the timeout of one connection.
	attempt = 3 * time.Second
	// removal is the timeout for the removal of the namespace.
	removal = time.Minute
)

// options are the flags.
type options struct {
	external string
	keep     bool
	hostPort int
	wait     time.Duration // timeout for the start of the pods
	retry    time.Duration // how long a failing check is repeated
}

// Command is `kubernetes connectivity`.
func Command(inv *invocation.Invocation, client *kubectl.Client) *cobra.Command {
	var o options
	testing := &cobra.Command{
		Use:   "test",
		Short: "Test connections between pods, services and nodes, and network policies",
		Long: `Test connections from a pod to pods of the same node and of another node, a Service, node
ports, a host port, the pod's own node, the DNS server and the API server, and the
enforcement of NetworkPolicies, for each address family of the pods. The pods run in a
temporary namespace, with the image of the DaemonSet, on the first two nodes with Sluice or
on the nodes of --node. The namespace is removed at the end, also after an interrupt. The
exit code is 1 if a check fails; each failure shows the connection, the expected and the
actual result, the verdict of the eBPF programs on such a packet, and the command for
further analysis.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.hostPort < 0 || o.hostPort > 65535 {
				return invocation.Usagef("--host-port: %d is not a port", o.hostPort)
			}
			if o.external != "" && host(o.external) == o.external {
				return invocation.Usagef("--external: %q is not HOST:PORT", o.external)
			}
			program := strings.TrimSuffix(cmd.CommandPath(), " connectivity test")
			t := &tester{inv: inv, client: client, options: o, program: program}
			return t.run(cmd.Context())
		},
	}
	f := testing.Flags()
	f.StringVar(&o.external, "external", "",
		"HOST:PORT outside of the cluster that pods must reach; empty: skip the check")
	f.IntVar(&o.hostPort, "host-port", 64720,
		"free port of the nodes for a pod with a hostPort; 0: skip the check")
	f.BoolVar(&o.keep, "keep", false, "keep the namespace with its pods")
	f.DurationVar(&o.wait, "wait", 2*time.Minute, "timeout for the start of the pods")
	f.DurationVar(&o.retry, "retry", 15*time.Second, "how long a failing check is repeated")
	return invocation.Group("connectivity", "Test the connectivity of the cluster", testing)
}

// tester is one run of the test.
type tester struct {
	options

	inv     *invocation.Invocation
	client  *kubectl.Client
	program string // prefix of the other commands

	env    environment
	set    kubectl.DaemonSet
	report report
}

// report is the output of `connectivity test -o json`.
type report struct {
	Namespace string    `json:"namespace"`
	Nodes     []string  `json:"nodes"`
	Image     string    `json:"image"`
	Notes     []string  `json:"notes"` // what was not tested, and why
	Checks    []result  `json:"checks"`
	Failed    []string  `json:"failed"`
	Skipped   []skipped `json:"skipped"`
	Kept      bool      `json:"kept"`
}

// result is the outcome of a check.
type result struct {
	Name     string `json:"name"`
	From     string `json:"from"`
	Target   string `json:"target"`
	OK       bool   `json:"ok"`
	Expected string `json:"expected"`
	Got      string `json:"got"`
	// for a failed check: the verdict of the eBPF programs on such a packet
	Says []string `json:"explained,omitempty"`
	Next string   `json:"next,omitempty"` // for a failed check: a command for further analysis
}

// skipped is a check that was skipped because its result would be meaningless.
type skipped struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

func (t *tester) run(ctx context.Context) (err error) {
	cluster, err := t.client.Cluster(ctx)
	if err != nil {
		return err
	}
	if err := t.choose(cluster); err != nil {
		return err
	}
	defer func() {
		if removed := t.remove(ctx); removed != nil {
			if errors.Is(err, invocation.ErrReported) {
				err = nil // the output contains the failures
			}
			err = errors.Join(err, removed)
		}
	}()
	if err := t.prepare(ctx); err != nil {
		return err
	}
	t.start(ctx)
	t.discover(ctx)
	t.try(ctx, t.env.connections())
	for _, s := range t.env.stages() {
		t.stage(ctx, s)
	}
	if ctx.Err() != nil {
		return fmt.Errorf("after %d checks: %w", len(t.report.Checks), ctx.Err())
	}
	return t.conclude()
}

// choose selects two nodes, or the only one.
func (t *tester) choose(cluster kubectl.Cluster) error {
	t.set = cluster.DaemonSet
	t.report = report{
		Image: t.set.Image, Notes: []string{}, Checks: []result{}, Failed: []string{}, Skipped: []skipped{}, Kept: t.keep,
	}
	t.env = environment{external: t.external, hostPort: t.hostPort, addresses: map[string][]string{}}
	if t.set.Image == "" {
		return fmt.Errorf("DaemonSet %s has no container cni, whose image the pods of the test need", t.set.Name)
	}
	for _, n := range cluster.Nodes {
		if _, err := n.Container(); err != nil {
			if n.Selected {
				t.report.Notes = append(t.report.Notes, fmt.Sprintf("%s is left out: %v", n.Name, err))
			}
			continue
		}
		t.env.all = append(t.env.all, n)
		if n.Problem != "" {
			t.report.Notes = append(t.report.Notes, fmt.Sprintf("%s is not used for pods: %s", n.Name, n.Problem))
		} else if len(t.env.nodes) < 2 {
			t.env.nodes = append(t.env.nodes, n)
		}
	}
	if len(t.env.nodes) == 0 {
		return fmt.Errorf("no Ready node has a running pod of Sluice; see `%s status`", t.program)
	}
	if !t.env.several() {
		t.report.Notes = append(t.report.Notes, "all pods are on one node: connections between nodes are not tested")
	}
	if len(t.set.PullSecrets) > 0 {
		t.report.Notes = append(t.report.Notes, fmt.Sprintf("the image is pulled with the Secrets %s, which the "+
			"namespace of the test does not have: it has to be on the nodes", strings.Join(t.set.PullSecrets, ", ")))
	}
	if t.external == "" {
		t.report.Notes = append(t.report.Notes, "the outside is not tested: --external names a HOST:PORT")
	}
	for _, n := range t.env.nodes {
		t.report.Nodes = append(t.report.Nodes, n.Name)
	}
	return nil
}

// prepare creates the namespace.
func (t *tester) prepare(ctx context.Context) error {
	name := labelValue + "-" + strings.ToLower(rand.Text()[:6])
	if err := t.create(ctx, namespaceOf(name)); err != nil {
		// The namespace may exist even if the answer was lost.
		t.env.namespace = name
		return fmt.Errorf("create the namespace %s: %w", name, err)
	}
	t.env.namespace, t.report.Namespace = name, name
	t.say("Namespace %s, nodes %s, image %s", name, strings.Join(t.report.Nodes, " and "), t.report.Image)
	for _, note := range append(t.report.Notes, t.earlier(ctx)...) {
		t.say("Note: %s", note)
	}
	return nil
}

// earlier returns the namespaces that killed runs of the command have left.
func (t *tester) earlier(ctx context.Context) []string {
	var namespaces struct {
		Items []struct{ Metadata struct{ Name string } }
	}
	if err := t.client.Get(ctx, &namespaces, "namespaces", "--selector="+labelKey+"="+labelValue); err != nil {
		return nil
	}
	var notes []string
	for _, n := range namespaces.Items {
		if n.Metadata.Name != t.env.namespace {
			notes = append(notes, "an earlier or another run has the namespace "+n.Metadata.Name)
		}
	}
	return notes
}

// say prints a line of progress, unless the output is JSON.
func (t *tester) say(format string, args ...any) {
	if t.inv.Format != "json" {
		fmt.Fprintln(t.inv.Out, output.Printable(fmt.Sprintf(format, args...)))
	}
}

func (t *tester) create(ctx context.Context, o object) error {
	content, err := json.Marshal(o)
	if err != nil {
		return err
	}
	_, err = t.client.RunFor(ctx, t.inv.Timeout, content, "create", "--filename=-")
	return err
}

// remove removes the namespace, even if ctx has ended.
func (t *tester) remove(ctx context.Context) error {
	namespace := t.env.namespace
	if namespace == "" {
		return nil
	}
	remove := []string{"delete", "namespace", namespace}
	if t.keep {
		t.say("The namespace is kept; to remove it: %s", t.client.Text(remove...))
		return nil
	}
	_, err := t.client.RunFor(context.WithoutCancel(ctx), removal, nil,
		append(remove, "--ignore-not-found", "--wait", "--timeout="+removal.String())...)
	if err != nil {
		return fmt.Errorf("the namespace %s may still exist: %w; remove it with `%s`", namespace, err,
			t.client.Text(remove...))
	}
	return nil
}

// conclude prints the end of the report.
func (t *tester) conclude() error {
	passed := 0
	for _, r := range t.report.Checks {
		if r.OK {
			passed++
			continue
		}
		t.report.Failed = append(t.report.Failed, r.Name)
	}
	if t.inv.Format == "json" {
		if err := t.inv.Show(t.report, nil); err != nil {
			return err
		}
	}
	t.say("")
	t.say("%d of %d checks passed, %d were left out", passed, len(t.report.Checks), len(t.report.Skipped))
	for _, name := range t.report.Failed {
		t.say("failed: %s", name)
	}
	if len(t.report.Failed) > 0 {
		if !t.keep {
			t.say("The pods are removed now; --keep leaves them, for the commands above.")
		}
		return invocation.ErrReported
	}
	return nil
}
