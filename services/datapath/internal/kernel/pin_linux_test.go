// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"github.com/cilium/ebpf"
)

// newPinned creates a map as another version, or another owner, has pinned it.
func newPinned(path string, ms *ebpf.MapSpec) (*ebpf.Map, error) {
	m, err := ebpf.NewMap(ms)
	if err != nil {
		return nil, err
	}
	if err := m.Pin(path); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// pinCopy pins a map at another path, too.
func pinCopy(m *ebpf.Map, path string) error {
	c, err := m.Clone()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Pin(path)
}
