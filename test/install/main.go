// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Command install executes the commands of docs/operations/install-host.md on a minimal Debian with systemd, which it
// makes in namespaces and removes afterwards. `make test-install` runs it as root.
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
	sources := flag.String("sources", ".", "directory of the built sources")
	mirror := flag.String("mirror", "http://deb.debian.org/debian", "archive of Debian")
	release := flag.String("release", "bookworm", "release of Debian")
	base := flag.String("base", "", "tree of debootstrap to copy instead of making a new one")
	keep := flag.Bool("keep", false, "keep the machine running if a command fails, and print how to enter it")
	on := flag.Int("machine", 0, "process ID of systemd on a machine that -keep left running, to continue on")
	from := flag.Int("from", 0, "line of the document to continue at, with -machine")
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
	// The machine's users must be able to enter its root directory; this machine's users must not.
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

// execute executes the document's commands from a line on.
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

// debian makes a minimal Debian system.
func debian(ctx context.Context, root, mirror, release, base string) error {
	if base != "" {
		return command(ctx, "cp", "-a", base, root)
	}
	fmt.Printf("Debian %s into %s\n", release, root)
	// The mounts of debootstrap in the tree end with this mount namespace.
	return command(ctx, "unshare", "--mount", "--propagation", "private", "debootstrap", "--variant=minbase",
		"--include=systemd,systemd-sysv,dbus,iproute2,procps", release, root, mirror)
}

// machine is a Debian system with systemd as its first process, in separate namespaces.
type machine struct {
	dir  string // for files of this program
	root string // below dir
	// stays keeps the machine after this program has ended, for inspection.
	stays bool
	boot  *exec.Cmd
	init  int // process ID of systemd
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

// follow executes a command of the document on the machine. It replaces "devel", the version in the document.
func (m *machine) follow(ctx context.Context, s guide.Step, version string) error {
	fmt.Printf("%4d $ %s\n", s.Line, strings.SplitN(s.Command, "\n", 2)[0])
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	namespaces := everything
	text := s.Command
	if strings.HasPrefix(text, "apt-get ") {
		// Downloading the archive needs the network of this machine.
		namespaces = []string{"--mount", "--pid", "--uts", "--ipc", "--cgroup"}
	}
	// The cgroup controllers belong to this machine.
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

// enter returns the arguments of nsenter that execute a command on the machine.
func (m *machine) enter(namespaces ...string) []string {
	return slices.Concat([]string{"nsenter", "--target", fmt.Sprint(m.init)}, namespaces, []string{
		"--root", "--wdns=/root", "--", "env", "-i", "HOME=/root",
		"PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C", "TERM=dumb", "SYSTEMD_PAGER=",
		"DEBIAN_FRONTEND=noninteractive",
	})
}

// everything selects all namespaces of the machine, as an option of nsenter.
var everything = []string{"--all"}

func (m *machine) command(ctx context.Context, namespaces []string, text string) *exec.Cmd {
	args := append(m.enter(namespaces...), "bash", "-c", text)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...) //nolint:gosec // commands of a document of the repository
	cmd.WaitDelay = time.Second                           // its background processes may hold the output open
	return cmd
}

// cgroup returns the directory of the machine in the cgroup2 hierarchy.
func (m *machine) cgroup() string {
	top := "/sys/fs/cgroup"
	if _, err := os.Stat(filepath.Join(top, "unified")); err == nil {
		top = filepath.Join(top, "unified")
	}
	return filepath.Join(top, filepath.Base(m.dir))
}

// remove ends the machine and removes all its files. When its first process ends, the kernel ends all others and
// removes the mounts.
func (m *machine) remove() error {
	if m.boot != nil && m.boot.Process != nil {
		if m.init > 0 {
			_ = syscall.Kill(m.init, syscall.SIGKILL)
		}
		_ = m.boot.Process.Kill()
		_ = m.boot.Wait()
	}
	var err error
	// A cgroup can be removed only after its processes are reaped.
	for range 100 {
		if err = removeCgroups(m.cgroup()); err == nil {
			break
		}
		_ = pause(context.Background())
	}
	mounts, merr := os.ReadFile("/proc/self/mountinfo")
	if merr != nil || strings.Contains(string(mounts), m.dir) {
		return errors.Join(err, merr, fmt.Errorf("%s has mounts and is not removed", m.dir))
	}
	return errors.Join(err, os.RemoveAll(m.dir))
}

// removeCgroups removes a cgroup and its children.
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

// command runs a program, and prints the program's output if it fails.
func command(ctx context.Context, name string, args ...string) error {
	cmd := exec.CommandContext(ctx, name, args...) //nolint:gosec // programs that this one names
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", name, err, out)
	}
	return nil
}

// pause waits between two checks of a condition.
func pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(100 * time.Millisecond):
		return nil
	}
}
