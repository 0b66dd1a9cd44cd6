// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"context"
	"errors"
	"testing"

	"github.com/sluice-net/sluice/model/workload"
)

// TestCreationReturnsWhenOthersCanKnowIt also checks that publication runs concurrently with the
// remaining steps.
func TestCreationReturnsWhenOthersCanKnowIt(t *testing.T) {
	m := newMachine()
	cfg := m.config()
	asked, known, goesOn := make(chan struct{}), make(chan struct{}), make(chan struct{})
	cfg.Published = func(_ context.Context, o workload.Owner) {
		close(asked)
		<-goesOn
		if e := m.recordOf(o); e.Phase == "" {
			t.Error("the publication is awaited before the record is written")
		}
		close(known)
	}
	c := newNode(cfg)
	restore(t, c)
	done := make(chan error, 1)
	go func() {
		_, err := c.Create(t.Context(), m.wanted("a", 2), false)
		done <- err
	}()
	<-asked
	select {
	case err := <-done:
		t.Fatalf("it returned before other nodes can know it: %v", err)
	default:
	}
	close(goesOn)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	select {
	case <-known:
	default:
		t.Error("it returned before other nodes can know it")
	}
}

// TestFailedCreationWaitsForNoPublication: the wait for publication ends with the failed creation.
func TestFailedCreationWaitsForNoPublication(t *testing.T) {
	m := newMachine()
	cfg := m.config()
	ended := make(chan struct{})
	cfg.Published = func(ctx context.Context, _ workload.Owner) {
		<-ctx.Done()
		close(ended)
	}
	c := newNode(cfg)
	restore(t, c)
	m.setFail("attach", errTest)
	if _, err := c.Create(t.Context(), m.wanted("a", 2), false); !errors.Is(err, errTest) {
		t.Fatal(err)
	}
	<-ended
}
