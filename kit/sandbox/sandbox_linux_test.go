// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/privilege"
)

// Irreversible changes are tested in a child process: this test binary, built without cgo like the
// shipped binaries.
const childEnv = "SANDBOX_TEST_DIR"

var childPath string

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		os.Exit(child(dir, os.Args[1]))
	}
	if withoutC() {
		self, err := os.Executable()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		childPath = self
		os.Exit(leaktest.Run(m))
	}
	dir, err := os.MkdirTemp("", "sandbox")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	childPath = filepath.Join(dir, "child")
	build := exec.Command("go", "test", "-c", "-o", childPath, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	code := 1
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the child: %v\n%s", err, out)
	} else {
		code = leaktest.Run(m)
	}
	if err := os.RemoveAll(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// withoutC reports whether this binary is linked like a service, without cgo. Then it can be its
// own child, even without a compiler.
func withoutC() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "CGO_ENABLED", Value: "0"})
}

// attempts has the error of each operation that the confined child tried, "" if it succeeded.
type attempts map[string]string

// errnoOf makes a system call and returns its error.
func errnoOf(number uintptr, args ...uintptr) error {
	var a [6]uintptr
	copy(a[:], args)
	if _, _, errno := unix.RawSyscall6(number, a[0], a[1], a[2], a[3], a[4], a[5]); errno != 0 {
		return errno
	}
	return nil
}

func socket(family int) error {
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		unix.Close(fd)
	}
	return err
}

// internet opens an IPv4 or IPv6 socket of the given kind, as package net does.
func internet(kind, protocol int) error {
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, protocol)
	if err == nil {
		unix.Close(fd)
	}
	return err
}

// udp sends a datagram to its own socket.
func udp(family int) error {
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	to := unix.Sockaddr(&unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	if family == unix.AF_INET6 {
		to = &unix.SockaddrInet6{Addr: [16]byte{15: 1}}
	}
	if err := unix.Bind(fd, to); err != nil {
		return err
	}
	if to, err = unix.Getsockname(fd); err != nil {
		return err
	}
	return unix.Sendto(fd, []byte("x"), 0, to)
}

func calls() map[string]func() error {
	return map[string]func() error{
		"execute a program":     func() error { return syscall.Exec("/bin/true", []string{"true"}, nil) },
		"start a program":       func() error { return exec.Command("/bin/true").Run() },
		"fork":                  fork,
		"trace a process":       func() error { return errnoOf(unix.SYS_PTRACE, unix.PTRACE_ATTACH, uintptr(os.Getppid())) },
		"read another's memory": func() error { return errnoOf(unix.SYS_PROCESS_VM_READV, uintptr(os.Getppid())) },
		"open a file by handle": func() error { return errnoOf(unix.SYS_OPEN_BY_HANDLE_AT) },
		"mount":                 func() error { return unix.Mount("none", "/mnt", "tmpfs", 0, "") },
		"unmount":               func() error { return unix.Unmount("/mnt", 0) },
		"make a namespace":      func() error { return errnoOf(unix.SYS_UNSHARE, unix.CLONE_NEWNS) },
		"enter a namespace":     func() error { return errnoOf(unix.SYS_SETNS, 0, unix.CLONE_NEWNET) },
		"make a TAP device":     tap,
		"ask a device":          func() error { return errnoOf(unix.SYS_IOCTL, 0, unix.TUNGETFEATURES) },
		"load a kernel module":  func() error { return errnoOf(unix.SYS_INIT_MODULE) },
		"load another kernel":   func() error { return errnoOf(unix.SYS_KEXEC_LOAD) },
		"use the kernel's keys": func() error { return errnoOf(unix.SYS_KEYCTL) },
		"change the user":       func() error { return errnoOf(unix.SYS_SETUID, uintptr(os.Getuid())) },
		"load eBPF":             func() error { return errnoOf(unix.SYS_BPF) },
		"watch the processor":   func() error { return errnoOf(unix.SYS_PERF_EVENT_OPEN) },
		"use io_uring":          func() error { return errnoOf(unix.SYS_IO_URING_SETUP) },
		"make memory a program": func() error {
			return errnoOf(unix.SYS_MMAP, 0, 4096, unix.PROT_READ|unix.PROT_EXEC, unix.MAP_PRIVATE|unix.MAP_ANON, ^uintptr(0))
		},
		"signal another process":   func() error { return unix.Kill(os.Getppid(), 0) },
		"make a device":            func() error { return errnoOf(unix.SYS_MKNODAT) },
		"open a packet socket":     func() error { return socket(unix.AF_PACKET) },
		"open an internet socket":  func() error { return socket(unix.AF_INET) },
		"open a UDP socket":        func() error { return errors.Join(udp(unix.AF_INET), udp(unix.AF_INET6)) },
		"open a TCP socket":        func() error { return internet(unix.SOCK_STREAM, 0) },
		"open a raw socket":        func() error { return internet(unix.SOCK_RAW, unix.IPPROTO_UDP) },
		"open a socket for ping":   func() error { return internet(unix.SOCK_DGRAM, unix.IPPROTO_ICMP) },
		"open a netlink socket":    func() error { return socket(unix.AF_NETLINK) },
		"call by the 32-bit table": func() error { return errnoOf(unix.SYS_GETPID | 0x40000000) },

		"open a unix socket": func() error { return socket(unix.AF_UNIX) },
		"signal itself":      func() error { return unix.Kill(os.Getpid(), 0) },
		"start a thread":     thread,
		"map memory": func() error {
			_, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON)
			return err
		},
		"listen and connect":  converse,
		"end a short process": func() error { return errnoOf(unix.SYS_GETPID) },
	}
}

