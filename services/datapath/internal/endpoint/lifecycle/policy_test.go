// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// fakePolicies blocks creations until the test releases them.
type fakePolicies struct {
	mu      sync.Mutex
	await   func(ctx context.Context, identity uint32) error
	of      map[uint16]endpoint.Policy
	awaited []uint32
}

func (p *fakePolicies) Await(ctx context.Context, identity uint32) error {
	p.mu.Lock()
	p.awaited = append(p.awaited, identity)
	await := p.await
	p.mu.Unlock()
	if await == nil {
		return nil
	}
	return await(ctx, identity)
}

func (p *fakePolicies) Prepare(ctx context.Context, identity uint32) error {
	return p.Await(ctx, identity)
}

func (p *fakePolicies) Of(slot uint16) (endpoint.Policy, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	of, ok := p.of[slot]
	return of, ok
}

func (m *machine) evaluated(t *testing.T, p *fakePolicies) *node {
	t.Helper()
	cfg := m.config()
	cfg.Policies = p
	c := newNode(cfg)
	restore(t, c)
	return c
}

// TestCreationIsPublishedOnlyWhenItsPolicyIsInTheKernel proves INV-52.
func TestCreationIsPublishedOnlyWhenItsPolicyIsInTheKernel(t *testing.T) {
	m := newMachine()
	waits, goes := make(chan struct{}), make(chan struct{})
	p := &fakePolicies{of: map[uint16]endpoint.Policy{1: {Revision: 4, EgressTable: 16, IngressTable: 17, Epoch: 9}}}
	p.await = func(context.Context, uint32) error {
		close(waits)
		<-goes
		if len(m.slotsNow()) != 0 {
			t.Error("it is published before its policy tables exist")
		}
		return nil
	}
	c := m.evaluated(t, p)
	s := m.wanted("a", 2)
	done := make(chan error, 1)
	var e endpoint.Endpoint
	go func() {
		var err error
		e, err = c.Create(t.Context(), s, false)
		done <- err
	}()
	<-waits
	if got, err := c.Get(s.Owner); err != nil || got.State != endpoint.WaitingForPolicy {
		t.Errorf("while it waits: %v, %v", got.State, err)
	}
	if n := c.Counts().ByState[endpoint.WaitingForPolicy]; n != 1 {
		t.Errorf("%d wait", n)
	}
	close(goes)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if e.State != endpoint.Ready || e.Policy.Revision != 4 || e.Policy.EgressTable != 16 {
		t.Errorf("endpoint %+v", e)
	}
	if !m.recordOf(s.Owner).Evaluated {
		t.Error("the record does not have Evaluated set")
	}
	if !slices.Equal(p.awaited, []uint32{m.number}) {
		t.Errorf("awaited %v", p.awaited)
	}
}

func TestCreationWithoutItsPolicyIsUndone(t *testing.T) {
	for _, want := range []error{endpoint.ErrUnavailable, endpoint.ErrFull} {
		m := newMachine()
		p := &fakePolicies{await: func(context.Context, uint32) error { return fmt.Errorf("policy of identity 1000: %w", want) }}
		c := m.evaluated(t, p)
		if _, err := c.Create(t.Context(), m.wanted("a", 2), false); !errors.Is(err, want) {
			t.Errorf("%v, want %v", err, want)
		}
		settle(t, c)
		m.holds(t, c, 0)
	}
}

func TestDeletionEndsACreationThatWaitsForItsPolicy(t *testing.T) {
	m := newMachine()
	waits := make(chan struct{})
	p := &fakePolicies{await: func(ctx context.Context, _ uint32) error {
		close(waits)
		<-ctx.Done()
		return ctx.Err()
	}}
	c := m.evaluated(t, p)
	s := m.wanted("a", 2)
	done := make(chan error, 1)
	go func() { _, err := c.Create(t.Context(), s, false); done <- err }()
	<-waits
	if _, err := c.Delete(t.Context(), s.Owner); err != nil {
		t.Fatal(err)
	}
	if err := <-done; !errors.Is(err, endpoint.ErrDeleted) {
		t.Errorf("the creation ended with %v", err)
	}
	settle(t, c)
	m.holds(t, c, 0)
}

