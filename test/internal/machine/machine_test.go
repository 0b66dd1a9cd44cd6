// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package machine

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/servicetest"
)

func TestMain(m *testing.M) { Main(m) }

// ip runs a command of iproute2 or nftables.
func ip(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%q: %v\n%s", args, err, out)
	}
}

// TestKernelLeftoversOfEachKindAreSeen: after an object was created, the list for its kind contains it.
func TestKernelLeftoversOfEachKindAreSeen(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	dir := t.TempDir()
	// The cgroup hierarchy of the process; cgroup version 1 has several.
	hierarchies, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	if err != nil {
		t.Fatal(err)
	}
	cgroup := filepath.Join("/sys/fs/cgroup", Name("sluice-test-"))
	if len(hierarchies) > 0 {
		cgroup = filepath.Join(filepath.Dir(hierarchies[0]), filepath.Base(cgroup))
	}
	for _, test := range []struct {
		kind  string // a Resource
		leave func(t *testing.T)
		clear func(t *testing.T)
	}{
		{
			"network devices and their addresses",
			func(t *testing.T) { ip(t, "ip", "link", "add", "left", "type", "veth", "peer", "left2") },
			func(t *testing.T) { ip(t, "ip", "link", "del", "left") },
		},
		{
			"network devices and their addresses",
			func(t *testing.T) { ip(t, "ip", "address", "add", "192.0.2.1/32", "dev", "lo") },
			func(t *testing.T) { ip(t, "ip", "address", "del", "192.0.2.1/32", "dev", "lo") },
		},
		{
			"routes",
			func(t *testing.T) { ip(t, "ip", "-6", "route", "add", "blackhole", "2001:db8::/64", "table", "77") },
			func(t *testing.T) { ip(t, "ip", "-6", "route", "del", "blackhole", "2001:db8::/64", "table", "77") },
		},
		{
			"routing rules",
			func(t *testing.T) { ip(t, "ip", "-6", "rule", "add", "from", "2001:db8::1", "table", "77") },
			func(t *testing.T) { ip(t, "ip", "-6", "rule", "del", "from", "2001:db8::1", "table", "77") },
		},
		{
			"lines of nftables",
			func(t *testing.T) { ip(t, "nft", "add", "table", "inet", "left") },
			func(t *testing.T) { ip(t, "nft", "delete", "table", "inet", "left") },
		},
		{
			"mounts",
			func(t *testing.T) {
				if err := unix.Mount("bpf", dir, "bpf", 0, ""); err != nil {
					t.Fatal(err)
				}
			},
			func(t *testing.T) {
				if err := unix.Unmount(dir, 0); err != nil {
					t.Error(err)
				}
			},
		},
		{
			"control groups",
			func(t *testing.T) {
				if err := os.Mkdir(cgroup, 0o700); err != nil {
					t.Fatal(err)
				}
			},
			func(t *testing.T) {
				if err := os.Remove(cgroup); err != nil {
					t.Error(err)
				}
			},
		},
		{
			"files in /run",
			func(t *testing.T) {
				if err := os.MkdirAll("/run/sluice-left/bpf", 0o700); err != nil {
					t.Fatal(err)
				}
			},
			func(t *testing.T) {
				if err := os.RemoveAll("/run/sluice-left"); err != nil {
					t.Error(err)
				}
			},
		},
		{
			"processes",
			func(t *testing.T) {
				cmd := exec.CommandContext(t.Context(), "sleep", "600")
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() {
					_ = cmd.Process.Kill()
					_ = cmd.Wait()
				})
				// Start returns when the kernel closes the files of the former program, before it sets the arguments.
				servicetest.Eventually(t, "the arguments of the process", func() bool {
					arguments, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", cmd.Process.Pid))
					return err == nil && len(arguments) > 0
				})
			},
			func(*testing.T) {},
		},
	} {
		t.Run(test.kind, func(t *testing.T) {
			resources := Resources()
			i := slices.IndexFunc(resources, func(r leaktest.Resource) bool { return r.Name == test.kind })
			before, err := resources[i].List()
			if err != nil {
				t.Fatal(err)
			}
			test.leave(t)
			after, err := resources[i].List()
			test.clear(t)
			if err != nil || len(after) <= len(before) {
				t.Errorf("%q before, %q and %v after", before, after, err)
			}
		})
	}
}

// TestKernelRunIsTheTestsOwn: these tests have a /run of their own.
func TestKernelRunIsTheTestsOwn(t *testing.T) {
	const netns = "/run/netns" // for `ip netns`
	if found, err := filepath.Glob("/run/*"); err != nil || !slices.Equal(found, []string{netns}) {
		t.Errorf("%q, %v: want %s alone", found, err, netns)
	}
	if found, err := filepath.Glob(netns + "/*"); err != nil || len(found) > 0 {
		t.Errorf("%q, %v: want an empty directory", found, err)
	}
}
