// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package privilege drops privileges that a process does not need, in all its threads.
//
// No change can be undone. Each function reads the credentials of every thread back from the kernel to verify the
// result; after an error the process must not continue. Binaries must be built without cgo (CGO_ENABLED=0): the Go
// runtime cannot change threads that C code may have started, and returns ENOTSUP.
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

// String returns the kernel's name, such as "CAP_BPF".
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

// Has reports whether c is in the set.
func (s Set) Has(c Cap) bool { return s&(1<<uint(c)) != 0 }

// String returns the names, separated by commas, or "none".
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

// State holds the credentials of a thread, as reported by the kernel.
type State struct {
	UIDs, GIDs [4]uint32 // real, effective, saved, file system

	Inheritable, Permitted, Effective, Bounding, Ambient Set

	NoNewPrivs bool
}

// Current returns the state of the process, or an error if its threads differ.
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

// KeepCapabilities reduces the permitted, effective and bounding sets of every thread to the given
// capabilities, and clears the inheritable and ambient sets, so that no executed program inherits
// capabilities through them. If the process lacks one of the capabilities, KeepCapabilities changes
// nothing and returns an error that lists the missing ones. To shrink the bounding set the process
// needs CAP_SETPCAP, which is dropped as well unless it is listed. Without CAP_SETPCAP the bounding
// set stays, and the process must have called NoNewPrivs, with which the bounding set grants
// nothing.
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
	// Pid 0 means the calling thread, so one header serves all threads; the kernel only writes to
	// it if it does not know the version.
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
		return fmt.Errorf("keep capabilities %s: the kernel reports %+v", keep, after)
	}
	return nil
}

// Become changes the user of every thread, with a single group and exactly the given capabilities,
// and sets no_new_privs. The process must be root with CAP_SETUID, CAP_SETGID and the given
// capabilities. With CAP_SETPCAP it also reduces the bounding set to the given capabilities;
// without, the bounding set stays, and grants nothing under no_new_privs.
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
		// Drop from the bounding set before changing the user, because that clears the effective set.
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
		return fmt.Errorf("become uid %d, gid %d: the kernel reports %v, %v", uid, gid, after.UIDs, after.GIDs)
	}
	return nil
}

// NoNewPrivs sets no_new_privs: executed programs gain no privileges from set-uid bits or file
// capabilities.
func NoNewPrivs() error {
	if _, _, errno := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0, 0); errno != 0 {
		return fmt.Errorf("set no_new_privs: %w", errno)
	}
	st, err := Current()
	if err != nil {
		return fmt.Errorf("set no_new_privs: read back: %w", err)
	}
	if !st.NoNewPrivs {
		return errors.New("set no_new_privs: the kernel did not set it")
	}
	return nil
}

// Unprivileged sets no_new_privs for a process that needs no privileges, and logs a warning if it
// was started with any.
func Unprivileged(log *slog.Logger) error {
	// Setting it for all threads is not supported in a binary that links C; only race detector
	// builds do.
	if err := NoNewPrivs(); err != nil && !errors.Is(err, errors.ErrUnsupported) {
		return err
	}
	state, err := Current()
	if err != nil {
		return err
	}
	if state.Permitted != 0 {
		log.Warn("running with capabilities; this service needs none and should run as its own user", "capabilities",
			state.Permitted.String())
	}
	return nil
}
