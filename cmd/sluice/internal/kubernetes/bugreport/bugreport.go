// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package bugreport collects diagnostics of a cluster into an archive.
package bugreport

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	archive "github.com/sluice-net/sluice/cmd/sluice/internal/report"
)

// silent is the number of consecutive timeouts after which a node is skipped.
const silent = 2

// onNode lists the commands to run on each node, with the names of their files.
var onNode = []struct {
	file string
	args []string
}{
	{"status.json", []string{"status"}},
	{"endpoints.json", []string{"endpoint", "list"}},
	{"identities.json", []string{"identity", "list"}},
	{"cluster-nodes.json", []string{"node", "list"}},
	{"node-files.json", []string{"node", "status"}},
	{"pools.json", []string{"ipam", "pools"}},
	{"allocations.json", []string{"ipam", "list"}},
	{"policies.json", []string{"policy", "list"}},
	{"services.json", []string{"service", "list"}},
	{"backends.json", []string{"backend", "list"}},
	{"maps.json", []string{"map", "list"}},
	{"check.json", []string{"check"}},
	{"flows.json", []string{"observe"}},
	{"version.txt", []string{"--version"}},
}

// Command is `kubernetes bugreport`.
func Command(inv *invocation.Invocation, client *kubectl.Client) *cobra.Command {
	r := &report{inv: inv, client: client}
	cmd := &cobra.Command{
		Use:   "bugreport",
		Short: "Collect diagnostics of the cluster into an archive",
		Long: `Collect diagnostics of the cluster into an archive: from each node the JSON
output of ` + "`sluice`" + ` commands (endpoints, labels, addresses, policies, services, remembered
events) and the logs of each container, including the one before a restart; from the
cluster the DaemonSet with its pods, the nodes, the events of the namespace and the
ConfigMap. Secrets are not read; passwords, tokens and users in URLs are replaced. Check
the archive before you share it. manifest.json in it lists missing files with the reasons;
the exit code is 1 if there are any.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if r.logLines < 1 {
				return invocation.Usagef("--log-lines: %d is not positive", r.logLines)
			}
			return r.run(cmd.Context(), time.Now().UTC())
		},
	}
	archive.Flag(cmd.Flags(), &r.file, &r.force, "sluice-bugreport-TIME.tar.gz")
	cmd.Flags().IntVar(&r.logLines, "log-lines", 5000, "number of lines from the end of each log")
	return cmd
}

// report is one run of the command.
type report struct {
	inv      *invocation.Invocation
	client   *kubectl.Client
	file     string
	force    bool // overwrite any regular file
	logLines int
	archive  *archive.Archive
}

func (r *report) run(ctx context.Context, now time.Time) (err error) {
	name := "sluice-bugreport-" + now.Format("20060102T150405Z")
	if r.file == "" {
		r.file = name + ".tar.gz"
	}
	if r.file == archive.Stdout && invocation.IsTerminal(r.inv.Out) {
		return invocation.Usagef("an archive cannot be written to a terminal: give a file with -w, or use a pipe")
	}
	target, err := archive.Open(r.file, r.inv.Out, r.force)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, target.Discard()) }()
	if r.archive, err = archive.New(now, 0); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.archive.Close()) }()
	r.ofCluster(ctx)
	cluster, err := r.client.Cluster(ctx)
	if err != nil {
		// Continue: the answers of the API are useful without the nodes.
		r.archive.Miss("nodes", err)
	}
	for _, n := range cluster.Nodes {
		r.archive.Node(n.Name)
	}
	r.client.Each(cluster.Nodes, func(_ int, n kubectl.Node) { r.ofNode(ctx, n) })
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return r.finish(target, name)
}

// ofCluster collects objects of the API.
func (r *report) ofCluster(ctx context.Context) {
	inNamespace := "--namespace=" + r.client.Namespace
	for _, c := range []struct {
		file string
		args []string
	}{
		{"daemonset.json", []string{"get", "daemonsets", inNamespace, "--selector=" + kubectl.Selector, "--output=json"}},
		{"pods.json", []string{"get", "pods", inNamespace, "--output=json"}},
		{"nodes.json", []string{"get", "nodes", "--output=json"}},
		{"events.json", []string{"get", "events", inNamespace, "--output=json"}},
		{"settings.json", []string{"get", "configmap", "sluice", inNamespace, "--output=json"}},
		{"version.json", []string{"version", "--output=json"}},
	} {
		out, err := r.client.Run(ctx, c.args...)
		r.archive.Keep("cluster/"+c.file, r.client.Text(c.args...), out, err)
	}
}

// ofNode collects the output of commands on a node, and its logs.
func (r *report) ofNode(ctx context.Context, n kubectl.Node) {
	dir := "nodes/" + archive.FileName(n.Name) + "/"
	if n.Pod == nil {
		r.archive.Miss(dir, errors.New(cmp.Or(n.NoPod, "the node has no pod of Sluice")))
		return
	}
	unanswered := 0
	collect := func(name, command string, run func() ([]byte, error)) {
		if unanswered >= silent {
			r.archive.Miss(name, fmt.Errorf("skipped: the %d commands before it timed out", silent))
			return
		}
		out, err := run()
		if unanswered++; !errors.Is(err, kubectl.ErrNoAnswer) {
			unanswered = 0
		}
		r.archive.Keep(name, command, out, err)
	}
	for _, c := range onNode {
		args := c.args
		if filepath.Ext(c.file) == ".json" {
			args = append(slices.Clone(args), "--output=json", "--timeout="+r.client.Timeout().String())
		}
		collect(dir+c.file, "sluice "+strings.Join(args, " "), func() ([]byte, error) {
			return r.client.Sluice(ctx, n, args...)
		})
	}
	log := func(container, suffix string, more ...string) {
		args := append([]string{
			"--namespace=" + r.client.Namespace, "logs", n.Pod.Name, "--container=" + container, "--timestamps",
			"--tail=" + strconv.Itoa(r.logLines), "--limit-bytes=" + strconv.Itoa(archive.FileLimit),
		}, more...)
		collect(dir+"logs/"+archive.FileName(container)+suffix, r.client.Text(args...), func() ([]byte, error) {
			return r.client.Run(ctx, args...)
		})
	}
	for _, name := range n.Pod.Inits {
		log(name, ".log")
	}
	for _, c := range n.Pod.Containers {
		log(c.Name, ".log")
		if c.Restarts > 0 {
			log(c.Name, ".previous.log", "--previous")
		}
	}
}

// finish writes the archive and prints a summary.
func (r *report) finish(target *archive.Target, directory string) error {
	if err := target.Write(r.archive, directory); err != nil {
		return err
	}
	m := r.archive.Manifest()
	if err := archive.Show(r.inv, r.file, m, output.Plural(len(m.Files), "file", "files")+
		" of "+output.Plural(len(m.Nodes), "node", "nodes")); err != nil {
		return err
	}
	if len(m.Missing) > 0 {
		return invocation.ErrReported
	}
	return nil
}
