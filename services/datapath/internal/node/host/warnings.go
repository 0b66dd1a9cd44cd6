// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package host

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
)

// realtimeFile contains "1" on a kernel with PREEMPT_RT, and is missing on other kernels.
const realtimeFile = "/sys/kernel/realtime"

// Warnings lists, one per line, foreign configuration of the node that limits the guarantees of the programs, as of the
// last audit, and current problems that block packets from other nodes.
func (h *Host) Warnings() []string {
	warnings := h.limits()
	if h.o.Router != nil {
		warnings = append(warnings, h.o.Router.Warnings()...)
	}
	return warnings
}

// limits returns the result of the last CheckWarnings.
func (h *Host) limits() []string {
	if w := h.warnings.Load(); w != nil {
		return slices.Clone(*w)
	}
	return nil
}

// Bypassed lists the firewall rules of others about the tunnel's port, as of the last audit. They do not apply to packets
// that bypass the tunnel device.
func (h *Host) Bypassed() []string {
	if b := h.bypassed.Load(); b != nil {
		return slices.Clone(*b)
	}
	return nil
}

// CheckWarnings updates the warnings about the node, and logs new ones.
func (h *Host) CheckWarnings() error {
	list, err := h.o.Firewall.MarkRules(netdev.MarkFree)
	if err != nil {
		return fmt.Errorf("look for firewall rules that change the packet mark: %w", err)
	}
	closed, err := h.o.Firewall.Closed()
	if err != nil {
		return fmt.Errorf("look for firewall chains that drop forwarded packets: %w", err)
	}
	list = append(list, closed...)
	if h.o.TunnelPort != 0 {
		bypassed, err := h.o.Firewall.PortRules(h.o.TunnelPort)
		if err != nil {
			return fmt.Errorf("look for firewall rules about the tunnel's port: %w", err)
		}
		h.bypassed.Store(&bypassed)
	}
	rt, err := realtime(realtimeFile)
	if err != nil {
		return err
	}
	if rt {
		list = append(list, "the kernel is built with PREEMPT_RT, where a program may be interrupted by another "+
			"on the same CPU; the programs are not tested there")
	}
	before := h.limits()
	h.warnings.Store(&list)
	for _, w := range list {
		if !slices.Contains(before, w) {
			h.o.Log.Warn("the node's configuration limits the guarantees of the programs", "why", w)
		}
	}
	return nil
}

func realtime(path string) (bool, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return strings.TrimSpace(string(b)) == "1", err
}
