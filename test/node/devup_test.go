// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-net/sluice/devnode"
)

// TestKernelDevSaysWhatIsThere: the errors of `sluice dev` contain the existing nodes and the command to use.
func TestKernelDevSaysWhatIsThere(t *testing.T) {
	t.Parallel()
	bin, err := filepath.Abs(binDir())
	if err != nil {
		t.Fatal(err)
	}
	// Another user may not be able to enter the directory of the programs.
	program := filepath.Join(t.TempDir(), "sluice")
	content, err := os.ReadFile(filepath.Join(bin, "sluice"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(program, content, 0o755); err != nil { //nolint:gosec // executed by another user
		t.Fatal(err)
	}
	for dir := filepath.Dir(program); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // entered by another user
			t.Fatal(err)
		}
	}
	first, second := name(t, "t"), name(t, "t")
	sluice := func(uid uint32, args ...string) (out string, code int) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
		defer cancel()
		cmd := exec.CommandContext(ctx, program, args...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
		said, err := cmd.CombinedOutput()
		if err != nil && cmd.ProcessState == nil {
			t.Fatal(err)
		}
		return string(said), cmd.ProcessState.ExitCode()
	}
	t.Cleanup(func() {
		for _, instance := range []string{first, second} {
			//nolint:usetesting // the context of the test has ended
			if err := devnode.Down(context.Background(), instance); err != nil {
				t.Error(err)
			}
		}
	})
	want := func(uid uint32, code int, text string, args ...string) {
		t.Helper()
		if out, got := sluice(uid, args...); got != code || !strings.Contains(out, text) {
			t.Errorf("sluice %q: exit code %d, want %d and %q:\n%s", args, got, code, text, out)
		}
	}

	up := []string{"dev", "up", "--bin-dir", bin, "--instance"}
	called := program // the program as the printed command calls it
	if _, err := exec.LookPath("sluice"); err == nil {
		called = "sluice"
	}
	want(0, 0, "\n  "+called+" status --instance "+first+"\n", append(up, first)...)
	n, err := devnode.Open(first)
	if err != nil {
		t.Fatal(err)
	}
	want(0, 1, "stop it with `sluice dev down --instance "+first+"`", append(up, first)...)
	if err := n.Kill(t.Context(), devnode.Policy); err != nil {
		t.Fatal(err)
	}
	want(0, 1, "policy has exited: start it again with `sluice dev restart policy --instance "+first+"`",
		append(up, first)...)
	want(0, 3, "policy of instance "+first+" is not running", "dev", "status", "--instance", first)
	want(0, 0, "policy serves again", "dev", "restart", "policy", "--instance", first)

	const nobody = 65534
	want(nobody, 1, "dev status must run as root, which owns the node's files", "dev", "status", "--instance", first)
	want(nobody, 1, "must run as root: it creates network namespaces", append(up, second)...)

	out, code := sluice(0, append(up, second, "--start-timeout", "1ms")...)
	if code != 1 || !strings.Contains(out, " does not serve: ") ||
		!strings.Contains(out, ".log ends with:\n") && !strings.Contains(out, "it has logged nothing") {
		t.Errorf("a start without time, exit code %d: %s", code, out)
	}
	want(0, 0, "Node "+second+" was not up; there is nothing left of it.", "dev", "down", "--instance", second)
	want(0, 0, "Node "+first+" is down.", "dev", "down", "--instance", first)
}
