// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// machine is a directory tree that represents a machine, with programs in PATH.
type machine struct {
	t     *testing.T
	paths instance.Paths
	o     options
	bin   string
}

func newMachine(t *testing.T) *machine {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test mounts and gives files to users, and needs root")
	}
	root := t.TempDir()
	p, err := instance.New("")
	if err != nil {
		t.Fatal(err)
	}
	m := &machine{t: t, paths: p.Under(root), bin: filepath.Join(root, "bin"), o: options{
		plugins: filepath.Join(root, "opt"), directory: filepath.Join(root, "net.d"), name: "05-sluice.conflist",
		mountBPFFS: "auto",
	}}
	for _, dir := range []string{
		m.bin, m.o.plugins, m.o.directory, filepath.Dir(m.paths.RunDir), filepath.Dir(m.paths.StateDir),
	} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", m.bin+":"+os.Getenv("PATH"))
	m.write(filepath.Join(m.bin, plugin), "the plugin", 0o755)
	m.write(filepath.Join(m.bin, "sluice-datapath"), "#!/bin/sh\necho \"$@\" >>"+root+"/calls\n", 0o755)
	t.Cleanup(func() {
		err := unix.Unmount(m.paths.BPFDir, unix.MNT_DETACH)
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			t.Error(err)
		}
	})
	return m
}

func (m *machine) write(path, content string, mode fs.FileMode) {
	m.t.Helper()
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		m.t.Fatal(err)
	}
}

func (m *machine) content(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// problems returns the parts with problems.
func (m *machine) problems() (all []string) {
	for _, p := range checkParts(m.paths, m.o) {
		if p.Problem != "" {
			all = append(all, p.Name+" "+p.Problem)
		}
	}
	return all
}

func TestKernelInstallAndUninstallAreWholeAndRepeatable(t *testing.T) {
	m := newMachine(t)
	if got := m.problems(); len(got) < 10 {
		t.Errorf("an empty machine lacks only %q", got)
	}
	// The directory of the plugins does not exist.
	if err := os.Remove(m.o.plugins); err != nil {
		t.Fatal(err)
	}
	if _, err := install(m.paths, m.o); err != nil {
		t.Fatal(err)
	}
	if changes, err := install(m.paths, m.o); err != nil || len(changes) > 0 {
		t.Errorf("once more: %q, %v, want no change", changes, err)
	}
	target := filepath.Join(m.o.plugins, plugin)
	if info, err := os.Stat(target); err != nil || info.Mode() != 0o755 || m.content(target) != "the plugin" {
		t.Errorf("the plugin: %v, %v, %q", info, err, m.content(target))
	}
	if got := m.problems(); len(got) != 1 || !strings.HasPrefix(got[0], "configuration is missing") {
		t.Errorf("after install: %q, want the configuration alone", got)
	}
	if _, err := m.o.configuration(m.paths).write(); err != nil {
		t.Fatal(err)
	}
	if got := m.problems(); len(got) > 0 {
		t.Errorf("a whole machine lacks %q", got)
	}
	// A new version of the plugin replaces the old one atomically.
	m.write(filepath.Join(m.bin, plugin), "the new plugin", 0o755)
	if changes, err := install(m.paths, m.o); err != nil || fmt.Sprint(changes) != "[wrote "+target+"]" {
		t.Errorf("a new plugin: %q, %v", changes, err)
	}
	if m.content(target) != "the new plugin" {
		t.Errorf("the plugin is %q", m.content(target))
	}

	other := filepath.Join(m.o.directory, "10-other.conflist")
	m.write(other, "{}", 0o600)
	m.write(filepath.Join(m.o.plugins, "portmap"), "another plugin", 0o755)
	cmd := &cobra.Command{}
	cmd.SetContext(t.Context())
	for range 2 {
		if _, err := uninstall(cmd, m.paths, m.o); err != nil {
			t.Fatal(err)
		}
		for _, path := range []string{target, m.o.configuration(m.paths).path(), m.paths.BPFDir} {
			if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s after uninstall: %v", path, err)
			}
		}
	}
	if got := m.content(filepath.Join(filepath.Dir(m.bin), "calls")); got != "--uninstall\n--uninstall\n" {
		t.Errorf("sluice-datapath was executed with %q", got)
	}
	if m.content(other) != "{}" || m.content(filepath.Join(m.o.plugins, "portmap")) != "another plugin" {
		t.Error("uninstall touched what is not ours")
	}
}

