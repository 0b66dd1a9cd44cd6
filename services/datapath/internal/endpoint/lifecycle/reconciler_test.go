// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"errors"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// TestRestoreFindsWhatAKilledCreationLeft: a killed process leaves the results of its completed
// steps. The fake cannot be killed, but it can fail every operation from some point on, including
// the undo, which leaves the same state. It proves INV-22.
func TestRestoreFindsWhatAKilledCreationLeft(t *testing.T) {
	for i, op := range createOps {
		t.Run(op, func(t *testing.T) {
			m := newMachine()
			c := m.start(t)
			s := m.wanted("a", 2)
			dead := append([]string{"remove devices", "unpublish", "cut", "save deleted", "remove record", "release lease", "release identity"}, createOps[i:]...)
			for _, d := range dead {
				m.setFail(d, errTest)
			}
			if _, err := c.Create(t.Context(), s, false); err == nil {
				t.Fatal("create succeeded")
			}
			for _, d := range dead {
				m.setFail(d, nil)
			}
			again := m.start(t)
			settle(t, again)
			m.holds(t, again, 0)
		})
	}
}

func TestRestoreFindsWhatAKilledDeletionLeft(t *testing.T) {
	for i, op := range deleteOps {
		t.Run(op, func(t *testing.T) {
			m := newMachine()
			c := m.start(t)
			s := m.wanted("a", 2)
			if _, err := c.Create(t.Context(), s, false); err != nil {
				t.Fatal(err)
			}
			for _, d := range deleteOps[i:] {
				m.setFail(d, errTest)
			}
			if _, err := c.Delete(t.Context(), s.Owner); !errors.Is(err, errTest) {
				t.Fatalf("delete: %v", err)
			}
			for _, d := range deleteOps {
				m.setFail(d, nil)
			}
			// the caller got an error, so it deletes again
			again := m.start(t)
			if existed, err := again.Delete(t.Context(), s.Owner); err != nil || !existed {
				t.Fatalf("delete again: %v, %v", existed, err)
			}
			settle(t, again)
			m.holds(t, again, 0)
		})
	}
}

func TestCallsAreServedBeforeDevicesAreCompared(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	kept, removed, later := m.wanted("kept", 10), m.wanted("removed", 11), m.wanted("later", 12)
	for _, s := range []endpoint.Spec{kept, removed} {
		if _, err := c.Create(t.Context(), s, false); err != nil {
			t.Fatal(err)
		}
	}
	m.deviceOf(kept.Owner).filtered = false

	c = newNode(m.config())
	if err := c.Restore(t.Context(), discard); err != nil {
		t.Fatal(err)
	}
	if e, err := c.Create(t.Context(), later, false); err != nil || e.State != endpoint.Ready {
		t.Errorf("creation before the devices are compared: %v, %v", e.State, err)
	}
	if _, err := c.Create(t.Context(), kept, false); err != nil {
		t.Errorf("repeated creation of an existing endpoint: %v", err)
	}
	if _, err := c.Delete(t.Context(), removed.Owner); err != nil {
		t.Error(err)
	}
	if e, err := c.Get(kept.Owner); err != nil || e.State != endpoint.Restoring || m.deviceOf(kept.Owner).filtered {
		t.Errorf("before the devices are compared: %v, %v, attached %v", e.State, err, m.deviceOf(kept.Owner).filtered)
	}

	if err := c.Audit(t.Context(), true, discard); err != nil {
		t.Fatal(err)
	}
	for _, s := range []endpoint.Spec{kept, later} {
		if e, err := c.Get(s.Owner); err != nil || e.State != endpoint.Ready || !m.deviceOf(s.Owner).filtered {
			t.Errorf("%s after the devices are compared: %v, %v, attached %v", s.Owner, e.State, err,
				m.deviceOf(s.Owner).filtered)
		}
	}
	if _, err := c.Get(removed.Owner); !errors.Is(err, endpoint.ErrNotFound) {
		t.Errorf("the endpoint deleted before the devices are compared: %v", err)
	}
}

