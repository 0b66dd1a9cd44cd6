// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package bugreport collects what developers need to look into a fault of a cluster, in one archive.
package bugreport

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	"github.com/sluice-net/sluice/kit/version"
)

const (
	// fileLimit bounds each file, beside what a log is bounded to by its flags.
	fileLimit = 16 << 20
	// silent is how many commands in a row a node may leave without an answer before it is asked no more.
	silent = 2
)

// onNode are the commands whose answers are collected of each node, by the names of the files.
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
	{"audit.json", []string{"audit"}},
	{"flows.json", []string{"observe"}},
	{"version.txt", []string{"--version"}},
}

// Command is `kubernetes bugreport`.
func Command(inv *invocation.Invocation, client *kubectl.Client) *cobra.Command {
	r := &report{inv: inv, client: client}
	cmd := &cobra.Command{
		Use:   "bugreport",
		Short: "Collect what is needed to look into a fault, in one archive",
		Long: `Collect what is needed to look into a fault: of each node what the commands of
` + "`sluice`" + ` print as JSON, with endpoints, labels, addresses, policies, services and
the packets that are remembered, and the logs of each container, of the one before a
restart, too; of the cluster the DaemonSet with its pods, the nodes, the events of
the namespace and the ConfigMap. No Secret is read, and what looks like a password,
a token or the user of a URL is replaced; look into the archive before you
give it away all the same. manifest.json in it says what could not be had, and why;
the exit code is 1 then.`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if r.logLines < 1 {
				return invocation.Usagef("--log-lines: %d is not positive", r.logLines)
			}
			return r.run(cmd.Context(), time.Now().UTC())
		},
	}
	cmd.Flags().StringVar(&r.file, "file", "", "the archive (default: sluice-bugreport-TIME.tar.gz in this directory)")
	cmd.Flags().IntVar(&r.logLines, "log-lines", 5000, "how many lines of each log are collected, from its end")
	return cmd
}

// report is one report that is made.
type report struct {
	inv      *invocation.Invocation
	client   *kubectl.Client
	file     string
	logLines int

	mu       sync.Mutex
	spool    spool    // guarded by mu
	manifest manifest // guarded by mu
}

// manifest is what `manifest.json` says.
type manifest struct {
	Created time.Time `json:"created"`
	Program string    `json:"program"` // version of the command that made the report
	Nodes   []string  `json:"nodes"`
	Files   []entry   `json:"files"`
	Missing []missing `json:"missing"`
}

// entry is a file and where it comes from.
type entry struct {
	Name    string `json:"name"`
	Command string `json:"command"`
	Bytes   int    `json:"bytes"`
	// Truncated says that the end of what the command printed is missing.
	Truncated bool `json:"truncated,omitempty"`
	// Error is how the command ended, if what it printed is here all the same.
	Error string `json:"error,omitempty"`
}

// missing is a file that could not be had.
type missing struct {
	Name   string `json:"name"`
	Reason string `json:"reason"`
}

func (r *report) run(ctx context.Context, now time.Time) (err error) {
	name := "sluice-bugreport-" + now.Format("20060102T150405Z")
	if r.file == "" {
		r.file = name + ".tar.gz"
	}
	if r.spool.dir, err = os.MkdirTemp("", "sluice-bugreport-"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.spool.dir)) }()
	r.manifest = manifest{
		Created: now, Program: version.Get().String(), Nodes: []string{}, Files: []entry{}, Missing: []missing{},
	}
	r.ofCluster(ctx)
	cluster, err := r.client.Cluster(ctx)
	if err != nil {
		// What the API gave is worth an archive.
		r.miss("nodes", err)
	}
	for _, n := range cluster.Nodes {
		r.manifest.Nodes = append(r.manifest.Nodes, n.Name)
	}
	r.client.Each(cluster.Nodes, func(_ int, n kubectl.Node) { r.ofNode(ctx, n) })
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return r.finish(name)
}

