// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// all operations of a creation, and of a deletion, in order
var (
	createOps = []string{"open namespace", "save creating", "confirm", "resolve", "create device", "configure", "publish", "attach", "activate", "save ready"}
	deleteOps = []string{"cut", "unpublish", "save deleted"}
)

func TestCreateMakesEverythingInOrder(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	m.calls = nil
	e, err := c.Create(t.Context(), m.wanted("a", 2), false)
	if err != nil {
		t.Fatal(err)
	}
	for _, order := range [][]string{
		{"open namespace", "save creating", "confirm", "publish", "attach", "activate", "save ready"},
		{"save creating", "resolve", "publish"}, // concurrent
		{"save creating", "create device", "configure", "publish"},
	} {
		if got := slices.DeleteFunc(slices.Clone(m.calls), func(op string) bool { return !slices.Contains(order, op) }); !slices.Equal(got, order) {
			t.Errorf("order %v, want %v", got, order)
		}
	}
	if len(m.calls) != len(createOps) {
		t.Errorf("it did %v, want %v", m.calls, createOps)
	}
	if e.State != endpoint.Ready || e.Slot == 0 || e.Device.MTU != 1500 || len(e.Device.HostName) != 13 || e.Device.MAC[0]&1 != 0 {
		t.Errorf("endpoint %+v", e)
	}
	m.holds(t, c, 1)
}

func TestCreateUndoesEverythingWhicheverStepFails(t *testing.T) {
	for _, op := range createOps {
		t.Run(op, func(t *testing.T) {
			m := newMachine()
			c := m.start(t)
			s := m.wanted("a", 2)
			m.setFail(op, errTest)
			if _, err := c.Create(t.Context(), s, false); !errors.Is(err, errTest) {
				t.Fatalf("create: %v", err)
			}
			m.setFail(op, nil)
			settle(t, c)
			m.holds(t, c, 0)
			// and nothing prevents the next attempt
			if _, err := c.Create(t.Context(), m.wanted("a", 2), false); err != nil {
				t.Fatalf("the next attempt: %v", err)
			}
			m.holds(t, c, 1)
		})
	}
}

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

// TestDeletionWorksWithEveryServiceDownAndReleasesOverRestarts proves INV-21.
func TestDeletionWorksWithEveryServiceDownAndReleasesOverRestarts(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	m.setFail("release lease", endpoint.ErrUnavailable)
	m.setFail("release identity", endpoint.ErrUnavailable)
	if existed, err := c.Delete(t.Context(), s.Owner); err != nil || !existed {
		t.Fatalf("delete: %v, %v", existed, err)
	}
	if err := c.releaseAll(t.Context()); !errors.Is(err, endpoint.ErrUnavailable) {
		t.Fatalf("release: %v", err)
	}
	if n := c.Counts().PendingReleases; n != 1 {
		t.Fatalf("%d pending releases, want 1", n)
	}
	again := m.start(t)
	m.setFail("release lease", nil)
	m.setFail("release identity", nil)
	settle(t, again)
	m.holds(t, again, 0)
}

// While sluice-ipam knows an owner, Reconcile finds what a killed process left of it. So the
// identity is released first, and the record that names both is removed last.
func TestIdentityIsReleasedBeforeTheAddressesAndBoth(t *testing.T) {
	order := []string{"release identity", "release lease", "remove record"}
	only := func(calls []string) []string {
		return slices.DeleteFunc(slices.Clone(calls), func(op string) bool { return !slices.Contains(order, op) })
	}
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Delete(t.Context(), s.Owner); err != nil {
		t.Fatal(err)
	}
	m.calls = nil
	if err := c.releaseAll(t.Context()); err != nil {
		t.Fatal(err)
	}
	if got := only(m.calls); !slices.Equal(got, order) {
		t.Errorf("release of a deleted endpoint: %v, want %v", got, order)
	}

	// A power failure lost the record: only the listing of sluice-ipam names the owner.
	if _, err := c.Create(t.Context(), m.wanted("b", 3), false); err != nil {
		t.Fatal(err)
	}
	m.records = map[workload.Owner]endpoint.Record{}
	restarted := m.start(t)
	m.calls = nil
	if n, err := restarted.Reconcile(t.Context()); err != nil || n != 1 {
		t.Fatalf("reconcile: %d, %v", n, err)
	}
	if got := only(m.calls); !slices.Equal(got, order[:2]) {
		t.Errorf("release of an owner without a record: %v, want %v", got, order[:2])
	}
}

