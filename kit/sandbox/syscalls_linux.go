// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package sandbox removes rights that no service needs: system calls by a seccomp filter, files by
// a Landlock ruleset. Both apply to all existing and future threads, and cannot be undone.
//
// If the kernel was built or booted without one of them, the functions return ErrUnsupported. The process continues
// without it, because its user and its capabilities still limit it.
package sandbox

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/sys/unix"
)

// ErrUnsupported is returned if the kernel lacks the feature; nothing was changed.
var ErrUnsupported = errors.New("not supported by this kernel")

// Calls are the system calls that a service needs in addition to the common ones.
type Calls struct {
	// Inet allows internet sockets, Netlink allows netlink sockets. Unix sockets are always
	// allowed; other families never are.
	Inet, Netlink bool
	// Datagram allows UDP sockets but, without Inet, no other internet sockets. They must be opened
	// with SOCK_CLOEXEC and SOCK_NONBLOCK and without a protocol number.
	Datagram bool
	// Enter allows setns into network namespaces, and the ioctl that returns the type of a
	// namespace.
	Enter bool
	// Namespace allows creating network namespaces, and opening TCP sockets, which are meant for them. The sockets must
	// be opened like the sockets of Datagram.
	Namespace bool
	// TAP allows the ioctl that attaches an open /dev/net/tun as a queue to a TUN or TAP device.
	TAP bool
	// Names lists calls that are allowed with any arguments.
	Names []string
}

// common lists the calls that every service may make with any arguments: the calls of the Go
// runtime, for files, for unix sockets and for watching directories. It excludes calls that execute
// programs, enter namespaces, mount, change users or capabilities, or inspect other processes. It
// also excludes calls that open files by handle, load code into the kernel, create devices or keys,
// or change the owner of files, and others. Calls that do not exist on this architecture are
// skipped.
var common = []string{
	// memory, threads, time, signals
	"arch_prctl", "brk", "clock_getres", "clock_gettime", "clock_nanosleep", "exit", "exit_group", "futex", "futex_wait", "futex_wake",
	"get_robust_list", "getcpu", "getitimer", "getrandom", "gettimeofday", "madvise", "membarrier", "mincore", "mlock", "mremap", "msync",
	"munlock", "munmap", "nanosleep", "restart_syscall", "rseq", "rt_sigaction", "rt_sigpending", "rt_sigprocmask", "rt_sigreturn",
	"rt_sigsuspend", "rt_sigtimedwait", "sched_getaffinity", "sched_getparam", "sched_getscheduler", "sched_yield", "set_robust_list",
	"set_tid_address", "setitimer", "sigaltstack", "time", "timer_create", "timer_delete", "timer_settime", "timerfd_create",
	"timerfd_gettime", "timerfd_settime", "times", "wait4", "waitid",
	// the process's own IDs and limits
	"capget", "getegid", "geteuid", "getgid", "getgroups", "getpgid", "getpgrp", "getpid", "getppid", "getpriority", "getresgid", "getresuid",
	"getrlimit", "getrusage", "getsid", "gettid", "getuid", "prlimit64", "setrlimit", "sysinfo", "umask", "uname",
	// files
	"access", "chdir", "chmod", "chown", "close", "close_range", "copy_file_range", "dup", "dup2", "dup3", "faccessat", "faccessat2",
	"fadvise64", "fallocate", "fchdir", "fchmod", "fchmodat", "fchmodat2", "fchown", "fchownat", "fcntl", "fdatasync", "flock", "fstat",
	"fstatfs", "fsync", "ftruncate", "futimesat", "getcwd", "getdents", "getdents64", "lchown", "link", "linkat", "lseek", "lstat", "mkdir",
	"mkdirat", "newfstatat", "open", "openat", "openat2", "pread64", "preadv", "preadv2", "pwrite64", "pwritev", "pwritev2", "read", "readahead",
	"readlink", "readlinkat", "readv", "rename", "renameat", "renameat2", "rmdir", "sendfile", "splice", "stat", "statfs", "statx", "symlink",
	"symlinkat", "sync", "sync_file_range", "syncfs", "tee", "truncate", "unlink", "unlinkat", "utime", "utimensat", "utimes", "write", "writev",
	// events and sockets
	"accept", "accept4", "bind", "connect", "epoll_create", "epoll_create1", "epoll_ctl", "epoll_pwait", "epoll_pwait2", "epoll_wait",
	"eventfd", "eventfd2", "getpeername", "getsockname", "getsockopt", "inotify_add_watch", "inotify_init", "inotify_init1",
	"inotify_rm_watch", "listen", "pipe", "pipe2", "poll", "ppoll", "pselect6", "recvfrom", "recvmmsg", "recvmsg", "select", "sendmmsg",
	"sendmsg", "sendto", "setsockopt", "shutdown", "signalfd", "signalfd4",
	// Landlock, the other half of the sandbox
	"landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self",
}

// prSetVMA is PR_SET_VMA, with which the Go runtime names memory regions.
const prSetVMA = 0x53564d41

