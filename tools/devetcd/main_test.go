// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sys/unix"
)

// patience limits every wait of these tests. No test measures time.
const patience = 30 * time.Second

// TestMain lets the test binary run as the program, or as a parent that starts the program and exits without stopping
// it.
func TestMain(m *testing.M) {
	switch os.Getenv("DEVETCD_TEST_ROLE") {
	case "program":
		os.Exit(run(os.Args[1:], os.Stdout, os.Stderr))
	case "parent":
		os.Exit(leaveChildBehind(os.Args[1:]))
	}
	os.Exit(m.Run())
}

// leaveChildBehind starts the program, waits until it serves, and returns.
func leaveChildBehind(args []string) int {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), "DEVETCD_TEST_ROLE=program")
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	fmt.Print(line)
	return 0
}

type member struct {
	cmd    *exec.Cmd
	ready  readyLine
	stderr *strings.Builder
}

func command(ctx context.Context, role string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), "DEVETCD_TEST_ROLE="+role)
	return cmd
}

// start runs the program and returns once it has written its ready line.
func start(t *testing.T, dataDir, listen string) *member {
	t.Helper()
	m := &member{stderr: new(strings.Builder)}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	m.cmd = command(context.Background(), "program", "--data-dir", dataDir, "--listen", listen, "--ready-fd", "3", "--die-with-parent")
	m.cmd.ExtraFiles = []*os.File{w}
	m.cmd.Stderr = m.stderr
	if err := m.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	t.Cleanup(func() {
		if m.cmd.ProcessState == nil {
			m.cmd.Process.Kill()
			m.cmd.Wait()
		}
	})
	if err := r.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	line, err := io.ReadAll(r) // the program closes the descriptor after the ready line
	if err != nil {
		t.Fatalf("read ready line: %v", err)
	}
	if err := json.Unmarshal(line, &m.ready); err != nil {
		m.cmd.Process.Kill()
		m.cmd.Wait()
		t.Fatalf("ready line %q: %v; stderr: %s", line, err, m.stderr)
	}
	return m
}

// stop ends the program with SIGTERM and fails the test if its exit status is not 0.
func (m *member) stop(t *testing.T) {
	t.Helper()
	if err := m.cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := m.cmd.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v; stderr: %s", err, m.stderr)
	}
	// The warnings depend on etcd's timing, but must never contain requests.
	if strings.Contains(m.stderr.String(), "request stats") {
		t.Errorf("ordinary requests were logged: %s", m.stderr)
	}
}

func connect(t *testing.T, endpoint string) (*clientv3.Client, context.Context) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{endpoint}, Context: ctx})
	if err != nil {
		t.Fatalf("client for %s: %v", endpoint, err)
	}
	t.Cleanup(func() { c.Close() })
	return c, ctx
}

func get(ctx context.Context, t *testing.T, c *clientv3.Client, key string) string {
	t.Helper()
	resp, err := c.Get(ctx, key)
	if err != nil {
		t.Fatalf("get %s: %v", key, err)
	}
	if len(resp.Kvs) == 0 {
		return ""
	}
	return string(resp.Kvs[0].Value)
}

// shortDir returns a temporary directory with a path short enough for a socket name. The path of t.TempDir contains
// the name of the test.
func shortDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "devetcd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func TestTwoMembersServeSideBySideAndKeepTheirData(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	socket := "unix://" + filepath.Join(dir, "a.sock")
	a := start(t, filepath.Join(dir, "a"), socket)
	b := start(t, filepath.Join(dir, "b"), "http://127.0.0.1:0")
	if a.ready.Endpoint != socket {
		t.Errorf("endpoint of the socket member: got %q, want %q", a.ready.Endpoint, socket)
	}
	if a.ready.PID != a.cmd.Process.Pid {
		t.Errorf("ready line names process %d, want %d", a.ready.PID, a.cmd.Process.Pid)
	}
	if u, err := url.Parse(b.ready.Endpoint); err != nil || u.Port() == "" || u.Port() == "0" {
		t.Errorf("endpoint of the port member: got %q, want the port that was picked", b.ready.Endpoint)
	}

	ca, ctx := connect(t, a.ready.Endpoint)
	cb, _ := connect(t, b.ready.Endpoint)
	if _, err := ca.Put(ctx, "k", "of a"); err != nil {
		t.Fatalf("put over %s: %v", a.ready.Endpoint, err)
	}
	if _, err := cb.Put(ctx, "k", "of b"); err != nil {
		t.Fatalf("put over %s: %v", b.ready.Endpoint, err)
	}
	if got := get(ctx, t, ca, "k"); got != "of a" {
		t.Errorf("member a: got %q, want %q", got, "of a")
	}
	if got := get(ctx, t, cb, "k"); got != "of b" {
		t.Errorf("member b: got %q, want %q", got, "of b")
	}
	b.stop(t)
	a.stop(t)

	again := start(t, filepath.Join(dir, "a"), socket)
	c, ctx := connect(t, again.ready.Endpoint)
	if got := get(ctx, t, c, "k"); got != "of a" {
		t.Errorf("after a restart: got %q, want %q", got, "of a")
	}
	again.stop(t)
}

func TestKilledMemberStartsAgainWithItsData(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	socket := "unix://" + filepath.Join(dir, "s.sock")
	first := start(t, filepath.Join(dir, "d"), socket)
	c, ctx := connect(t, socket)
	if _, err := c.Put(ctx, "k", "v"); err != nil {
		t.Fatal(err)
	}
	first.cmd.Process.Kill()
	first.cmd.Wait()

	second := start(t, filepath.Join(dir, "d"), socket)
	if got := get(ctx, t, c, "k"); got != "v" {
		t.Errorf("the same client after kill and restart: got %q, want %q", got, "v")
	}
	second.stop(t)
}