func TestReleasesRetryUntilTheServiceIsBack(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for _, work := range []func(context.Context) error{c.Releases, c.Reaper.Run} {
		wg.Go(func() {
			if err := work(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("background work ended with %v", err)
			}
		})
	}
	defer wg.Wait()
	defer cancel()
	m.setFail("release identity", endpoint.ErrUnavailable)
	if _, err := c.Delete(t.Context(), s.Owner); err != nil {
		t.Fatal(err)
	}
	servicetest.Eventually(t, "three attempts to release the identity",
		func() bool { return m.count("release identity") >= 3 })
	m.setFail("release identity", nil)
	servicetest.Eventually(t, "nothing is held", func() bool { return m.holding(c) == holding{} })
}

func (m *machine) count(op string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := 0
	for _, c := range m.calls {
		if c == op {
			n++
		}
	}
	return n
}

func TestDeletionEndsACreationUnderWay(t *testing.T) {
	for _, op := range createOps {
		if op == "open namespace" {
			continue // nothing exists yet: see the next test
		}
		t.Run(op, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := newMachine()
				c := m.start(t)
				s := m.wanted("a", 2)
				gate := make(chan struct{})
				m.mu.Lock()
				m.block[op] = gate
				m.mu.Unlock()
				created := make(chan error, 1)
				go func() {
					_, err := c.Create(t.Context(), s, false)
					created <- err
				}()
				// before the creation blocks, it may end without reaching that point
				servicetest.Eventually(t, "the creation waits", func() bool {
					m.mu.Lock()
					defer m.mu.Unlock()
					return m.held[op]
				})
				deleted := make(chan error, 1)
				go func() {
					_, err := c.Delete(t.Context(), s.Owner)
					deleted <- err
				}()
				synctest.Wait() // the deletion waits
				m.mu.Lock()
				delete(m.block, op)
				m.mu.Unlock()
				close(gate)
				if err := <-created; !errors.Is(err, endpoint.ErrDeleted) && !(op == "save ready" && err == nil) {
					t.Errorf("create: %v, want ErrDeleted", err)
				}
				if err := <-deleted; err != nil {
					t.Errorf("delete: %v", err)
				}
				settle(t, c)
				m.holds(t, c, 0)
			})
		})
	}
}

// TestSameContentAgainIsTheSameAndOtherContentIsRefused proves INV-40.
func TestSameContentAgainIsTheSameAndOtherContentIsRefused(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	s.Labels = []label.Label{{Source: "cni", Key: "a", Value: "1"}, {Source: "cni", Key: "b", Value: "2"}}
	s.Ports = []workload.NamedPort{{Name: "http", Port: 80, Protocol: 6}, {Name: "dns", Port: 53, Protocol: 17}}
	first, err := c.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	same := s
	same.Labels = []label.Label{s.Labels[1], s.Labels[0]}
	same.Ports = []workload.NamedPort{s.Ports[1], s.Ports[0]}
	same.Addrs = []netip.Addr{s.Addrs[1], s.Addrs[0]}
	same.LeaseExpiry = time.Now().Add(time.Hour)
	if e, err := c.Create(t.Context(), same, false); err != nil || e.Slot != first.Slot || !e.Created.Equal(first.Created) {
		t.Errorf("the same content in another order: %+v, %v", e, err)
	}
	for name, change := range map[string]func(*endpoint.Spec){
		"addresses":   func(s *endpoint.Spec) { s.Addrs = s.Addrs[:1] },
		"labels":      func(s *endpoint.Spec) { s.Labels = s.Labels[:1] },
		"named_ports": func(s *endpoint.Spec) { s.Ports = nil },
		"mtu":         func(s *endpoint.Spec) { s.MTU = 1400 },
		"mac":         func(s *endpoint.Spec) { s.MAC = endpoint.MAC{2, 0, 0, 0, 0, 1} },
	} {
		other := s
		change(&other)
		var exists *endpoint.ExistsError
		if _, err := c.Create(t.Context(), other, false); !errors.Is(err, endpoint.ErrExists) ||
			!errors.As(err, &exists) || !slices.Equal(exists.Fields, []string{name}) {
			t.Errorf("different %s: %v, want ErrExists that names the field", name, err)
		}
	}
	m.holds(t, c, 1)
}

