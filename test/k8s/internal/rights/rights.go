// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rights compares the rights that the kernel reports for a container's process with the container's manifest.
package rights

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// capabilities are the names of the kernel's capability bits, from bit 0.
var capabilities = strings.Fields(`CHOWN DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID KILL SETGID SETUID SETPCAP
	LINUX_IMMUTABLE NET_BIND_SERVICE NET_BROADCAST NET_ADMIN NET_RAW IPC_LOCK IPC_OWNER SYS_MODULE SYS_RAWIO
	SYS_CHROOT SYS_PTRACE SYS_PACCT SYS_ADMIN SYS_BOOT SYS_NICE SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG MKNOD LEASE
	AUDIT_WRITE AUDIT_CONTROL SETFCAP MAC_OVERRIDE MAC_ADMIN SYSLOG WAKE_ALARM BLOCK_SUSPEND AUDIT_READ PERFMON
	BPF CHECKPOINT_RESTORE`)

// Container is the part of a container's manifest that defines its rights. The field names are the API's.
type Container struct {
	Name            string
	SecurityContext struct {
		Privileged               *bool
		RunAsUser, RunAsGroup    *int
		AllowPrivilegeEscalation *bool
		ReadOnlyRootFilesystem   *bool
		Capabilities             struct{ Add, Drop []string }
		SeccompProfile           struct{ Type string }
	}
}

// Process contains the rights that the kernel reports for a process.
type Process struct {
	UID, GID   int
	NoNewPrivs bool
	// Seccomp is 2 if a filter is installed.
	Seccomp                      int
	Effective, Permitted, Bounds []string
}

// Parse reads /proc/PID/status.
func Parse(status string) (Process, error) {
	fields := map[string][]string{}
	for line := range strings.Lines(status) {
		name, value, _ := strings.Cut(line, ":")
		fields[name] = strings.Fields(value)
	}
	var p Process
	number := func(name string, into *int) error {
		if len(fields[name]) == 0 {
			return fmt.Errorf("no line %s in the status of a process", name)
		}
		var err error
		// Of the four numbers of Uid and Gid, the second is the effective one.
		*into, err = strconv.Atoi(fields[name][min(1, len(fields[name])-1)])
		return err
	}
	var noNewPrivs int
	for name, into := range map[string]*int{
		"Uid": &p.UID, "Gid": &p.GID, "Seccomp": &p.Seccomp, "NoNewPrivs": &noNewPrivs,
	} {
		if err := number(name, into); err != nil {
			return p, err
		}
	}
	p.NoNewPrivs = noNewPrivs == 1
	for name, into := range map[string]*[]string{"CapEff": &p.Effective, "CapPrm": &p.Permitted, "CapBnd": &p.Bounds} {
		if len(fields[name]) != 1 {
			return p, fmt.Errorf("no line %s in the status of a process", name)
		}
		bits, err := strconv.ParseUint(fields[name][0], 16, 64)
		if err != nil {
			return p, err
		}
		for bit := range 64 {
			if bits&(1<<bit) == 0 {
				continue
			}
			if bit >= len(capabilities) {
				return p, fmt.Errorf("%s has the unknown bit %d", name, bit)
			}
			*into = append(*into, capabilities[bit])
		}
		slices.Sort(*into)
	}
	return p, nil
}

// Differences returns the rights in which the process differs from the manifest, and rights that the manifest leaves
// open but must set. If user is not negative, the process must have changed from the manifest's user to that user,
// and may have fewer capabilities.
func Differences(c Container, p Process, user int) []string {
	var all []string
	differs := func(is bool, format string, args ...any) {
		if is {
			all = append(all, c.Name+": "+fmt.Sprintf(format, args...))
		}
	}
	s := c.SecurityContext
	isTrue := func(b *bool) bool { return b != nil && *b }
	differs(isTrue(s.Privileged), "is privileged")
	differs(s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation,
		"allows privilege escalation in its manifest")
	differs(!isTrue(s.ReadOnlyRootFilesystem), "has a writable root file system in its manifest")
	differs(!slices.Equal(s.Capabilities.Drop, []string{"ALL"}), "drops %v, not ALL", s.Capabilities.Drop)
	differs(s.SeccompProfile.Type != "RuntimeDefault", "has the seccomp profile %q", s.SeccompProfile.Type)

	if user < 0 && s.RunAsUser != nil {
		user = *s.RunAsUser
	}
	differs(user >= 0 && p.UID != user, "runs as user %d, want %d", p.UID, user)
	differs(s.RunAsGroup != nil && p.GID != *s.RunAsGroup, "runs as group %d, want %v", p.GID, s.RunAsGroup)
	differs(!p.NoNewPrivs, "may gain privileges")
	differs(p.Seccomp != 2, "has no seccomp filter (mode %d)", p.Seccomp)
	want := slices.Sorted(slices.Values(s.Capabilities.Add))
	differs(!slices.Equal(p.Bounds, want), "is bound by %v, want %v", p.Bounds, want)
	for _, held := range [][]string{p.Effective, p.Permitted} {
		differs(slices.ContainsFunc(held, func(n string) bool { return !slices.Contains(want, n) }),
			"holds %v, want no more than %v", held, want)
	}
	return all
}
