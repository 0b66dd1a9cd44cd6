// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// fakeHostPorts stores the claimed ports by owner, and whether they are forwarded. It lives as long
// as a process.
type fakeHostPorts struct {
	*machine
	led map[workload.Owner]bool
	// Tenants of namespaces. If narrow is set, only tenants with the label may have host ports.
	tenants map[string]shares.Tenant
	narrow  bool
}

func (f fakeHostPorts) Check(endpoint.Spec) error { return f.free("check ports") }

// free runs an operation that changes nothing.
func (f fakeHostPorts) free(op string) error {
	err := f.do(op)
	if err == nil {
		f.mu.Unlock()
	}
	return err
}

func (f fakeHostPorts) Claim(s endpoint.Spec) error {
	if len(s.PortMappings) == 0 {
		return nil
	}
	if err := f.do("claim ports"); err != nil {
		return err
	}
	defer f.mu.Unlock()
	if f.narrow && !f.tenants[s.Pod.Namespace].HasLabel() {
		return fmt.Errorf("%w of %s", endpoint.ErrFull, s.Pod.Namespace)
	}
	f.led[s.Owner] = false
	return nil
}

func (f fakeHostPorts) SetTenant(namespace string, t shares.Tenant) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tenants[namespace] = t
}

func (f fakeHostPorts) Restore(rs []endpoint.Record) {
	for _, r := range rs {
		_ = f.Claim(r.Spec) // no test injects an error here
	}
}

func (f fakeHostPorts) Lead(_ context.Context, o workload.Owner) error {
	if err := f.do("lead ports"); err != nil {
		return err
	}
	defer f.mu.Unlock()
	f.led[o] = true
	return nil
}

func (f fakeHostPorts) LeadAll(context.Context) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for o := range f.led {
		f.led[o] = true
	}
}

func (f fakeHostPorts) Release(o workload.Owner) error {
	f.mu.Lock()
	_, ok := f.led[o]
	f.mu.Unlock()
	if !ok {
		return nil
	}
	if err := f.do("release ports"); err != nil {
		return err
	}
	defer f.mu.Unlock()
	delete(f.led, o)
	return nil
}

// startWithPorts is like start, but with host ports.
func (m *machine) startWithPorts(t *testing.T) (*node, fakeHostPorts) {
	t.Helper()
	ports := fakeHostPorts{machine: m, led: map[workload.Owner]bool{}, tenants: map[string]shares.Tenant{}}
	cfg := m.config()
	cfg.HostPorts = ports
	c := newNode(cfg)
	restore(t, c)
	return c, ports
}

// wantedWithPort is like wanted, but for an endpoint with a host port.
func (m *machine) wantedWithPort(name string, last byte) endpoint.Spec {
	s := m.wanted(name, last)
	s.PortMappings = []endpoint.PortMapping{{HostPort: 8080, ContainerPort: 80, Protocol: workload.TCP}}
	return s
}

var (
	portOps    = []string{"save creating", "claim ports", "activate", "lead ports", "save ready"}
	portDelOps = []string{"cut", "release ports", "unpublish", "save deleted"}
)

// only filters the calls of the machine: it returns the calls that are in ops.
func (m *machine) only(ops []string) []string {
	return slices.DeleteFunc(slices.Clone(m.calls), func(op string) bool { return !slices.Contains(ops, op) })
}

