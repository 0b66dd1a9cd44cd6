// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pin

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"
)

// Requirement is a feature of the kernel or a privilege of the process that the programs require.
type Requirement struct {
	Name string // "helper FnRedirectPeer", "capability CAP_BPF"
	// Missing is the reason why the requirement is not met; nil if it is.
	Missing error
	// Hint describes to an operator how to meet the requirement.
	Hint string
}

// Report is the result of Probe.
type Report struct {
	// Kernel is the running kernel's release.
	Kernel       string
	Requirements []Requirement
}

const (
	hintCapability = "give the process CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN"
	hintKernel     = "use a kernel of 6.1 or newer"
	hintBTF        = "use a kernel built with CONFIG_DEBUG_INFO_BTF=y"
	hintRefused    = "the kernel may have it, but something forbids bpf(): look at the capabilities, the seccomp profile, AppArmor, " +
		"SELinux and /sys/kernel/security/lockdown"
	hintConfig = "use a kernel built with CONFIG_NET_CLS_BPF, CONFIG_NET_CLS_ACT and CONFIG_BPF_SYSCALL"
)

// Probe checks all requirements of Open without changing anything. Without the capabilities, or if bpf() is
// forbidden, the rest cannot be checked and is missing from the report.
func Probe(ctx context.Context) Report {
	r := Report{Kernel: Release()}
	caps, err := effectiveCapabilities()
	for _, c := range requiredCapabilities {
		missing := err
		if err == nil && caps&(1<<c.bit) == 0 {
			missing = errors.New("not in the effective set")
		}
		r.add("capability "+c.name, hintCapability, missing)
	}
	if r.Err() != nil {
		return r
	}

	if err := features.HaveMapType(ebpf.Array); errors.Is(err, unix.EPERM) {
		r.add("system call bpf", hintRefused, err)
		return r
	}
	// Only its existence is checked, because parsing it would take longer than all other checks.
	_, err = os.Stat("/sys/kernel/btf/vmlinux")
	r.add("type information of the kernel (BTF)", hintBTF, err)
	for _, t := range []ebpf.MapType{ebpf.Array, ebpf.Hash, ebpf.LPMTrie, ebpf.PerCPUArray, ebpf.RingBuf} {
		if ctx.Err() != nil {
			r.add("map type "+t.String(), hintKernel, ctx.Err())
			continue
		}
		r.add("map type "+t.String(), hintKernel, features.HaveMapType(t))
	}
	r.add("arrays in shared memory", hintKernel, features.HaveMapFlag(features.BPF_F_MMAPABLE))
	r.add("program type "+ebpf.SchedCLS.String(), hintConfig, features.HaveProgramType(ebpf.SchedCLS))
	r.add("instruction set v3", hintKernel, features.HaveV3ISA())
	r.add("bounded loops", hintKernel, features.HaveBoundedLoops())
	for _, h := range []asm.BuiltinFunc{
		asm.FnSkbLoadBytes, asm.FnSkbStoreBytes, asm.FnSkbChangeTail, asm.FnCsumDiff, asm.FnRedirect,
		asm.FnRedirectPeer, asm.FnCheckMtu, asm.FnKtimeGetNs, asm.FnRingbufReserve, asm.FnRingbufSubmit,
	} {
		if ctx.Err() != nil {
			r.add("helper "+h.String(), hintKernel, ctx.Err())
			continue
		}
		r.add("helper "+h.String(), hintKernel, features.HaveProgramHelper(ebpf.SchedCLS, h))
	}
	return r
}

// add records one requirement. A permission error does not mean that the kernel lacks the feature.
func (r *Report) add(name, hint string, missing error) {
	if errors.Is(missing, unix.EPERM) || errors.Is(missing, unix.EACCES) {
		hint = hintRefused
	}
	r.Requirements = append(r.Requirements, Requirement{Name: name, Missing: missing, Hint: hint})
}

// Err returns an error that lists all missing requirements with their hints; nil if all are met.
func (r Report) Err() error {
	var b strings.Builder
	var missing int
	for _, q := range r.Requirements {
		if q.Missing != nil {
			missing++
			fmt.Fprintf(&b, "\n  %s: %v (%s)", q.Name, q.Missing, q.Hint)
		}
	}
	if missing == 0 {
		return nil
	}
	return fmt.Errorf("kernel %s: %d of %d requirements are missing:%s", r.Kernel, missing, len(r.Requirements), b.String())
}

type capability struct {
	name string
	bit  uint
}

// requiredCapabilities are the capabilities for maps and programs. Without CAP_PERFMON the verifier rejects the
// programs' arithmetic on map values.
var requiredCapabilities = []capability{
	{"CAP_BPF", unix.CAP_BPF},
	{"CAP_PERFMON", unix.CAP_PERFMON},
	{"CAP_NET_ADMIN", unix.CAP_NET_ADMIN},
}

func effectiveCapabilities() (uint64, error) {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return 0, fmt.Errorf("capget: %w", err)
	}
	return uint64(data[0].Effective) | uint64(data[1].Effective)<<32, nil
}

// Release returns the release of the running kernel, as `uname -r` does.
func Release() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "of unknown release"
	}
	return unix.ByteSliceToString(u.Release[:])
}