func TestSecondProcessOnTheSameDataIsRefusedAndHarmless(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	socket := "unix://" + filepath.Join(dir, "s.sock")
	first := start(t, filepath.Join(dir, "d"), socket)

	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	out, err := command(ctx, "program", "--data-dir", filepath.Join(dir, "d"), "--listen", socket).CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(string(out), "in use by another process") {
		t.Fatalf("second process: got %v and %q, want exit 1 and \"in use by another process\"", err, out)
	}
	c, cctx := connect(t, socket)
	if _, err := c.Put(cctx, "k", "v"); err != nil {
		t.Errorf("the first member after the attempt: %v", err)
	}
	first.stop(t)
}

func TestMemberEndsWithItsParent(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	parent := command(context.Background(), "parent", "--data-dir", filepath.Join(dir, "d"),
		"--listen", "unix://"+filepath.Join(dir, "s.sock"), "--die-with-parent")
	// The member inherits this pipe, which reaches end of file when the member ends.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	parent.Stderr = w
	var out strings.Builder
	parent.Stdout = &out
	if err := parent.Run(); err != nil {
		t.Fatalf("parent: %v", err)
	}
	w.Close()
	var ready readyLine
	if err := json.Unmarshal([]byte(out.String()), &ready); err != nil {
		t.Fatalf("the member did not serve before its parent left: %q: %v", out.String(), err)
	}
	if err := r.SetReadDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(r); err != nil {
		unix.Kill(ready.PID, unix.SIGKILL)
		t.Fatalf("member %d outlives its parent: %v", ready.PID, err)
	}
}

func TestCommandLineNamesEveryMistake(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		args []string
		want []string
	}{
		{"nothing given", nil, []string{"--data-dir: is required", "--listen: "}},
		{"relative socket", []string{"--data-dir", "d", "--listen", "unix://run/s.sock"}, []string{"unix:///absolute/path"}},
		{"socket path of 108 bytes", []string{"--data-dir", "d", "--listen", "unix:///" + strings.Repeat("x", 107)}, []string{"has 108 bytes"}},
		{"address others can reach", []string{"--data-dir", "d", "--listen", "http://0.0.0.0:2379"}, []string{"loopback"}},
		{"no port", []string{"--data-dir", "d", "--listen", "http://127.0.0.1"}, []string{"and a port"}},
		{"other scheme", []string{"--data-dir", "d", "--listen", "ftp://127.0.0.1:1"}, []string{"wants unix:///path"}},
		{"https alone", []string{"--data-dir", "d", "--listen", "https://127.0.0.1:1"}, []string{"--client-ca: required"}},
		{
			"certificate alone",
			[]string{
				"--data-dir", "d", "--listen", "http://127.0.0.1:1", "--cert", "c", "--key", "k",
				"--client-ca", "a",
			},
			[]string{"--client-ca: required"},
		},
		{"standard stream", []string{"--data-dir", "d", "--listen", "unix:///s", "--ready-fd", "1"}, []string{"--ready-fd: 1"}},
		{"peer without members", []string{
			"--data-dir", "d", "--listen", "unix:///s", "--peer",
			"http://127.0.0.1:2380",
		}, []string{"--members"}},
		{
			"member of another cluster",
			[]string{
				"--data-dir", "d", "--listen", "unix:///s", "--peer",
				"http://127.0.0.1:2380", "--members", "m0=http://127.0.0.1:2380",
			},
			[]string{"has not the member sluice-dev="},
		},
		{
			"peers that others can reach",
			[]string{
				"--data-dir", "d", "--listen", "unix:///s", "--name", "a", "--peer",
				"http://127.0.0.1:2380", "--members", "a=http://127.0.0.1:2380,b=http://192.0.2.1:2380",
			},
			[]string{"192.0.2.1"},
		},
		{"stray word", []string{"--data-dir", "d", "--listen", "unix:///s", "now"}, []string{`unexpected argument "now"`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, err := parse(tt.args, io.Discard)
			if err == nil {
				t.Fatalf("parse(%q) accepted it", tt.args)
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("parse(%q): got %q, want it to contain %q", tt.args, err, want)
				}
			}
		})
	}
	if _, err := parse([]string{"--data-dir", "d", "--listen", "unix:///" + strings.Repeat("x", 106)}, io.Discard); err != nil {
		t.Errorf("a socket path of 107 bytes: %v", err)
	}
}

func TestThreeMembersAreOneCluster(t *testing.T) {
	dir := t.TempDir()
	members := make([]string, 3)
	for i := range members {
		members[i] = fmt.Sprintf("m%d=http://127.71.%d.%d:238%d", i, os.Getpid()>>8&0xff, os.Getpid()&0xff, i)
	}
	// Start all members without waiting: none serves before the others do.
	for i, member := range members {
		name, peer, _ := strings.Cut(member, "=")
		cmd := command(t.Context(), "program", "--data-dir", filepath.Join(dir, name), "--listen",
			"unix://"+filepath.Join(dir, fmt.Sprint(i)),
			"--die-with-parent", "--name", name, "--peer", peer, "--members", strings.Join(members, ","))
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			cmd.Process.Kill()
			cmd.Wait()
		})
	}
	first, ctx := connect(t, "unix://"+filepath.Join(dir, "0"))
	if _, err := first.Put(ctx, "k", "v"); err != nil {
		t.Fatal(err)
	}
	last, ctx := connect(t, "unix://"+filepath.Join(dir, "2"))
	if got := get(ctx, t, last, "k"); got != "v" {
		t.Errorf("another member has %q, want v", got)
	}
	if all, err := last.MemberList(ctx); err != nil || len(all.Members) != 3 {
		t.Errorf("members %v, %v", all, err)
	}
}
