// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package equivalence tests that the kernel judges every packet as the policy
// engine does. The engine writes tables and questions with its answers; the
// tables go into real maps by the way that those of a policy service go, and
// the programs themselves are asked.
package equivalence

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
)

// privateEnv marks the copy of the test binary that runs in namespaces of its
// own.
const privateEnv = "SLUICE_TEST_PRIVATE"

// TestMain runs the tests in a mount and a network namespace of their own, so
// that nothing of them outlives the process, however it ends.
func TestMain(m *testing.M) {
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
}

// openKernel has maps and programs of its own.
func openKernel(t testing.TB) (k *kernel.Kernel, dir string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("this test needs root")
	}
	mount := t.TempDir()
	if err := unix.Mount("bpf", mount, "bpf", 0, "mode=0755"); err != nil {
		t.Fatalf("mount a bpffs at %s: %v", mount, err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mount, 0); err != nil {
			t.Errorf("unmount %s: %v", mount, err)
		}
	})
	dir = filepath.Join(mount, "sluice")
	// pod ranges and tunnel port that no question is about
	k, err := kernel.Open(t.Context(), kernel.Options{
		Dir:             dir,
		PodCIDRs:        []netip.Prefix{netip.MustParsePrefix("198.19.255.0/24"), netip.MustParsePrefix("2001:2:ffff::/64")},
		TunnelPorts:     []uint16{65535},
		EventsPerSecond: 1 << 30,
		// subjects of the vectors have any identity
		ReservedEndpoints: true,
	})
	if err != nil {
		t.Fatalf("open the kernel's maps and programs: %v", err)
	}
	t.Cleanup(func() {
		if err := k.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
	})
	return k, dir
}
