// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package privilege gives up what a process does not need, for all its threads.
//
// Nothing here can be taken back. Each function reads back from the kernel
// what every thread has afterwards, and an error means that the process must
// not go on. Binaries must be built without cgo (CGO_ENABLED=0): the Go runtime
// cannot reach threads that C code might have started, and says ENOTSUP.
package privilege

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Cap is the number of a Linux capability, unix.CAP_….
type Cap int

var capNames = []string{
	"CHOWN", "DAC_OVERRIDE", "DAC_READ_SEARCH", "FOWNER", "FSETID", "KILL", "SETGID", "SETUID", "SETPCAP",
	"LINUX_IMMUTABLE", "NET_BIND_SERVICE", "NET_BROADCAST", "NET_ADMIN", "NET_RAW", "IPC_LOCK", "IPC_OWNER",
	"SYS_MODULE", "SYS_RAWIO", "SYS_CHROOT", "SYS_PTRACE", "SYS_PACCT", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE",
	"SYS_RESOURCE", "SYS_TIME", "SYS_TTY_CONFIG", "MKNOD", "LEASE", "AUDIT_WRITE", "AUDIT_CONTROL", "SETFCAP",
	"MAC_OVERRIDE", "MAC_ADMIN", "SYSLOG", "WAKE_ALARM", "BLOCK_SUSPEND", "AUDIT_READ", "PERFMON", "BPF",
	"CHECKPOINT_RESTORE",
}

// String is the kernel's name, "CAP_BPF".
func (c Cap) String() string {
	if c >= 0 && int(c) < len(capNames) {
		return "CAP_" + capNames[c]
	}
	return "CAP_" + strconv.Itoa(int(c))
}

// Set is a set of capabilities, bit n for capability n.
type Set uint64

// SetOf returns the set of the given capabilities.
func SetOf(caps ...Cap) Set {
	var s Set
	for _, c := range caps {
		s |= 1 << uint(c)
	}
	return s
}

// Has says whether c is in the set.
func (s Set) Has(c Cap) bool { return s&(1<<uint(c)) != 0 }

// String lists the names, separated by commas; "none" for the empty set.
func (s Set) String() string {
	var names []string
	for c := Cap(0); c < 64; c++ {
		if s.Has(c) {
			names = append(names, c.String())
		}
	}
	if names == nil {
		return "none"
	}
	return strings.Join(names, ",")
}

// State is what the kernel says about one thread.
type State struct {
	UIDs, GIDs [4]uint32 // real, effective, saved, of the file system

	Inheritable, Permitted, Effective, Bounding, Ambient Set

	NoNewPrivs bool
}

// Current returns the state of the process, and an error if its threads differ.
func Current() (State, error) {
	var first State
	dirs, err := filepath.Glob("/proc/self/task/*/status")
	if err != nil || len(dirs) == 0 {
		return State{}, errors.Join(errors.New("no thread in /proc/self/task"), err)
	}
	seen := 0
	for _, path := range dirs {
		b, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
			continue // the thread ended
		}
		if err != nil {
			return State{}, err
		}
		st, err := parseStatus(string(b))
		if err != nil {
			return State{}, fmt.Errorf("%s: %w", path, err)
		}
		if seen > 0 && st != first {
			return State{}, fmt.Errorf("threads differ: %s has %+v, another %+v", path, st, first)
		}
		first = st
		seen++
	}
	if seen == 0 {
		return State{}, errors.New("no thread in /proc/self/task could be read")
	}
	return first, nil
}

func parseStatus(text string) (State, error) {
	var st State
	want := map[string]*Set{
		"CapInh": &st.Inheritable, "CapPrm": &st.Permitted, "CapEff": &st.Effective,
		"CapBnd": &st.Bounding, "CapAmb": &st.Ambient,
	}
	ids := map[string]*[4]uint32{"Uid": &st.UIDs, "Gid": &st.GIDs}
	nnp := false
	for line := range strings.Lines(text) {
		key, value, _ := strings.Cut(line, ":")
		value = strings.TrimSpace(value)
		if set, ok := want[key]; ok {
			n, err := strconv.ParseUint(value, 16, 64)
			if err != nil {
				return State{}, fmt.Errorf("%s is %q", key, value)
			}
			*set = Set(n)
			delete(want, key)
		}
		if four, ok := ids[key]; ok {
			if _, err := fmt.Sscan(value, &four[0], &four[1], &four[2], &four[3]); err != nil {
				return State{}, fmt.Errorf("%s is %q", key, value)
			}
			delete(ids, key)
		}
		if key == "NoNewPrivs" {
			st.NoNewPrivs, nnp = value == "1", true
		}
	}
	if len(want) > 0 || len(ids) > 0 || !nnp {
		return State{}, errors.New("lines about users or capabilities are missing")
	}
	return st, nil
}

