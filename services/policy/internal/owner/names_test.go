// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

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

// idle is an owner that the test itself runs.
func idle(t testing.TB, now func() time.Time, names, addresses int) *Owner {
	t.Helper()
	o, err := New(Config{
		Engine: engine.Config{Cluster: "default"}, MaxPolicies: 10, MaxManifestBytes: 1 << 20, MaxNames: names, MaxAddresses: addresses,
		NameGrace: 10 * time.Minute, Linger: time.Minute, Stream: stream.Defaults(), Log: log.Discard(), Now: now,
	}, t.TempDir(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := o.Close(); err != nil {
			t.Error(err)
		}
	})
	return o
}

// learnMany has names with 16 addresses each that end one after the other.
func learnMany(t testing.TB, o *Owner, now *time.Time, names int) {
	t.Helper()
	next := netip.MustParseAddr("20.0.0.0")
	for i := range names {
		var addrs []netip.Addr
		for range 16 {
			addrs = append(addrs, next)
			next = next.Next()
		}
		*now = now.Add(time.Millisecond)
		if err := o.learn(fmt.Sprintf("h%d.example.com", i), addrs, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSweepLooksOnlyAtNamesThatEnd(t *testing.T) {
	const names = 1024
	now := time.Now()
	o := idle(t, func() time.Time { return now }, names, 16*names)
	learnMany(t, o, &now, names)
	o.ending.Visits = 0
	for left := names; left > 0; left-- {
		if len(o.names) != left {
			t.Fatalf("%d names are left, want %d", len(o.names), left)
		}
		now = o.sweepAt
		o.sweep()
	}
	if len(o.names) != 0 || o.addresses != 0 {
		t.Errorf("%d names with %d addresses are left", len(o.names), o.addresses)
	}
	// One look finds the name that ends, one the name after it, and one that the
	// name has gone.
	if most := 3 * names; o.ending.Visits > most {
		t.Errorf("%d sweeps looked at %d names, want at most %d", names, o.ending.Visits, most)
	}
}

func TestFullMemoryOfNamesLooksOnlyAtNamesThatEnd(t *testing.T) {
	const names = 512
	for what, limit := range map[string][2]int{"names": {names, 32 * names}, "addresses": {2 * names, 16 * names}} {
		now := time.Now()
		o := idle(t, func() time.Time { return now }, limit[0], limit[1])
		learnMany(t, o, &now, names)
		o.ending.Visits, o.ended.Visits = 0, 0
		for i := range names {
			at := []netip.Addr{netip.AddrFrom4([4]byte{30, 0, byte(i >> 8), byte(i)})}
			if err := o.learn(fmt.Sprintf("x%d.example.com", i), at, time.Minute); err == nil {
				t.Fatalf("full of %s that are valid: a new name was taken", what)
			}
		}
		now = now.Add(2 * time.Minute) // all are in their grace
		for i := range names / 2 {
			at := []netip.Addr{netip.AddrFrom4([4]byte{30, 0, byte(i >> 8), byte(i)})}
			if err := o.learn(fmt.Sprintf("x%d.example.com", i), at, time.Minute); err != nil {
				t.Fatalf("full of %s in their grace: %v", what, err)
			}
		}
		if visits, most := o.ending.Visits+o.ended.Visits, 8*names; visits > most {
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
	o := idle(t, func() time.Time { return now }, 20, 64)
	for step := range 3000 {
		if r.IntN(3) == 0 {
			now = now.Add(time.Duration(r.IntN(300)) * time.Second)
			want := make(map[string]map[netip.Addr]time.Time)
			for name, addrs := range o.names {
				for a, until := range addrs {
					if until.Add(o.config.NameGrace).After(now) {
						if want[name] == nil {
							want[name] = make(map[netip.Addr]time.Time)
						}
						want[name][a] = until
					}
				}
			}
			o.sweep()
			if !maps.EqualFunc(o.names, want, maps.Equal[map[netip.Addr]time.Time]) {
				t.Fatalf("step %d: after a sweep\n%v, want\n%v", step, o.names, want)
			}
			continue
		}
		over := false // whether any address is in its grace
		for _, addrs := range o.names {
			for _, until := range addrs {
				over = over || until.Before(now)
			}
		}
		name := fmt.Sprintf("n%d.example.com", r.IntN(20))
		at := netip.AddrFrom4([4]byte{20, 0, 0, byte(r.IntN(100))})
		known := o.names[name][at] != time.Time{}
		err := o.learn(name, []netip.Addr{at}, time.Duration(1+r.IntN(20))*time.Minute)
		if err != nil && (over || known) {
			t.Fatalf("step %d: refused though something may go (%t), or it is known (%t): %v", step, over, known, err)
		}
		count := 0
		for _, addrs := range o.names {
			count += len(addrs)
		}
		if count != o.addresses || count > 64 {
			t.Fatalf("step %d: %d addresses, counted as %d, the limit is 64", step, count, o.addresses)
		}
	}
}

// BenchmarkNamesThatEndOneByOne: 4,096 names with 65,536 addresses.
func BenchmarkNamesThatEndOneByOne(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		now := time.Now()
		o := idle(b, func() time.Time { return now }, 4096, 65536)
		learnMany(b, o, &now, 4096)
		b.StartTimer()
		for len(o.names) > 0 {
			now = o.sweepAt
			o.sweep()
		}
	}
}