func TestOwnerWhoseNamespaceWasReplacedGetsANewEndpoint(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	first, err := c.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	m.removeNamespace(s.Netns)
	m.addNamespace(s.Netns)
	second, err := c.Create(t.Context(), s, false)
	if err != nil || second.Slot == first.Slot {
		t.Fatalf("in the new namespace: %+v, %v", second, err)
	}
	settle(t, c)
	m.holds(t, c, 1)
}

func TestAddressOfALiveEndpointIsRefused(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	if _, err := c.Create(t.Context(), m.wanted("a", 2), false); err != nil {
		t.Fatal(err)
	}
	thief := m.wanted("b", 2)
	if _, err := c.Create(t.Context(), thief, false); !errors.Is(err, endpoint.ErrAddressHeld) {
		t.Fatalf("the same address: %v, want ErrAddressHeld", err)
	}
	settle(t, c)
	m.holds(t, c, 1)
}

func TestExpiredLeaseIsRefusedAndLeavesNothing(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	s.LeaseExpiry = time.Now().Add(-time.Second)
	if _, err := c.Create(t.Context(), s, false); !errors.Is(err, endpoint.ErrLease) {
		t.Errorf("lease expired by the caller's clock: %v, want ErrLease", err)
	}
	delete(m.leases, s.Owner)
	s.LeaseExpiry = time.Time{}
	if _, err := c.Create(t.Context(), s, false); !errors.Is(err, endpoint.ErrLease) {
		t.Errorf("lease expired in sluice-ipam: %v, want ErrLease", err)
	}
	settle(t, c)
	m.holds(t, c, 0)
}

// TestLeaseAndIdentityAreAskedForTogether: the two calls run concurrently, and an error of one ends
// the creation without waiting for the other.
func TestLeaseAndIdentityAreAskedForTogether(t *testing.T) {
	for _, c := range []struct {
		name  string
		lease bool // the lease exists
		fail  error
		want  error
		holds int
	}{
		{"both answer", true, nil, nil, 1},
		{"the lease is lost", false, nil, endpoint.ErrLease, 0},
		{"the identity is refused", true, endpoint.ErrExhausted, endpoint.ErrExhausted, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMachine()
			core := m.start(t)
			s := m.wanted("a", 2)
			if !c.lease {
				delete(m.leases, s.Owner)
			}
			m.setFail("resolve", c.fail)
			confirm, resolve := make(chan struct{}), make(chan struct{})
			m.block["confirm"], m.block["resolve"] = confirm, resolve
			created := make(chan error, 1)
			go func() {
				_, err := core.Create(context.Background(), s, false)
				created <- err
			}()
			servicetest.Eventually(t, "both services are called", func() bool {
				m.mu.Lock()
				defer m.mu.Unlock()
				return m.held["confirm"] && m.held["resolve"]
			})
			if c.fail == nil { // otherwise the error cancels the other call
				close(confirm)
			}
			if c.lease {
				close(resolve)
			}
			if err := <-created; !errors.Is(err, c.want) {
				t.Errorf("Create: %v, want %v", err, c.want)
			}
			m.mu.Lock()
			clear(m.block)
			m.mu.Unlock()
			settle(t, core)
			m.holds(t, core, c.holds)
		})
	}
}

