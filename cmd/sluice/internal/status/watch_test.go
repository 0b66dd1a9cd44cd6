// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package status

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
)

// screen collects the output, and calls seen with all of it after each write.
type screen struct {
	bytes.Buffer
	seen func(text string)
}

func (s *screen) Write(p []byte) (int, error) {
	n, err := s.Buffer.Write(p)
	s.seen(s.String())
	return n, err
}

// healthy returns a node without problems.
func healthy(t *testing.T) *nodetest.Node {
	n := nodetest.New(t, Command)
	n.Healthy, n.Policy.Healthy = true, true
	return n
}

// watched runs --watch until the output has the second text. When the output has the first text, it stops ipam.
func watched(t *testing.T, n *nodetest.Node, format, first, second string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	stopped := false
	out := &screen{seen: func(text string) {
		if !stopped && strings.Contains(text, first) {
			n.Stop("ipam")
			stopped = true
		}
		if strings.Contains(text, second) {
			cancel()
		}
	}}
	inv := &invocation.Invocation{Out: out, Format: format, RunDir: n.RunDir, Timeout: 10 * time.Second}
	cmd := Command(inv)
	cmd.SetArgs([]string{"--watch"})
	if err := cmd.ExecuteContext(ctx); err != nil {
		t.Fatal(err)
	}
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		t.Fatalf("%q did not come:\n%s", second, out.String())
	}
	return out.String()
}

func TestWatchWritesALineForEachChange(t *testing.T) {
	out := watched(t, healthy(t), "table", "Ready: yes", "Problem: sluice-ipam: ")
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 3 || !strings.HasSuffix(lines[0], "  Ready: yes") || !strings.HasSuffix(lines[1], "  Ready: no") ||
		!strings.Contains(lines[2], "  Problem: sluice-ipam: dial unix ") {
		t.Errorf("lines\n%s", out)
	}
}

func TestWatchWritesAnObjectForEachChange(t *testing.T) {
	out := watched(t, healthy(t), "json", `"ready":true`, `"ready":false`)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if len(lines) != 2 {
		t.Fatalf("lines\n%s", out)
	}
	for i, line := range lines {
		var s Node
		if err := json.Unmarshal([]byte(line), &s); err != nil || s.Ready != (i == 0) || len(s.Services) != 7 {
			t.Errorf("line %d: %+v, %v", i, s, err)
		}
	}
}

func TestWatchTellsWhatIsOver(t *testing.T) {
	var out bytes.Buffer
	show := changes(&out)
	for _, s := range []*Node{
		{Problems: []string{"a\x1b[2J"}, Warnings: []string{"w"}},
		{Problems: []string{"a\x1b[2J"}, Warnings: []string{"w"}},
		{Ready: true, Warnings: []string{"v"}},
		{Ready: true},
	} {
		if err := show(s); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		got = append(got, line[len("15:04:05  "):])
	}
	want := "Ready: no\nProblem: a\\x1b[2J\nWarning: w\n" +
		"Ready: yes\nresolved: Problem: a\\x1b[2J\nresolved: Warning: w\nWarning: v\n" + "resolved: Warning: v\n"
	if strings.Join(got, "") != want {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, ""), want)
	}
}

// TestWatchRedrawsATerminal: a terminal shows the whole status, and is redrawn only after a change.
func TestWatchRedrawsATerminal(t *testing.T) {
	var out bytes.Buffer
	show := redraw(&out)
	for _, s := range []*Node{{Ready: true}, {Ready: true}, {Problems: []string{"sluice-ipam: away"}}} {
		if err := show(s); err != nil {
			t.Fatal(err)
		}
	}
	screens := strings.Split(out.String(), "\x1b[H\x1b[2J")
	if len(screens) != 3 || screens[0] != "" || !strings.Contains(screens[1], "Ready  yes") ||
		!strings.Contains(screens[2], "Problem: sluice-ipam: away") {
		t.Errorf("screens %q", screens)
	}
	if isTerminal(&out) {
		t.Error("a buffer is a terminal")
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	pty, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer pty.Close()
	if isTerminal(w) || !isTerminal(pty) {
		t.Errorf("a pipe is a terminal: %t; a pty is: %t", isTerminal(w), isTerminal(pty))
	}
}

func TestWaitEndsWhenTheNodeIsReady(t *testing.T) {
	n := healthy(t)
	later := filepath.Join(t.TempDir(), "run") // does not exist yet
	var out bytes.Buffer
	inv := &invocation.Invocation{Out: &out, Format: "table", RunDir: later, Timeout: 10 * time.Second}
	cmd := Command(inv)
	cmd.SetArgs([]string{"--wait=1m"})
	done := make(chan error, 1)
	go func() { done <- cmd.ExecuteContext(t.Context()) }()
	if err := os.Symlink(n.RunDir, later); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	nodetest.WantLines(t, out.String(), "Ready yes")
}

// TestWaitIsForReadinessAlone: --wait does not wait for warnings, which may be permanent.
func TestWaitIsForReadinessAlone(t *testing.T) {
	n := healthy(t)
	n.Healthy = false
	out, _ := n.Want(t, 0, "status", "--wait")
	if nodetest.WantLines(t, out, "Ready yes"); !strings.Contains(out, "Warning: ") {
		t.Errorf("the warning is not shown:\n%s", out)
	}
}

func TestWaitSaysWhatIsMissingAtTheEnd(t *testing.T) {
	n := healthy(t)
	n.AddReady, n.KnownReady = false, true
	out, errOut := n.Want(t, invocation.ExitNotReady, "status", "--wait=2s")
	nodetest.WantLines(t, out, "Ready only for label sets that this node has")
	if !strings.Contains(out, "Problem: sluice-datapath: ") {
		t.Errorf("what is missing is not said:\n%s", out)
	}
	if !strings.HasPrefix(errOut, "sluice: the node is not ready after ") {
		t.Errorf("standard error %q", errOut)
	}
	for _, bad := range [][]string{{"--wait=0s"}, {"--wait=x"}, {"--wait", "5s"}, {"--watch", "--wait"}} {
		n.Want(t, invocation.ExitUsage, append([]string{"status"}, bad...)...)
	}
}
