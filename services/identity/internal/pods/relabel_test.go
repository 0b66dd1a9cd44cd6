// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pods

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

// nothing is Records that keep nothing, and a Publisher that nobody reads.
type nothing struct{}

func (nothing) SaveHolds(allocator.HoldsChange) error             { return nil }
func (nothing) NoteKnown(allocator.KnownChange) error             { return nil }
func (nothing) SaveKnown(func() allocator.KnownChange) error      { return nil }
func (nothing) Upsert(identity.Numeric, identity.Identity) uint64 { return 0 }
func (nothing) Delete(identity.Numeric) bool                      { return false }
func (nothing) Reach(uint64, int64)                               {}
func (nothing) Loaded()                                           {}

// node is a Relabeler with an allocator.
type node struct {
	told
	*Relabeler
	t         *testing.T
	alloc     *allocator.Allocator
	endpoints *watch.Hub[allocator.Holder, allocator.Endpoint]
	store     *storetest.Fake
}

// relabelling runs f in a bubble with a node that runs.
func relabelling(t *testing.T, f func(*node)) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{t: t, told: newSet(t), store: storetest.NewFake()}
		n.endpoints = watch.NewHub[allocator.Holder](watch.Options[allocator.Endpoint]{Equal: allocator.Endpoint.Equal})
		var err error
		n.alloc, err = allocator.New(allocator.Config{
			Quota: 4096, StoreTimeout: time.Second, Heartbeat: 5 * time.Second, Reconcile: time.Minute, Grace: 15 * time.Minute,
			Quarantine: time.Hour, KnownDelay: time.Second, RetryMin: 100 * time.Millisecond, RetryMax: time.Second,
			Log: slog.New(slog.DiscardHandler),
		}, n.store.Node("n1"), nothing{}, nothing{}, n.endpoints, allocator.Holds{}, allocator.Known{}, false)
		if err != nil {
			t.Fatal(err)
		}
		n.Relabeler = NewRelabeler(n.Set, n.alloc, n.endpoints, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 2)
		go func() { ended <- n.alloc.Run(ctx) }()
		go func() { ended <- n.Run(ctx) }()
		n.complete()
		time.Sleep(time.Second)
		f(n)
		cancel()
		for range 2 {
			if err := <-ended; err != nil {
				t.Errorf("run: %v", err)
			}
		}
	})
}

// add makes a pod, and its endpoint as ADD does.
func (n *node) add(i int, app string) {
	n.t.Helper()
	n.pod(fmt.Sprint("web-", i), fmt.Sprint("u", i), map[string]string{"app": app})
	ref := workload.PodReference{Namespace: "prod", Name: fmt.Sprint("web-", i), UID: fmt.Sprint("u", i)}
	set, ok, err := n.Labels(ref)
	if err != nil || !ok {
		n.t.Fatalf("pod %d: %t, %v", i, ok, err)
	}
	if _, err := n.alloc.HoldEndpoint(n.t.Context(), holder(i), set, allocator.Workload{Pod: ref}); err != nil {
		n.t.Fatal(err)
	}
}

func holder(i int) allocator.Holder { return allocator.EndpointHolder(fmt.Sprint("c", i), "eth0") }

// want waits until the relabelling has nothing to do, and fails unless the label
// set of an endpoint has a label, and the endpoint owes a confirmation or not.
func (n *node) want(what string, i int, label string, owes bool) allocator.Endpoint {
	n.t.Helper()
	time.Sleep(time.Second)
	synctest.Wait()
	e, ok := n.endpoints.Get(holder(i))
	if !ok || !strings.Contains(";"+e.Identity.Labels.Text(), ";k8s:"+label+";") || (e.Former != 0) != owes {
		n.t.Errorf("%s: endpoint %d has %d (before %d) %s; want %s, to confirm: %t",
			what, i, e.Identity.Number, e.Former, e.Identity.Labels, label, owes)
	}
	return e
}

func (n *node) confirm(i int) {
	n.t.Helper()
	e, _ := n.endpoints.Get(holder(i))
	if err := n.alloc.Confirm(n.t.Context(), holder(i), e.Identity.Number); err != nil {
		n.t.Fatal(err)
	}
}

