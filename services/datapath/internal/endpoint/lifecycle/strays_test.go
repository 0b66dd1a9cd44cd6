// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// TestAuditLeavesASlotThatWasGivenAwaySinceItLooked: an audit that finds two strays repairs one after the other. In
// between, the ID of the second may be reused for a new endpoint.
func TestAuditLeavesASlotThatWasGivenAwaySinceItLooked(t *testing.T) {
	for name, now := range map[string]func(*endpoint.Entry){
		"the same device, published again": func(e *endpoint.Entry) { e.Epoch++ },
		"another device":                   func(e *endpoint.Entry) { e.Ifindex++ },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine()
			c := m.start(t)
			for _, slot := range []uint16{7, 8} {
				m.slots[slot] = endpoint.Entry{Slot: slot, Ifindex: 100 + uint32(slot), Epoch: 3, Forwards: true}
			}
			var given endpoint.Entry
			found := 0
			err := c.Audit(t.Context(), true, func(f endpoint.Finding) error {
				if found++; found > 1 {
					return nil
				}
				m.mu.Lock()
				defer m.mu.Unlock()
				if len(m.slots) != 1 {
					t.Fatalf("after the first stray %d slots are left, want 1", len(m.slots))
				}
				for slot, e := range m.slots {
					now(&e)
					m.slots[slot], given = e, e
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
			if found != 2 {
				t.Errorf("%d strays, want 2", found)
			}
			if e, there := m.slots[given.Slot]; !there || e.Epoch != given.Epoch || e.Ifindex != given.Ifindex {
				t.Errorf("reused slot %d: found %v, %+v, want %+v", given.Slot, there, e, given)
			}
			// the next audit sees the new endpoint
			if err := c.Audit(t.Context(), true, nothing); err != nil {
				t.Fatal(err)
			}
			if len(m.slots) != 0 {
				t.Errorf("after the next audit %+v is left", m.slots)
			}
		})
	}
}
