// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"
)

// replaceNamespace gives the path a new namespace with the number of the old
// one, as the kernel does when nobody else has taken it meanwhile.
func (m *machine) replaceNamespace(path string) {
	id := m.namespaces[path].id
	m.removeNamespace(path)
	m.addNamespace(path)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.namespaces[path].id = id
}

func TestNewNamespaceWithTheNumberOfTheOldOneGetsANewEndpoint(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	first, err := c.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	m.replaceNamespace(s.Netns)
	c = m.start(t) // nobody was there to see the device go
	second, err := c.Create(t.Context(), s, false)
	if err != nil || second.Slot == first.Slot {
		t.Fatalf("in the new namespace: slot %d, %v; before slot %d", second.Slot, err, first.Slot)
	}
	settle(t, c)
	m.holds(t, c, 1)
}

// lend gives a slot that is free to another endpoint.
func (m *machine) lend(t *testing.T, slot uint16, e Entry) {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, taken := m.slots[slot]; taken {
		t.Fatalf("slot %d is not free", slot)
	}
	e.Slot, e.Forwards = slot, true
	m.slots[slot] = e
}

func TestRepeatedDeletionLeavesTheNextHolderOfItsSlotAlone(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	e, err := c.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	m.setFail("save "+string(PhaseDeleted), errTest)
	if _, err := c.Delete(t.Context(), s.Owner); !errors.Is(err, errTest) {
		t.Fatalf("deletion without room for its tombstone: %v", err)
	}
	m.number++
	if changed, err := c.Refresh(t.Context()); changed != 0 || err != nil {
		t.Errorf("refresh of what is half deleted: %d changed, %v", changed, err)
	}
	other := m.wanted("b", 3)
	m.lend(t, e.Slot, Entry{Ifindex: 99, Addrs: other.Addrs, MAC: MAC{2, 0, 0, 0, 0, 9}, HostMAC: MAC{2, 0, 0, 0, 0, 8}})
	m.setFail("save "+string(PhaseDeleted), nil)
	if existed, err := c.Delete(t.Context(), s.Owner); err != nil || !existed {
		t.Fatalf("again: %v, %v", existed, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if got := m.slots[e.Slot]; got.Ifindex != 99 || !got.Forwards {
		t.Errorf("the slot of the next endpoint is %+v, want it untouched", got)
	}
}

func TestFailedRepairLeavesTheNextHolderOfTheSlotAlone(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	e, err := c.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	m.mu.Lock()
	damaged := m.slots[e.Slot]
	damaged.Forwards = false
	m.slots[e.Slot] = damaged
	m.mu.Unlock()
	m.setFail("publish", errTest)
	if err := c.Audit(t.Context(), true, func(Finding) error { return nil }); err != nil {
		t.Fatal(err)
	}
	m.setFail("publish", nil)
	other := m.wanted("b", 3)
	m.lend(t, e.Slot, Entry{Ifindex: 99, Addrs: other.Addrs, MAC: MAC{2, 0, 0, 0, 0, 9}, HostMAC: MAC{2, 0, 0, 0, 0, 8}})
	if _, err := c.Delete(t.Context(), s.Owner); err != nil {
		t.Fatal(err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if got := m.slots[e.Slot]; got.Ifindex != 99 || !got.Forwards {
		t.Errorf("the slot of the next endpoint is %+v, want it untouched", got)
	}
}

func TestOneAddressIsReservedByOneOwner(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	var rs [4]Record
	for i := range rs {
		s := m.wanted(string(rune('a'+i)), 2)
		rs[i] = Record{Phase: PhaseCreating, Spec: s}
	}
	for range 2000 {
		var wg sync.WaitGroup
		var won atomic.Int32
		for _, r := range rs {
			wg.Go(func() {
				if c.reserve(r) == nil {
					won.Add(1)
				}
			})
		}
		wg.Wait()
		if n := won.Load(); n != 1 {
			t.Fatalf("%d owners reserved the same address", n)
		}
		for _, r := range rs {
			c.forget(r.Spec.Owner)
		}
	}
}

func TestInterfaceOfADeletedEndpointMakesRoomForTheNextOne(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	old := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), old, false); err != nil {
		t.Fatal(err)
	}
	next := m.wanted("b", 3)
	next.Netns = old.Netns
	if _, err := c.Create(t.Context(), next, false); !errors.Is(err, ErrNameTaken) {
		t.Fatalf("beside the live one: %v, want ErrNameTaken", err)
	}
	settle(t, c)
	m.wanted("b", 3)
	if _, err := c.Delete(t.Context(), old.Owner); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Create(t.Context(), next, false); err != nil {
		t.Fatalf("after the deletion: %v", err)
	}
	settle(t, c)
	m.holds(t, c, 1)
}

func TestCreationAfterAFailedDeletionMakesTheEndpointAnew(t *testing.T) {
	for _, op := range []string{"cut", "unpublish", "save " + string(PhaseDeleted)} {
		t.Run(op, func(t *testing.T) {
			m := newMachine()
			c := m.start(t)
			s := m.wanted("a", 2)
			if _, err := c.Create(t.Context(), s, false); err != nil {
				t.Fatal(err)
			}
			m.setFail(op, errTest)
			if _, err := c.Delete(t.Context(), s.Owner); !errors.Is(err, errTest) {
				t.Fatalf("deletion: %v", err)
			}
			m.setFail(op, nil)
			e, err := c.Create(t.Context(), s, false)
			if err != nil {
				t.Fatal(err)
			}
			m.mu.Lock()
			if !m.slots[e.Slot].Forwards {
				t.Errorf("slot %d does not forward", e.Slot)
			}
			m.mu.Unlock()
			settle(t, c)
			m.holds(t, c, 1)
		})
	}
}

func TestAuditFinishesADeletionThatFailed(t *testing.T) {
	for _, op := range []string{"cut", "unpublish", "save " + string(PhaseDeleted)} {
		t.Run(op, func(t *testing.T) {
			m := newMachine()
			c := m.start(t)
			s := m.wanted("a", 2)
			if _, err := c.Create(t.Context(), s, false); err != nil {
				t.Fatal(err)
			}
			m.setFail(op, errTest)
			if _, err := c.Delete(t.Context(), s.Owner); !errors.Is(err, errTest) {
				t.Fatalf("deletion: %v", err)
			}
			m.setFail(op, nil)
			if err := c.Audit(t.Context(), true, func(Finding) error { return nil }); err != nil {
				t.Fatal(err)
			}
			settle(t, c)
			m.holds(t, c, 0)
		})
	}
}