func TestChangedPodMovesOnceItConfirms(t *testing.T) {
	relabelling(t, func(n *node) {
		n.namespace(map[string]string{"team": "red"})
		n.add(1, "web")
		n.add(2, "web")
		first := n.want("at the start", 1, "app=web", false)
		n.pod("web-1", "u1", map[string]string{"app": "db"})
		moved := n.want("after the change", 1, "app=db", true)
		if moved.Former != first.Identity.Number {
			t.Errorf("it had %d, and says %d", first.Identity.Number, moved.Former)
		}
		n.want("another pod", 2, "app=web", false)
		for _, app := range []string{"a", "b", "c"} {
			n.pod("web-1", "u1", map[string]string{"app": app})
		}
		n.want("changes before the confirmation", 1, "app=db", true)
		n.confirm(1)
		n.want("after the confirmation", 1, "app=c", true)
		n.confirm(1)
		n.want("at the end", 1, "app=c", false)

		// The same name, and another pod; then none.
		n.pod("web-2", "another", map[string]string{"app": "new"})
		n.want("another pod of its name", 2, "app=web", false)
		n.pods.Delete(types.NamespacedName{Namespace: "prod", Name: "web-2"})
		n.want("no pod", 2, "app=web", false)
		if err := n.Relabeler.Problem(); err != nil {
			t.Errorf("problem %v", err)
		}
	})
}

func TestNamespaceMovesAllItsPodsWithFewNumbers(t *testing.T) {
	relabelling(t, func(n *node) {
		const pods, apps = 100, 5
		n.namespace(map[string]string{"team": "red"})
		for i := range pods {
			n.add(i, fmt.Sprint("app-", i%apps))
		}
		before := n.alloc.Counters()
		n.namespace(map[string]string{"team": "blue"})
		for i := range pods {
			n.want("after the change", i, "io.cilium.k8s.namespace.labels.team=blue", true)
			n.confirm(i)
		}
		time.Sleep(time.Minute)
		after := n.alloc.Counters()
		if after.Relabelled-before.Relabelled != pods || after.Allocated-before.Allocated != apps {
			t.Errorf("%d moves with %d new numbers, want %d and %d",
				after.Relabelled-before.Relabelled, after.Allocated-before.Allocated, pods, apps)
		}
		if s := n.alloc.Summary(); s.Held != apps || s.PendingWrites != 0 {
			t.Errorf("%d identities are held and %d writes wait, want %d and none", s.Held, s.PendingWrites, apps)
		}
	})
}

func TestChangesWithoutStoreAreMadeLater(t *testing.T) {
	relabelling(t, func(n *node) {
		n.namespace(nil)
		n.add(1, "web")
		n.store.Down()
		n.pod("web-1", "u1", map[string]string{"app": "db"})
		time.Sleep(time.Hour)
		n.want("without store", 1, "app=web", false)
		if err := n.Relabeler.Problem(); err == nil || !strings.Contains(err.Error(), "1 endpoints") {
			t.Errorf("problem %v, want one about 1 endpoint", err)
		}
		n.store.Up()
		time.Sleep(2 * longestPause)
		n.want("with store", 1, "app=db", true)
		if err := n.Relabeler.Problem(); err != nil {
			t.Errorf("problem %v", err)
		}
	})
}

// TestLabelsThatNeverRestTakeFewNumbers of the cluster: numbers that are given up
// are not free for more than an hour.
func TestLabelsThatNeverRestTakeFewNumbers(t *testing.T) {
	relabelling(t, func(n *node) {
		n.namespace(nil)
		const pods, rounds = 10, 600
		for i := range pods {
			n.add(i, "web")
		}
		for round := range rounds {
			for i := range pods {
				n.pod(fmt.Sprint("web-", i), fmt.Sprint("u", i), map[string]string{"app": "web", "at": fmt.Sprint(round, "-", i)})
			}
			time.Sleep(time.Second)
			synctest.Wait()
			for i := range pods {
				n.confirm(i)
			}
		}
		if c := n.alloc.Counters(); c.Allocated > newNumbers+rounds+inFlight+1 || c.Allocated < newNumbers {
			t.Errorf("%d new numbers in %d s, want at most %d and one a second", c.Allocated, rounds, newNumbers)
		}
		time.Sleep(time.Minute)
		for i := range pods {
			e, _ := n.endpoints.Get(holder(i))
			n.want("at rest", i, fmt.Sprint("at=", rounds-1, "-", i), e.Former != 0)
		}
	})
}

func TestEndpointsOfNoPodStayAsTheyAre(t *testing.T) {
	relabelling(t, func(n *node) {
		n.namespace(nil)
		n.pod("web-1", "u1", map[string]string{"app": "web"})
		set := storetest.Labels(t, "own")
		for i, ref := range []workload.PodReference{{}, {Namespace: "prod", Name: "web-1"}, {Name: "web-1", UID: "u1"}} {
			if _, err := n.alloc.HoldEndpoint(n.t.Context(), holder(i), set, allocator.Workload{Pod: ref}); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
			if e, _ := n.endpoints.Get(holder(i)); e.Identity.Labels.Text() != set.Text() {
				t.Errorf("%+v became %s", ref, e.Identity.Labels)
			}
		}
	})
}
