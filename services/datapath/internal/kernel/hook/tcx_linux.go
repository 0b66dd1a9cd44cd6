// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hook

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// checkTCX reports the tcx programs of an endpoint's device. Since Linux 6.6 they run before the filters of
// clsact, and if one returns a verdict other than TCX_NEXT, our filter does not run. On endpoints' devices we
// do not use tcx, because attaching waits for an RCU grace period (8 to 15 ms with RTNL held); so every program
// found here belongs to another component.
func (h *Hooks) checkTCX(ds *[]endpoint.Difference, ifindex uint32, name string) error {
	// the kernel resolves the index in the namespace of the calling thread
	return h.Home.Do(func() error {
		for _, at := range deviceHooks {
			programs, err := tcxPrograms(int(ifindex), tcxHooks[at])
			if err != nil {
				return fmt.Errorf("query tcx %s of %s: %w", at, name, err)
			}
			for _, p := range programs {
				*ds = append(*ds, endpoint.Difference{
					Subject: endpoint.SubjectTCX, Key: name + " " + string(at), Have: describeTCX(p),
				})
			}
		}
		return nil
	})
}

// tcxPrograms lists the programs of a hook, in the order in which they run.
func tcxPrograms(ifindex int, attach ebpf.AttachType) ([]link.AttachedProgram, error) {
	for range mostLists {
		r, err := link.QueryPrograms(link.QueryOptions{Target: ifindex, Attach: attach})
		switch {
		case err == nil:
			return r.Programs, nil
		case errors.Is(err, unix.ENOSPC):
			// A program was attached between the calls that count and list.
			continue
		case errors.Is(err, unix.EINVAL), errors.Is(err, ebpf.ErrNotSupported):
			// Linux before 6.6, or without CONFIG_NET_XGRESS: there is no tcx.
			return nil, nil
		case errors.Is(err, unix.ENODEV):
			return nil, nil // the device is gone, which another check reports
		default:
			return nil, err
		}
	}
	return nil, unix.ENOSPC
}

func describeTCX(p link.AttachedProgram) string {
	s := fmt.Sprintf("%s, program %d", cmp.Or(nameOf(p.ID), "unnamed"), p.ID)
	if id, ok := p.LinkID(); ok {
		s += fmt.Sprintf(", link %d", id)
	}
	return s
}
