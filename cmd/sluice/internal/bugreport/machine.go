// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package bugreport

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
	archive "github.com/sluice-net/sluice/cmd/sluice/internal/report"
)

// own reports whether the report is about the installed node, not another instance.
func (r *report) own() bool { return r.inv.Instance == "" && r.inv.RunDir == "" }

// ofMachine returns the parts that no service provides.
func (r *report) ofMachine(ctx context.Context) []group {
	all := []group{r.network(ctx), {parts: []part{
		{name: "machine/kernel.txt", command: "cat /proc/version ...", take: kernel},
		{name: "machine/mounts.txt", command: "cat /proc/self/mountinfo; df", take: r.mounts},
	}}}
	if r.own() {
		all[1].parts = append(all[1].parts, r.sluice("machine/files.json", "node status"))
	}
	for _, name := range append([]string{"etcd"}, invocation.Services...) {
		socket := filepath.Join(r.runDir, name, name+".sock")
		if _, err := os.Lstat(socket); name == "etcd" && err != nil {
			continue // only development nodes have it
		}
		all = append(all, group{parts: []part{{
			name: "processes/" + name + ".txt", command: "cat /proc/PID/status ...",
			take: func(ctx context.Context, w *content) error { return process(ctx, w, socket) },
		}}})
	}
	return append(all, r.logs(), r.journal())
}

// logs returns the logs of a development node and of the CNI plugin.
func (r *report) logs() group {
	g := group{telling: true}
	paths, err := filepath.Glob(filepath.Join(r.runDir, "log", "*.log"))
	if _, rerr := os.ReadDir(filepath.Join(r.runDir, "log")); err == nil && !errors.Is(rerr, fs.ErrNotExist) {
		err = rerr
	}
	if err != nil {
		r.archive.Miss("logs", err)
	}
	if r.own() {
		if path := "/var/log/sluice/cni.log"; exists(path) {
			paths = append(paths, path)
		}
	}
	for _, path := range paths[:min(len(paths), 64)] {
		g.parts = append(g.parts, part{
			name: "logs/" + archive.FileName(filepath.Base(path)), command: fmt.Sprintf("tail -n %d %s", r.logLines, path),
			take: func(_ context.Context, w *content) error { return tail(w, path, r.logLines) },
		})
	}
	return g
}

// exists reports whether a file exists. It returns true if that cannot be determined.
func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// journal returns the logs of the systemd units.
func (r *report) journal() group {
	g := group{telling: true}
	if !r.own() {
		return g
	}
	for _, unit := range append([]string{"prepare"}, invocation.Services...) {
		args := []string{
			"journalctl", "--unit=sluice-" + unit + ".service", "--lines=" + strconv.Itoa(r.logLines), "--no-pager",
			"--output=short-iso-precise", "--quiet",
		}
		g.parts = append(g.parts, part{
			name: "logs/sluice-" + unit + ".journal", command: strings.Join(args, " "),
			take: func(ctx context.Context, w *content) error {
				if err := run(ctx, w, args...); err != nil {
					return err
				}
				if w.empty() {
					return errors.New("the journal has no entries of the unit")
				}
				return nil
			},
		})
	}
	return g
}

func (c *content) empty() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.bytes) == 0
}

// run writes the output of another program, and kills the program when the context ends.
func run(ctx context.Context, w io.Writer, args ...string) error {
	errOut := content{limit: 4 << 10}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	// A write beyond the limit closes the pipe, which ends the program.
	cmd.Stdout, cmd.Stderr = w, &errOut
	cmd.WaitDelay = 500 * time.Millisecond // its child processes may keep the output open
	err := cmd.Run()
	if said, _ := errOut.close(); err != nil && len(bytes.TrimSpace(said)) > 0 {
		return fmt.Errorf("%w: %s", err, oneLine(string(said)))
	}
	return err
}

// kernel writes the version, the settings and the load of the kernel, and the distribution.
func kernel(_ context.Context, w *content) error {
	paths := []string{
		"/proc/version", "/proc/cmdline", "/proc/uptime", "/proc/loadavg", "/proc/meminfo", "/proc/pressure/cpu",
		"/proc/pressure/io", "/proc/pressure/memory", "/proc/modules", "/proc/cgroups", "/proc/softirqs",
		"/sys/kernel/security/lsm", "/sys/fs/cgroup/cgroup.controllers",
	}
	for _, name := range []string{
		"kernel/unprivileged_bpf_disabled", "kernel/bpf_stats_enabled", "kernel/pid_max", "kernel/threads-max",
		"kernel/tainted", "fs/file-nr", "fs/file-max", "fs/inotify/max_user_watches", "fs/inotify/max_user_instances",
	} {
		paths = append(paths, "/proc/sys/"+name)
	}
	for _, path := range []string{"/etc/os-release", "/usr/lib/os-release"} {
		// /etc/os-release is a link on most systems.
		if target, err := filepath.EvalSymlinks(path); err == nil {
			paths = append(paths, target)
			break
		}
	}
	return sections(w, paths)
}

