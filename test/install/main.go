// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command install executes docs/operations/install-host.md on a minimal Debian
// with systemd, which it makes in namespaces and removes again. `make test-install`
// runs it, as root.
package main

import (
	"context"
	_ "embed"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-net/sluice/test/internal/guide"
)

//go:embed boot.sh
var boot string

func main() {
	sources := flag.String("sources", ".", "directory of the sources, built")
	mirror := flag.String("mirror", "http://deb.debian.org/debian", "archive of Debian")
	release := flag.String("release", "bookworm", "release of Debian")
	base := flag.String("base", "", "tree that debootstrap has made, to copy instead of making one")
	keep := flag.Bool("keep", false, "leave the machine running if a command fails, and say how to enter it")
	on := flag.Int("machine", 0, "process id of systemd of a machine that -keep has left, to go on with")
	from := flag.Int("from", 0, "line of the document to go on at, with -machine")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	execute := func() error { return run(ctx, *sources, *mirror, *release, *base, *keep) }
	if *on > 0 {
		execute = func() error { return (&machine{init: *on}).execute(ctx, *sources, *from) }
	}
	if err := execute(); err != nil {
		fmt.Fprintln(os.Stderr, "test/install:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, sources, mirror, release, base string, keep bool) (err error) {
	dir, err := os.MkdirTemp("/var/tmp", "sluice-install-")
	if err != nil {
		return err
	}
	// The machine's users enter its root, those of this one do not.
	root := filepath.Join(dir, "root")
	m := machine{dir: dir, root: root, stays: keep}
	defer func() {
		if err != nil && keep && m.init > 0 {
			fmt.Printf("The machine runs: %s\n", strings.Join(m.enter(everything...), " "))
			return
		}
		err = errors.Join(err, m.remove())
	}()
	if err := debian(ctx, root, mirror, release, base); err != nil {
		return err
	}
	if err := m.start(ctx); err != nil {
		return err
	}
	if err := command(ctx, "make", "-C", sources, "install", "DESTDIR="+root); err != nil {
		return err
	}
	return m.execute(ctx, sources, 0)
}

// execute executes the commands of the document from a line on.
func (m *machine) execute(ctx context.Context, sources string, from int) error {
	steps, err := guide.Read(filepath.Join(sources, "docs/operations/install-host.md"))
	if err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, filepath.Join(sources, "bin/sluice"), "--version").Output() //nolint:gosec // ours
	if err != nil {
		return err
	}
	words := strings.Fields(string(out))
	for _, s := range steps {
		if s.Line < from {
			continue
		}
		if err := m.follow(ctx, s, words[len(words)-1]); err != nil {
			return err
		}
	}
	fmt.Printf("%d commands of docs/operations/install-host.md do what it says\n", len(steps))
	return nil
}

// debian makes a minimal Debian.
func debian(ctx context.Context, root, mirror, release, base string) error {
	if base != "" {
		return command(ctx, "cp", "-a", base, root)
	}
	fmt.Printf("Debian %s into %s\n", release, root)
	// What debootstrap mounts in the tree ends with it.
	return command(ctx, "unshare", "--mount", "--propagation", "private", "debootstrap", "--variant=minbase",
		"--include=systemd,systemd-sysv,dbus,iproute2,procps", release, root, mirror)
}

// machine is a Debian with systemd as its first process, in namespaces of its own.
type machine struct {
	dir  string // of this program
	root string // below dir
	// It outlives this program, for somebody to look at.
	stays bool
	boot  *exec.Cmd
	init  int // process id of systemd
}

// start boots the machine.
func (m *machine) start(ctx context.Context) error {
	resolv, err := os.ReadFile("/etc/resolv.conf")
	if err != nil {
		return err
	}
	for path, content := range map[string][]byte{
		"etc/hostname": []byte("minimal\n"), "etc/hosts": []byte("127.0.0.1 localhost\n127.0.1.1 minimal\n"),
		"etc/resolv.conf": resolv,
	} {
		//nolint:gosec // every user of a machine reads these
		if err := os.WriteFile(filepath.Join(m.root, path), content, 0o644); err != nil {
			return err
		}
	}
	m.boot = exec.Command("bash", "-euc", boot, "boot", m.root, m.cgroup()) //nolint:gosec // a script of this program
	m.boot.Stderr = os.Stderr
	m.boot.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if !m.stays {
		m.boot.SysProcAttr.Pdeathsig = syscall.SIGKILL
	}
	if err := m.boot.Start(); err != nil {
		return err
	}
	for {
		parent := fmt.Sprint(m.boot.Process.Pid)
		out, err := exec.CommandContext(ctx, "pgrep", "--parent", parent).Output() //nolint:gosec // a number
		if _, scanned := fmt.Sscan(string(out), &m.init); err == nil && scanned == nil {
			break
		}
		if err := pause(ctx); err != nil {
			return fmt.Errorf("boot the machine: %w", err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	for {
		out, _ := m.command(ctx, everything, "systemctl is-system-running").Output()
		state := strings.TrimSpace(string(out))
		if state == "running" {
			return nil
		}
		if state == "degraded" {
			failed, _ := m.command(ctx, everything, "systemctl --no-pager --failed").CombinedOutput()
			return fmt.Errorf("boot the machine: %s", failed)
		}
		if err := pause(ctx); err != nil {
			return fmt.Errorf("boot the machine, which is %q: %w", state, err)
		}
	}
}

// follow executes a command of the document on the machine. The version of the
// programs is "devel" in the document.
func (m *machine) follow(ctx context.Context, s guide.Step, version string) error {
	fmt.Printf("%4d $ %s\n", s.Line, strings.SplitN(s.Command, "\n", 2)[0])
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	namespaces := everything
	text := s.Command
	if strings.HasPrefix(text, "apt-get ") {
		// The archive is reached by the network of this machine.
		namespaces = []string{"--mount", "--pid", "--uts", "--ipc", "--cgroup"}
	}
	// The controllers of cgroups belong to this machine.
	text = strings.ReplaceAll(text, "podman run ", "podman run --cgroups=disabled ")
	out, err := m.command(ctx, namespaces, text).CombinedOutput()
	if ctx.Err() != nil {
		return fmt.Errorf("line %d: %s: %w:\n%s", s.Line, s.Command, ctx.Err(), out)
	}
	if err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		return fmt.Errorf("line %d: %s: %w:\n%s", s.Line, s.Command, err, out)
	}
	if err := guide.SameShape(s.Output, strings.ReplaceAll(string(out), version, "devel")); err != nil {
		return fmt.Errorf("line %d: %s: %w\nit prints:\n%s", s.Line, s.Command, err, out)
	}
	return nil
}

// enter is what a command is executed on the machine by.
func (m *machine) enter(namespaces ...string) []string {
	return slices.Concat([]string{"nsenter", "--target", fmt.Sprint(m.init)}, namespaces, []string{
		"--root", "--wdns=/root", "--", "env", "-i", "HOME=/root",
		"PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", "TERM=dumb", "SYSTEMD_PAGER=",
		"DEBIAN_FRONTEND=noninteractive",
	})
}

// everything are all namespaces of the machine, as options of nsenter.
var everything = []string{"--all"}

func (m *machine) command(ctx context.Context, namespaces []string, text string) *exec.Cmd {
	args := append(m.enter(namespaces...), "bash", "-c", text)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...) //nolint:gosec // commands of a document of the repository
	cmd.WaitDelay = time.Second                           // what it has left running may have its output
	return cmd
}

// cgroup is the directory of the machine in the hierarchy of cgroup2.
func (m *machine) cgroup() string {
	top := "/sys/fs/cgroup"
	if _, err := os.Stat(filepath.Join(top, "unified")); err == nil {
		top = filepath.Join(top, "unified")
	}
	return filepath.Join(top, filepath.Base(m.dir))
}

// remove ends the machine and removes everything of it. The end of its first
// process ends all others, and its mounts.
func (m *machine) remove() error {
	if m.boot != nil && m.boot.Process != nil {
		if m.init > 0 {
			_ = syscall.Kill(m.init, syscall.SIGKILL)
		}
		_ = m.boot.Process.Kill()
		_ = m.boot.Wait()
	}
	var err error
	// A cgroup can be removed once its processes are reaped.
	for range 100 {
		if err = removeCgroups(m.cgroup()); err == nil {
			break
		}
		_ = pause(context.Background())
	}
	mounts, merr := os.ReadFile("/proc/self/mountinfo")
	if merr != nil || strings.Contains(string(mounts), m.dir) {
		return errors.Join(err, merr, fmt.Errorf("something is mounted in %s, which stays", m.dir))
	}
	return errors.Join(err, os.RemoveAll(m.dir))
}

// removeCgroups removes a cgroup with those in it.
func removeCgroups(path string) error {
	entries, err := os.ReadDir(path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeCgroups(filepath.Join(path, e.Name())); err != nil {
				return err
			}
		}
	}
	return os.Remove(path)
}

// command runs a program, and prints what it says if it fails.
func command(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...) //nolint:gosec // programs that this one names
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}

// pause is the time between two looks at a condition.
func pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(100 * time.Millisecond):
		return nil
	}
}
