// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam_test

import (
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/store"
)

// filledStore returns a file in which n addresses of a range are held.
func filledStore(b *testing.B, cidr string, n int) *store.Store {
	b.Helper()
	s, err := store.Open(b.TempDir() + "/ipam")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { s.Close() }) //nolint:errcheck // the benchmark is over
	if _, err := s.Load(); err != nil {
		b.Fatal(err)
	}
	prefix := netip.MustParsePrefix(cidr)
	c := &ipam.Changes{Allocations: map[workload.Owner]*ipam.Allocation{}, Cursors: map[netip.Prefix]netip.Addr{}}
	at := prefix.Addr().Next().Next()
	for i := range n {
		o := workload.Owner{ContainerID: fmt.Sprintf("%064x", i*7919), Interface: "eth0"}
		c.Allocations[o] = &ipam.Allocation{Owner: o, State: ipam.Confirmed, Addresses: []ipam.Address{{Addr: at, PoolBits: prefix.Bits()}}}
		at = at.Next()
		c.Cursors[prefix] = at
		// In parts: bbolt inserts into one growing page within a commit.
		if (i+1)%1000 == 0 || i == n-1 {
			if err := s.Commit(c); err != nil {
				b.Fatal(err)
			}
			clear(c.Allocations)
		}
	}
	return s
}

var fills = []struct {
	cidr string
	held int
}{{"10.0.0.0/16", 0}, {"10.0.0.0/16", 60_000}, {"fd00::/64", 0}, {"fd00::/64", 60_000}}

// BenchmarkDurable measures ipam's part of one ADD and DEL: Allocate, and Confirm and Release with a synced commit
// each, one caller at a time.
func BenchmarkDurable(b *testing.B) {
	for _, c := range fills {
		b.Run(fmt.Sprintf("%s held=%d", c.cidr, c.held), func(b *testing.B) {
			a, _ := start(b, filledStore(b, c.cidr, c.held), ipam.Options{Ranges: prefixes(c.cidr)})
			i := 0
			for b.Loop() {
				o := owner(fmt.Sprintf("b%d", i))
				i++
				confirm(b, a, allocate(b, a, ipam.Request{Owner: o}))
				if _, err := a.Release(b.Context(), o); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkDurableTogether is BenchmarkDurable with 64 callers, which share commits.
func BenchmarkDurableTogether(b *testing.B) {
	for _, c := range fills {
		b.Run(fmt.Sprintf("%s held=%d", c.cidr, c.held), func(b *testing.B) {
			a, _ := start(b, filledStore(b, c.cidr, c.held), ipam.Options{Ranges: prefixes(c.cidr)})
			var n atomic.Int64
			b.SetParallelism(32) // times GOMAXPROCS
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					o := owner(fmt.Sprintf("b%d", n.Add(1)))
					got, err := a.Allocate(b.Context(), ipam.Request{Owner: o})
					if err != nil {
						b.Error(err)
						return
					}
					if _, err := a.Confirm(b.Context(), o, addresses(got)); err != nil {
						b.Error(err)
						return
					}
					if _, err := a.Release(b.Context(), o); err != nil {
						b.Error(err)
						return
					}
				}
			})
		})
	}
}

// BenchmarkStart measures the time from opening a file to an index that serves calls.
func BenchmarkStart(b *testing.B) {
	for _, c := range fills[:2] {
		b.Run(fmt.Sprintf("%s held=%d", c.cidr, c.held), func(b *testing.B) {
			s := filledStore(b, c.cidr, c.held)
			dir := s.Path()[:len(s.Path())-len("/"+store.FileName)]
			if err := s.Close(); err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				s, err := store.Open(dir)
				if err != nil {
					b.Fatal(err)
				}
				if _, err := ipam.New(s, ipam.Options{Field: "pools", Ranges: prefixes(c.cidr), Lease: ipam.DefaultLease}); err != nil {
					b.Fatal(err)
				}
				if err := s.Close(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