// sections writes files of the kernel. The error lists files that cannot be read.
func sections(w io.Writer, paths []string) error {
	var errs []string
	for _, path := range paths {
		err := section(w, path)
		if errors.Is(err, errFull) || errors.Is(err, os.ErrClosed) {
			return err
		}
		if err != nil {
			errs = append(errs, err.Error())
		}
	}
	if len(errs) > 0 {
		return errors.New(strings.Join(errs, "; "))
	}
	return nil
}

// mounts writes the mounts, and the usage of the file systems that Sluice writes to.
func (r *report) mounts(_ context.Context, w *content) error {
	err := section(w, "/proc/thread-self/mountinfo")
	state := "/var/lib/sluice"
	if r.inv.Instance != "" {
		state += "-" + r.inv.Instance
	}
	fmt.Fprintln(w, "==> file systems <==")
	for _, dir := range []string{r.runDir, filepath.Join(r.runDir, "bpf"), state, "/tmp", "/var/log"} {
		var st unix.Statfs_t
		if err := unix.Statfs(dir, &st); err != nil {
			fmt.Fprintf(w, "%s: %v\n", dir, err)
			continue
		}
		fmt.Fprintf(w, "%s: type %#x, %d of %d blocks of %d bytes available, %d of %d inodes free\n", dir, st.Type,
			st.Bavail, st.Blocks, st.Bsize, st.Ffree, st.Files)
	}
	return err
}

// process writes the kernel's information about the process that listens on a socket, without its environment.
func process(ctx context.Context, w *content, socket string) error {
	pid, err := listener(ctx, socket)
	if err != nil {
		return err
	}
	dir := fmt.Sprintf("/proc/%d/", pid)
	var errs []error
	if text, err := readSmall(dir + "cmdline"); err != nil {
		errs = append(errs, err)
	} else {
		fmt.Fprintf(w, "==> %scmdline <==\n%s\n\n", dir, strings.TrimSpace(strings.ReplaceAll(string(text), "\x00", " ")))
	}
	var paths []string
	for _, name := range []string{
		"status", "limits", "cgroup", "stat", "sched", "wchan", "stack", "oom_score", "oom_score_adj", "smaps_rollup",
		"mountinfo",
	} {
		paths = append(paths, dir+name)
	}
	errs = append(errs, sections(w, paths))
	fmt.Fprintf(w, "==> links <==\n")
	for _, name := range []string{"exe", "ns/net", "ns/mnt", "ns/pid", "ns/cgroup", "ns/user"} {
		to, err := os.Readlink(dir + name)
		fmt.Fprintf(w, "%s -> %s\n", name, cmp.Or(to, fmt.Sprint(err)))
	}
	if fds, err := os.ReadDir(dir + "fd"); err != nil {
		errs = append(errs, err)
	} else {
		fmt.Fprintf(w, "%d file descriptors\n\n", len(fds))
	}
	errs = append(errs, sections(w, cgroupFiles(dir+"cgroup")))
	return joined(errs)
}