// TestHostPortsLeadToAWholeEndpointOnly: ports are forwarded only once the endpoint is reachable,
// and until just before its address can be reused.
func TestHostPortsLeadToAWholeEndpointOnly(t *testing.T) {
	m := newMachine()
	c, ports := m.startWithPorts(t)
	m.calls = nil
	s := m.wantedWithPort("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	want := []string{"claim ports", "save creating", "activate", "lead ports", "save ready"}
	if got := m.only(portOps); !slices.Equal(got, want) {
		t.Errorf("it did %v, want %v", got, want)
	}
	if !ports.led[s.Owner] {
		t.Error("its port is not forwarded to it")
	}
	m.calls = nil
	if _, err := c.Delete(t.Context(), s.Owner); err != nil {
		t.Fatal(err)
	}
	if got := m.only(portDelOps); !slices.Equal(got, portDelOps) {
		t.Errorf("the deletion called %v, want %v", got, portDelOps)
	}
	settle(t, c)
	m.holds(t, c, 0)
	if len(ports.led) > 0 {
		t.Errorf("its ports are still claimed: %v", ports.led)
	}
}

func TestFailedCreationGivesItsHostPortsUp(t *testing.T) {
	for _, op := range append(slices.Clone(createOps), "claim ports", "lead ports") {
		t.Run(op, func(t *testing.T) {
			m := newMachine()
			c, ports := m.startWithPorts(t)
			m.setFail(op, errTest)
			if _, err := c.Create(t.Context(), m.wantedWithPort("a", 2), false); !errors.Is(err, errTest) {
				t.Fatalf("create: %v", err)
			}
			m.setFail(op, nil)
			settle(t, c)
			m.holds(t, c, 0)
			if len(ports.led) > 0 {
				t.Errorf("its ports are still claimed: %v", ports.led)
			}
		})
	}
}

// TestHostPortsAreThereAgainAfterARestart: an endpoint has its host ports again. An endpoint whose
// creation or deletion was killed half-way has none.
func TestHostPortsAreThereAgainAfterARestart(t *testing.T) {
	m := newMachine()
	c, _ := m.startWithPorts(t)
	stays := m.wantedWithPort("stays", 2)
	if _, err := c.Create(t.Context(), stays, false); err != nil {
		t.Fatal(err)
	}
	killed := []string{
		"save ready", "cut", "release ports", "unpublish", "save deleted", "remove record", "remove devices",
	}
	for _, op := range killed {
		m.setFail(op, errTest)
	}
	if _, err := c.Create(t.Context(), m.wantedWithPort("killed", 3), false); err == nil {
		t.Fatal("create succeeded")
	}
	m.setFail("cut", nil)
	if _, err := c.Delete(t.Context(), stays.Owner); err == nil {
		t.Fatal("delete succeeded")
	}
	for _, op := range killed {
		m.setFail(op, nil)
	}
	c, ports := m.startWithPorts(t)
	settle(t, c)
	m.holds(t, c, 1)
	if want := map[workload.Owner]bool{stays.Owner: true}; !maps.Equal(ports.led, want) {
		t.Errorf("claimed ports: %v, want %v", ports.led, want)
	}
}

func TestHostPortsNeedServices(t *testing.T) {
	m := newMachine()
	c := m.start(t)
	for _, validateOnly := range []bool{true, false} {
		_, err := c.Create(t.Context(), m.wantedWithPort("a", 2), validateOnly)
		if !errors.Is(err, endpoint.ErrLoadBalancingOff) {
			t.Errorf("create: %v", err)
		}
	}
	m.holds(t, c, 0)
}

func TestValidateOnlyAsksForHostPortsAndKeepsNone(t *testing.T) {
	m := newMachine()
	c, ports := m.startWithPorts(t)
	s := m.wantedWithPort("a", 2)
	if _, err := c.Create(t.Context(), s, true); err != nil {
		t.Fatal(err)
	}
	m.setFail("check ports", errTest)
	if _, err := c.Create(t.Context(), s, true); !errors.Is(err, errTest) {
		t.Errorf("a port in use: %v", err)
	}
	m.holds(t, c, 0)
	if len(ports.led) > 0 {
		t.Errorf("claimed are %v", ports.led)
	}
}

// TestFirstPodOfALabelledTenantGetsItsHostPort: namespaces without the label have no share of host
// ports left. The datapath resolves the tenant before it rejects the port.
func TestFirstPodOfALabelledTenantGetsItsHostPort(t *testing.T) {
	m := newMachine()
	ports := fakeHostPorts{
		machine: m, led: map[workload.Owner]bool{}, tenants: map[string]shares.Tenant{}, narrow: true,
	}
	cfg := m.config()
	cfg.HostPorts = ports
	c := newNode(cfg)
	restore(t, c)
	for i, tenant := range []shares.Tenant{shares.Namespace("shop"), shares.Labelled("acme")} {
		m.tenant = tenant
		s := m.wantedWithPort(fmt.Sprint("pod", i), byte(20+i))
		s.Pod.Namespace, s.Pod.Name = "shop", "pod"
		_, err := c.Create(t.Context(), s, false)
		if full := errors.Is(err, endpoint.ErrFull); full == tenant.HasLabel() || err != nil && !full {
			t.Errorf("%s: %v", tenant, err)
		}
	}
}