// ofCluster collects what the API says.
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
		r.keep("cluster/"+c.file, r.client.Text(c.args...), out, err)
	}
}

// ofNode collects what the commands of a node print, and its logs.
func (r *report) ofNode(ctx context.Context, n kubectl.Node) {
	dir := "nodes/" + fileName(n.Name) + "/"
	if n.Pod == nil {
		r.miss(dir, errors.New(cmp.Or(n.NoPod, "no pod of Sluice is on the node")))
		return
	}
	unanswered := 0
	collect := func(name, command string, run func() ([]byte, error)) {
		if unanswered >= silent {
			r.miss(name, fmt.Errorf("not asked: %d commands before it had no answer", silent))
			return
		}
		out, err := run()
		if unanswered++; !errors.Is(err, kubectl.ErrNoAnswer) {
			unanswered = 0
		}
		r.keep(name, command, out, err)
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
			"--tail=" + strconv.Itoa(r.logLines), "--limit-bytes=" + strconv.Itoa(fileLimit),
		}, more...)
		collect(dir+"logs/"+fileName(container)+suffix, r.client.Text(args...), func() ([]byte, error) {
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

// fileName keeps a name of the API from leading elsewhere.
func fileName(name string) string {
	return strings.TrimLeft(strings.Map(func(c rune) rune {
		if c == '/' || c == '\\' || c < ' ' {
			return '_'
		}
		return c
	}, name), ".")
}

// keep adds what a command printed, without secrets. One that failed may have printed what is worth keeping: the exit
// code of `sluice status` says what is in its output.
func (r *report) keep(name, command string, out []byte, err error) {
	if err != nil && len(bytes.TrimSpace(out)) == 0 {
		r.miss(name, err)
		return
	}
	e := entry{Name: name, Command: redactText(command)}
	if err != nil {
		e.Error = redactText(err.Error())
	}
	out = redactOutput(out)
	if len(out) > fileLimit {
		out, e.Truncated = out[:fileLimit], true
	}
	e.Bytes = len(out)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.spool.add(name, out); err != nil {
		r.manifest.Missing = append(r.manifest.Missing, missing{name, err.Error()})
		return
	}
	r.manifest.Files = append(r.manifest.Files, e)
	if e.Error != "" && !answered(err) {
		r.manifest.Missing = append(r.manifest.Missing, missing{name, "incomplete: " + e.Error})
	}
}

// answered says that a command ended by itself: its exit code is part of its answer.
func answered(err error) bool {
	var failed *kubectl.Error
	return errors.As(err, &failed)
}

func (r *report) miss(name string, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.manifest.Missing = append(r.manifest.Missing, missing{name, redactText(err.Error())})
}

// finish writes the manifest and the archive.
func (r *report) finish(directory string) error {
	m := &r.manifest
	slices.SortFunc(m.Files, func(a, b entry) int { return strings.Compare(a.Name, b.Name) })
	slices.SortFunc(m.Missing, func(a, b missing) int {
		return cmp.Or(strings.Compare(a.Name, b.Name), strings.Compare(a.Reason, b.Reason))
	})
	content, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	if err := r.spool.add("manifest.json", append(content, '\n')); err != nil {
		return err
	}
	if err := r.spool.write(r.file, directory, m.Created); err != nil {
		return fmt.Errorf("write %s: %w", r.file, err)
	}
	if err := r.inv.Show(struct {
		Archive string `json:"archive"`
		*manifest
	}{r.file, m}, func(w io.Writer) {
		fmt.Fprintf(w, "%s: %d files of %d nodes\n", r.file, len(m.Files), len(m.Nodes))
		for _, x := range m.Missing {
			fmt.Fprintln(w, output.Printable(fmt.Sprintf("missing: %s: %s", x.Name, x.Reason)))
		}
	}); err != nil {
		return err
	}
	if len(m.Missing) > 0 {
		return invocation.ErrReported
	}
	return nil
}
