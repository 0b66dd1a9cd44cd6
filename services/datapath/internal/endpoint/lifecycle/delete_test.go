// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

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

func TestDeletionEndsACreationUnderWay(t *testing.T) {
	for _, op := range createOps {
		if op == "open namespace" {
			continue // the endpoint does not exist yet: see the next test
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

// TestReclaimStaysWithinManagerAndNetwork: Reclaim of one manager and network deletes no endpoint of
// another manager or network.
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
