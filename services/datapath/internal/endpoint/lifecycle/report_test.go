// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package lifecycle

import (
	"testing"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

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
