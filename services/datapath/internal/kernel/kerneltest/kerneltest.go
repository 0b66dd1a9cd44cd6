// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kerneltest is what tests of maps and programs share: namespaces of
// their own, a bpffs, and the programs' function that evaluates a policy table.
package kerneltest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/leaktest"
)

// privateEnv marks the copy of the test binary that runs in namespaces of its
// own.
const privateEnv = "SLUICE_TEST_PRIVATE"

// Main runs the tests in a mount and a network namespace of their own, so that
// nothing of them outlives the process, however it ends.
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

// RequireRoot fails: a kernel test that is skipped proves nothing.
func RequireRoot(t testing.TB) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("this test needs root")
	}
}

// NewBPFFS mounts a bpffs that ends with the test, and names a directory in it.
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
