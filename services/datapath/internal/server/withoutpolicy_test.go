// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"testing"

	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// TestWatchWithoutPolicySendsOtherChanges: changes of the policy alone are not sent, and no policy is.
func TestWatchWithoutPolicySendsOtherChanges(t *testing.T) {
	owner := workload.Owner{ContainerID: "c1"}
	put := func(slot uint16, epoch uint32) watch.Event[workload.Owner, endpoint.Endpoint] {
		return watch.Event[workload.Owner, endpoint.Endpoint]{
			Kind: watch.Upsert, Key: owner,
			Value: endpoint.Endpoint{
				Slot: slot, Policy: endpoint.Policy{Epoch: epoch}, Ports: []workload.NamedPort{{Name: "dns", Port: 53}},
			},
		}
	}
	w := make(withoutPolicy)
	for _, c := range []struct {
		name  string
		event watch.Event[workload.Owner, endpoint.Endpoint]
		want  bool
	}{
		{"a new endpoint", put(1, 0), true},
		{"its first policy", put(1, 1), false},
		{"another policy", put(1, 2), false},
		{"another change", put(2, 2), true},
		{"a bookmark", watch.Event[workload.Owner, endpoint.Endpoint]{Kind: watch.Bookmark}, true},
		{"the end", watch.Event[workload.Owner, endpoint.Endpoint]{Kind: watch.Delete, Key: owner}, true},
		{"the same endpoint again", put(2, 2), true},
	} {
		if got := w.changes(&c.event); got != c.want {
			t.Errorf("%s: sent: %t, want %t", c.name, got, c.want)
		}
		if c.event.Value.Policy != (endpoint.Policy{}) {
			t.Errorf("%s: it is sent with a policy", c.name)
		}
	}
}