func TestBadRequestsNameTheField(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	for field, change := range map[string]func(*endpoint.Spec){
		"owner.container_id":   func(s *endpoint.Spec) { s.Owner.ContainerID = "../x" },
		"owner.interface_name": func(s *endpoint.Spec) { s.Owner.Interface = "sixteen-bytes-ab" },
		"network_namespace":    func(s *endpoint.Spec) { s.Netns = "relative" },
		"addresses":            func(s *endpoint.Spec) { s.Addrs = []netip.Addr{netip.MustParseAddr("192.0.2.1")} },
		"mtu":                  func(s *endpoint.Spec) { s.MTU = 1000 },
		"mac":                  func(s *endpoint.Spec) { s.MAC = endpoint.MAC{1, 0, 0, 0, 0, 1} },
	} {
		s := m.wanted("a", 2)
		change(&s)
		var fe *endpoint.FieldError
		if _, err := c.Create(t.Context(), s, false); !errors.As(err, &fe) || fe.Field != field {
			t.Errorf("bad %s: %v", field, err)
		}
	}
	m.holds(t, c, 0)
}

func TestValidateOnlyChangesNothing(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	m.calls = nil
	e, err := c.Create(t.Context(), s, true)
	if err != nil || e.Slot != 0 || e.Device.HostIndex != 0 {
		t.Errorf("%+v, %v", e, err)
	}
	if !slices.Equal(m.calls, []string{"open namespace"}) {
		t.Errorf("it did %v", m.calls)
	}
	m.holds(t, c, 0)
}

// A start reconciles node and records to the same state, independent of the endpoint's history.
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

func (m *machine) deviceOf(o workload.Owner) *device { return m.devices[m.records[o].Device.HostIndex] }

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

func TestReclaimDeletesWhatNobodyOwns(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	k8s := endpoint.Scope{Manager: "cni", Network: "k8s"}
	var keep workload.Owner
	for i := range byte(5) {
		s := m.wanted(fmt.Sprint("p", i), 2+i)
		s.Manager, s.Network = k8s.Manager, k8s.Network
		if _, err := c.Create(t.Context(), s, false); err != nil {
			t.Fatal(err)
		}
		keep = s.Owner
	}
	valid := []workload.Owner{keep, {ContainerID: "other", Interface: "eth0"}}
	reclaimed, err := c.Reclaim(t.Context(), k8s, valid, false)
	if err != nil || len(reclaimed) != 4 || slices.Contains(reclaimed, keep) {
		t.Fatalf("reclaimed %v, %v", reclaimed, err)
	}
	settle(t, c)
	m.holds(t, c, 1)
}

