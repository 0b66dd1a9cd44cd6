// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

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
	other.Labels = first.Labels // the labels of first but no named port, so another label set
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
