// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// nothing ignores findings.
func nothing(endpoint.Finding) error { return nil }

func TestChangedHostEndIsRepairedAndCounted(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	e, err := c.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	for i, changed := range []func(emit func(endpoint.Finding) error) (bool, error){
		func(emit func(endpoint.Finding) error) (bool, error) {
			return c.LinkChanged(t.Context(), e.Device.HostIndex, emit)
		},
		func(emit func(endpoint.Finding) error) (bool, error) {
			return c.AddrChanged(t.Context(), s.Addrs[0], emit)
		},
		func(emit func(endpoint.Finding) error) (bool, error) {
			return c.AddrChanged(t.Context(), s.Addrs[1], emit)
		},
	} {
		m.deviceOf(s.Owner).up = false
		var found []endpoint.Finding
		again, err := changed(func(f endpoint.Finding) error { found = append(found, f); return nil })
		if err != nil || again || !m.deviceOf(s.Owner).up {
			t.Errorf("change %d: up %v, again %v, %v", i, m.deviceOf(s.Owner).up, again, err)
		}
		if len(found) != 1 || !found[0].Repaired || found[0].Err != nil {
			t.Errorf("change %d: findings %+v", i, found)
		}
		if n := c.Counts(); n.DeviceRepairs != uint64(i+1) || n.Repairs != 0 || len(n.Unrepaired) != 0 {
			t.Errorf("change %d: %d repairs of devices, %d of attachments, %q unrepaired", i, n.DeviceRepairs, n.Repairs, n.Unrepaired)
		}
	}
}

// TestChangeIsLookedAtAgainAfterAnError: the kernel reports a change once. After a failed check,
// for example because the list changed during the dump, or a failed repair, the caller must try
// again.
func TestChangeIsLookedAtAgainAfterAnError(t *testing.T) {
	for _, op := range []string{"check device", "repair device"} {
		m := newMachine()
		c := m.start(t)
		s := m.wanted("a", 2)
		e, err := c.Create(t.Context(), s, false)
		if err != nil {
			t.Fatal(err)
		}
		m.setFail(op, errTest)
		m.deviceOf(s.Owner).up = false
		if again, _ := c.LinkChanged(t.Context(), e.Device.HostIndex, nothing); !again {
			t.Errorf("%s failed, and the caller is not asked to try again", op)
		}
		m.setFail(op, nil)
		again, err := c.LinkChanged(t.Context(), e.Device.HostIndex, nothing)
		if err != nil || again || !m.deviceOf(s.Owner).up || c.Counts().DeviceRepairs != 1 {
			t.Errorf("after %s failed: again %v, %v, up %v, %d repairs", op, again, err, m.deviceOf(s.Owner).up, c.Counts().DeviceRepairs)
		}
	}
}

// TestEventsEndWithRepairsThatChangeNothing: a repair sends events. If repairs change nothing, their events must not
// trigger further repairs for ever.
func TestEventsEndWithRepairsThatChangeNothing(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	e, err := c.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	changed := func() {
		t.Helper()
		if again, err := c.LinkChanged(t.Context(), e.Device.HostIndex, nothing); err != nil || again {
			t.Fatalf("again %v, %v", again, err)
		}
	}
	m.setFail("repair device", errTest)
	m.deviceOf(s.Owner).up = false
	for i := range 3 * mostVain {
		// A failed repair may have sent no event.
		again, err := c.LinkChanged(t.Context(), e.Device.HostIndex, nothing)
		if err != nil || again != (i < mostVain-1) {
			t.Fatalf("repair %d: again %v, %v", i, again, err)
		}
	}
	if n := m.count("repair device"); n != mostVain {
		t.Errorf("%d repairs without effect, want %d", n, mostVain)
	}
	if left := c.Counts().Unrepaired; len(left) != 1 {
		t.Errorf("unrepaired %q, want the device", left)
	}
	// a foreign program is never repaired, and reported once
	m.deviceOf(s.Owner).up = true
	m.deviceOf(s.Owner).foreign = "passes"
	for range 3 {
		changed()
	}
	if n := m.count("repair device"); n != mostVain {
		t.Errorf("%d repairs for a foreign program", n-mostVain)
	}
	if left := c.Counts().Unrepaired; len(left) != 1 {
		t.Errorf("unrepaired %q, want the foreign program", left)
	}
	// the audit tries again
	m.setFail("repair device", nil)
	m.deviceOf(s.Owner).foreign, m.deviceOf(s.Owner).up = "", false
	if err := c.Audit(t.Context(), true, nothing); err != nil {
		t.Fatal(err)
	}
	if n := c.Counts(); !m.deviceOf(s.Owner).up || n.DeviceRepairs != 1 || len(n.Unrepaired) != 0 {
		t.Errorf("after the audit: up %v, %d repairs, %q unrepaired", m.deviceOf(s.Owner).up, n.DeviceRepairs, n.Unrepaired)
	}
}

