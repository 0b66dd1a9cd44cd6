// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package deps tests scripts/deps, which installs packages on a machine.
package deps

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// deps runs scripts/deps for a group on a machine without installed packages, with the commands in PATH, and returns
// the calls of apt-get.
func deps(t *testing.T, group string, commands ...string) (calls []string) {
	t.Helper()
	dir := t.TempDir()
	write := func(name, content string) {
		t.Helper()
		//nolint:gosec // a program
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+content+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write("dpkg-query", "exit 1")
	write("id", "echo 0")
	write("apt-get", `echo "$*" >>"`+dir+`/calls"; cat "`+dir+`/policy-rc.d" >>"`+dir+`/policy"`)
	for _, name := range commands {
		write(name, "exit 1")
	}
	// The programs that the script itself needs, and no others of this machine.
	for _, name := range []string{"bash", "sort", "mktemp", "chmod", "rm", "cp", "mv", "cat", "printf"} {
		path, err := exec.LookPath(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	policy := filepath.Join(dir, "policy-rc.d")
	const own = "#!/bin/sh\nexit 0\n"
	if err := os.WriteFile(policy, []byte(own), 0o600); err != nil {
		t.Fatal(err)
	}
	bash := filepath.Join(dir, "bash")
	script := exec.CommandContext(t.Context(), bash, "../../scripts/deps", group) //nolint:gosec // our script
	script.Env = []string{"PATH=" + dir, "SLUICE_POLICY_RC_D=" + policy, "TMPDIR=" + dir}
	if out, err := script.CombinedOutput(); err != nil {
		t.Fatalf("scripts/deps %s: %v: %s", group, err, out)
	}
	if content, err := os.ReadFile(policy); err != nil || string(content) != own {
		t.Errorf("the machine's policy-rc.d is %q afterwards: %v", content, err)
	}
	content, err := os.ReadFile(filepath.Join(dir, "calls"))
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	asked, err := os.ReadFile(filepath.Join(dir, "policy"))
	if err != nil || !strings.Contains(string(asked), "exit 101") {
		t.Errorf("apt-get starts daemons: %q, %v", asked, err)
	}
	return strings.Split(strings.TrimSpace(string(content)), "\n")
}

// TestNoPackageIsRemoved: with the options of the script, apt-get fails instead of removing a package, and waits for
// another process's lock.
func TestNoPackageIsRemoved(t *testing.T) {
	calls := deps(t, "demo")
	if len(calls) != 2 {
		t.Fatalf("apt-get was called with %q, want update and install", calls)
	}
	for _, want := range []string{
		"install", "--no-remove", "DPkg::Lock::Timeout=", "containerd", "runc", "containernetworking-plugins",
	} {
		if !strings.Contains(calls[1], want) {
			t.Errorf("apt-get %s: without %s", calls[1], want)
		}
	}
}

// TestContainerdOfAnotherPackageIsUsed: Docker's containerd.io contains containerd and runc, and conflicts with
// Debian's packages.
func TestContainerdOfAnotherPackageIsUsed(t *testing.T) {
	calls := deps(t, "demo", "containerd", "ctr", "runc")
	if len(calls) != 2 || strings.Contains(calls[1], "containerd") || strings.Contains(calls[1], "runc") ||
		!strings.Contains(calls[1], "containernetworking-plugins") {
		t.Errorf("with Docker's containerd, apt-get was called with %q", calls)
	}
	if calls := deps(t, "demo", "containerd", "runc"); len(calls) != 2 || !strings.Contains(calls[1], "containerd") {
		t.Errorf("without ctr, apt-get was called with %q", calls)
	}
}