// TestKernelDryRunsNameEachChangeAndMakeNone: a dry run lists exactly the changes that the command then makes.
func TestKernelDryRunsNameEachChangeAndMakeNone(t *testing.T) {
	m := newMachine(t)
	plan := func(f func(instance.Paths, options) ([]string, error), want ...string) []string {
		t.Helper()
		before := m.problems()
		changes, err := f(m.paths, m.o)
		if err != nil {
			t.Fatal(err)
		}
		if after := m.problems(); !slices.Equal(before, after) {
			t.Errorf("a dry run changed %q to %q", before, after)
		}
		for _, w := range want {
			if !slices.Contains(changes, w) {
				t.Errorf("no %q in %q", w, changes)
			}
		}
		return changes
	}
	target := filepath.Join(m.o.plugins, plugin)
	plan(planInstall, "write "+target, "mount a bpffs at "+m.paths.BPFDir, "create "+m.paths.StateDir)
	m.o.mountBPFFS = "never"
	if _, err := planInstall(m.paths, m.o); err == nil || !strings.Contains(err.Error(), "--mount-bpffs is never") {
		t.Errorf("without a bpffs: %v", err)
	}
	m.o.mountBPFFS = "auto"
	if _, err := install(m.paths, m.o); err != nil {
		t.Fatal(err)
	}
	if changes := plan(planInstall); len(changes) > 0 {
		t.Errorf("after install: %q", changes)
	}
	if _, err := m.o.configuration(m.paths).write(); err != nil {
		t.Fatal(err)
	}
	kernel := "remove devices, rules, routes and firewall table of " + filepath.Base(m.paths.RunDir) +
		", if there are any"
	if changes := plan(planUninstall, "remove "+m.o.configuration(m.paths).path(), kernel,
		"remove "+m.paths.BPFDir+" and its pins", "remove "+target); len(changes) != 4 {
		t.Errorf("uninstall: %q", changes)
	}
	m.o.state = true
	plan(planUninstall, "remove "+m.paths.RunDir, "remove "+m.paths.StateDir)
	cmd := &cobra.Command{}
	cmd.SetContext(t.Context())
	if _, err := uninstall(cmd, m.paths, m.o); err != nil {
		t.Fatal(err)
	}
	if changes := plan(planUninstall); !slices.Equal(changes, []string{kernel}) {
		t.Errorf("after uninstall: %q", changes)
	}
}