// checked lists the calls that are only allowed with some arguments. A call is refused if all
// conditions of its entry hold.
func checked(c Calls, pid int) []seccomp.NameWithConditions {
	arg := func(n uint32, op seccomp.Operation, value uint64) seccomp.Condition {
		return seccomp.Condition{Argument: n, Operation: op, Value: value}
	}
	other := func(name string, n uint32, than ...uint64) seccomp.NameWithConditions {
		call := seccomp.NameWithConditions{Name: name}
		for _, value := range than {
			call.Conditions = append(call.Conditions, arg(n, seccomp.NotEqual, value))
		}
		return call
	}
	// internet returns an entry that refuses a call for internet sockets unless argument n has one of the values.
	internet := func(name string, n uint32, than ...uint64) seccomp.NameWithConditions {
		call := seccomp.NameWithConditions{Name: name, Conditions: seccomp.ArgumentConditions{
			arg(0, seccomp.NotEqual, unix.AF_UNIX), arg(0, seccomp.NotEqual, unix.AF_NETLINK),
		}}
		for _, value := range than {
			call.Conditions = append(call.Conditions, arg(n, seccomp.NotEqual, value))
		}
		return call
	}
	families := []uint64{unix.AF_UNIX}
	if c.Inet || c.Datagram || c.Namespace {
		families = append(families, unix.AF_INET, unix.AF_INET6)
	}
	if c.Netlink {
		families = append(families, unix.AF_NETLINK)
	}
	calls := []seccomp.NameWithConditions{
		// Refuse new executable memory.
		{Name: "mmap", Conditions: seccomp.ArgumentConditions{arg(2, seccomp.BitsSet, unix.PROT_EXEC)}},
		{Name: "mprotect", Conditions: seccomp.ArgumentConditions{arg(2, seccomp.BitsSet, unix.PROT_EXEC)}},
		// Allow new threads, but no new processes.
		{Name: "clone", Conditions: seccomp.ArgumentConditions{arg(0, seccomp.BitsNotSet, unix.CLONE_THREAD)}},
		// Allow signals only to the process itself: the Go runtime sends some, and SIGABRT and others after a
		// crash.
		other("kill", 0, uint64(pid)),
		other("tgkill", 0, uint64(pid)),
		other("prctl", 0, prSetVMA, unix.PR_SET_NAME, unix.PR_SET_NO_NEW_PRIVS, unix.PR_GET_NO_NEW_PRIVS),
		other("socket", 0, families...),
		other("socketpair", 0, unix.AF_UNIX),
	}
	if (c.Datagram || c.Namespace) && !c.Inet {
		var types []uint64
		if c.Datagram {
			types = append(types, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
		}
		if c.Namespace {
			types = append(types, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK)
		}
		calls = append(calls, internet("socket", 1, types...), internet("socket", 2, 0))
	}
	if c.Namespace {
		calls = append(calls, other("unshare", 0, unix.CLONE_NEWNET))
	}
	var requests []uint64 // of ioctl
	if c.Enter {
		calls = append(calls, other("setns", 1, unix.CLONE_NEWNET))
		requests = append(requests, unix.NS_GET_NSTYPE)
	}
	if c.TAP {
		requests = append(requests, unix.TUNSETIFF)
	}
	if len(requests) > 0 {
		calls = append(calls, other("ioctl", 1, requests...))
	}
	return calls
}

// policies returns the filters of a process; the kernel applies the strictest result. The first filter lists every call
// that may succeed. All other calls, and all calls of other architectures, fail with EPERM. Each of the other filters
// checks the arguments of one call. They are separate filters because of a bug in version 1.6.0 of the library: within
// one filter it compares the number of the next call with the last loaded argument.
func policies(c Calls, pid int) ([]seccomp.Policy, error) {
	info, err := arch.GetInfo("")
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	for _, name := range c.Names {
		if _, ok := info.SyscallNames[name]; !ok {
			return nil, fmt.Errorf("system call %q is unknown", name)
		}
	}
	names := append(slices.Clone(common), c.Names...)
	var looks []seccomp.Policy
	for _, call := range checked(c, pid) {
		if !slices.Contains(names, call.Name) { // some calls have several entries
			names = append(names, call.Name)
		}
		looks = append(looks, seccomp.Policy{
			DefaultAction: seccomp.ActionAllow,
			Syscalls:      []seccomp.SyscallGroup{{NamesWithCondtions: []seccomp.NameWithConditions{call}, Action: seccomp.ActionErrno}},
		})
	}
	names = slices.DeleteFunc(names, func(name string) bool { _, ok := info.SyscallNames[name]; return !ok })
	return append([]seccomp.Policy{{
		DefaultAction: seccomp.ActionErrno,
		Syscalls: []seccomp.SyscallGroup{
			// seccomp cannot read the arguments behind clone3's pointer. With ENOSYS its callers
			// fall back to clone.
			{Names: []string{"clone3"}, Action: seccomp.ActionErrno&^0xffff | seccomp.Action(unix.ENOSYS)},
			{Names: names, Action: seccomp.ActionAllow},
		},
	}}, looks...), nil
}

// RestrictCalls limits every thread to the common system calls and the calls in c. The process must
// have set no_new_privs.
func RestrictCalls(c Calls) error {
	all, err := policies(c, os.Getpid())
	if err != nil {
		return fmt.Errorf("restrict system calls: %w", err)
	}
	if !seccomp.Supported() {
		return fmt.Errorf("restrict system calls by seccomp: %w", ErrUnsupported)
	}
	// The filter with the list of calls is installed last, because it does not allow the call that
	// installs filters.
	slices.Reverse(all)
	for _, p := range all {
		if err := seccomp.LoadFilter(seccomp.Filter{Flag: seccomp.FilterFlagTSync, Policy: p}); err != nil {
			return fmt.Errorf("restrict system calls: %w", err)
		}
	}
	return nil
}
