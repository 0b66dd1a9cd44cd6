// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/looptime/looptimetest"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/store"
)

// Sizes of BenchmarkOwner.
const (
	ownerHeld    = 65_000 // addresses that are confirmed continuously
	ownerBurst   = 10_000 // calls of one burst
	ownerCallers = 64     // at a time
)

// owned is an allocator whose loop is watched.
type owned struct {
	*ipam.Allocator
	*looptimetest.Owner
	b *testing.B
}

func watched(b *testing.B, a *ipam.Allocator) *owned {
	return &owned{Allocator: a, Owner: looptimetest.Watch(b, a.Busy), b: b}
}

func (o *owned) burst(call func(ctx context.Context, i int) error) {
	o.b.Helper()
	var wg sync.WaitGroup
	next := make(chan int)
	for range ownerCallers {
		wg.Go(func() {
			for i := range next {
				if err := call(o.b.Context(), i); err != nil {
					o.b.Error(err)
				}
			}
		})
	}
	for i := range ownerBurst {
		next <- i
	}
	close(next)
	wg.Wait()
}

// BenchmarkOwner runs every operation of the ledger's API, with 65,000 held addresses and a real file. It fails if one
// turn of the loop took longer than looptimetest.Limit.
func BenchmarkOwner(b *testing.B) {
	for b.Loop() {
		owner65000(b)
	}
}

func owner65000(b *testing.B) {
	const lease, rest = 5 * time.Second, 5 * time.Second
	ranges := prefixes("10.0.0.0/15", "fd00::/64")
	file := filledStore(b, "10.0.0.0/15", ownerHeld)
	path := filepath.Dir(file.Path())
	options := func() ipam.Options { return ipam.Options{Ranges: ranges, Lease: lease, Quarantine: rest} }
	a, stop := start(b, file, options())
	o := watched(b, a)
	fmt.Printf("\nbursts of %d calls, %d at a time, with %d addresses held\n", ownerBurst, ownerCallers, ownerHeld)
	got := make([][]netip.Addr, ownerBurst)
	allocate := func(ctx context.Context, i int) error {
		l, err := o.Allocate(ctx, ipam.Request{Owner: owner(fmt.Sprint("b", i))})
		if err != nil {
			return err
		}
		got[i] = nil
		for _, x := range l.Addresses {
			got[i] = append(got[i], x.Addr)
		}
		return nil
	}
	release := func(ctx context.Context, i int) error {
		_, err := o.Release(ctx, owner(fmt.Sprint("b", i)))
		return err
	}
	confirm := func(ctx context.Context, i int) error {
		_, err := o.Confirm(ctx, owner(fmt.Sprint("b", i)), got[i])
		return err
	}
	figures := func() (leased, quarantined uint64) {
		for _, p := range o.Summary().Pools {
			leased, quarantined = leased+p.Leased, quarantined+p.Quarantined
		}
		return leased, quarantined
	}
	until := func(what string, ok func() bool) {
		b.Helper()
		for end := time.Now().Add(time.Minute); !ok(); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				b.Fatal(what, " did not happen")
			}
		}
	}
	o.Step("allocate", func() { o.burst(allocate) })
	o.Step("the leases expire", func() { until("the end of the leases", func() bool { n, _ := figures(); return n == 0 }) })
	o.Step("allocate and confirm", func() {
		o.burst(func(ctx context.Context, i int) error { return errors.Join(allocate(ctx, i), confirm(ctx, i)) })
	})
	o.Step("confirm again", func() { o.burst(confirm) })
	o.Step("list, 20 times", func() {
		for range 20 {
			if all, err := o.List(b.Context()); err != nil || len(all) != ownerHeld+ownerBurst {
				b.Errorf("%d allocations, %v", len(all), err)
			}
		}
	})
	o.Step("release", func() { o.burst(release) })
	o.Step("they leave the quarantine", func() { until("the end of the quarantine", func() bool { _, n := figures(); return n == 0 }) })
	o.Step("allocate and release", func() {
		o.burst(func(ctx context.Context, i int) error { return errors.Join(allocate(ctx, i), release(ctx, i)) })
	})
	o.Step("allocate, and all expire or leave while the process is down", func() {
		o.burst(allocate)
		o.burst(func(ctx context.Context, i int) error {
			if i%2 == 0 {
				return nil
			}
			return errors.Join(confirm(ctx, i), release(ctx, i))
		})
	})
	if err := errors.Join(stop(), file.Close()); err != nil {
		b.Fatal(err)
	}
	time.Sleep(max(lease, rest)) // all of them end while the ledger is closed
	began := time.Now()
	again, err := store.Open(path)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { again.Close() }) //nolint:errcheck // the benchmark is over
	a, stop = start(b, again, options())
	fmt.Printf("  %-58s %8s\n", "restart until the first call is taken", time.Since(began).Round(time.Millisecond))
	o = watched(b, a)
	o.Step("what ended meanwhile is removed", func() {
		until("the end of all", func() bool { leased, quarantined := figures(); return leased == 0 && quarantined == 0 })
	})
	if err := stop(); err != nil {
		b.Fatal(err)
	}
}
