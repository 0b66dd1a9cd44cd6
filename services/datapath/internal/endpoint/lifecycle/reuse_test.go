// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"errors"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/reaper"
)

// replaceNamespace gives the path a new namespace with the inode of the old one, as the kernel does
// if the inode is still free.
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
	c = m.start(t) // no process saw the device vanish
	second, err := c.Create(t.Context(), s, false)
	if err != nil || second.Slot == first.Slot {
		t.Fatalf("in the new namespace: slot %d, %v; before slot %d", second.Slot, err, first.Slot)
	}
	settle(t, c)
	m.holds(t, c, 1)
}

// lend assigns a free endpoint ID to another endpoint.
func (m *machine) lend(t *testing.T, slot uint16, e endpoint.Entry) {
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
	m.setFail("save "+string(endpoint.PhaseDeleted), errTest)
	if _, err := c.Delete(t.Context(), s.Owner); !errors.Is(err, errTest) {
		t.Fatalf("deletion with a full disk: %v", err)
	}
	m.number++
	if changed, err := c.Refresh(t.Context()); changed != 0 || err != nil {
		t.Errorf("refresh of a half-deleted endpoint: %d changed, %v", changed, err)
	}
	other := m.wanted("b", 3)
	m.lend(t, e.Slot, endpoint.Entry{Ifindex: 99, Addrs: other.Addrs, MAC: endpoint.MAC{2, 0, 0, 0, 0, 9}, HostMAC: endpoint.MAC{2, 0, 0, 0, 0, 8}})
	m.setFail("save "+string(endpoint.PhaseDeleted), nil)
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
	if err := c.Audit(t.Context(), true, func(endpoint.Finding) error { return nil }); err != nil {
		t.Fatal(err)
	}
	m.setFail("publish", nil)
	other := m.wanted("b", 3)
	m.lend(t, e.Slot, endpoint.Entry{Ifindex: 99, Addrs: other.Addrs, MAC: endpoint.MAC{2, 0, 0, 0, 0, 9}, HostMAC: endpoint.MAC{2, 0, 0, 0, 0, 8}})
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
	var rs [4]endpoint.Record
	for i := range rs {
		s := m.wanted(string(rune('a'+i)), 2)
		rs[i] = endpoint.Record{Phase: endpoint.PhaseCreating, Spec: s}
	}
	for range 2000 {
		var wg sync.WaitGroup
		var won atomic.Int32
		for _, r := range rs {
			wg.Go(func() {
				n := &creation{Lifecycle: c.Lifecycle, r: r}
				if err := n.reserve(nil); err == nil {
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
	if _, err := c.Create(t.Context(), next, false); !errors.Is(err, endpoint.ErrNameTaken) {
		t.Fatalf("next to the live endpoint: %v, want ErrNameTaken", err)
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
	for _, op := range []string{"cut", "unpublish", "save " + string(endpoint.PhaseDeleted)} {
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
	for _, op := range []string{"cut", "unpublish", "save " + string(endpoint.PhaseDeleted)} {
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
			if err := c.Audit(t.Context(), true, func(endpoint.Finding) error { return nil }); err != nil {
				t.Fatal(err)
			}
			settle(t, c)
			m.holds(t, c, 0)
		})
	}
}

// secondOf returns a request for another interface of the container.
func (m *machine) secondOf(s endpoint.Spec, name string, last byte) endpoint.Spec {
	t := m.wanted(s.Owner.ContainerID+"-"+name, last)
	l := m.leases[t.Owner]
	delete(m.leases, t.Owner)
	t.Owner = workload.Owner{ContainerID: s.Owner.ContainerID, Interface: name}
	m.leases[t.Owner] = l
	t.Netns = s.Netns
	return t
}

// TestDeviceOfAKilledCreationIsRemovedByItsIndex: the owner's next creation makes a device of the
// same name, which the reaper must not remove.
func TestDeviceOfAKilledCreationIsRemovedByItsIndex(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	half := endpoint.Record{
		Phase: endpoint.PhaseCreating, BootID: c.cfg.BootID, Spec: s, Device: c.cfg.device(s),
		Namespace: m.namespaces[s.Netns].id,
	}
	for _, made := range []bool{false, true} {
		m.records[s.Owner] = half // the state in which a killed process leaves the record
		m.leases[s.Owner] = lease{addrs: s.Addrs}
		if made {
			if _, err := (fakeLinks{m}).Create(openNamespace{m, m.namespaces[s.Netns]}, half.Device); err != nil {
				t.Fatal(err)
			}
		}
		again := m.start(t)
		e, err := again.Create(t.Context(), s, false)
		if err != nil {
			t.Fatal(err)
		}
		for again.Reaper.Reap(reaper.Everything) > 0 { //nolint:revive // until nothing is scheduled
		}
		if m.devices[e.Device.HostIndex] == nil {
			t.Errorf("killed after its device was made: %v: the reaper removed the device of the next creation", made)
		}
		if _, err := again.Delete(t.Context(), s.Owner); err != nil {
			t.Fatal(err)
		}
		settle(t, again)
	}
}

// TestFirstAttachmentHasTheDefaultRoutes: the first attachment has the default routes of each address family, and only
// while it exists.
func TestFirstAttachmentHasTheDefaultRoutes(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	first := m.wanted("a", 2)
	first.Addrs = first.Addrs[:1]
	m.leases[first.Owner] = lease{addrs: first.Addrs}
	second, third := m.secondOf(first, "net1", 3), m.secondOf(first, "net2", 4)
	create := func(s endpoint.Spec, want ...netip.Addr) {
		t.Helper()
		e, err := c.Create(t.Context(), s, false)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(e.Device.SourceRouted, want) {
			t.Errorf("%s: source-routed %v, want %v", s.Owner, e.Device.SourceRouted, want)
		}
		if got := m.records[s.Owner].Device.SourceRouted; !slices.Equal(got, want) {
			t.Errorf("%s: the record says %v, want %v", s.Owner, got, want)
		}
	}
	del := func(s endpoint.Spec) {
		t.Helper()
		if _, err := c.Delete(t.Context(), s.Owner); err != nil {
			t.Fatal(err)
		}
		settle(t, c)
		m.leases[s.Owner] = lease{addrs: s.Addrs}
	}
	create(first)
	create(second, second.Addrs[0])
	create(third, third.Addrs...)
	create(m.wanted("another", 9))
	del(first)
	create(first)
	del(second)
	create(second, second.Addrs[0])

	// A new namespace that reuses the inode of a removed one has no attachment yet.
	other := m.wanted("b", 11)
	create(other)
	m.replaceNamespace(other.Netns)
	newcomer := m.wanted("c", 12)
	newcomer.Netns = other.Netns
	create(newcomer)

	c.cfg.RefuseSecond = true
	refused := m.secondOf(first, "net3", 5)
	if _, err := c.Create(t.Context(), refused, false); !errors.Is(err, endpoint.ErrSecond) {
		t.Errorf("with refusal: %v, want ErrSecond", err)
	}
}

// TestDeletedSecondAttachmentLeavesNoRules: the container keeps running without the attachment. The
// same holds if a new process completes the deletion.
func TestDeletedSecondAttachmentLeavesNoRules(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	first := m.wanted("a", 2)
	second := m.secondOf(first, "net1", 3)
	for _, s := range []endpoint.Spec{first, second} {
		if _, err := c.Create(t.Context(), s, false); err != nil {
			t.Fatal(err)
		}
	}
	m.calls = nil
	if _, err := c.Delete(t.Context(), first.Owner); err != nil || slices.Contains(m.calls, "deactivate") {
		t.Errorf("the first one has no rules: %v, calls %v", err, m.calls)
	}
	if _, err := c.Delete(t.Context(), second.Owner); err != nil || !slices.Contains(m.calls, "deactivate") {
		t.Errorf("the rules of the second stay: %v, calls %v", err, m.calls)
	}
	settle(t, c)
	m.holds(t, c, 0)
}

func TestAuditOfContainersRepairsWhenAsked(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	first := m.wanted("a", 2)
	second := m.secondOf(first, "net1", 3)
	for _, s := range []endpoint.Spec{first, second} {
		if _, err := c.Create(t.Context(), s, false); err != nil {
			t.Fatal(err)
		}
	}
	for _, d := range m.devices {
		d.rules = nil
	}
	for i, want := range []struct{ repair, found bool }{{false, true}, {true, true}, {true, false}} {
		var found []endpoint.Finding
		if err := c.AuditContainers(t.Context(), want.repair, func(f endpoint.Finding) error { found = append(found, f); return nil }); err != nil {
			t.Fatal(err)
		}
		if (len(found) == 1) != want.found || want.found && found[0].Repaired != want.repair {
			t.Errorf("audit %d found %+v, want %+v", i, found, want)
		}
	}
	var found []endpoint.Finding
	if err := c.Audit(t.Context(), true, func(f endpoint.Finding) error { found = append(found, f); return nil }); err != nil || len(found) > 0 {
		t.Errorf("the audit of the node checks the interior of containers: %v, %v", found, err)
	}
}
