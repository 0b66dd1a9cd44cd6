// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"runtime"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/model/dnsname"
)

func learnedAddress(n int) netip.Addr {
	return netip.AddrFrom4([4]byte{20, byte(n >> 16), byte(n >> 8), byte(n)})
}

// TestLearnedNamesAreThoseOfTwoMaps adds and removes addresses at random, and compares the lookups in both directions
// with maps.
func TestLearnedNamesAreThoseOfTwoMaps(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	l := newLearned()
	names, namesOf := map[string]map[netip.Addr]struct{}{}, map[netip.Addr]map[string]struct{}{}
	for step := range 20_000 {
		name, a := fmt.Sprint("n", r.IntN(12)), learnedAddress(r.IntN(20))
		_, had := names[name][a]
		if r.IntN(240) < 20+step%200 {
			if added := l.add(dnsname.Learned(name), a); added == had {
				t.Fatalf("step %d: %s of %s added: %t", step, a, name, added)
			}
			include(names, name, a)
			include(namesOf, a, name)
		} else {
			if removed := l.remove(dnsname.Learned(name), a); removed != had {
				t.Fatalf("step %d: %s of %s removed: %t", step, a, name, removed)
			}
			exclude(names, name, a)
			exclude(namesOf, a, name)
		}
		if len(l.byName) != len(names) || len(l.first) != len(namesOf) || len(l.further) > len(l.first) {
			t.Fatalf("step %d: %d names of %d addresses (%d with several), want %d of %d",
				step, len(l.byName), len(l.first), len(l.further), len(names), len(namesOf))
		}
		for name, addrs := range names {
			want := slices.SortedFunc(maps.Keys(addrs), netip.Addr.Compare)
			if got := l.byName[dnsname.Learned(name)]; string(got.text) != name || !slices.Equal(got.addrs, want) {
				t.Fatalf("step %d: %s has %v, want %v", step, name, got, want)
			}
		}
		for a, of := range namesOf {
			got, want := slices.Sorted(slices.Values(l.names(a, ""))), slices.Sorted(maps.Keys(of))
			if !slices.Equal(got, want) {
				t.Fatalf("step %d: %s has the names %v, want %v", step, a, got, want)
			}
		}
	}
}

// TestRemovedAddressesTakeNoMemory: a name that had a thousand addresses and has one left uses no more memory than a
// name that never had more than one. The same applies to an address that had a thousand names.
func TestRemovedAddressesTakeNoMemory(t *testing.T) {
	l := newLearned()
	for i := range 1000 {
		l.add("a.", learnedAddress(i))
		l.add(dnsname.Learned(fmt.Sprint("n", i, ".")), learnedAddress(0))
	}
	for i := 1; i < 1000; i++ {
		l.remove("a.", learnedAddress(i))
		l.remove(dnsname.Learned(fmt.Sprint("n", i, ".")), learnedAddress(0))
	}
	if n := cap(l.byName["a."].addrs); n > 4 {
		t.Errorf("the name has one address, and memory for %d", n)
	}
	if n := cap(l.further[learnedAddress(0)]); n > 4 {
		t.Errorf("the address has two names, and memory for %d", n)
	}
}

// BenchmarkMemoryOfLearnedNames reports the memory that the names and addresses of a full table use in an engine.
func BenchmarkMemoryOfLearnedNames(b *testing.B) {
	for _, shape := range []struct{ names, addresses, namesPerAddress int }{
		{16_384, 262_144, 1}, {256, 262_144, 1}, {16_384, 262_144, 2}, {16_384, 262_144, 16},
	} {
		b.Run(fmt.Sprintf("%d-names-%d-per-address", shape.names, shape.namesPerAddress), func(b *testing.B) {
			perName := shape.addresses / shape.names
			var learn []Name
			for n := range shape.names {
				l := Name{Name: dnsname.Learned(fmt.Sprintf("service-%d.region.example.com.", n))}
				for i := range perName {
					a := n/shape.namesPerAddress*perName + i
					l.Addrs = append(l.Addrs, learnedAddress(a))
				}
				learn = append(learn, l)
			}
			used := func() uint64 {
				var m runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&m)
				return m.HeapAlloc
			}
			for b.Loop() {
				before := used()
				e := New(Config{})
				for _, l := range learn {
					if err := e.Apply(Change{Learn: []Name{l}}); err != nil {
						b.Fatal(err)
					}
				}
				b.ReportMetric(float64(used()-before)/(1<<20), "MiB")
				runtime.KeepAlive(e)
			}
		})
	}
}