// tap makes the ioctl of a TAP device. The file is another device, which does not know it.
func tap() error {
	f, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	request, err := unix.NewIfreq("tap0")
	if err == nil {
		err = unix.IoctlIfreq(int(f.Fd()), unix.TUNSETIFF, request)
	}
	if errors.Is(err, unix.ENOTTY) {
		return nil
	}
	return err
}

// fork creates a child process that ends at once.
func fork() error {
	pid, _, errno := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		return errno
	}
	if pid == 0 {
		unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0) //nolint:errcheck // does not return
	}
	return nil
}

// thread runs code on a new thread.
func thread() error {
	done := make(chan struct{})
	go func() { runtime.LockOSThread(); close(done) }()
	<-done
	return nil
}

// converse connects to a socket in the writable directory.
func converse() error {
	path := filepath.Join(os.Getenv(childEnv), "write", "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		return err
	}
	defer l.Close()
	c, err := net.Dial("unix", path)
	if err != nil {
		return err
	}
	return c.Close()
}

func files(dir string) map[string]func() error {
	in := func(names ...string) string { return filepath.Join(append([]string{dir}, names...)...) }
	read := func(path string) func() error {
		return func() error { _, err := os.ReadFile(path); return err }
	}
	write := func(path string) func() error {
		return func() error { return os.WriteFile(path, []byte("x"), 0o600) }
	}
	return map[string]func() error{
		"read outside":                   read(in("outside", "f")),
		"write outside":                  write(in("outside", "f")),
		"make a file outside":            write(in("outside", "new")),
		"remove outside":                 func() error { return os.Remove(in("outside", "f")) },
		"list the root":                  func() error { _, err := os.ReadDir("/"); return err },
		"read /etc/passwd":               read("/etc/passwd"),
		"write what may be read":         write(in("read", "f")),
		"make a file where one may read": write(in("read", "new")),
		"make a file in a changeable":    write(in("change", "new")),
		"move out":                       func() error { return os.Rename(in("write", "f"), in("outside", "g")) },
		"read through a link":            read(in("write", "link")),

		"read":       read(in("read", "f")),
		"read below": read(in("read", "deep", "f")),
		"write":      write(in("write", "f")),
		"replace": func() error {
			return errors.Join(write(in("write", "a"))(), os.Rename(in("write", "a"), in("write", "b")))
		},
		"make and remove": func() error { return errors.Join(os.Mkdir(in("write", "d"), 0o700), os.Remove(in("write", "d"))) },
		"change":          write(in("change", "f")),
		"where nothing was": func() error {
			return errors.Join(os.Mkdir(in("maybe", "late"), 0o700), write(in("maybe", "late", "f"))())
		},
		"one file":               read(in("file")),
		"read a setting of net":  read("/proc/sys/net/ipv4/ip_forward"),
		"a namespace of its own": func() error { f, err := os.Open("/proc/thread-self/ns/net"); return errors.Join(err, f.Close()) },
	}
}

