// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/sluice-net/sluice/kit/looptime/looptimetest"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

// Sizes of BenchmarkOwner.
const (
	ownerBurst      = 10_000 // number of calls in one burst
	ownerCallers    = 64     // number of calls at a time; the service accepts as many
	ownerIdentities = 65_000 // number of identities in a full cluster
	ownerNodes      = 2_000  // number of nodes in a full cluster, with 100 references each
	ownerHeld       = 200    // at the restart
)

// owner is a node whose lock is watched.
type owner struct {
	*node
	*looptimetest.Owner
}

// burst makes n calls, some at a time.
func burst(b *testing.B, n int, call func(ctx context.Context, i int) error) {
	b.Helper()
	var wg sync.WaitGroup
	next := make(chan int)
	for range ownerCallers {
		wg.Go(func() {
			for i := range next {
				if err := call(b.Context(), i); err != nil {
					b.Error(err)
				}
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
}

// reads follows the hub as a subscriber does.
func reads(b *testing.B, h *hub) {
	b.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		for ctx.Err() == nil {
			// One that is too slow starts again, as subscribers do.
			watch.Serve(ctx, h, nil, func(watch.Event[identity.Numeric, identity.Identity]) error { return nil }) //nolint:errcheck // see above
		}
	})
	b.Cleanup(func() { cancel(); wg.Wait() })
}

func startOwner(b *testing.B, endpoint, dir string, cfg nodeConfig) *owner {
	n := startNode(b, endpoint, "a", dir, cfg)
	reads(b, n.hub)
	return &owner{node: n, Owner: looptimetest.Watch(b, n.Busy)}
}

// BenchmarkOwner runs every operation of a node's API, at the size of a full cluster, with a real etcd and real files.
// It fails if an operation holds the allocator's lock for longer than looptimetest.Limit.
func BenchmarkOwner(b *testing.B) {
	for b.Loop() {
		bursts(b)
		fullCluster(b)
	}
}

func ownerConfig() nodeConfig {
	cfg := quick()
	cfg.Quota, cfg.StoreTimeout, cfg.Heartbeat, cfg.Reconcile = 2*ownerBurst, 30*time.Second, time.Second, time.Second
	cfg.KnownDelay, cfg.Grace = time.Second, 2*time.Second
	return cfg
}

func bursts(b *testing.B) {
	s := etcdtest.Start(b)
	o := startOwner(b, s.Endpoint, b.TempDir(), ownerConfig())
	o.connected()
	shared := func(i int) label.Canonical { return storetest.Labels(b, fmt.Sprint("shared", i%ownerCallers)) }
	hold := func(ctx context.Context, h allocator.Holder, l label.Canonical) error {
		_, err := o.Hold(ctx, h, l, true)
		return err
	}
	release := func(ctx context.Context, h allocator.Holder) error {
		_, err := o.Release(ctx, h)
		return err
	}
	reference := func(i int) allocator.Holder { return allocator.ReferenceHolder(fmt.Sprint("r", i)) }
	fmt.Printf("\nbursts of %d calls, %d at a time\n", ownerBurst, ownerCallers)
	o.Step("hold as many new label sets", func() {
		burst(b, ownerBurst, func(ctx context.Context, i int) error {
			return hold(ctx, holder(i), storetest.Labels(b, fmt.Sprint(i)))
		})
	})
	o.Step("hold 64 label sets by as many references", func() {
		burst(b, ownerBurst, func(ctx context.Context, i int) error { return hold(ctx, reference(i), shared(i)) })
	})
	o.Step("hold again what is held", func() {
		burst(b, ownerBurst, func(ctx context.Context, i int) error { return hold(ctx, reference(i), shared(i)) })
	})
	o.Step("move each reference to another label set", func() {
		burst(b, ownerBurst, func(ctx context.Context, i int) error { return hold(ctx, reference(i), shared(i+1)) })
	})
	o.Step("read: list, status, each identity", func() {
		for range 20 {
			o.List()
			o.Status()
		}
		for _, l := range o.List() {
			if _, _, err := o.Get(l.Identity.Number); err != nil {
				b.Error(err)
			}
		}
	})
	o.Step("the session is lost and joined again", func() {
		before := o.Counters().Restored
		if _, err := s.Client().Revoke(b.Context(), referenceLease(b, s)); err != nil {
			b.Fatal(err)
		}
		servicetest.Eventually(b, "every reference is written again", func() bool {
			return o.Counters().Restored >= before+ownerBurst && o.Summary().PendingWrites == 0
		})
	})
	o.Step("release the references", func() {
		burst(b, ownerBurst, func(ctx context.Context, i int) error { return release(ctx, reference(i)) })
	})
	o.Step("release the label sets", func() {
		burst(b, ownerBurst, func(ctx context.Context, i int) error { return release(ctx, holder(i)) })
	})
	o.Step("collect them", func() {
		servicetest.Eventually(b, "the collection", func() bool { return o.Counters().Collected >= ownerBurst+ownerCallers })
	})
	o.stop()
}

// referenceLease returns the lease of the references in the etcd of a single node.
func referenceLease(b *testing.B, s *etcdtest.Server) clientv3.LeaseID {
	b.Helper()
	resp, err := s.Client().Get(b.Context(), testPrefix+"/ref/", clientv3.WithPrefix(), clientv3.WithLimit(1))
	if err != nil || len(resp.Kvs) == 0 {
		b.Fatalf("no reference: %v", err)
	}
	return clientv3.LeaseID(resp.Kvs[0].Lease)
}

func fullCluster(b *testing.B) {
	s := etcdtest.Start(b)
	fillCluster(b, s, ownerIdentities, ownerNodes, 100)
	dir, cfg := b.TempDir(), ownerConfig()
	cfg.Grace = time.Hour
	fmt.Printf("\na cluster of %d identities, %d references\n", ownerIdentities, ownerNodes*100)
	o := startOwner(b, s.Endpoint, dir, cfg)
	o.Step("list the cluster", o.connected)
	label := func(i int) label.Canonical { return storetest.Labels(b, fmt.Sprint("app", i)) }
	o.Step(fmt.Sprintf("hold %d of them", ownerHeld), func() {
		burst(b, ownerHeld, func(ctx context.Context, i int) error {
			_, err := o.Hold(ctx, holder(i), label(i), true)
			return err
		})
	})
	o.Step("100 new label sets, almost no number is free", func() {
		burst(b, 100, func(ctx context.Context, i int) error {
			_, err := o.Hold(ctx, holder(1000+i), storetest.Labels(b, fmt.Sprint("new", i)), true)
			if err == nil {
				_, err = o.Release(ctx, holder(1000+i))
			}
			return err
		})
	})
	o.Step("read: list, status", func() {
		for range 5 {
			o.List()
			o.Status()
		}
	})
	o.Step("count the references, find what is unused", func() { time.Sleep(3 * cfg.Reconcile) }) // the step is that time
	o.stop()
	o = startOwner(b, s.Endpoint, dir, cfg)
	o.Step(fmt.Sprintf("restart with %d held", ownerHeld), o.settled)
	o.Step("55,000 identities are deleted in etcd", func() {
		if _, err := s.Client().Delete(b.Context(), testPrefix+"/id/1", clientv3.WithPrefix()); err != nil {
			b.Fatal(err)
		}
		for _, first := range []string{"2", "3", "4", "5"} {
			if _, err := s.Client().Delete(b.Context(), testPrefix+"/id/"+first, clientv3.WithPrefix()); err != nil {
				b.Fatal(err)
			}
		}
		servicetest.Eventually(b, "they are forgotten", func() bool { return o.Summary().Known < 10_000+ownerHeld })
	})
	o.Step("etcd loses everything, what is held is created again", func() {
		s.Down()
		s.Wipe()
		s.Up()
		servicetest.Eventually(b, "only what is held is left", func() bool {
			return o.Summary().Known == ownerHeld && o.Summary().PendingWrites == 0
		})
	})
	o.stop()
}
