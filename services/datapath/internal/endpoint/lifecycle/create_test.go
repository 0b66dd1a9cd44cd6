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
