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

// BenchmarkHold measures one call with a real etcd and real files.
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

// BenchmarkBurst allocates 10,000 new label sets at once on one node. For comparison, it alternates with the same
// number of writes of single keys to the same etcd, 500 at a time, which shows the speed of the disk. ratio is the
// number of label sets per single write.
func BenchmarkBurst(b *testing.B) {
	const sets, turn = 10_000, 500
	for _, atOnce := range []int{16, 64} {
		b.Run(fmt.Sprintf("%d at once", atOnce), func(b *testing.B) {
			s := etcdtest.Start(b)
			cfg := quick()
			cfg.Quota, cfg.StoreTimeout, cfg.Reconcile, cfg.Heartbeat = 2*sets, 30*time.Second, time.Minute, time.Second
			cfg.KnownDelay = 10 * time.Second // the same delay as in the service
			n := startNode(b, s.Endpoint, "a", b.TempDir(), cfg)
			n.connected()
			client := s.Client()
			together := func(from int, call func(i int) error) time.Duration {
				began := time.Now()
				next := make(chan int)
				var wg sync.WaitGroup
				for range atOnce {
					wg.Go(func() {
						for i := range next {
							if err := call(i); err != nil {
								b.Error(err)
							}
						}
					})
				}
				for i := range turn {
					next <- from + i
				}
				close(next)
				wg.Wait()
				return time.Since(began)
			}
			var puts, claims time.Duration
			count := 0
			for b.Loop() {
				for range sets / turn {
					puts += together(count, func(i int) error {
						_, err := client.Put(b.Context(), fmt.Sprint("/bench/", i), "k8s:app=1234;")
						return err
					})
					claims += together(count, func(i int) error {
						_, err := n.Hold(b.Context(), holder(i), storetest.Labels(b, fmt.Sprint(i)), true)
						return err
					})
					count += turn
				}
			}
			b.ReportMetric(float64(count)/claims.Seconds(), "sets/s")
			b.ReportMetric(float64(count)/puts.Seconds(), "puts/s")
			b.ReportMetric(puts.Seconds()/claims.Seconds(), "ratio")
		})
	}
}
