// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package bugreport collects what others need to look into a fault of one node, in one archive: what the services
// answer, what they have logged, and what the kernel has. It changes nothing, and waits for nothing longer than for an
// answer: a process that hangs is what it is made for.
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
	archive "github.com/sluice-net/sluice/cmd/sluice/internal/report"
)

const (
	// together bounds the bytes of all files.
	together = 128 << 20
	// answerLimit bounds what a service may send as one answer: it is in memory before it is written.
	answerLimit = 32 << 20
	// atOnce is how many groups are collected at once.
	atOnce = 8
	// grace is what a part may take beyond the time of one answer: `status` says then who gave none.
	grace = 3 * time.Second
	// silent is how many parts in a row a group may leave without an answer before it is asked no more.
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
		Short: "Collect what is needed to look into a fault of this node, in one archive",
		Long: `Collect what is needed to look into a fault of this node, in one archive: what the
services answer as JSON, their settings, metrics and logs, policies with their
manifests, the packets that are remembered, and the network, the processes, the
kernel and the mounts as the node sees them. What looks like a password, a token, a
key or the user of a URL is replaced, and no environment and no file of keys is
read; look into the archive before you give it away all the same.

A part that has no answer within --timeout is left out. What is missing is on
standard error and in the manifest.json of the archive, with the reason, and does not
change the exit code, unless no service answered and no log was there. A member of
group 65700 gets what the group may read; the rest is missing then. For all nodes of
a cluster there is ` + "`sluice kubernetes bugreport`" + `.`,
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
	cmd.Flags().IntVar(&r.logLines, "log-lines", 5000, "how many lines of each log are collected, from its end")
	cmd.Flags().BoolVar(&r.bare, "without-manifests", false, "leave the manifests of policies out")
	return cmd
}

// report is one report that is made.
type report struct {
	inv      *invocation.Invocation
	file     string
	force    bool // replaces a file of any kind
	logLines int
	bare     bool // without manifests

	fileLimit   int // bytes of a file
	answerLimit int // bytes that a service may send as one answer
	grace       time.Duration

	runDir    string
	configDir string // of the processes; empty: that of the instance
	archive   *archive.Archive
	taken     atomic.Int64 // groups
	came      atomic.Bool  // an answer of a service, or a log

	space    sync.Once
	found    namespace // written by space
	notFound error     // written by space
}

// group are parts that are collected one after the other, because one reason keeps all of them from coming.
type group struct {
	parts []part
	// telling says that a part of it makes the report worth something: the machine alone does not.
	telling bool
}

// part is a file of the report.
type part struct {
	name    string
	command string // what a person would type
	// take writes the content. It may go on after its context has ended: then it is left to itself.
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
		return invocation.Usagef("an archive is not for a terminal: name a file with -w, or pipe it")
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
	summary := fmt.Sprintf("%d files, %d missing", len(m.Files), len(m.Missing))
	if err := archive.Show(r.inv, r.file, m, summary); err != nil {
		return err
	}
	if !r.came.Load() {
		return fmt.Errorf("no service answered at the sockets under %s, and there are no logs: the report has the machine "+
			"alone\n%sBe root, and name the node by --instance", r.runDir, r.inv.OtherNodes())
	}
	return nil
}

// node is how the files are named: by the machine or by the instance.
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

// collect takes the parts of all groups.
func (r *report) collect(ctx context.Context) {
	groups := r.groups(ctx)
	defer r.inv.Progress(func() string {
		return fmt.Sprintf("%d of %d groups of files are collected", r.taken.Load(), len(groups))
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
	_ = all.Wait() // what failed is missing
}

// errNoAnswer says that a part took longer than it may.
var errNoAnswer = errors.New("no answer")

func (r *report) take(ctx context.Context, g group) {
	unanswered := 0
	for _, p := range g.parts {
		switch {
		case ctx.Err() != nil:
			return
		case unanswered >= silent:
			r.archive.Miss(p.name, fmt.Errorf("not asked: %d parts before it had no answer", silent))
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

// within takes one part, and goes on without it when its time is over.
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
		// What knows the context ends now, and says what it has.
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
	case errors.As(err, &ended): // its output says what it had no answer to
	case cut:
		err = fmt.Errorf("cut at %d MiB", r.fileLimit>>20)
	case err != nil && time.Since(began) >= r.inv.Timeout:
		err = fmt.Errorf("%w within %s: %s", errNoAnswer, r.inv.Timeout, oneLine(err.Error()))
	}
	return out, err
}

func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
