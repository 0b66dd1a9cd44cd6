// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package etcd

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/services/identity/internal/test/etcdtest"
	"github.com/sluice-net/sluice/services/identity/internal/test/storetest"
)

// BenchmarkHold measures one answer, with real etcd and real files.
func BenchmarkHold(b *testing.B) {
	s := etcdtest.Start(b)
	n := startNode(b, s.Endpoint, "a", b.TempDir(), quick())
	n.connected()
	hold := func(b *testing.B, holderNumber int, app string) {
		if _, err := n.Hold(b.Context(), holder(holderNumber), storetest.Labels(b, app), true); err != nil {
			b.Fatal(err)
		}
	}
	release := func(b *testing.B, holderNumber int) {
		if _, err := n.Release(b.Context(), holder(holderNumber)); err != nil {
			b.Fatal(err)
		}
	}
	next := 0
	b.Run("new label set", func(b *testing.B) {
		for b.Loop() {
			next++
			hold(b, 0, fmt.Sprint(next)) // moves, so that the holds stay few
		}
	})
	b.Run("set of another holder", func(b *testing.B) {
		hold(b, 1, "shared")
		for b.Loop() {
			hold(b, 2, "shared")
			release(b, 2)
		}
	})
	b.Run("come and go", func(b *testing.B) {
		for b.Loop() {
			hold(b, 3, "alone")
			release(b, 3)
		}
	})
	b.Run("asked again", func(b *testing.B) {
		hold(b, 4, "again")
		for b.Loop() {
			hold(b, 4, "again")
		}
	})
}

// BenchmarkBurst is 10,000 new label sets at once on one node, 64 at a time, as
// the service lets in.
func BenchmarkBurst(b *testing.B) {
	const sets, atOnce = 10_000, 64
	s := etcdtest.Start(b)
	cfg := quick()
	cfg.Quota, cfg.StoreTimeout, cfg.Reconcile, cfg.Heartbeat = 2*sets, 10*time.Second, time.Minute, time.Second
	n := startNode(b, s.Endpoint, "a", b.TempDir(), cfg)
	n.connected()
	for b.Loop() {
		next := make(chan int)
		var wg sync.WaitGroup
		for range atOnce {
			wg.Go(func() {
				for i := range next {
					if _, err := n.Hold(b.Context(), holder(i), storetest.Labels(b, fmt.Sprint(i)), true); err != nil {
						b.Error(err)
					}
				}
			})
		}
		for i := range sets {
			next <- i
		}
		close(next)
		wg.Wait()
	}
	b.ReportMetric(float64(b.Elapsed().Microseconds())/sets, "us/set")
}
