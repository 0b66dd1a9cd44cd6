// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package status

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
)

// Intervals between two requests of the status.
const (
	watchPause = time.Second
	waitPause  = 200 * time.Millisecond
)

// waiting is the value of --wait.
type waiting struct{ limit time.Duration }

func (w *waiting) flag(cmd *cobra.Command) {
	f := cmd.Flags()
	f.Var(w, "wait", "wait up to this long for the node to become ready")
	f.Lookup("wait").NoOptDefVal = "1m"
}

// String implements pflag.Value.
func (w *waiting) String() string {
	if w.limit == 0 {
		return ""
	}
	return w.limit.String()
}

// Set implements pflag.Value.
func (w *waiting) Set(text string) error {
	d, err := time.ParseDuration(text)
	if err != nil || d <= 0 {
		return errors.New("want a duration such as 30s")
	}
	w.limit = d
	return nil
}

// Type implements pflag.Value.
func (*waiting) Type() string { return "duration" }

// await polls until the node is ready or the time is over, and prints the last status.
func await(ctx context.Context, inv *invocation.Invocation, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	began := time.Now()
	var last *Node
	for {
		s, err := collect(ctx, inv)
		if err != nil {
			return err
		}
		// If the deadline interrupted collect, the previous status is more complete, so print that.
		if ctx.Err() == nil || last == nil {
			last = s
		}
		if s.Ready {
			return inv.Show(s, s.table)
		}
		if !pause(ctx, waitPause) {
			break
		}
	}
	if err := inv.Show(last, last.table); err != nil {
		return err
	}
	if !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return ctx.Err()
	}
	return &invocation.ExitError{
		Code: invocation.ExitNotReady,
		Err:  fmt.Errorf("the node is not ready after %s", time.Since(began).Round(time.Second)),
	}
}

// pause waits; it returns false if ctx ends.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// watchNode prints the status until ctx ends: on a terminal the whole status, otherwise the changes.
func watchNode(ctx context.Context, inv *invocation.Invocation) error {
	show := changes(inv.Out)
	switch {
	case inv.Format == "json":
		show = objects(inv.Out)
	case isTerminal(inv.Out):
		show = redraw(inv.Out)
	}
	for {
		s, err := collect(ctx, inv)
		if err != nil {
			return err
		}
		if ctx.Err() != nil {
			return nil
		}
		if err := show(s); err != nil {
			return err
		}
		if !pause(ctx, watchPause) {
			return nil
		}
	}
}

// redraw replaces the previous status on the terminal.
func redraw(w io.Writer) func(*Node) error {
	var last []byte
	return func(s *Node) error {
		var text bytes.Buffer
		t := output.Aligned(&text)
		s.table(t)
		if err := t.Flush(); err != nil {
			return err
		}
		if bytes.Equal(text.Bytes(), last) {
			return nil
		}
		last = bytes.Clone(text.Bytes())
		_, err := fmt.Fprintf(w, "\x1b[H\x1b[2J%s", last) // to the corner, and clear
		return err
	}
}

// verdictOf returns the problems and warnings. A change of these is printed; a change of counters is not.
func verdictOf(s *Node) []string {
	all := []string{}
	for _, problem := range s.Problems {
		all = append(all, "Problem: "+problem)
	}
	for _, warning := range s.Warnings {
		all = append(all, "Warning: "+warning)
	}
	return all
}

// changes returns a function that writes a line, with the time, for each problem that is new or resolved. Its first
// call writes all problems.
func changes(w io.Writer) func(*Node) error {
	var ready string
	var last []string
	return func(s *Node) error {
		now, verdict := time.Now().Format("15:04:05"), verdictOf(s)
		var lines []string
		if r := s.readyText(); r != ready {
			ready = r
			lines = append(lines, "Ready: "+r)
		}
		for _, text := range last {
			if !slices.Contains(verdict, text) {
				lines = append(lines, "resolved: "+text)
			}
		}
		for _, text := range verdict {
			if !slices.Contains(last, text) {
				lines = append(lines, text)
			}
		}
		last = verdict
		for _, line := range lines {
			if _, err := fmt.Fprintln(w, now+"  "+output.Printable(line)); err != nil {
				return err
			}
		}
		return nil
	}
}

// objects returns a function that writes the whole status as one line of JSON: at its first call, and when a problem, a
// warning or the readiness has changed.
func objects(w io.Writer) func(*Node) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	var last []string
	return func(s *Node) error {
		verdict := append(verdictOf(s), s.readyText())
		if last != nil && slices.Equal(verdict, last) {
			return nil
		}
		last = verdict
		return e.Encode(s)
	}
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
