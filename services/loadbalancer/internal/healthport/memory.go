// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package healthport

import (
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/owner"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// memory stores, for each service, the addresses that the datapath last enforced. The kernel continues to forward to
// them while the datapath or this process restarts. The file is valid for only one boot, because a reboot clears the
// kernel's tables.
type memory struct {
	path string // "": not kept across a restart
	boot string

	led map[service.Name][]netip.Addr
	// unlisted contains the services in led that an earlier process stored and that this process has not listed yet.
	unlisted map[service.Name]bool
}

var memorySchema = durable.Schema{Name: "sluice.loadbalancer.healthchecks", Version: 1}

// maxMemory is the maximum size of the file; 65,536 services with an address of 39 characters each
// need less.
const maxMemory = 64 << 20

type memoryFile struct {
	Boot string        `json:"boot"`
	Led  []memoryEntry `json:"led"`
}

type memoryEntry struct {
	Namespace string       `json:"namespace"`
	Name      string       `json:"name"`
	Addresses []netip.Addr `json:"addresses"`
}

// openMemory reads the file of an earlier process of this boot. If the file is unreadable, it
// returns an error and an empty memory.
func openMemory(path string) (*memory, error) {
	m := &memory{path: path, led: make(map[service.Name][]netip.Addr), unlisted: make(map[service.Name]bool)}
	if path == "" {
		return m, nil
	}
	var err error
	if m.boot, err = durable.BootID(); err != nil {
		m.path = ""
		return m, err
	}
	var f memoryFile
	switch err := durable.Load(path, maxMemory, memorySchema, &f); {
	case errors.Is(err, fs.ErrNotExist):
		return m, nil
	case err != nil:
		return m, fmt.Errorf("read the state of health check ports before the restart: %w", err)
	case f.Boot != m.boot:
		return m, nil
	}
	for _, e := range f.Led {
		name := service.Name{Namespace: e.Namespace, Name: e.Name}
		m.led[name], m.unlisted[name] = e.Addresses, true
	}
	return m, nil
}

// leads reports whether the datapath forwards to a ready address of the service on this node. While that is unknown,
// it answers from the last known addresses.
func (m *memory) leads(l owner.Local) bool {
	switch {
	case len(l.Ready) == 0 || l.Enforced == owner.NotEnforced:
		return false
	case l.Enforced == owner.Enforced:
		return true
	}
	return slices.ContainsFunc(m.led[l.Name], func(a netip.Addr) bool { return slices.Contains(l.Ready, a) })
}

// update stores the state of the given services, and removes all others. A service that an earlier process stored
// stays until it was listed once.
func (m *memory) update(all []owner.Local) error {
	led, changed := make(map[service.Name][]netip.Addr, len(all)), false
	for _, l := range all {
		delete(m.unlisted, l.Name)
		was := m.led[l.Name]
		now := was
		switch {
		case len(l.Ready) == 0 || l.Enforced == owner.NotEnforced:
			now = nil
		case l.Enforced == owner.Enforced:
			now = l.Ready
		}
		if len(now) > 0 {
			led[l.Name] = now
		}
		changed = changed || !slices.Equal(was, now)
	}
	for name := range m.unlisted {
		led[name] = m.led[name]
	}
	changed = changed || len(led) != len(m.led)
	m.led = led
	if !changed || m.path == "" {
		return nil
	}
	f := memoryFile{Boot: m.boot}
	for name, addresses := range led {
		f.Led = append(f.Led, memoryEntry{name.Namespace, name.Name, addresses})
	}
	return durable.Save(m.path, memorySchema, f, durable.SyncNone)
}