// child confines itself while many threads run, and then tries everything on each thread.
func child(dir, what string) int {
	const threads = 6
	begin := make(chan struct{})
	results := make(chan attempts, threads)
	tries := calls()
	if what == "files" {
		tries = files(dir)
	}
	var one sync.Mutex
	var locked sync.WaitGroup
	for range threads {
		locked.Add(1)
		go func() {
			runtime.LockOSThread()
			locked.Done()
			<-begin
			one.Lock()
			defer one.Unlock()
			if what == "files" { // created by an earlier thread
				_ = os.Remove(filepath.Join(dir, "maybe", "late", "f"))
				_ = os.Remove(filepath.Join(dir, "maybe", "late"))
			}
			got := attempts{}
			for name, try := range tries {
				got[name] = ""
				if err := try(); err != nil {
					got[name] = err.Error()
				}
			}
			results <- got
		}()
	}
	locked.Wait()
	err := privilege.NoNewPrivs()
	if err == nil && what == "calls" {
		err = RestrictCalls(Calls{})
	}
	if err == nil && what == "datagram" {
		err = RestrictCalls(Calls{Datagram: true})
	}
	if err == nil && what == "tap" {
		err = RestrictCalls(Calls{TAP: true})
	}
	if err == nil && what == "files" {
		_, err = RestrictFiles(Files{
			Read:   []string{filepath.Join(dir, "read"), filepath.Join(dir, "file"), "/proc", "/no/such/thing"},
			Change: []string{filepath.Join(dir, "change")},
			Write:  []string{filepath.Join(dir, "write"), filepath.Join(dir, "maybe", "late", "deeper")},
		})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	close(begin)
	var all []attempts
	for range threads {
		all = append(all, <-results)
	}
	if err := json.NewEncoder(os.Stdout).Encode(all); err != nil {
		return 1
	}
	return 0
}

func try(t *testing.T, dir, what string) []attempts {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, childPath, what) //nolint:gosec // built by TestMain
	cmd.Env = append(os.Environ(), childEnv+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("the child: %v\n%s", err, out)
	}
	var all []attempts
	if err := json.Unmarshal(out, &all); err != nil {
		t.Fatalf("the child said %q", out)
	}
	return all
}

func TestKernelCallsThatNoServiceMakesFailInEveryThread(t *testing.T) {
	wantCalls(t, "calls")
}

// TestKernelDatagramAllowsUDPAlone: Datagram allows no internet socket other than UDP.
func TestKernelDatagramAllowsUDPAlone(t *testing.T) {
	wantCalls(t, "datagram", "open a UDP socket")
}

// TestKernelTAPAllowsOneRequest: TAP allows the request that makes a TAP device, and no other ioctl.
func TestKernelTAPAllowsOneRequest(t *testing.T) {
	wantCalls(t, "tap", "make a TAP device")
}

// wantCalls makes the child try every operation. Only the common ones and the allowed ones may
// succeed.
func wantCalls(t *testing.T, what string, allowed ...string) {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "write"), 0o700); err != nil {
		t.Fatal(err)
	}
	allowed = append(allowed, "open a unix socket", "signal itself", "start a thread", "map memory", "listen and connect",
		"end a short process")
	for i, got := range try(t, dir, what) {
		for name, err := range got {
			want := "operation not permitted"
			if name == "call by the 32-bit table" && runtime.GOARCH == "amd64" {
				want = "function not implemented"
			}
			for _, a := range allowed {
				if name == a {
					want = ""
				}
			}
			if want == "" && err != "" || want != "" && !strings.HasSuffix(err, want) {
				t.Errorf("thread %d, %s: %q, want %q", i, name, err, want)
			}
		}
	}
}

func TestKernelFilesOutsideAreClosedInEveryThread(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"outside/f", "read/f", "read/deep/f", "change/f", "write/f", "maybe/f", "file"} {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(filepath.Join(dir, "outside", "f"), filepath.Join(dir, "write", "link")); err != nil {
		t.Fatal(err)
	}
	allowed := map[string]bool{}
	for _, name := range []string{
		"read", "read below", "write", "replace", "make and remove", "change", "one file",
		"read a setting of net", "a namespace of its own",
		"where nothing was", // below the nearest existing directory
	} {
		allowed[name] = true
	}
	for i, got := range try(t, dir, "files") {
		for name, err := range got {
			if allowed[name] && err != "" {
				t.Errorf("thread %d, %s: %q, want it to work", i, name, err)
			}
			if !allowed[name] && !strings.HasSuffix(err, "permission denied") && !strings.HasSuffix(err, "invalid cross-device link") {
				t.Errorf("thread %d, %s: %q, want it refused", i, name, err)
			}
		}
	}
}
