// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// tasks is a cgroup with a limit of tasks.
type tasks struct {
	t   *testing.T
	dir string
}

func newTasks(t *testing.T) tasks {
	t.Helper()
	root := "/sys/fs/cgroup/pids"
	if _, err := os.Stat(root); err != nil {
		root = "/sys/fs/cgroup"
	}
	g := tasks{t, filepath.Join(root, name(t, "sluice-tasks-"))}
	if err := os.Mkdir(g.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Ended processes leave the cgroup a moment later.
		servicetest.EventuallyNil(t, "the cgroup is empty", func() error { return os.Remove(g.dir) })
	})
	return g
}

func (g tasks) write(file, value string) {
	g.t.Helper()
	if err := os.WriteFile(filepath.Join(g.dir, file), []byte(value), 0o600); err != nil {
		g.t.Fatal(err)
	}
}

// run runs a program in the cgroup, and returns its exit code and output.
func (g tasks) run(limit string, args ...string) (int, string) {
	g.t.Helper()
	g.write("pids.max", limit)
	script := fmt.Sprintf(`echo $$ >%s/cgroup.procs && exec "$@"`, g.dir)
	cmd := exec.Command("/bin/sh", append([]string{"-c", script, "sh"}, args...)...)
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil {
		g.t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), string(out)
}

// TestKernelTooFewThreads: if the limit of tasks is too low for a start, the error is one line that contains the
// limit. If a running process reaches the limit, the Go runtime may end it. Traffic and policies continue, and the
// process is started again.
func TestKernelTooFewThreads(t *testing.T) {
	t.Parallel()
	b := newFailing(t)
	g := newTasks(t)
	sluice := filepath.Join(binDir(), "sluice")
	const limit = "16" // the program itself has 5 to 10 threads

	pids := map[string]int{}
	for _, service := range b.Services() {
		pid, err := b.PID(service)
		if err != nil {
			t.Fatal(err)
		}
		pids[service] = pid
	}
	for _, c := range []struct {
		what string
		args []string
		want string
	}{
		{"dev restart", []string{sluice, "--instance", b.Instance(), "dev", "restart", "datapath"}, "restart datapath: "},
		{
			"dev up",
			[]string{sluice, "--instance", name(t, "few"), "dev", "up", "--bin-dir", binDir()},
			"a node of 7 services needs ",
		},
	} {
		code, out := g.run(limit, c.args...)
		if code != 1 || strings.Contains(out, "goroutine") || !strings.Contains(out, c.want) ||
			!strings.Contains(out, g.dir+"/pids.max allows ") {
			t.Errorf("%s: exit code %d, %s", c.what, code, out)
		}
	}
	for service, pid := range pids {
		if now, err := b.PID(service); err != nil || now != pid {
			t.Errorf("%s: pid %d, %v, was %d", service, now, err, pid)
		}
	}
	dir := t.TempDir()
	code, out := g.run("8", filepath.Join(binDir(), "sluice-ipam"), "--pools", "10.9.0.0/24", "--state-dir", dir,
		"--socket-path", filepath.Join(dir, "ipam.sock"))
	if code != 1 || strings.Contains(out, "goroutine") || !strings.Contains(out, "/pids.max allows ") {
		t.Errorf("sluice-ipam: exit code %d, %s", code, out)
	}

	// Limit all of the node's processes to their present number of threads.
	for _, pid := range pids {
		g.write("cgroup.procs", strconv.Itoa(pid))
	}
	g.write("pids.max", "1")
	var group sync.WaitGroup
	var burst []pod.Pod
	for range 16 {
		burst = append(burst, newPod(t, "burst"))
	}
	for i, p := range burst {
		group.Go(func() {
			_, _ = b.verb(t, "ADD", p, b.config(t, "1.0.0", map[string]any{
				"timeout": "4s", "runtimeConfig": labels("app", strconv.Itoa(i))["runtimeConfig"],
			}))
		})
	}
	for range 20 {
		push(t, b.old.client, b.old.server, "there")
		push(t, b.old.server, b.old.client, "and back")
	}
	group.Wait()
	if err := b.reaches(t, b.client, allowedPort); err != nil {
		t.Errorf("new connections: %v", err)
	}
	if b.reaches(t, b.denied, allowedPort) == nil {
		t.Error("policies are not enforced")
	}
	g.write("pids.max", "max")
	for service, pid := range pids {
		if now, err := b.PID(service); err != nil || now != pid {
			t.Logf("%s has ended: %v", service, err)
		}
		if err := b.Restart(t.Context(), service); err != nil {
			t.Errorf("restart %s: %v", service, err)
		}
	}
	for _, p := range burst {
		b.del(t, p)
	}
	b.wantAsBefore(t)
}
