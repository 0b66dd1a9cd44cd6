// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// damage makes the owner's record unreadable.
func (m *machine) damage(o workload.Owner) (r endpoint.Record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	r = m.records[o]
	delete(m.records, o)
	file := o.Key() + ".ready.json"
	m.bad = append(m.bad, endpoint.Unreadable{File: file, Key: o.Key(), Err: fmt.Errorf("%s: %w", file, errTest)})
	return r
}

func (m *machine) repair(r endpoint.Record) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bad = nil
	if r.Spec.Owner != (workload.Owner{}) {
		m.records[r.Spec.Owner] = r
	}
}

// traffic returns the number of map entries, and how many of them forward.
func (m *machine) traffic() (slots, forward int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, e := range m.slots {
		slots++
		if e.Forwards {
			forward++
		}
	}
	return slots, forward
}

// damaged returns a node with two endpoints. After a restart, the record of the first is unreadable.
func damaged(t *testing.T) (m *machine, c *node, lost endpoint.Spec, record endpoint.Record) {
	t.Helper()
	m = newMachine()
	before := m.start(t)
	lost = m.wanted("lost", 2)
	for _, s := range []endpoint.Spec{lost, m.wanted("well", 3)} {
		if _, err := before.Create(t.Context(), s, false); err != nil {
			t.Fatal(err)
		}
	}
	record = m.damage(lost.Owner)
	c = m.start(t)
	for range 2 { // the second audit must not differ
		if err := c.Audit(t.Context(), true, func(endpoint.Finding) error { return nil }); err != nil {
			t.Fatal(err)
		}
		if n, err := c.Reconcile(t.Context()); err != nil || n != 0 {
			t.Errorf("the reconciliation with ipam released %d, %v", n, err)
		}
		settle(t, c)
	}
	if got, want := m.holding(c), (holding{Devices: 2, Slots: 2, Confirmed: 2, Identities: 2, Records: 1, Known: 1}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if _, forward := m.traffic(); forward != 1 {
		t.Errorf("%d slots forward, want only the endpoint with the readable record", forward)
	}
	return m, c, lost, record
}

func TestUnreadableRecordKeepsItsEndpointClosed(t *testing.T) {
	m, c, lost, _ := damaged(t)
	text := strings.Join(c.Counts().BadRecords, "\n")
	for _, want := range []string{lost.Owner.Key() + ".ready.json", "repair or remove the file", "10.0.0.2 fd00::2"} {
		if !strings.Contains(text, want) {
			t.Errorf("the status does not say %q:\n%s", want, text)
		}
	}
	if _, err := c.Create(t.Context(), lost, false); !errors.Is(err, endpoint.ErrUnreadable) || !strings.Contains(err.Error(), lost.Owner.Key()) {
		t.Errorf("an ADD of its owner: %v, want ErrUnreadable with the file", err)
	}
	taken := m.wanted("other", 4)
	taken.Addrs = lost.Addrs
	m.leases[taken.Owner] = lease{addrs: taken.Addrs}
	if _, err := c.Create(t.Context(), taken, false); !errors.Is(err, endpoint.ErrAddressHeld) {
		t.Errorf("an ADD with its addresses: %v, want ErrAddressHeld", err)
	}
}

func TestDeletionResolvesAnUnreadableRecord(t *testing.T) {
	for name, del := range map[string]func(*node, workload.Owner) (bool, error){
		"by call": func(c *node, o workload.Owner) (bool, error) { return c.Delete(t.Context(), o) },
		"by spool": func(c *node, o workload.Owner) (bool, error) {
			var e entry
			e.there.Store(true)
			return c.DeleteSpooled(t.Context(), o, e.spooled())
		},
	} {
		t.Run(name, func(t *testing.T) {
			m, c, lost, _ := damaged(t)
			if existed, err := del(c, lost.Owner); !existed || err != nil {
				t.Fatalf("deleted %v, %v", existed, err)
			}
			settle(t, c)
			m.holds(t, c, 1)
			if bad := c.Counts().BadRecords; len(bad) != 0 {
				t.Errorf("still reported: %v", bad)
			}
			again := m.wanted("lost", 2)
			if _, err := c.Create(t.Context(), again, false); err != nil {
				t.Errorf("a new ADD of the owner: %v", err)
			}
			m.holds(t, c, 2)
		})
	}
}

func TestRepairedRecordBringsItsEndpointBack(t *testing.T) {
	m, c, lost, record := damaged(t)
	m.repair(record)
	if err := c.Audit(t.Context(), true, func(endpoint.Finding) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if e, err := c.Get(lost.Owner); err != nil || e.State != endpoint.Ready {
		t.Errorf("the endpoint is %v, %v, want it ready", e.State, err)
	}
	if slots, forward := m.traffic(); slots != 2 || forward != 2 {
		t.Errorf("%d of %d slots forward, want 2 of 2", forward, slots)
	}
	if bad := c.Counts().BadRecords; len(bad) != 0 {
		t.Errorf("still reported: %v", bad)
	}
	m.holds(t, c, 2)
}

func TestRemovedRecordGivesItsEndpointUp(t *testing.T) {
	m, c, _, _ := damaged(t)
	m.repair(endpoint.Record{})
	if err := c.Audit(t.Context(), true, func(endpoint.Finding) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Reconcile(t.Context()); n != 1 || err != nil {
		t.Errorf("the reconciliation with ipam released %d, %v, want the lost endpoint's", n, err)
	}
	settle(t, c)
	m.holds(t, c, 1)
}

// TestContainerOfAnUnreadableRecordGoes: once the container of an unreadable record is gone, its kernel state is
// removed. Its addresses stay leased until its owner is known.
func TestContainerOfAnUnreadableRecordGoes(t *testing.T) {
	m, c, lost, _ := damaged(t)
	m.removeNamespace(lost.Netns)
	if err := c.Audit(t.Context(), true, func(endpoint.Finding) error { return nil }); err != nil {
		t.Fatal(err)
	}
	if slots, forward := m.traffic(); slots != 1 || forward != 1 {
		t.Errorf("%d of %d slots forward, want 1 of 1", forward, slots)
	}
	if n, err := c.Reconcile(t.Context()); n != 0 || err != nil {
		t.Errorf("the reconciliation with ipam released %d, %v", n, err)
	}
	if existed, err := c.Delete(t.Context(), lost.Owner); !existed || err != nil {
		t.Errorf("its DEL: %v, %v", existed, err)
	}
	settle(t, c)
	m.holds(t, c, 1)
}

// TestUnreadableFileOfNoOwnerHoldsWhatIsUnknown: an unreadable file without an owner's name may belong to any unknown
// endpoint, so unknown endpoints stay.
func TestUnreadableFileOfNoOwnerHoldsWhatIsUnknown(t *testing.T) {
	m, _, _, record := damaged(t)
	m.bad[0].Key, m.bad[0].File = "", "x.json"
	c := m.start(t)
	if n, err := c.Reconcile(t.Context()); err != nil || n != 0 {
		t.Errorf("the reconciliation with ipam released %d, %v", n, err)
	}
	if slots, forward := m.traffic(); slots != 2 || forward != 1 {
		t.Errorf("%d of %d slots forward, want 1 of 2", forward, slots)
	}
	m.repair(record) // renamed to its proper name
	if err := c.Audit(t.Context(), true, func(endpoint.Finding) error { return nil }); err != nil {
		t.Fatal(err)
	}
	m.holds(t, c, 2)
	if slots, forward := m.traffic(); slots != 2 || forward != 2 {
		t.Errorf("%d of %d slots forward, want 2 of 2", forward, slots)
	}
}

// TestUnreadableRecordIsReportedAndTheRestRestored proves INV-43.
func TestUnreadableRecordIsReportedAndTheRestRestored(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	if _, err := c.Create(t.Context(), m.wanted("a", 2), false); err != nil {
		t.Fatal(err)
	}
	m.bad = []endpoint.Unreadable{{File: "x.json", Err: errTest}}
	again := m.start(t)
	if n := again.Counts(); n.ByState[endpoint.Ready] != 1 || len(n.BadRecords) != 1 {
		t.Errorf("%+v", n)
	}
}
