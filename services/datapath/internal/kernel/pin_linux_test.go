// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"github.com/cilium/ebpf"
)

// newPinned makes a map that another version, or another owner, has pinned.
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

// pinCopy pins a map at another path too.
func pinCopy(m *ebpf.Map, path string) error {
	c, err := m.Clone()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Pin(path)
}

// pinLeadsTo says whether the pin is the map.
func pinLeadsTo(path string, m *ebpf.Map) (bool, error) {
	pinned, err := ebpf.LoadPinnedMap(path, nil)
	if err != nil {
		return false, err
	}
	defer pinned.Close()
	there, err := pinned.Info()
	if err != nil {
		return false, err
	}
	ours, err := m.Info()
	if err != nil {
		return false, err
	}
	a, _ := there.ID()
	b, _ := ours.ID()
	return a == b, nil
}