// TestEventWaitsForACallOfTheSameOwnerForABoundedTime: events of all endpoints are handled one
// after the other, so none may wait long.
func TestEventWaitsForACallOfTheSameOwnerForABoundedTime(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	e, err := c.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	leave, err := c.locks.Lock(t.Context(), s.Owner)
	if err != nil {
		t.Fatal(err)
	}
	m.deviceOf(s.Owner).up = false
	if again, err := c.LinkChanged(t.Context(), e.Device.HostIndex, nothing); err != nil || !again || m.deviceOf(s.Owner).up {
		t.Errorf("during a concurrent call: again %v, %v, up %v", again, err, m.deviceOf(s.Owner).up)
	}
	leave()
	if again, err := c.LinkChanged(t.Context(), e.Device.HostIndex, nothing); err != nil || again || !m.deviceOf(s.Owner).up {
		t.Errorf("after the call: again %v, %v, up %v", again, err, m.deviceOf(s.Owner).up)
	}
}

// TestEventGetsItsTurnBetweenConstantChecks: callers that check the endpoint without a pause never
// leave its mutex free, so an event that only tried to lock it would never be handled.
func TestEventGetsItsTurnBetweenConstantChecks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		c := m.start(t)
		s := m.wanted("a", 2)
		e, err := c.Create(t.Context(), s, false)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				for ctx.Err() == nil {
					if leave, err := c.locks.Lock(ctx, s.Owner); err == nil {
						time.Sleep(eventPatience / 10) // a check takes this long
						leave()
					}
				}
			})
		}
		synctest.Wait()
		m.deviceOf(s.Owner).up = false
		if again, err := c.LinkChanged(ctx, e.Device.HostIndex, nothing); err != nil || again || !m.deviceOf(s.Owner).up {
			t.Errorf("again %v, %v, up %v", again, err, m.deviceOf(s.Owner).up)
		}
		cancel()
		wg.Wait()
	})
}

func TestChangedAttachmentIsRepairedAndCounted(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	var heard []string
	c.cfg.Repaired = func(e endpoint.Endpoint, d endpoint.Difference, err error) {
		heard = append(heard, fmt.Sprintf("%s %d %s %v", e.Spec.Owner, e.Slot, d.Subject, err))
	}
	s := m.wanted("a", 2)
	e, err := c.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	if h, ok := c.HolderOf(s.Addrs[0]); !ok || h.Slot != e.Slot {
		t.Errorf("the address belongs to %+v, %v", h, ok)
	}
	if ls, ok := c.LabelsOf(e.Identity.Number); !ok || len(ls) != len(e.Identity.Labels) {
		t.Errorf("labels of identity %d: %v, %v", e.Identity.Number, ls, ok)
	}
	for _, index := range []uint32{e.Device.HostIndex, 4711} {
		if _, err := c.LinkChanged(t.Context(), index, nothing); err != nil {
			t.Fatal(err)
		}
	}
	if m.count("repair device") != 0 {
		t.Error("a device without a difference was repaired")
	}
	m.deviceOf(s.Owner).filtered = false
	if _, err := c.LinkChanged(t.Context(), e.Device.HostIndex, nothing); err != nil {
		t.Fatal(err)
	}
	if !m.deviceOf(s.Owner).filtered || c.Counts().Repairs != 1 {
		t.Errorf("filtered %v, %d repairs", m.deviceOf(s.Owner).filtered, c.Counts().Repairs)
	}
	if want := []string{fmt.Sprintf("%s %d filter <nil>", s.Owner, e.Slot)}; !slices.Equal(heard, want) {
		t.Errorf("heard %q, want %q", heard, want)
	}
	m.removeNamespace(s.Netns)
	if _, err := c.LinkChanged(t.Context(), e.Device.HostIndex, nothing); err != nil {
		t.Fatal(err)
	}
	settle(t, c)
	m.holds(t, c, 0)
}