// TestReclaimStaysWithinManagerAndNetwork: the list of one network does not concern the endpoints
// of other networks or other managers.
func TestReclaimStaysWithinManagerAndNetwork(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	scopes := []endpoint.Scope{{Manager: "cni", Network: "k8s"}, {Manager: "cni", Network: "podman"}, {Manager: "nomad", Network: "k8s"}, {Manager: "nomad", Network: ""}, {Manager: "", Network: ""}}
	for i, s := range scopes {
		spec := m.wanted(fmt.Sprint("p", i), byte(2+i))
		spec.Manager, spec.Network = s.Manager, s.Network
		if _, err := c.Create(t.Context(), spec, false); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range []endpoint.Scope{{Manager: "cni", Network: ""}, {Manager: "cni", Network: "other"}, {Manager: "", Network: "k8s"}, {Manager: "", Network: ""}} {
		if got, err := c.Reclaim(t.Context(), s, nil, false); err != nil && s.Manager != "" || len(got) > 0 {
			t.Errorf("%+v: reclaimed %v, %v", s, got, err)
		}
	}
	for i, s := range scopes[:4] {
		want := []workload.Owner{{ContainerID: fmt.Sprint("p", i), Interface: "eth0"}}
		if got, err := c.Reclaim(t.Context(), s, nil, false); err != nil || !slices.Equal(got, want) {
			t.Errorf("%+v: reclaimed %v, %v, want %v", s, got, err, want)
		}
	}
	settle(t, c)
	m.holds(t, c, 1)
}

// TestUnknownManagerIsLearntFromARepetition: an endpoint of an earlier version has no manager, and
// setting it does not change the content.
func TestUnknownManagerIsLearntFromARepetition(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	s.Manager, s.Network, s.Pod = "cni", "k8s", workload.PodReference{Namespace: "shop", Name: "web-0", UID: "1"}
	if _, err := c.Create(t.Context(), s, true); err != nil {
		t.Fatal(err)
	}
	if e, err := c.Get(s.Owner); err != nil || e.Spec.Manager != "" {
		t.Errorf("validate only set the manager: %+v, %v", e.Spec, err)
	}
	e, err := c.Create(t.Context(), s, false)
	if err != nil || e.Spec.Manager != "cni" || e.Spec.Network != "k8s" || e.Spec.Pod != s.Pod {
		t.Fatalf("the repeated creation returned %+v, %v", e.Spec, err)
	}
	if e, err = m.start(t).Get(s.Owner); err != nil || e.Spec.Manager != "cni" || e.Spec.Pod != s.Pod {
		t.Errorf("after a restart: %+v, %v", e.Spec, err)
	}
	for _, change := range []func(*endpoint.Spec){
		func(s *endpoint.Spec) { s.Manager = "nomad" }, func(s *endpoint.Spec) { s.Network = "podman" }, func(s *endpoint.Spec) { s.Pod.UID = "2" },
	} {
		other := s
		change(&other)
		if _, err := c.Create(t.Context(), other, false); !errors.Is(err, endpoint.ErrExists) {
			t.Errorf("%s/%s %v: %v, want ErrExists", other.Manager, other.Network, other.Pod, err)
		}
	}
	m.holds(t, c, 1)
}

// TestReconcileReleasesOnlyOwnersNobodyKnows proves INV-11.
func TestReconcileReleasesOnlyOwnersNobodyKnows(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	lost, leased := workload.Owner{ContainerID: "lost", Interface: "eth0"}, workload.Owner{ContainerID: "adding", Interface: "eth0"}
	m.leases[lost] = lease{confirmed: true}
	m.identities[lost] = true
	m.leases[leased] = lease{} // an ADD that has not reached the datapath yet
	foreign := workload.Owner{ContainerID: "nomad", Interface: "eth0"}
	m.leases[foreign], m.identities[foreign] = lease{confirmed: true, foreign: true}, true
	if n, err := c.Reconcile(t.Context()); err != nil || n != 1 {
		t.Errorf("released %d, %v", n, err)
	}
	if _, ok := m.leases[leased]; !ok {
		t.Error("an unconfirmed lease was released")
	}
	if _, ok := m.leases[foreign]; !ok || !m.identities[foreign] {
		t.Error("a lease of another manager was released")
	}
	delete(m.leases, foreign)
	delete(m.identities, foreign)
	m.holds(t, c, 1)
}

// TestReconcileClaimsWhatIpamHasForgotten: if sluice-ipam loses its state while endpoints live, it
// must not lease their addresses to others.
func TestReconcileClaimsWhatIpamHasForgotten(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	specs := []endpoint.Spec{m.wanted("a", 2), m.wanted("b", 3), m.wanted("c", 4)}
	for _, s := range specs {
		if _, err := c.Create(t.Context(), s, false); err != nil {
			t.Fatal(err)
		}
	}
	clear(m.leases)
	thief := workload.Owner{ContainerID: "thief", Interface: "eth0"} // an ADD that was faster than the reconciliation
	m.leases[thief] = lease{addrs: specs[2].Addrs}
	if n, err := c.Reconcile(t.Context()); n != 0 || !errors.Is(err, endpoint.ErrLease) || !strings.Contains(err.Error(), "10.0.0.4") {
		t.Errorf("released %d, %v, want 0 and an error for the address that another owner has", n, err)
	}
	for _, s := range specs[:2] {
		if l := m.leases[s.Owner]; !l.confirmed || !slices.Equal(l.addrs, s.Addrs) {
			t.Errorf("%s has %+v, want its addresses confirmed", s.Owner, l)
		}
	}
	if warnings := c.Counts().Unrepaired; len(warnings) != 1 || !strings.Contains(warnings[0], specs[2].Owner.String()) {
		t.Errorf("warnings: %q", warnings)
	}
	delete(m.leases, thief) // its creation failed
	if n, err := c.Reconcile(t.Context()); n != 0 || err != nil || len(c.Counts().Unrepaired) != 0 {
		t.Errorf("released %d, %v, warnings %q", n, err, c.Counts().Unrepaired)
	}
	m.holds(t, c, 3)
	m.calls = nil
	if _, err := c.Reconcile(t.Context()); err != nil || slices.Contains(m.calls, "claim") {
		t.Errorf("with nothing lost: %v, calls %v", err, m.calls)
	}
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

func TestWatchShowsALife(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	sub, err := c.Hub().Subscribe(nil)
	if err != nil {
		t.Fatal(err)
	}
	defer sub.Close()
	s := m.wanted("a", 2)
	next := func() watch.Event[workload.Owner, endpoint.Endpoint] {
		t.Helper()
		e, err := sub.Next(servicetest.Context(t))
		if err != nil {
			t.Fatal(err)
		}
		return e
	}
	if e := next(); !e.SnapshotComplete {
		t.Fatalf("first event %+v, want the end of an empty listing", e)
	}
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	if e := next(); e.Kind != watch.Upsert || e.Value.State != endpoint.Ready {
		t.Errorf("after the creation %+v", e)
	}
	if _, err := c.Delete(t.Context(), s.Owner); err != nil {
		t.Fatal(err)
	}
	if e := next(); e.Kind != watch.Delete || e.Key != s.Owner {
		t.Errorf("after the deletion %+v", e)
	}
}

func TestManyOwnersAtOnceLeaveNothing(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	var specs []endpoint.Spec
	for i := range byte(16) {
		specs = append(specs, m.wanted(fmt.Sprint("p", i), 2+i))
	}
	var wg sync.WaitGroup
	for _, s := range specs {
		for range 2 { // creations and deletions of one owner collide
			wg.Go(func() {
				for range 20 {
					m.mu.Lock()
					m.leases[s.Owner] = lease{addrs: s.Addrs, confirmed: m.leases[s.Owner].confirmed}
					m.mu.Unlock()
					if _, err := c.Create(context.Background(), s, false); err != nil && !errors.Is(err, endpoint.ErrDeleted) && !errors.Is(err, endpoint.ErrLease) {
						t.Errorf("create %s: %v", s.Owner, err)
					}
					if _, err := c.Delete(context.Background(), s.Owner); err != nil {
						t.Errorf("delete %s: %v", s.Owner, err)
					}
				}
			})
		}
	}
	wg.Wait()
	settle(t, c)
	m.holds(t, c, 0)
}

func TestWithoutIdentityTheNumberOfAnEqualEndpointIsTaken(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	first := m.wanted("a", 2)
	first.Ports = []workload.NamedPort{{Name: "http", Port: 80, Protocol: 6}}
	if _, err := c.Create(t.Context(), first, false); err != nil {
		t.Fatal(err)
	}
	m.setFail("resolve", endpoint.ErrUnavailable)
	equal := m.wanted("b", 3)
	equal.Labels, equal.Ports = first.Labels, first.Ports
	e, err := c.Create(t.Context(), equal, false)
	if err != nil || e.Identity.Number != 1000 || !c.RefreshDue() {
		t.Fatalf("an endpoint of equal labels and ports: %+v, %v, refresh due %v", e.Identity, err, c.RefreshDue())
	}
	other := m.wanted("c", 4)
	other.Labels = first.Labels // but no port, so another label set
	if _, err := c.Create(t.Context(), other, false); !errors.Is(err, endpoint.ErrUnavailable) {
		t.Errorf("an endpoint of other ports: %v, want ErrUnavailable", err)
	}
	if _, err := c.Refresh(t.Context()); err == nil || !c.RefreshDue() {
		t.Errorf("refresh without the service: %v, due %v", err, c.RefreshDue())
	}
	m.setFail("resolve", nil)
	if _, err := c.Refresh(t.Context()); err != nil || c.RefreshDue() {
		t.Errorf("refresh: %v, due %v", err, c.RefreshDue())
	}
	settle(t, c)
	m.holds(t, c, 2)
}

// TestWithoutAnAnswerOfIdentityTheNumberOfAnEqualEndpointIsTaken: a stopped process accepts
// connections and answers nothing. The fake clock advances until the creation stops waiting.
func TestWithoutAnAnswerOfIdentityTheNumberOfAnEqualEndpointIsTaken(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		c := m.start(t)
		first := m.wanted("a", 2)
		if _, err := c.Create(t.Context(), first, false); err != nil {
			t.Fatal(err)
		}
		m.mu.Lock()
		m.block["resolve"] = make(chan struct{})
		m.mu.Unlock()
		equal := m.wanted("b", 3)
		equal.Labels = first.Labels
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		began := time.Now()
		e, err := c.Create(ctx, equal, false)
		if err != nil || e.Identity.Number != 1000 || !c.RefreshDue() || time.Since(began) != standInAfter {
			t.Errorf("an endpoint of equal labels and ports: %+v, %v, refresh due %v, after %s", e.Identity, err,
				c.RefreshDue(), time.Since(began))
		}
	})
}

