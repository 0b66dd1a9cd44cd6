// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package bugreport writes an archive of diagnostics of one node. It contains answers, logs and metrics of the
// services, and the state of the kernel. It changes nothing. Every step has a timeout, because a service may hang.
package bugreport

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	archive "github.com/sluice-net/sluice/cmd/sluice/internal/report"
)

const (
	// together limits the total size of all files in bytes.
	together = 128 << 20
	// answerLimit limits the bytes of one answer of a service, which is held in memory.
	answerLimit = 32 << 20
	// atOnce is the number of groups that are collected at the same time.
	atOnce = 8
	// grace is how long a part may take in addition to --timeout, so that `status` can still report which service did
	// not answer.
	grace = 3 * time.Second
	// silent is the number of consecutive timeouts after which the rest of a group is skipped.
	silent = 2
)

// Command is `bugreport`.
func Command(inv *invocation.Invocation) *cobra.Command {
	return command(inv, archive.FileLimit, answerLimit)
}

func command(inv *invocation.Invocation, fileLimit, answerLimit int) *cobra.Command {
	r := &report{inv: inv, fileLimit: fileLimit, answerLimit: answerLimit, grace: grace}
	cmd := &cobra.Command{
		Use:   "bugreport",
		Short: "Collect diagnostics of this node into an archive",
		Long: `Collect diagnostics of this node into an archive: the answers of the services
as JSON, their settings, metrics and logs, policies with their manifests, stored events,
and the state of network, processes, kernel and mounts. Passwords, tokens, keys and users
in URLs are replaced, and no environment variables or key files are read. Check the
archive before you share it.

If a service does not answer within --timeout, its parts are missing in the archive.
Standard error and manifest.json in the archive list missing parts with the reason. Missing
parts do not change the exit code, unless no service answered and there were no logs. A
member of group 65700 gets only the parts that the group may read. For all nodes of a
cluster, use ` + "`sluice kubernetes bugreport`" + `.`,
		Example: `  sluice bugreport
  sluice bugreport --instance dev --without-manifests -w /tmp/report.tar.gz
  ssh node1 sluice bugreport -w - > node1.tar.gz`,
		Args: invocation.Args(0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if r.logLines < 1 || r.logLines > mostLines {
				return invocation.Usagef("--log-lines: %d is not from 1 to %d", r.logLines, mostLines)
			}
			return r.run(cmd.Context(), time.Now().UTC())
		},
	}
	archive.Flag(cmd.Flags(), &r.file, &r.force, "sluice-bugreport-NODE-TIME.tar.gz")
	cmd.Flags().IntVar(&r.logLines, "log-lines", 5000, "number of lines from the end of each log")
	cmd.Flags().BoolVar(&r.bare, "without-manifests", false, "do not include the manifests of policies")
	return cmd
}

// report is one run of the command.
type report struct {
	inv      *invocation.Invocation
	file     string
	force    bool // overwrite any regular file
	logLines int
	bare     bool // --without-manifests

	fileLimit   int // largest file in bytes
	answerLimit int // largest answer of a service in bytes
	grace       time.Duration

	runDir    string
	configDir string // configuration directory; empty: the instance's
	archive   *archive.Archive
	taken     atomic.Int64 // number of collected groups
	came      atomic.Bool  // set once an answer of a service or a log was collected

	space    sync.Once
	found    namespace // written by space
	notFound error     // written by space
}

// group is a list of parts that are collected one after the other, because a failure of one usually means that the
// others fail, too.
type group struct {
	parts []part
	// telling means that a part of the group describes Sluice, and not only the machine.
	telling bool
}

// part is a file of the report.
type part struct {
	name    string
	command string // the origin for the manifest: a command or a file
	// take writes the content. If it does not return when its context ends, it is abandoned.
	take func(ctx context.Context, w *content) error
}

func (r *report) run(ctx context.Context, now time.Time) (err error) {
	socket, err := r.inv.Socket("datapath")
	if err != nil {
		return err
	}
	r.runDir = filepath.Dir(filepath.Dir(socket))
	node := r.node()
	name := "sluice-bugreport-" + node + "-" + now.Format("20060102T150405Z")
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
	if r.archive, err = archive.New(now, together); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.archive.Close()) }()
	r.archive.Node(node)
	r.collect(ctx)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err := target.Write(r.archive, name); err != nil {
		return err
	}
	m := r.archive.Manifest()
	summary := fmt.Sprintf("%s, %d missing", output.Plural(len(m.Files), "file", "files"), len(m.Missing))
	if err := archive.Show(r.inv, r.file, m, summary); err != nil {
		return err
	}
	if !r.came.Load() {
		return fmt.Errorf("no service answered at the sockets under %s, and there are no logs: the report covers only the "+
			"machine\n%sRun as root, and give the node with --instance", r.runDir, r.inv.OtherNodes())
	}
	return nil
}

// node returns the name of the machine or the instance for file names.
func (r *report) node() string {
	if r.inv.Instance != "" {
		return archive.FileName("sluice-" + r.inv.Instance)
	}
	host, err := os.Hostname()
	if err != nil || host == "" {
		return "node"
	}
	return archive.FileName(host)
}

// collect collects all groups.
func (r *report) collect(ctx context.Context) {
	groups := r.groups(ctx)
	defer r.inv.Progress(func() string {
		return fmt.Sprintf("%d of %d groups of files collected", r.taken.Load(), len(groups))
	})()
	var all errgroup.Group
	all.SetLimit(atOnce)
	for _, g := range groups {
		all.Go(func() error {
			r.take(ctx, g)
			r.taken.Add(1)
			return nil
		})
	}
	_ = all.Wait() // failed parts are listed as missing
}

// errNoAnswer is the error of a part that timed out.
var errNoAnswer = errors.New("no answer")

func (r *report) take(ctx context.Context, g group) {
	unanswered := 0
	for _, p := range g.parts {
		switch {
		case ctx.Err() != nil:
			return
		case unanswered >= silent:
			r.archive.Miss(p.name, fmt.Errorf("skipped: the %d parts before it timed out", silent))
			continue
		}
		out, err := r.within(ctx, p)
		if errors.Is(err, errNoAnswer) {
			unanswered++
		} else {
			unanswered = 0
		}
		if g.telling && len(out) > 0 {
			r.came.Store(true)
		}
		r.archive.Keep(p.name, p.command, out, err)
	}
}

// within collects one part, or abandons it after its timeout.
func (r *report) within(ctx context.Context, p part) ([]byte, error) {
	limit := r.inv.Timeout + r.grace
	timed, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	w, began := &content{limit: r.fileLimit}, time.Now()
	done := make(chan error, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				done <- fmt.Errorf("panic: %v", p)
			}
		}()
		done <- p.take(timed, w)
	}()
	var err error
	select {
	case err = <-done:
	case <-timed.Done():
		// A part that respects the end of its context returns now, with the content that it has collected.
		late := time.NewTimer(time.Second)
		defer late.Stop()
		select {
		case err = <-done:
		case <-late.C:
			err = errNoAnswer
		}
	}
	out, cut := w.close()
	var ended exitCode
	switch {
	case errors.As(err, &ended): // the output of the command explains the failure
	case cut:
		err = fmt.Errorf("cut at %d MiB", r.fileLimit>>20)
	case err != nil && time.Since(began) >= r.inv.Timeout:
		err = fmt.Errorf("%w within %s: %s", errNoAnswer, r.inv.Timeout, oneLine(err.Error()))
	}
	return out, err
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
