// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// idle is a node whose owner is the test.
func idle(t testing.TB, now func() time.Time, names, addresses int) *Node {
	t.Helper()
	n, err := New(Config{
		Engine: engine.Config{Cluster: "default"}, MaxPolicies: 10, MaxManifestBytes: 1 << 20, MaxNames: names, MaxAddresses: addresses,
		NameGrace: 10 * time.Minute, Linger: time.Minute, Stream: stream.Defaults(), Log: log.Discard(), Now: now,
	}, t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// learnMany has names with 16 addresses each that end one after the other.
func learnMany(t testing.TB, n *Node, now *time.Time, names int) {
	t.Helper()
	next := netip.MustParseAddr("20.0.0.0")
	for i := range names {
		var addrs []netip.Addr
		for range 16 {
			addrs = append(addrs, next)
			next = next.Next()
		}
		*now = now.Add(time.Millisecond)
		if err := n.learn(fmt.Sprintf("h%d.example.com", i), addrs, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSweepLooksOnlyAtNamesThatEnd(t *testing.T) {
	const names = 1024
	now := time.Now()
	n := idle(t, func() time.Time { return now }, names, 16*names)
	learnMany(t, n, &now, names)
	n.ending.visits = 0
	for left := names; left > 0; left-- {
		if len(n.names) != left {
			t.Fatalf("%d names are left, want %d", len(n.names), left)
		}
		now = n.sweepAt
		n.sweep()
	}
	if len(n.names) != 0 || n.addresses != 0 {
		t.Errorf("%d names with %d addresses are left", len(n.names), n.addresses)
	}
	// One look finds the name that ends, one the name after it, and one that the
	// name has gone.
	if most := 3 * names; n.ending.visits > most {
		t.Errorf("%d sweeps looked at %d names, want at most %d", names, n.ending.visits, most)
	}
}

func TestFullMemoryOfNamesLooksOnlyAtNamesThatEnd(t *testing.T) {
	const names = 512
	for what, limit := range map[string][2]int{"names": {names, 32 * names}, "addresses": {2 * names, 16 * names}} {
		now := time.Now()
		n := idle(t, func() time.Time { return now }, limit[0], limit[1])
		learnMany(t, n, &now, names)
		n.ending.visits, n.ended.visits = 0, 0
		for i := range names {
			at := []netip.Addr{netip.AddrFrom4([4]byte{30, 0, byte(i >> 8), byte(i)})}
			if err := n.learn(fmt.Sprintf("x%d.example.com", i), at, time.Minute); err == nil {
				t.Fatalf("full of %s that are valid: a new name was taken", what)
			}
		}
		now = now.Add(2 * time.Minute) // all are in their grace
		for i := range names / 2 {
			at := []netip.Addr{netip.AddrFrom4([4]byte{30, 0, byte(i >> 8), byte(i)})}
			if err := n.learn(fmt.Sprintf("x%d.example.com", i), at, time.Minute); err != nil {
				t.Fatalf("full of %s in their grace: %v", what, err)
			}
		}
		if visits, most := n.ending.visits+n.ended.visits, 8*names; visits > most {
			t.Errorf("%s: %d calls looked at %d names, want at most %d", what, names+names/2, visits, most)
		}
	}
}

// The slow way looks at every address.
func TestAddressesEndAsTheSlowWaySays(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	now := time.Unix(1_700_000_000, 0)
	n := idle(t, func() time.Time { return now }, 20, 64)
	for step := range 3000 {
		if r.IntN(3) == 0 {
			now = now.Add(time.Duration(r.IntN(300)) * time.Second)
			want := make(map[string]map[netip.Addr]time.Time)
			for name, addrs := range n.names {
				for a, until := range addrs {
					if until.Add(n.config.NameGrace).After(now) {
						if want[name] == nil {
							want[name] = make(map[netip.Addr]time.Time)
						}
						want[name][a] = until
					}
				}
			}
			n.sweep()
			if !maps.EqualFunc(n.names, want, maps.Equal[map[netip.Addr]time.Time]) {
				t.Fatalf("step %d: after a sweep\n%v, want\n%v", step, n.names, want)
			}
			continue
		}
		over := false // whether any address is in its grace
		for _, addrs := range n.names {
			for _, until := range addrs {
				over = over || until.Before(now)
			}
		}
		name := fmt.Sprintf("n%d.example.com", r.IntN(20))
		at := netip.AddrFrom4([4]byte{20, 0, 0, byte(r.IntN(100))})
		known := n.names[name][at] != time.Time{}
		err := n.learn(name, []netip.Addr{at}, time.Duration(1+r.IntN(20))*time.Minute)
		if err != nil && (over || known) {
			t.Fatalf("step %d: refused though something may go (%t), or it is known (%t): %v", step, over, known, err)
		}
		count := 0
		for _, addrs := range n.names {
			count += len(addrs)
		}
		if count != n.addresses || count > 64 {
			t.Fatalf("step %d: %d addresses, counted as %d, the limit is 64", step, count, n.addresses)
		}
	}
}

// BenchmarkNamesThatEndOneByOne: 4,096 names with 65,536 addresses.
func BenchmarkNamesThatEndOneByOne(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		now := time.Now()
		n := idle(b, func() time.Time { return now }, 4096, 65536)
		learnMany(b, n, &now, 4096)
		b.StartTimer()
		for len(n.names) > 0 {
			now = n.sweepAt
			n.sweep()
		}
	}
}
