// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// TestHistoryHasTheChangesSinceTheStart: endpoints of an earlier run are not reported as changes. The next listing
// finds changes that happened while the subscription was lost.
func TestHistoryHasTheChangesSinceTheStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hub := watch.NewHub[workload.Owner](watch.Options[endpoint.Endpoint]{})
		a, b, c := workload.Owner{ContainerID: "a"}, workload.Owner{ContainerID: "b"}, workload.Owner{ContainerID: "c"}
		put := func(o workload.Owner, slot uint16) { hub.Upsert(o, endpoint.Endpoint{Slot: slot}) }
		var h history
		r := historian{to: &h, known: map[workload.Owner]*datapathv1.Endpoint{}}
		r.convert = func(e endpoint.Endpoint) *datapathv1.Endpoint {
			return &datapathv1.Endpoint{EndpointIndex: uint32(e.Slot)}
		}
		during := func(f func()) {
			t.Helper()
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan error)
			go func() { ended <- r.follow(ctx, hub) }()
			synctest.Wait()
			f()
			synctest.Wait()
			cancel()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("the end: %v", err)
			}
		}
		put(a, 1)
		during(func() {
			put(b, 2)
			synctest.Wait()
			put(b, 3)
		})
		hub.Delete(a)
		put(c, 4)
		during(func() { hub.Delete(c) })
		var got string
		for _, e := range h.list() {
			if e.GetTime() == nil {
				t.Errorf("%v has no time", e)
			}
			got += fmt.Sprintf("%d->%d ", e.GetPrevious().GetEndpointIndex(), e.GetEndpoint().GetEndpointIndex())
		}
		// The listing has new endpoints before it shows which ones are gone.
		if want := "0->2 2->3 0->4 1->0 4->0 "; got != want {
			t.Errorf("got %s, want %s", got, want)
		}
	})
}

func TestHistoryTellsWhatChanged(t *testing.T) {
	of := func(mtu, epoch uint32) *datapathv1.Endpoint {
		e := &datapathv1.Endpoint{Mtu: mtu}
		if epoch != 0 {
			e.Policy = &datapathv1.EndpointPolicy{Epoch: epoch}
		}
		return e
	}
	for _, c := range []struct {
		name          string
		previous, now *datapathv1.Endpoint
		want          bool
	}{
		{"the first", nil, of(1500, 0), true},
		{"no policy, no change", of(1500, 0), of(1500, 0), false},
		{"no change", of(1500, 1), of(1500, 1), false},
		{"the first policy", of(1500, 0), of(1500, 1), true},
		{"the policy", of(1500, 1), of(1500, 2), true},
		{"something else", of(1500, 1), of(1400, 1), true},
	} {
		if got := changed(c.previous, c.now); got != c.want {
			t.Errorf("%s: changed is %t, want %t", c.name, got, c.want)
		}
	}
}

func TestHistoryForgetsTheOldestChanges(t *testing.T) {
	var h history
	for i := range uint32(historyLimit + 10) {
		h.add(nil, &datapathv1.Endpoint{EndpointIndex: i})
	}
	all := h.list()
	if len(all) != historyLimit {
		t.Fatalf("%d changes, want %d", len(all), historyLimit)
	}
	for i, e := range all {
		if got := e.GetEndpoint().GetEndpointIndex(); got != uint32(i)+10 {
			t.Fatalf("change %d is number %d, want %d", i, got, i+10)
		}
	}
}