// KeepCapabilities leaves every thread exactly the given capabilities, as
// permitted, effective and bounding set. Nothing is inheritable or ambient:
// no program that the process might execute gets any of it that way.
// It fails, before it changes anything, with the names of those that are not
// there. To shrink the bounding set it needs CAP_SETPCAP, which it gives up
// too unless it is listed; a process without it keeps its bounding set and
// must have called NoNewPrivs, under which that set gives nothing to anybody.
func KeepCapabilities(caps ...Cap) error {
	keep := SetOf(caps...)
	before, err := Current()
	if err != nil {
		return fmt.Errorf("keep capabilities %s: %w", keep, err)
	}
	if missing := keep &^ before.Permitted; missing != 0 {
		return fmt.Errorf("keep capabilities %s: the process does not have %s", keep, missing)
	}
	if missing := keep &^ before.Bounding; missing != 0 {
		return fmt.Errorf("keep capabilities %s: the bounding set does not have %s", keep, missing)
	}
	bounding := keep
	if !before.Effective.Has(unix.CAP_SETPCAP) {
		if before.Bounding != keep && !before.NoNewPrivs {
			return fmt.Errorf("keep capabilities %s: the bounding set has more, and cannot be shrunk without CAP_SETPCAP; set no_new_privs first", keep)
		}
		bounding = before.Bounding
	}
	for c := Cap(0); c < 64; c++ {
		if !before.Bounding.Has(c) || bounding.Has(c) {
			continue
		}
		if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uintptr(c), 0); errno != 0 {
			return fmt.Errorf("keep capabilities %s: drop %s from the bounding set: %w", keep, c, errno)
		}
	}
	if before.Ambient != 0 {
		if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0, 0); errno != 0 {
			return fmt.Errorf("keep capabilities %s: clear the ambient set: %w", keep, errno)
		}
	}
	// Pid 0 is the calling thread, so one header serves them all; the kernel
	// only writes to it when it does not know the version.
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	data := [2]unix.CapUserData{
		{Effective: uint32(keep), Permitted: uint32(keep)},
		{Effective: uint32(keep >> 32), Permitted: uint32(keep >> 32)},
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_CAPSET, uintptr(unsafe.Pointer(&header)), uintptr(unsafe.Pointer(&data[0])), 0); errno != 0 {
		return fmt.Errorf("keep capabilities %s: %w", keep, errno)
	}
	after, err := Current()
	if err != nil {
		return fmt.Errorf("keep capabilities %s: read back: %w", keep, err)
	}
	want := State{UIDs: before.UIDs, GIDs: before.GIDs, Permitted: keep, Effective: keep, Bounding: bounding, NoNewPrivs: before.NoNewPrivs}
	if after != want {
		return fmt.Errorf("keep capabilities %s: the kernel says %+v", keep, after)
	}
	return nil
}

// Become gives every thread another user, with one group and exactly the given
// capabilities, and sets no_new_privs. The process must be root with
// CAP_SETUID, CAP_SETGID and the given capabilities. With CAP_SETPCAP the
// bounding set becomes the given capabilities; without, it stays what it was,
// and under no_new_privs it gives nothing to anybody.
func Become(uid, gid uint32, caps ...Cap) error {
	keep := SetOf(caps...)
	before, err := Current()
	if err != nil {
		return fmt.Errorf("become uid %d: %w", uid, err)
	}
	if missing := (keep | SetOf(unix.CAP_SETUID, unix.CAP_SETGID)) &^ before.Effective; missing != 0 {
		return fmt.Errorf("become uid %d with %s: the process does not have %s", uid, keep, missing)
	}
	if before.Effective.Has(unix.CAP_SETPCAP) {
		// First: the change of the user takes the effective set away.
		for c := Cap(0); c < 64; c++ {
			if !before.Bounding.Has(c) || keep.Has(c) {
				continue
			}
			if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uintptr(c), 0); errno != 0 {
				return fmt.Errorf("become uid %d: drop %s from the bounding set: %w", uid, c, errno)
			}
		}
	}
	if _, _, errno := syscall.AllThreadsSyscall(unix.SYS_PRCTL, unix.PR_SET_KEEPCAPS, 1, 0); errno != 0 {
		return fmt.Errorf("become uid %d: keep capabilities: %w", uid, errno)
	}
	u, g := int(uid), int(gid)
	if err := syscall.Setgroups([]int{g}); err != nil {
		return fmt.Errorf("become uid %d: set groups to %d: %w", uid, gid, err)
	}
	if err := syscall.Setresgid(g, g, g); err != nil {
		return fmt.Errorf("become uid %d: set group %d: %w", uid, gid, err)
	}
	if err := syscall.Setresuid(u, u, u); err != nil {
		return fmt.Errorf("become uid %d: %w", uid, err)
	}
	if err := NoNewPrivs(); err != nil {
		return err
	}
	if err := KeepCapabilities(caps...); err != nil {
		return err
	}
	after, err := Current()
	if err != nil {
		return fmt.Errorf("become uid %d: read back: %w", uid, err)
	}
	if after.UIDs != [4]uint32{uid, uid, uid, uid} || after.GIDs != [4]uint32{gid, gid, gid, gid} {
		return fmt.Errorf("become uid %d, gid %d: the kernel says %v, %v", uid, gid, after.UIDs, after.GIDs)
	}
	return nil
}

// NoNewPrivs makes sure that no executed program gets more rights than the
// process has, by set-uid bits or file capabilities.
func NoNewPrivs() error {
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return fmt.Errorf("set no_new_privs: %w", errno)
	}
	st, err := Current()
	if err != nil {
		return fmt.Errorf("set no_new_privs: read back: %w", err)
	}
	if !st.NoNewPrivs {
		return errors.New("set no_new_privs: the kernel did not take it")
	}
	return nil
}

// Unprivileged makes sure that a process which needs no rights gets none that
// it was not started with, and says so if it was started with any.
func Unprivileged(log *slog.Logger) error {
	// Not supported in a binary that links C, which only the race detector's do.
	if err := NoNewPrivs(); err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	state, err := Current()
	if err != nil {
		return err
	}
	if state.Permitted != 0 {
		log.Warn("running with capabilities; this service needs none and is meant to run as an own user", "capabilities", state.Permitted.String())
	}
	return nil
}
