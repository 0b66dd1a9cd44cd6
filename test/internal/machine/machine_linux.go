// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package machine runs the tests of whole nodes on a machine of their own, as far as the kernel has namespaces for
// it, and compares the machine's state before and after the tests:
//
//	func TestMain(m *testing.M) { machine.Main(m) }
//
// The tests have their own network and mount namespaces and their own /run. They do not see other copies of Sluice or
// other tests, so anything left in the namespaces was left by these tests. Control groups are shared by the whole
// machine; the tests look only for groups with a Name.
package machine

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/leaktest"
)

// outsideEnv passes the original mount namespace to the copy of the test binary that runs in the new namespaces.
const outsideEnv = "SLUICE_TEST_MACHINE_OUTSIDE"

// Main runs the tests of a package.
func Main(m *testing.M) {
	if os.Geteuid() != 0 { // the tests report that they need root
		os.Exit(m.Run())
	}
	outside := os.Getenv(outsideEnv)
	if outside == "" {
		os.Exit(inNamespaces())
	}
	if err := prepare(outside); err != nil {
		fmt.Fprintln(os.Stderr, "a machine for the tests:", err)
		os.Exit(1)
	}
	leaktest.Main(m, Resources()...)
}

// inNamespaces executes this binary again in new namespaces.
func inNamespaces() int {
	here, err := os.Readlink(mountNamespace)
	if err != nil {
		fmt.Fprintln(os.Stderr, "tests on a machine of their own:", err)
		return 1
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), outsideEnv+"="+here)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &unix.SysProcAttr{Unshareflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET, Pdeathsig: unix.SIGKILL}
	if err := cmd.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "tests on a machine of their own:", err)
		return 1
	}
	return 0
}

const mountNamespace = "/proc/self/ns/mnt"

// prepare makes what exists on a machine after boot. Outside is the original mount namespace, whose /run must not
// change.
func prepare(outside string) error {
	here, err := os.Readlink(mountNamespace)
	if err != nil {
		return err
	}
	if here == outside {
		return fmt.Errorf("%s is set, but this is still mount namespace %s", outsideEnv, here)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	// The first `ip netns add` makes this mount, which is never removed.
	const netns = "/run/netns"
	if err := os.Mkdir(netns, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(netns, netns, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s: %w", netns, err)
	}
	if err := unix.Mount("", netns, "", unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("share %s: %w", netns, err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

// Resources are the kinds of objects that nodes could leave on the machine.
func Resources() []leaktest.Resource {
	return []leaktest.Resource{
		{Name: "network devices and their addresses", List: links},
		{Name: "routes", List: routes},
		{Name: "routing rules", List: rules},
		{Name: "lines of nftables", List: ruleset},
		{Name: "mounts", List: mounts},
		{Name: "control groups", List: cgroups},
		{Name: "files in /run", List: runFiles},
		{Name: "processes", List: processes},
	}
}

// names are the names that Name has returned.
var names struct {
	sync.Mutex
	all []string
}

// Name returns a name that no other test and no other copy of it uses.
func Name(prefix string) string {
	random := make([]byte, 4)
	rand.Read(random) //nolint:errcheck // never fails
	name := prefix + hex.EncodeToString(random)
	names.Lock()
	defer names.Unlock()
	names.all = append(names.all, name)
	return name
}

// cgroups lists the first two levels of cgroups, which contain any hierarchy or group of these tests.
func cgroups() (out []string, err error) {
	for _, pattern := range []string{"/sys/fs/cgroup/*", "/sys/fs/cgroup/*/*"} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		names.Lock()
		for _, path := range found {
			if slices.ContainsFunc(names.all, func(n string) bool { return strings.Contains(path, n) }) {
				out = append(out, path)
			}
		}
		names.Unlock()
	}
	return out, nil
}

// mostDumps limits the repetitions of a dump.
const mostDumps = 100

// whole repeats a dump of the kernel that was interrupted by a change.
func whole[T any](dump func() ([]T, error)) (all []T, err error) {
	for range mostDumps {
		if all, err = dump(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return all, err
		}
	}
	return nil, err
}

func links() (out []string, err error) {
	all, err := whole(netlink.LinkList)
	if err != nil {
		return nil, err
	}
	for _, l := range all {
		out = append(out, l.Attrs().Name)
	}
	addresses, err := whole(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	for _, a := range addresses {
		out = append(out, a.String())
	}
	return out, err
}

func routes() (out []string, err error) {
	all, err := whole(func() ([]netlink.Route, error) {
		ofAll := &netlink.Route{Table: unix.RT_TABLE_UNSPEC}
		return netlink.RouteListFiltered(netlink.FAMILY_ALL, ofAll, netlink.RT_FILTER_TABLE)
	})
	for _, r := range all {
		out = append(out, r.String())
	}
	return out, err
}

func rules() (out []string, err error) {
	all, err := whole(func() ([]netlink.Rule, error) { return netlink.RuleList(netlink.FAMILY_ALL) })
	for _, r := range all {
		out = append(out, r.String())
	}
	return out, err
}

func ruleset() ([]string, error) {
	out, err := exec.Command("nft", "list", "ruleset").Output()
	if err != nil {
		return nil, fmt.Errorf("nft list ruleset: %w", err)
	}
	return strings.FieldsFunc(string(out), func(r rune) bool { return r == '\n' }), nil
}

func mounts() (out []string, err error) {
	lines, err := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(lines)) {
		if fields := strings.Fields(line); len(fields) > 4 {
			out = append(out, fields[4])
		}
	}
	return out, err
}

func runFiles() (out []string, err error) {
	err = filepath.WalkDir("/run", func(path string, entry fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		// containerd keeps its directories, and other programs also use /run/netns.
		kept := path == "/run" || path == "/run/netns" || strings.HasPrefix(path, "/run/containerd") && entry.IsDir()
		if err == nil && !kept {
			out = append(out, path)
		}
		return err
	})
	return out, err
}

// processes lists the processes in this mount namespace, which include all processes that the tests start.
func processes() (out []string, err error) {
	own, err := os.Readlink(mountNamespace)
	if err != nil {
		return nil, err
	}
	all, err := filepath.Glob("/proc/[0-9]*")
	for _, dir := range all {
		if ns, err := os.Readlink(filepath.Join(dir, "ns", "mnt")); err != nil || ns != own {
			continue // of another user, or ended
		}
		name, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err == nil && len(name) > 0 { // empty for a zombie
			out = append(out, filepath.Base(dir)+" "+strings.ReplaceAll(strings.TrimRight(string(name), "\x00"), "\x00", " "))
		}
	}
	return out, err
}