// TestCreationAnswersBeforeTheDeadline: the caller gets the reason for the wait, because the answer
// comes before the caller's deadline.
func TestCreationAnswersBeforeTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine()
		p := &fakePolicies{await: func(ctx context.Context, _ uint32) error {
			<-ctx.Done()
			return fmt.Errorf("%w: the policy service is unavailable", endpoint.ErrUnavailable)
		}}
		c := m.evaluated(t, p)
		for _, timeout := range []time.Duration{time.Second, 30 * time.Second} {
			ctx, cancel := context.WithTimeout(t.Context(), timeout)
			_, err := c.Create(ctx, m.wanted("a", 2), false)
			if !errors.Is(err, endpoint.ErrUnavailable) || !strings.Contains(err.Error(), "the policy service is unavailable") ||
				ctx.Err() != nil {
				t.Errorf("within %s: %v, context %v, want the reason before the deadline", timeout, err, ctx.Err())
			}
			cancel()
			settle(t, c)
		}
	})
}

func TestRefreshHoldsIdentitiesAndAdoptsNewNumbers(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	s := m.wanted("a", 2)
	e, err := c.Create(t.Context(), s, false)
	if err != nil {
		t.Fatal(err)
	}
	clear(m.identities) // the service has lost its state
	if n, err := c.Refresh(t.Context()); err != nil || n != 0 {
		t.Errorf("the same number: %d changed, %v", n, err)
	}
	m.holds(t, c, 1)

	m.number = 2000
	if n, err := c.Refresh(t.Context()); err != nil || n != 1 {
		t.Errorf("another number: %d changed, %v", n, err)
	}
	now, err := c.Get(s.Owner)
	if err != nil || now.Identity.Number != 2000 || m.slots[e.Slot].Identity != 2000 || m.records[s.Owner].Identity.Number != 2000 {
		t.Errorf("endpoint %+v, slot %+v, %v", now.Identity, m.slots[e.Slot], err)
	}
	m.setFail("resolve", endpoint.ErrUnavailable)
	if _, err := c.Refresh(t.Context()); !errors.Is(err, endpoint.ErrUnavailable) {
		t.Errorf("without the service: %v", err)
	}
	if now, err := c.Get(s.Owner); err != nil || now.State != endpoint.Ready {
		t.Errorf("without the service: endpoint %+v, %v", now, err)
	}
}