// joined returns all errors as one line.
func joined(errs []error) error {
	if err := errors.Join(errs...); err != nil {
		return errors.New(strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return nil
}

// listener returns the PID of the process that listens on a socket. It also finds a stopped process, because the kernel
// accepts the connection.
func listener(ctx context.Context, socket string) (int, error) {
	conn, err := dialOwn(ctx, filepath.Dir(socket), filepath.Base(socket))
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var peer *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { peer, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err := errors.Join(cerr, err); err != nil {
		return 0, fmt.Errorf("find the process listening on %s: %w", socket, err)
	}
	if peer.Pid == 0 {
		return 0, fmt.Errorf("the process listening on %s is in another PID namespace", socket)
	}
	return int(peer.Pid), nil
}

// cgroupFiles returns the files with the limits and the usage of a process's control group.
func cgroupFiles(path string) (files []string) {
	text, err := readSmall(path)
	if err != nil {
		return nil // already reported
	}
	for line := range strings.Lines(string(text)) {
		hierarchy, rest, _ := strings.Cut(strings.TrimSpace(line), ":")
		controllers, group, ok := strings.Cut(rest, ":")
		if !ok {
			continue
		}
		if hierarchy == "0" {
			for _, name := range unifiedFiles {
				files = append(files, filepath.Join("/sys/fs/cgroup", group, name),
					filepath.Join("/sys/fs/cgroup/unified", group, name))
			}
		}
		for controller := range strings.SplitSeq(controllers, ",") {
			for _, name := range controllerFiles[controller] {
				files = append(files, filepath.Join("/sys/fs/cgroup", controller, group, name))
			}
		}
	}
	return files
}

// unifiedFiles are the files of a cgroup v2.
var unifiedFiles = []string{
	"cgroup.events", "cpu.max", "cpu.pressure", "cpu.stat", "io.pressure", "memory.current", "memory.events",
	"memory.high", "memory.max", "memory.peak", "memory.pressure", "memory.stat", "memory.swap.current",
	"pids.current", "pids.max",
}

// controllerFiles are the files of a cgroup v1 by controller.
var controllerFiles = map[string][]string{
	"cpu":    {"cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.stat"},
	"memory": {"memory.limit_in_bytes", "memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.failcnt"},
	"pids":   {"pids.current", "pids.max"},
}

// network returns the parts about the node's network namespace.
func (r *report) network(ctx context.Context) group {
	g := group{parts: []part{{
		name: "network/namespace.txt", command: "readlink /proc/PID/ns/net",
		take: func(ctx context.Context, w *content) error {
			space, err := r.namespace(ctx)
			if err != nil {
				return err
			}
			_, werr := fmt.Fprintln(w, space.text)
			return errors.Join(space.doubt, werr)
		},
	}}}
	for _, c := range []struct{ file, command string }{
		{"links", "ip -d -s link"},
		{"addresses", "ip -d addr"},
		{"routes4", "ip -4 -d route show table all"},
		{"routes6", "ip -6 -d route show table all"},
		{"rules4", "ip -4 -d rule"},
		{"rules6", "ip -6 -d rule"},
		{"neighbours", "ip -d neigh"},
		{"nftables", "nft list ruleset"},
		{"sockets", "ss -s"},
	} {
		args := strings.Fields(c.command)
		g.parts = append(g.parts, part{
			name: "network/" + c.file + ".txt", command: c.command,
			take: func(ctx context.Context, w *content) error {
				return r.inNamespace(ctx, func() error { return run(ctx, w, args...) })
			},
		})
	}
	g.parts = append(g.parts, part{
		name: "network/sysctls.txt", command: "sysctl -a --pattern ^net",
		take: func(ctx context.Context, w *content) error {
			return r.inNamespace(ctx, func() error { return sysctls(ctx, w) })
		},
	})
	for _, file := range []string{"snmp", "snmp6", "netstat", "softnet_stat", "sockstat", "sockstat6"} {
		g.parts = append(g.parts, part{
			name: "network/" + file + ".txt", command: "cat /proc/net/" + file,
			take: func(ctx context.Context, w *content) error {
				return r.inNamespace(ctx, func() error { return section(w, "/proc/thread-self/net/"+file) })
			},
		})
	}
	return g
}

// secretSysctls are the names of sysctls whose values are secret.
var secretSysctls = []string{"tcp_fastopen_key", "stable_secret"}

// sysctls writes the sysctls of the thread's network namespace.
func sysctls(ctx context.Context, w io.Writer) error {
	const root = "/proc/sys/net"
	denied := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, fs.ErrPermission):
			denied++
			return nil
		case errors.Is(err, fs.ErrNotExist): // the device was removed
			return nil
		case err != nil:
			return err
		case d.IsDir() || slices.Contains(secretSysctls, d.Name()):
			return nil
		}
		info, err := d.Info()
		if err != nil || info.Mode().Perm()&0o444 == 0 {
			return nil // write-only
		}
		text, err := readSmall(path)
		if errors.Is(err, fs.ErrPermission) {
			denied++
		}
		if err != nil {
			return nil
		}
		_, err = fmt.Fprintf(w, "%s = %s\n", strings.TrimPrefix(path, "/proc/sys/"), oneLine(string(text)))
		return err
	})
	if err == nil && denied > 0 {
		err = fmt.Errorf("no permission to read %s", output.Plural(denied, "file or directory", "files or directories"))
	}
	return err
}
