// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"fmt"

	"github.com/sluice-net/sluice/kit/mountinfo"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// probeMounts returns an error that names a missing mount without which the process would run but could not connect any
// container.
func (c *Config) probeMounts() error {
	if c.ValidateOnly {
		return nil
	}
	if err := pin.CheckMounted(c.BPFDir); err != nil {
		return err
	}
	if err := netdev.CheckWritable(c.ProcSysNet); err != nil {
		return err
	}
	if c.MountPropagation == "ignore" {
		return nil
	}
	for _, dir := range c.NetnsDirs {
		m, err := mountinfo.Of(dir)
		if err != nil {
			return fmt.Errorf("netnsDirs: %w; mount the machine's %s there with mountPropagation HostToContainer", err, dir)
		}
		if !m.Receives() {
			return fmt.Errorf("netnsDirs: namespaces that are mounted later below %s are not seen here, "+
				"because the mount at %s is private; mount the machine's %[1]s with mountPropagation HostToContainer, "+
				"and make it shared on the machine (mount --make-rshared /)", dir, m.Point)
		}
	}
	return nil
}
