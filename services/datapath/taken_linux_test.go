// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/node/probe"
	"github.com/sluice-net/sluice/services/datapath/internal/proxy/tap"
)

// takenEnv makes the test binary act as a compromised datapath: it has the privileges of the real one, and attempts
// what docs/privileges.md lists. The value is the directory of the test.
const takenEnv = "DATAPATH_TEST_TAKEN"

func taken(_ context.Context, p *process.Process, cfg Config) error {
	if err := p.Confine(cfg.files()); err != nil {
		return err
	}
	dir, got := os.Getenv(takenEnv), map[string]string{}
	for name, try := range misdeeds(dir, cfg) {
		got[name] = ""
		if err := try(); err != nil {
			got[name] = err.Error()
		}
	}
	return json.NewEncoder(os.Stdout).Encode(got)
}

func write(path string) func() error {
	return func() error {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		return f.Close()
	}
}

func read(path string) func() error {
	return func() error {
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		return f.Close()
	}
}

func raw(number uintptr, args ...uintptr) func() error {
	return func() error {
		var a [3]uintptr
		copy(a[:], args)
		if _, _, errno := unix.RawSyscall(number, a[0], a[1], a[2]); errno != 0 {
			return errno
		}
		return nil
	}
}

// misdeeds returns the lines of docs/privileges.md. Files are only opened, and programs are not attached.
func misdeeds(dir string, cfg Config) map[string]func() error {
	return map[string]func() error{
		"write /etc/shadow":                   write("/etc/shadow"),
		"read /etc/shadow":                    read("/etc/shadow"),
		"read /etc/passwd":                    read("/etc/passwd"),
		"write /etc/cron.d":                   write("/etc/cron.d/sluice-test-taken"),
		"write /usr/local/bin":                write("/usr/local/bin/sluice-test-taken"),
		"read another service's state":        read(filepath.Join(dir, "other", "db")),
		"write /proc/sys/kernel/core_pattern": write("/proc/sys/kernel/core_pattern"),
		"read another process's environment":  read("/proc/1/environ"),
		"execute a program":                   func() error { return syscall.Exec("/bin/true", []string{"true"}, nil) },
		"start a process":                     func() error { _, err := syscall.ForkExec("/bin/true", []string{"true"}, nil); return err },
		"become root":                         raw(unix.SYS_SETUID, 0),
		"trace a process":                     raw(unix.SYS_PTRACE, unix.PTRACE_ATTACH, 1),
		"signal a process":                    func() error { return unix.Kill(1, 0) },
		"open a file by handle":               raw(unix.SYS_OPEN_BY_HANDLE_AT),
		"mount":                               func() error { return unix.Mount("none", dir, "tmpfs", 0, "") },
		"enter a mount namespace":             raw(unix.SYS_SETNS, 0, unix.CLONE_NEWNS),
		"open /dev/net/tun again":             write(tap.File),
		"load a kernel module":                raw(unix.SYS_INIT_MODULE),
		"load another kernel":                 raw(unix.SYS_KEXEC_LOAD),
		"use the kernel's keys":               raw(unix.SYS_KEYCTL),
		"open a packet socket":                func() error { return openSocket(unix.AF_PACKET) },
		"open a TCP socket":                   func() error { return openInternet(unix.SOCK_STREAM, 0) },
		"make a network namespace":            newNamespace,
		"open a socket for ping":              func() error { return openInternet(unix.SOCK_DGRAM, unix.IPPROTO_ICMP) },
		"open a raw internet socket":          func() error { return openSocket(unix.AF_INET) },
		"send and receive UDP packets":        func() error { return talkUDP(cfg) },
		"make memory executable": func() error {
			_, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANON)
			return err
		},
		"change routes, devices and the firewall": func() error { return openSocket(unix.AF_NETLINK) },
		"enter a pod's network namespace":         enterOwn,
		"write network sysctls":                   write("/proc/sys/net/ipv4/ip_forward"),
		"change its records":                      write(filepath.Join(cfg.StateDir, "taken")),
		"unpin what it pinned": func() error {
			return errors.Join(os.Mkdir(filepath.Join(cfg.BPFDir, "x"), 0o700), os.Remove(filepath.Join(cfg.BPFDir, "x")))
		},
		"call the other services":                  func() error { c, err := net.Dial("unix", cfg.Services.IPAM); return errors.Join(err, c.Close()) },
		"load eBPF that reads the kernel's memory": loadTracing,
	}
}