// TestKernelUninstallWithStateLeavesNoDirectory: an uninstall with state removes all directories, even if the plugin
// has mounted a network namespace in one.
func TestKernelUninstallWithStateLeavesNoDirectory(t *testing.T) {
	m := newMachine(t)
	if _, err := install(m.paths, m.o); err != nil {
		t.Fatal(err)
	}
	bound := filepath.Join(m.paths.RunDir, "netns", "bound")
	m.write(bound, "", 0o600)
	if err := unix.Mount("/proc/self/ns/net", bound, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	logs := filepath.Join(filepath.Dir(filepath.Dir(m.paths.StateDir)), "log", "sluice")
	if err := os.MkdirAll(logs, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := &cobra.Command{}
	cmd.SetContext(t.Context())
	m.o.state = true
	for range 2 {
		if changes, err := uninstall(cmd, m.paths, m.o); err != nil {
			t.Fatal(changes, err)
		}
		for _, dir := range []string{m.paths.RunDir, m.paths.StateDir, logs} {
			if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s after uninstall: %v", dir, err)
			}
		}
	}
}

// TestKernelUninstallEmptiesMountPoints: the state directory and a directory in it are mount points. A second run
// changes nothing.
func TestKernelUninstallEmptiesMountPoints(t *testing.T) {
	m := newMachine(t)
	logs := filepath.Join(filepath.Dir(filepath.Dir(m.paths.StateDir)), "log", "sluice")
	for _, dir := range []string{m.paths.StateDir, logs} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	mount := func(dir string) {
		t.Helper()
		if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=0755"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
	}
	mount(m.paths.StateDir)
	if _, err := install(m.paths, m.o); err != nil {
		t.Fatal(err)
	}
	below := filepath.Join(m.paths.StateDir, "policy")
	mount(below)
	m.write(filepath.Join(below, "policies.db"), "state", 0o600)
	cmd := &cobra.Command{}
	cmd.SetContext(t.Context())
	m.o.state = true
	changes, err := uninstall(cmd, m.paths, m.o)
	if err != nil {
		t.Fatal(changes, err)
	}
	if want := "emptied " + m.paths.StateDir; !strings.Contains(strings.Join(changes, "\n"), want) {
		t.Errorf("the changes are %q, want %q", changes, want)
	}
	var left []string
	if err := filepath.WalkDir(m.paths.StateDir, func(path string, _ fs.DirEntry, err error) error {
		left = append(left, path)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	if want := []string{m.paths.StateDir, below}; !slices.Equal(left, want) {
		t.Errorf("there is still %q, want the mount points %q", left, want)
	}
	if _, err := os.Lstat(logs); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the logs: %v", err)
	}
	again, err := uninstall(cmd, m.paths, m.o)
	if err != nil || slices.ContainsFunc(again, func(c string) bool { return strings.Contains(c, m.paths.StateDir) }) {
		t.Errorf("once more: %q, %v", again, err)
	}
	// A file that cannot be removed is an error.
	busy := filepath.Join(below, "busy")
	m.write(busy, "", 0o600)
	if err := unix.Mount("/proc/self/ns/net", busy, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	if changes, err := uninstall(cmd, m.paths, m.o); !errors.Is(err, unix.EBUSY) {
		t.Errorf("with a busy file: %q, %v", changes, err)
	}
	if err := unix.Unmount(busy, unix.MNT_DETACH); err != nil {
		t.Fatal(err)
	}
}

// TestKernelUninstallThatFailsSaysWhy: after a failure, a second run completes the uninstallation.
func TestKernelUninstallThatFailsSaysWhy(t *testing.T) {
	m := newMachine(t)
	if _, err := install(m.paths, m.o); err != nil {
		t.Fatal(err)
	}
	m.write(filepath.Join(m.bin, "sluice-datapath"), "#!/bin/sh\necho another process runs >&2; exit 1\n", 0o755)
	cmd := &cobra.Command{}
	cmd.SetContext(t.Context())
	if _, err := uninstall(cmd, m.paths, m.o); err == nil || !strings.Contains(err.Error(), "another process runs") {
		t.Errorf("uninstall while a service runs: %v", err)
	}
	if got := m.content(filepath.Join(m.o.plugins, plugin)); got != "the plugin" {
		t.Errorf("the plugin is %q", got)
	}
	// Only errors of the log are shown.
	m.write(filepath.Join(m.bin, "sluice-datapath"), `#!/bin/sh
echo '{"level":"INFO","msg":"starting","config":{"instance":"u"}}' >&2
echo '{"level":"ERROR","msg":"stopped","error":"another process runs"}' >&2
exit 1
`, 0o755)
	_, err := uninstall(cmd, m.paths, m.o)
	if err == nil || !strings.HasSuffix(err.Error(), "exit status 1: stopped: another process runs") {
		t.Errorf("the error is %v", err)
	}
}

func TestKernelInstallAsksForMountsByName(t *testing.T) {
	m := newMachine(t)
	m.o.mountBPFFS = "never"
	if _, err := install(m.paths, m.o); err == nil || !strings.Contains(err.Error(), "mount -t bpf") {
		t.Errorf("without a bpffs: %v, want the command that mounts it", err)
	}
	m.o.mountBPFFS = "sometimes"
	if _, err := install(m.paths, m.o); err == nil {
		t.Error("a third value is taken")
	}
	// The run directory is a private mount, as in a container without mount propagation.
	m.o.mountBPFFS = "auto"
	for _, flags := range []uintptr{0, unix.MS_PRIVATE} {
		if err := unix.Mount("tmpfs", m.paths.RunDir, "tmpfs", flags, "mode=0755"); err != nil {
			t.Fatal(err)
		}
	}
	defer func() {
		if err := unix.Unmount(m.paths.RunDir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	}()
	if _, err := install(m.paths, m.o); err == nil || !strings.Contains(err.Error(), "Bidirectional") {
		t.Errorf("with a private run directory: %v, want an error about propagation", err)
	}
	if err := unix.Mount("", m.paths.RunDir, "", unix.MS_SHARED, ""); err != nil {
		t.Fatal(err)
	}
	if _, err := install(m.paths, m.o); err != nil {
		t.Errorf("with a shared run directory: %v", err)
	}
}
