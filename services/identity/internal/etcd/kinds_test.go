// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"fmt"
	"testing"

	"github.com/sluice-net/sluice/services/identity/internal/kinds"
)

func TestPublishedKindsReachOtherNodes(t *testing.T) {
	t.Parallel() // it mostly waits
	c := newCluster(t)
	writer, reader := NewKinds(newSession(t, c.Endpoint, "writer")), NewKinds(newSession(t, c.Endpoint, "reader"))
	states := make(chan kinds.State)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- reader.FollowKinds(ctx, func(s kinds.State) {
			select {
			case states <- s:
			case <-ctx.Done():
			}
		})
	}()
	want := func(what, state string) {
		t.Helper()
		for s := range states { // progress without a change repeats the state
			if got := fmt.Sprint(s.Published, s.Kinds); got == state {
				return
			}
		}
		t.Errorf("%s: not %s", what, state)
	}
	want("before a publication", "false []")
	publish := func(all ...string) {
		t.Helper()
		if err := writer.PublishKinds(t.Context(), all); err != nil {
			t.Fatal(err)
		}
	}
	publish("a/v1/k", "b/v1/k")
	want("published", "true [a/v1/k b/v1/k]")
	before := keysBelow(t, c.admin, "/cluster/")
	revision := func() int64 {
		t.Helper()
		resp, err := c.admin.Get(t.Context(), testPrefix+"/cluster/kinds")
		if err != nil || len(resp.Kvs) != 1 {
			t.Fatal(resp, err)
		}
		return resp.Kvs[0].ModRevision
	}
	at := revision()
	publish("a/v1/k", "b/v1/k")
	if now := revision(); now != at || len(before) != 1 {
		t.Errorf("the same kinds are written again, or there is more than one key: %v", before)
	}
	publish()
	want("no kind", "true []")
	if _, err := c.admin.Put(t.Context(), testPrefix+"/cluster/kinds", `{"kinds":["damaged"]}`); err != nil {
		t.Fatal(err)
	}
	want("a corrupt value", "false []")
	publish("a/v1/k")
	want("repaired", "true [a/v1/k]")
	if _, err := c.admin.Delete(t.Context(), testPrefix+"/cluster/kinds"); err != nil {
		t.Fatal(err)
	}
	want("lost", "false []")
	cancel()
	<-ended
}
