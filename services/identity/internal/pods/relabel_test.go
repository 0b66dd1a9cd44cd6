// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package pods

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/types"

	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

// nothing discards Records and publications.
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
func relabelling(t *testing.T, f func(*node)) { relabellingWith(t, 4096, f) }

// relabellingWith is like relabelling, but with a node that may hold so many numbers.
func relabellingWith(t *testing.T, quota int, f func(*node)) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{t: t, told: newSet(t), store: storetest.NewFake()}
		n.endpoints = watch.NewHub[allocator.Holder](watch.Options[allocator.Endpoint]{Equal: allocator.Endpoint.Equal})
		var err error
		n.alloc, err = allocator.New(allocator.Config{
			Quota: quota, StoreTimeout: time.Second, Heartbeat: 5 * time.Second, Reconcile: time.Minute, Grace: 15 * time.Minute,
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
	n.hold(i, map[string]string{"app": app})
}

// hold is like add, but with all labels.
func (n *node) hold(i int, labels map[string]string) {
	n.t.Helper()
	n.holdIn("prod", i, labels)
}

func (n *node) holdIn(namespace string, i int, labels map[string]string) {
	n.t.Helper()
	n.podIn(namespace, i, labels)
	ref := workload.PodReference{Namespace: namespace, Name: fmt.Sprint("web-", i), UID: fmt.Sprint("u", i)}
	set, ok, err := n.Labels(ref)
	if err != nil || !ok {
		n.t.Fatalf("pod %d: %t, %v", i, ok, err)
	}
	if _, err := n.alloc.HoldEndpoint(n.t.Context(), holder(i), set, allocator.Workload{Pod: ref}); err != nil {
		n.t.Fatal(err)
	}
}

func (n *node) podIn(namespace string, i int, labels map[string]string) {
	n.pods.Upsert(types.NamespacedName{Namespace: namespace, Name: fmt.Sprint("web-", i)},
		Pod{UID: fmt.Sprint("u", i), ServiceAccount: "robot", Labels: labels})
}

func holder(i int) allocator.Holder { return allocator.EndpointHolder(fmt.Sprint("c", i), "eth0") }

// want waits until the relabelling is idle. It fails unless the label set of an endpoint has a label, and owes equals
// whether the endpoint's confirmation is pending.
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

// isIsolated fails unless an endpoint has the identity reserved:init or, if want is not set, has another one.
func (n *node) isIsolated(what string, i int, want bool) {
	n.t.Helper()
	time.Sleep(time.Second)
	synctest.Wait()
	e, ok := n.endpoints.Get(holder(i))
	if got := ok && e.Identity.Number == identity.Init && allocator.IsIsolated(e.Identity.Labels); got != want {
		n.t.Errorf("%s: endpoint %d has %d %s; isolated: %t, want %t",
			what, i, e.Identity.Number, e.Identity.Labels, got, want)
	}
}

// TestChangesWithoutStoreIsolateUntilItIsBack: while the store is unavailable, a label change gets no number. The pod
// keeps its former identity for a short time, and is then isolated until the store is available.
func TestChangesWithoutStoreIsolateUntilItIsBack(t *testing.T) {
	relabelling(t, func(n *node) {
		n.namespace(nil)
		n.add(1, "web")
		n.add(2, "other")
		n.store.Down()
		time.Sleep(10 * time.Second)
		n.pod("web-1", "u1", map[string]string{"app": "db"})
		n.want("in a short time without store", 1, "app=web", false)
		time.Sleep(patience)
		n.isIsolated("after that", 1, true)
		if err := n.Relabeler.Problem(); err == nil || !strings.Contains(err.Error(), "1 endpoints are isolated") {
			t.Errorf("problem %v, want one about 1 endpoint", err)
		}
		n.confirm(1)
		time.Sleep(30 * time.Minute)
		n.isIsolated("after half an hour", 1, true)
		// A label set that this node has needs no store.
		n.pod("web-1", "u1", map[string]string{"app": "other"})
		n.want("with labels that the node has", 1, "app=other", true)
		n.confirm(1)
		n.pod("web-1", "u1", map[string]string{"app": "db"})
		time.Sleep(2 * patience)
		n.isIsolated("with labels that are new again", 1, true)
		n.confirm(1)
		n.store.Up()
		time.Sleep(2 * longestPause)
		n.want("with store", 1, "app=db", true)
		n.confirm(1)
		time.Sleep(time.Second)
		if err := n.Relabeler.Problem(); err != nil {
			t.Errorf("problem %v", err)
		}
		n.want("who did not change", 2, "app=other", false)
	})
}

// TestQuarantineWithoutStoreIsolatesAtOnce: a change after which a pod may do less gets no number while the store is
// unavailable, whether this is known already or not. The pod is isolated once sluice-policy has admitted the change.
func TestQuarantineWithoutStoreIsolatesAtOnce(t *testing.T) {
	for what, known := range map[string]bool{"known": true, "not known yet": false} {
		t.Run(what, func(t *testing.T) {
			relabelling(t, func(n *node) {
				n.namespace(nil)
				n.add(1, "web")
				n.add(2, "web")
				n.store.Down()
				if known {
					time.Sleep(10 * time.Second)
				}
				_, changed := n.Held()
				n.pod("web-1", "u1", map[string]string{"app": "web", "quarantine": "true"})
				n.pod("web-2", "u2", map[string]string{"app": "db"})
				<-changed
				synctest.Wait()
				all, _ := n.Held()
				for _, h := range all {
					if strings.Contains(h.Labels.Text(), "quarantine") {
						n.Admit(h.Number)
					}
				}
				if len(all) != 2 {
					t.Fatalf("%d changes wait, want 2", len(all))
				}
				n.isIsolated("in quarantine", 1, true)
				n.isIsolated("with other labels", 2, false)
				n.confirm(1)
				n.store.Up()
				time.Sleep(2 * longestPause)
				n.want("with store", 1, "quarantine=true", true)
			})
		})
	}
}

// TestPodThatGetsTooManyLabelsIsIsolated: the author of a pod uses up the maximum number of labels. A label that is
// added later, such as an administrator's quarantine=true, must not be ignored silently, so the pod is isolated.
func TestPodThatGetsTooManyLabelsIsIsolated(t *testing.T) {
	for _, of := range []string{"pod", "namespace"} {
		t.Run(of, func(t *testing.T) {
			relabelling(t, func(n *node) {
				n.namespace(nil)
				labels := map[string]string{"app": "web"}
				for i := range label.MaxLabels - 4 {
					labels[fmt.Sprintf("filler-%03d", i)] = "x"
				}
				n.hold(1, labels)
				n.want("as many as there may be", 1, "app=web", false)
				n.store.Down() // it needs none
				if of == "pod" {
					more := maps.Clone(labels)
					more["quarantine"] = "true"
					n.pod("web-1", "u1", more)
				} else {
					n.namespace(map[string]string{"quarantine": "true"})
				}
				n.isIsolated("one more", 1, true)
				if err := n.Relabeler.Problem(); err == nil ||
					!strings.Contains(err.Error(), "pod prod/web-1: labels: 257 labels") {
					t.Errorf("problem %v, want one about 257 labels", err)
				}
				n.confirm(1)
				n.store.Up()
				n.namespace(nil)
				n.pod("web-1", "u1", labels)
				time.Sleep(2 * longestPause)
				n.want("one less", 1, "app=web", true)
				n.confirm(1)
				n.isIsolated("at the end", 1, false)
				if err := n.Relabeler.Problem(); err != nil {
					t.Errorf("problem %v", err)
				}
			})
		})
	}
}

// TestChangeWithoutNumberIsolatesAtOnce: a pod is isolated at once if its node has used up its quota of numbers.
func TestChangeWithoutNumberIsolatesAtOnce(t *testing.T) {
	relabellingWith(t, 2, func(n *node) {
		n.namespace(nil)
		n.add(1, "web")
		n.add(2, "web")
		n.add(3, "other")
		n.pod("web-1", "u1", map[string]string{"app": "web", "quarantine": "true"})
		n.isIsolated("without a number", 1, true)
		n.confirm(1)
		if err := n.Relabeler.Problem(); err == nil || !strings.Contains(err.Error(), "quota") {
			t.Errorf("problem %v, want one about the quota", err)
		}
		n.isIsolated("another pod", 2, false)
		if _, err := n.alloc.Release(n.t.Context(), holder(3)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * longestPause)
		n.want("once there is a number", 1, "quarantine=true", true)
	})
}

// TestLabelsThatNeverRestTakeFewNumbers: a pod that changes its labels continuously uses few numbers of the cluster,
// although a released number is not free for more than an hour.
func TestLabelsThatNeverRestTakeFewNumbers(t *testing.T) {
	for pods, rounds := range map[int]int{1: 3600, 10: 600} {
		t.Run(fmt.Sprint(pods), func(t *testing.T) {
			relabelling(t, func(n *node) {
				n.namespace(nil)
				for i := range pods {
					n.add(i, "web")
				}
				before := n.alloc.Counters().Allocated
				for round := range rounds {
					n.flip(pods, round, "prod")
				}
				most := pods * (podRate.burst + int(time.Duration(rounds)*time.Second/podRate.every) + 1)
				if c := int(n.alloc.Counters().Allocated - before); c > most || c < most/2 {
					t.Errorf("%d new numbers in %d s, the limit is %d", c, rounds, most)
				}
				time.Sleep(time.Minute)
				for i := range pods {
					n.confirm(i)
					e, _ := n.endpoints.Get(holder(i))
					n.want("at rest", i, fmt.Sprint("at=", rounds-1, "-", i), e.Former != 0)
				}
			})
		})
	}
}

// flip changes a label of the first pods and lets a second go by. They are in the
// namespaces that are given, in turn.
func (n *node) flip(pods, round int, namespaces ...string) {
	for i := range pods {
		n.podIn(namespaces[i%len(namespaces)], i, map[string]string{"app": "web", "at": fmt.Sprint(round, "-", i)})
	}
	time.Sleep(time.Second)
	synctest.Wait()
	for i := range pods {
		n.confirm(i)
	}
}

// TestPodsThatFlipTheirLabelsDelayNoOtherTenant: some pods change their labels continuously. When a pod of another
// namespace on the node is put into quarantine, its identity changes within seconds, however many pods change their
// labels.
func TestPodsThatFlipTheirLabelsDelayNoOtherTenant(t *testing.T) {
	many := make([]string, 500)
	for i := range many {
		many[i] = fmt.Sprint("made-", i)
	}
	for _, v := range []struct {
		name         string
		flip, rounds int
		of           []string // namespaces of those that flip
		namespace    string   // of the other one
	}{
		{"10 pods, another namespace", 10, 60, []string{"prod"}, "shop"},
		{"10 pods, the same namespace", 10, 60, []string{"prod"}, "prod"},
		{"2,000 pods, another namespace", 2000, 20, []string{"prod"}, "shop"},
		{"1,000 pods of 500 namespaces without a tenant", 1000, 20, many, "shop"},
	} {
		t.Run(v.name, func(t *testing.T) {
			relabelling(t, func(n *node) {
				n.namespace(nil)
				n.namespaces.Upsert(types.NamespacedName{Name: "shop"}, map[string]string{shares.DefaultTenantLabel: "shop"})
				for i := range v.flip {
					n.namespaces.Upsert(types.NamespacedName{Name: v.of[i%len(v.of)]}, nil)
					n.holdIn(v.of[i%len(v.of)], i, map[string]string{"app": "web"})
				}
				victim := v.flip
				n.holdIn(v.namespace, victim, map[string]string{"app": "web"})
				for round := range v.rounds {
					n.flip(v.flip, round, v.of...)
				}
				began := time.Now()
				n.podIn(v.namespace, victim, map[string]string{"app": "web", "quarantine": "true"})
				for round := v.rounds; ; round++ {
					e, _ := n.endpoints.Get(holder(victim))
					if strings.Contains(e.Identity.Labels.Text(), "quarantine") {
						break
					}
					if time.Since(began) > patience {
						t.Fatalf("it has %s after %s", e.Identity.Labels, time.Since(began))
					}
					n.flip(v.flip, round, v.of...)
				}
				if most := 5 * time.Second; time.Since(began) > most {
					t.Errorf("it moved after %s, the limit is %s", time.Since(began), most)
				}
			})
		})
	}
}

// TestChangeThatNarrowsWaitsForNoRate: the rates of the pod, of its controller and of the node are used up. A change
// that sluice-policy has admitted is applied at once; the next change, which was not admitted, waits.
func TestChangeThatNarrowsWaitsForNoRate(t *testing.T) {
	relabelling(t, func(n *node) {
		n.namespace(nil)
		n.add(1, "web")
		now := func() string {
			synctest.Wait()
			e, _ := n.endpoints.Get(holder(1))
			return e.Identity.Labels.Text()
		}
		const many = 300
		for i := range many {
			n.add(100+i, "web")
		}
		for i := range podRate.burst + 1 {
			n.pod("web-1", "u1", map[string]string{"app": "web", "at": fmt.Sprint(i)})
			time.Sleep(time.Second)
			n.confirm(1)
		}
		for i := range many { // of the node
			n.pod(fmt.Sprint("web-", 100+i), fmt.Sprint("u", 100+i), map[string]string{"app": "web", "one": fmt.Sprint(i)})
		}
		time.Sleep(time.Second)
		for i := range many {
			n.confirm(100 + i)
		}
		fifth := func(h HeldChange) bool { return strings.Contains(h.Labels.Text(), "at=5") }
		if all, _ := n.Held(); !slices.ContainsFunc(all, fifth) {
			t.Fatalf("no change of the pod waits: %v", all)
		}
		_, changed := n.Held()
		n.pod("web-1", "u1", map[string]string{"app": "web", "quarantine": "true"})
		<-changed
		all, _ := n.Held()
		last := all[len(all)-1]
		if !strings.Contains(last.Labels.Text(), "quarantine") || strings.Contains(now(), "quarantine") {
			t.Fatalf("the newest change that waits is %s", last.Labels)
		}
		n.Admit(last.Number + 1000) // of no change
		n.Admit(last.Number)
		time.Sleep(time.Second) // by its rate, the pod would wait for 10 s
		if got := now(); !strings.Contains(got, "quarantine") {
			t.Fatalf("the change is admitted, and the pod has %s", got)
		}
		n.confirm(1)
		n.pod("web-1", "u1", map[string]string{"app": "web"})
		time.Sleep(time.Second)
		if got := now(); !strings.Contains(got, "quarantine") {
			t.Errorf("the way back is not admitted, and the pod has %s", got)
		}
		n.Admit(last.Number) // once
		if got := now(); !strings.Contains(got, "quarantine") {
			t.Errorf("an earlier change is admitted, and the pod has %s", got)
		}
	})
}

// TestEveryEndpointHasItsPodsLabelsOrIsIsolated: under all failures, an endpoint keeps its former labels only for a
// short time.
func TestEveryEndpointHasItsPodsLabelsOrIsIsolated(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			random := rand.New(rand.NewPCG(seed, 0))
			relabellingWith(t, 6, func(n *node) {
				const pods = 8
				n.namespace(nil)
				for i := range pods {
					n.add(i, fmt.Sprint("app-", i%3))
				}
				up := true
				for range 60 {
					switch random.IntN(6) {
					case 0:
						if up = !up; up {
							n.store.Up()
						} else {
							n.store.Down()
						}
					case 1:
						n.namespace(map[string]string{"team": fmt.Sprint(random.IntN(2))})
					default:
						i := random.IntN(pods)
						labels := map[string]string{"app": fmt.Sprint("app-", random.IntN(5))}
						if random.IntN(4) == 0 {
							for k := range 300 {
								labels[fmt.Sprint("key-", k)] = "x"
							}
						}
						n.pod(fmt.Sprint("web-", i), fmt.Sprint("u", i), labels)
					}
					if random.IntN(3) != 0 {
						continue
					}
					for range 3 { // a move that was under way, and the one after it
						time.Sleep(patience)
						synctest.Wait()
						for i := range pods {
							n.confirm(i)
						}
					}
					time.Sleep(patience)
					synctest.Wait()
					for i := range pods {
						want, _, _ := n.Labels(workload.PodReference{
							Namespace: "prod", Name: fmt.Sprint("web-", i), UID: fmt.Sprint("u", i),
						})
						e, _ := n.endpoints.Get(holder(i))
						if !allocator.IsIsolated(e.Identity.Labels) && e.Identity.Labels.Text() != want.Text() {
							t.Errorf("endpoint %d has %s, its pod %s; store up: %t; %v",
								i, e.Identity.Labels, want, up, n.Relabeler.Problem())
						}
					}
				}
			})
		})
	}
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