func newNamespace() error {
	n, err := netns.New()
	if err == nil {
		err = n.Close()
	}
	return err
}

func openSocket(family int) error {
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Close(fd)
	}
	return err
}

func openInternet(kind, protocol int) error {
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err == nil {
		err = unix.Close(fd)
	}
	return err
}

// talkUDP sends a packet to itself through the probe socket.
func talkUDP(cfg Config) error {
	c, err := probe.Listen(probe.IPv4, cfg.Routing.ProbePort)
	if err != nil {
		return err
	}
	self := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), cfg.Routing.ProbePort)
	if err = c.Write([]byte("x"), self, self.Addr()); err == nil {
		_, _, _, err = c.Read(make([]byte, 1))
	}
	return errors.Join(err, c.Close())
}

func enterOwn() error {
	fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	return errors.Join(unix.Setns(fd, unix.CLONE_NEWNET), unix.Close(fd))
}

// loadTracing loads a program that could be attached to every system call of the machine, but does not attach it.
func loadTracing() error {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.RawTracepoint, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R1, asm.R10), asm.Add.Imm(asm.R1, -8), asm.Mov.Imm(asm.R2, 8), asm.Mov.Imm(asm.R3, 0), asm.FnProbeReadKernel.Call(),
			asm.Mov.Imm(asm.R0, 0), asm.Return(),
		},
	})
	if err != nil {
		return err
	}
	return p.Close()
}

// TestKernelTakenProcess proves the table of docs/privileges.md, line by line.
func TestKernelTakenProcess(t *testing.T) {
	n := newNode(t)
	child := filepath.Join(filepath.Dir(executable), "taken")
	build := exec.Command("go", "test", "-c", "-o", child, ".") //nolint:gosec // arguments of the test's own
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	if err := errors.Join(os.Mkdir(filepath.Join(n.dir, "other"), 0o755), os.WriteFile(filepath.Join(n.dir, "other", "db"), nil, 0o644), //nolint:gosec // readable by other users
		os.Mkdir(filepath.Join(n.dir, "state"), 0o700), os.Chown(filepath.Join(n.dir, "state"), 65706, 65700)); err != nil {
		t.Fatal(err)
	}
	cmd := n.command("--socket-path", filepath.Join(n.dir, "state", "s.sock"), "--metrics-address", "off", "--netns-dirs", "/run",
		"--spool-dir", filepath.Join(n.dir, "state", "deletes"), "--routing-mode", "overlay")
	cmd.Path, cmd.Args[0] = child, child
	cmd.Env = append(os.Environ(), takenEnv+"="+n.dir)
	if err := in(n.home, exec.Command("ip", "link", "set", "lo", "up").Run); err != nil {
		t.Fatal(err)
	}
	var out []byte
	if err := in(n.home, func() (err error) { out, err = cmd.Output(); return err }); err != nil {
		t.Fatalf("the child: %v\n%s", err, out)
	}
	var got map[string]string
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatalf("the child printed %q", out)
	}
	page, err := os.ReadFile("../../docs/privileges.md")
	if err != nil {
		t.Fatal(err)
	}
	for name, err := range got {
		answer := "yes"
		if strings.HasSuffix(err, "permission denied") || strings.HasSuffix(err, "operation not permitted") {
			answer = "no"
		} else if err != "" {
			t.Errorf("%s: %s", name, err)
		}
		if line := fmt.Sprintf("| %s | %s |", name, answer); !strings.Contains(string(page), line) {
			t.Errorf("docs/privileges.md lacks the line %q (%s)", line, err)
		}
	}
}