func TestPendingEndpointWaitsUntilItsPolicyComesAndWatchersHearOfIt(t *testing.T) {
	m := newMachine()
	p := &fakePolicies{of: map[uint16]endpoint.Policy{1: {Pending: true, Epoch: 1}}}
	c := m.evaluated(t, p)
	s := m.wanted("a", 2)
	e, err := c.Create(t.Context(), s, false)
	if err != nil || e.State != endpoint.WaitingForPolicy {
		t.Fatal(e.State, err)
	}
	p.mu.Lock()
	p.of[1] = endpoint.Policy{Revision: 2, Epoch: 2}
	p.mu.Unlock()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	events := endpoint.NewSlotEvents()
	followed := make(chan error, 1)
	go func() { followed <- c.FollowPolicies(ctx, events) }()
	states := make(chan endpoint.State, 16)
	go func() {
		_ = watch.Serve(ctx, c.Hub(), nil, func(e watch.Event[workload.Owner, endpoint.Endpoint]) error {
			if e.Kind == watch.Upsert {
				states <- e.Value.State
			} else if e.SnapshotComplete {
				events.Add([]uint16{1})
			}
			return nil
		})
	}()
	for state := range states {
		if state == endpoint.Ready {
			break
		}
	}
	cancel()
	if err := <-followed; !errors.Is(err, context.Canceled) {
		t.Errorf("following policies ended with %v", err)
	}
	if n := c.Counts().ByState; n[endpoint.Ready] != 1 || n[endpoint.WaitingForPolicy] != 0 {
		t.Errorf("states %v", n)
	}
}

func TestChangedIdentityWaitsForItsPolicy(t *testing.T) {
	m := newMachine()
	p := &fakePolicies{}
	c := m.evaluated(t, p)
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	m.mu.Lock()
	m.number = 2000
	m.mu.Unlock()
	p.mu.Lock()
	p.await = func(context.Context, uint32) error { return endpoint.ErrUnavailable }
	p.mu.Unlock()
	if changed, err := c.Refresh(t.Context()); changed != 0 || !errors.Is(err, endpoint.ErrUnavailable) {
		t.Errorf("%d changed, %v", changed, err)
	}
	if m.slotsNow()[1].Identity != 1000 || m.recordOf(s.Owner).Identity.Number != 1000 {
		t.Error("the identity changed before its policy tables existed")
	}
	p.mu.Lock()
	p.await = nil
	p.mu.Unlock()
	if changed, err := c.Refresh(t.Context()); changed != 1 || err != nil {
		t.Errorf("%d changed, %v", changed, err)
	}
	if m.slotsNow()[1].Identity != 2000 {
		t.Error("the identity did not change")
	}
}

// TestDeletionEndsAWaitForThePolicyOfAChangedIdentity: a deletion takes milliseconds, whatever is waiting for the
// policy.
func TestDeletionEndsAWaitForThePolicyOfAChangedIdentity(t *testing.T) {
	m := newMachine()
	p := &fakePolicies{}
	c := m.evaluated(t, p)
	s := m.wanted("a", 2)
	if _, err := c.Create(t.Context(), s, false); err != nil {
		t.Fatal(err)
	}
	m.mu.Lock()
	m.number = 2000
	m.mu.Unlock()
	// Bounded, so that the test fails if the deletion does not end the wait.
	bounded := servicetest.Context(t)
	waits := make(chan struct{}, 1)
	p.mu.Lock()
	p.await = func(ctx context.Context, _ uint32) error {
		select {
		case waits <- struct{}{}:
		default:
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-bounded.Done():
			return bounded.Err()
		}
	}
	p.mu.Unlock()
	done := make(chan error, 1)
	go func() { _, err := c.Refresh(bounded); done <- err }()
	select {
	case <-waits:
	case err := <-done:
		t.Fatalf("the refresh did not wait for the policy: %v", err)
	}
	if _, err := c.Delete(bounded, s.Owner); err != nil || bounded.Err() != nil {
		t.Fatalf("the deletion waited for the policy: %v", err)
	}
	if err := <-done; err != nil {
		t.Errorf("the refresh ended with %v", err)
	}
	settle(t, c)
	m.holds(t, c, 0)
}

func (m *machine) slotsNow() map[uint16]endpoint.Entry {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := map[uint16]endpoint.Entry{}
	for n, e := range m.slots {
		out[n] = e
	}
	return out
}

func (m *machine) recordOf(o workload.Owner) endpoint.Record {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.records[o]
}
