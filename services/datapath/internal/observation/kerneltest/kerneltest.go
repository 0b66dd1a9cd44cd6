// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kerneltest has helpers for tests of maps and programs: private namespaces, a bpffs, a cgroup, and the
// programs' function that evaluates a policy table.
package kerneltest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/leaktest"
)

// privateEnv marks the copy of the test binary that runs in private namespaces.
const privateEnv = "SLUICE_TEST_PRIVATE"

// Main runs the tests in a private mount and network namespace, so that they leave nothing behind, however the process
// ends.
func Main(m *testing.M) {
	if os.Getuid() != 0 || os.Getenv(privateEnv) != "" {
		leaktest.Main(m)
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), privateEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &unix.SysProcAttr{
		Unshareflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET,
		Pdeathsig:    unix.SIGKILL,
	}
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "tests in private namespaces:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// RequireRoot fails the test without root, because a skipped kernel test proves nothing.
func RequireRoot(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("this test needs root")
	}
}

// NewBPFFS mounts a bpffs until the end of the test, and returns the path of a directory in it, which does not exist
// yet.
func NewBPFFS(t testing.TB) string {
	t.Helper()
	RequireRoot(t)
	dir := t.TempDir()
	if err := unix.Mount("bpf", dir, "bpf", 0, "mode=0755"); err != nil {
		t.Fatalf("mount a bpffs at %s: %v", dir, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return filepath.Join(dir, "sluice")
}

// NewCgroup creates a cgroup2 until the end of the test and moves this process into it: sockets that the process then
// opens belong to the cgroup. It returns the directory. Tests that call it must not run in parallel.
func NewCgroup(t testing.TB) string {
	t.Helper()
	RequireRoot(t)
	root := t.TempDir()
	if err := unix.Mount("cgroup2", root, "cgroup2", 0, ""); err != nil {
		t.Fatalf("mount cgroup2 at %s: %v", root, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(root, 0); err != nil {
			t.Errorf("unmount %s: %v", root, err)
		}
	})
	home, err := cgroupOfProcess()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp(root, "sluice-test-")
	if err != nil {
		t.Fatalf("make a cgroup: %v", err)
	}
	join := func(dir string) error {
		return os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte("0"), 0)
	}
	t.Cleanup(func() {
		if err := errors.Join(join(filepath.Join(root, home)), os.Remove(dir)); err != nil {
			t.Errorf("leave and remove cgroup %s: %v", dir, err)
		}
	})
	if err := join(dir); err != nil {
		t.Fatalf("join a cgroup: %v", err)
	}
	return dir
}

// cgroupOfProcess returns the path of this process's cgroup in the cgroup2 hierarchy.
func cgroupOfProcess() (string, error) {
	lines, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(lines)) {
		if path, ok := strings.CutPrefix(line, "0::"); ok {
			return strings.TrimSpace(path), nil
		}
	}
	return "", errors.New("this process is in no cgroup2")
}
