// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// TestIdentityIsReleasedBeforeTheAddressesAndBoth: while sluice-ipam knows an owner, Reconcile finds what a killed
// process left of it. So the identity is released first, and the record that names both is removed last.
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
	m.leases[leased] = lease{} // lease of an ADD that has not reached the datapath yet
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