// TestRestoreFromEveryStateToEveryState: a start reconciles node and records to the same state, independent of the
// endpoint's history.
func TestRestoreFromEveryStateToEveryState(t *testing.T) {
	states := map[string]func(*testing.T, *machine, *node, endpoint.Spec){
		"absent":   func(*testing.T, *machine, *node, endpoint.Spec) {},
		"ready":    func(*testing.T, *machine, *node, endpoint.Spec) {},
		"unrouted": func(_ *testing.T, m *machine, _ *node, s endpoint.Spec) { m.deviceOf(s.Owner).up = false },
		"unfiltered": func(_ *testing.T, m *machine, _ *node, s endpoint.Spec) {
			m.deviceOf(s.Owner).filtered = false
		},
		"unpublished": func(_ *testing.T, m *machine, _ *node, s endpoint.Spec) { clear(m.slots) },
		"cut": func(_ *testing.T, m *machine, _ *node, s endpoint.Spec) {
			for i, e := range m.slots {
				e.Forwards = false
				m.slots[i] = e
			}
		},
		"container gone": func(_ *testing.T, m *machine, _ *node, s endpoint.Spec) { m.removeNamespace(s.Netns) },
		"other boot": func(_ *testing.T, m *machine, _ *node, s endpoint.Spec) {
			r := m.records[s.Owner]
			r.BootID = "another"
			m.records[s.Owner] = r
			clear(m.slots) // a reboot leaves nothing in the kernel
			m.removeNamespace(s.Netns)
		},
		"deleted": func(t *testing.T, _ *machine, c *node, s endpoint.Spec) {
			if _, err := c.Delete(t.Context(), s.Owner); err != nil {
				t.Fatal(err)
			}
		},
		"record lost": func(_ *testing.T, m *machine, _ *node, s endpoint.Spec) { delete(m.records, s.Owner) },
	}
	survives := map[string]bool{"ready": true, "unrouted": true, "unfiltered": true, "unpublished": true, "cut": true}
	for first := range states {
		for second, disturb := range states {
			t.Run(first+" then "+second, func(t *testing.T) {
				m := newMachine()
				s := m.wanted("a", 2)
				live := false
				for _, st := range []string{first, second} {
					c := m.start(t)
					if !live && st != "absent" {
						if m.namespaces[s.Netns] == nil {
							m.addNamespace(s.Netns)
						}
						if _, err := c.Create(t.Context(), m.wanted("a", 2), false); err != nil {
							t.Fatalf("create before %q: %v", st, err)
						}
					}
					if st == "absent" {
						if _, err := c.Delete(t.Context(), s.Owner); err != nil {
							t.Fatal(err)
						}
					}
					if st == second {
						disturb(t, m, c, s)
					} else {
						states[st](t, m, c, s)
					}
					live = survives[st]
					again := m.start(t)
					if _, err := again.Reconcile(t.Context()); err != nil {
						t.Fatal(err)
					}
					settle(t, again)
					n := 0
					if live {
						n = 1
					}
					m.holds(t, again, n)
					// and a second start finds no differences
					if left, err := newNode(m.config()).Inspect(t.Context()); err != nil || len(left) > 0 {
						t.Errorf("after %q a restart still finds %+v, %v", st, left, err)
					}
				}
			})
		}
	}
}

func TestInspectChangesNothing(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	m.deviceOf(s.Owner).filtered = false
	m.calls = nil
	findings, err := newNode(m.config()).Inspect(t.Context())
	if err != nil || len(findings) != 1 || findings[0].Subject != endpoint.SubjectFilter || findings[0].Repaired {
		t.Errorf("findings %+v, %v", findings, err)
	}
	for _, op := range m.calls {
		if !slices.Contains([]string{"load records", "list entries", "list devices", "check device", "open namespace"}, op) {
			t.Errorf("a look did %q", op)
		}
	}
	if m.deviceOf(s.Owner).filtered {
		t.Error("an audit without repair repaired the filter")
	}
}

func TestAuditLeavesAloneWhatChangesUnderIt(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	old := m.wanted("old", 2)
	if _, err := c.Create(t.Context(), old, false); err != nil {
		t.Fatal(err)
	}
	before := m.count("list entries")
	gate := make(chan struct{})
	m.mu.Lock()
	m.block["list devices"] = gate // right after the entries were listed
	m.mu.Unlock()
	audited := make(chan error, 1)
	go func() {
		audited <- c.Audit(t.Context(), true, func(f endpoint.Finding) error {
			t.Errorf("the audit finds %+v", f)
			return nil
		})
	}()
	servicetest.Eventually(t, "the entries are listed", func() bool { return m.count("list entries") > before })
	created, err := c.Create(t.Context(), m.wanted("new", 3), false)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Delete(t.Context(), old.Owner); err != nil {
		t.Fatal(err)
	}
	m.mu.Lock()
	delete(m.block, "list devices")
	m.mu.Unlock()
	close(gate)
	if err := <-audited; err != nil {
		t.Fatal(err)
	}
	if now, err := c.Get(created.Spec.Owner); err != nil || now.Slot != created.Slot {
		t.Errorf("the new endpoint has slot %d (%v), want %d", now.Slot, err, created.Slot)
	}
	settle(t, c)
	m.holds(t, c, 1)
}
