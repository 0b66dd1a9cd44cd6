// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pin

import (
	"context"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// membarrierGlobal is MEMBARRIER_CMD_GLOBAL of linux/membarrier.h.
const membarrierGlobal = 1

// GracePeriod returns after all program runs that had begun have ended. It uses membarrier, which waits for an RCU
// grace period. Kernels with nohz_full CPUs reject it with EINVAL; there it changes a map of maps instead, which also
// waits for a grace period.
func GracePeriod(ctx context.Context) error {
	_, _, errno := unix.Syscall(unix.SYS_MEMBARRIER, membarrierGlobal, 0, 0)
	switch {
	case errno == 0:
		return nil
	case !errors.Is(errno, unix.EINVAL) && !errors.Is(errno, unix.ENOSYS) && !errors.Is(errno, unix.EPERM):
		return fmt.Errorf("membarrier: %w", errno)
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("wait for program runs to end: %w", err)
	}
	if err := graceByMap(); err != nil {
		return fmt.Errorf("wait for program runs to end: %w", err)
	}
	return nil
}

// graceByMap waits for a grace period by changing a map of maps. The kernel returns from the change when no
// program can use the previous inner map any more: maybe_wait_bpf_programs of kernel/bpf/syscall.c, since 4.18.
func graceByMap() error {
	inner := &ebpf.MapSpec{Name: "sluice_grace", Type: ebpf.Array, KeySize: 4, ValueSize: 4, MaxEntries: 1}
	m, err := ebpf.NewMap(inner)
	if err != nil {
		return fmt.Errorf("make the inner map: %w", err)
	}
	defer m.Close()
	outer, err := ebpf.NewMap(&ebpf.MapSpec{
		Name: "sluice_graces", Type: ebpf.ArrayOfMaps, KeySize: 4, ValueSize: 4, MaxEntries: 1, InnerMap: inner,
	})
	if err != nil {
		return fmt.Errorf("make the outer map: %w", err)
	}
	defer outer.Close()
	// in place: no program uses the map
	if err := outer.Put(uint32(0), m); err != nil {
		return fmt.Errorf("change the outer map: %w", err)
	}
	return nil
}
