// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/test/ipamtest"
)

// ranges are what the hub has, in the order of their prefixes.
func ranges(a *ipam.Allocator) string {
	var lines []string
	for _, p := range a.Hub().Keys() {
		line := p.String()
		if r, _ := a.Hub().Get(p); r.Draining {
			line += " drains"
		}
		lines = append(lines, line)
	}
	slices.Sort(lines)
	return strings.Join(lines, ", ")
}

func setRanges(t *testing.T, a *ipam.Allocator, list ...string) {
	t.Helper()
	if err := a.SetRanges(t.Context(), prefixes(list...)); err != nil {
		t.Fatal(err)
	}
}

// TestARangeDrainsUntilItsLastAddressIsReleased proves INV-16.
func TestARangeDrainsUntilItsLastAddressIsReleased(t *testing.T) {
	m := ipamtest.NewMemory()
	o := ipam.Options{Stored: true, Quarantine: time.Hour}
	a, stop := start(t, m, o)
	want := func(text string) {
		t.Helper()
		if got := ranges(a); got != text {
			t.Fatalf("the ranges are %q, want %q", got, text)
		}
	}
	if _, err := a.Allocate(t.Context(), ipam.Request{Owner: owner("a")}); !errors.Is(err, ipam.ErrNoRange) {
		t.Fatalf("Allocate without a range: %v", err)
	}
	setRanges(t, a, "10.1.0.0/24", "fd01::/64")
	if got := allocate(t, a, ipam.Request{Owner: owner("a")}); got.List() != "10.1.0.2 and fd01::2" {
		t.Fatalf("the first owner has %s", got.List())
	}
	if _, err := a.Confirm(t.Context(), owner("a"), addrs("10.1.0.2", "fd01::2")); err != nil {
		t.Fatal(err)
	}
	allocate(t, a, ipam.Request{Owner: owner("lease")})

	setRanges(t, a, "10.2.0.0/24")
	const draining = "10.1.0.0/24 drains, 10.2.0.0/24, fd01::/64 drains"
	for leased := range 2 { // the second time after a restart
		leased := uint64(1 - leased) // it ends with the process
		want(draining)
		if got := allocate(t, a, ipam.Request{Owner: owner("a")}); got.List() != "10.1.0.2 and fd01::2" || got.State != ipam.Confirmed {
			t.Errorf("the owner of the draining range has %s, %s", got.List(), got.State)
		}
		if got := allocate(t, a, ipam.Request{Owner: owner("b"), ValidateOnly: true}); got.List() != "10.2.0.2" {
			t.Errorf("a new owner would get %s", got.List())
		}
		for _, r := range []ipam.Request{
			{Owner: owner("c"), Wanted: addrs("10.1.0.9")}, {Owner: owner("c"), Families: []ipam.Family{ipam.IPv6}},
		} {
			if got, err := a.Allocate(t.Context(), r); !errors.Is(err, ipam.ErrUnavailable) && !errors.Is(err, ipam.ErrNoPool) {
				t.Errorf("%+v of a draining range got %v, %v", r, got, err)
			}
		}
		if f := a.Summary().Pools[1]; !f.Draining || f.Free != 0 || f.Confirmed != 1 || f.Leased != leased {
			t.Errorf("the figures of the draining range: %+v", f)
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		a, stop = start(t, m, o)
	}
	want(draining)
	if _, err := a.Release(t.Context(), owner("a")); err != nil {
		t.Fatal(err)
	}
	want("10.2.0.0/24")
	// What was released is in quarantine all the same.
	setRanges(t, a, "10.1.0.0/30")
	if got, err := a.Allocate(t.Context(), ipam.Request{Owner: owner("d")}); !errors.Is(err, ipam.ErrExhausted) {
		t.Errorf("a quarantined address of a range that came back: %v, %v", got, err)
	}
	setRanges(t, a)
	want("")
	if _, err := a.Allocate(t.Context(), ipam.Request{Owner: owner("d")}); !errors.Is(err, ipam.ErrNoRange) {
		t.Errorf("Allocate after the last range: %v", err)
	}
}

func TestARangeThatOverlapsOneInUseIsRefusedByName(t *testing.T) {
	m := ipamtest.NewMemory()
	a, _ := start(t, m, ipam.Options{Stored: true})
	setRanges(t, a, "10.1.0.0/24")
	allocate(t, a, ipam.Request{Owner: owner("a")})
	commits := m.Commits()
	for text, list := range map[string][]string{
		"pools[1]: 10.1.0.0/16 overlaps 10.1.0.0/24, of which 1 addresses are in use": {"10.2.0.0/24", "10.1.0.0/16"},
		"pools[1]: 10.2.0.0/25 overlaps pools[0], 10.2.0.0/24":                        {"10.2.0.0/24", "10.2.0.0/25"},
		"pools[0]: 127.0.0.0/24 overlaps the loopback range 127.0.0.0/8":              {"127.0.0.0/24"},
	} {
		if err := a.SetRanges(t.Context(), prefixes(list...)); err == nil || err.Error() != text {
			t.Errorf("SetRanges(%v): %v, want %s", list, err, text)
		}
	}
	if got := ranges(a); got != "10.1.0.0/24" || m.Commits() != commits {
		t.Errorf("refused ranges left %q and %d commits", got, m.Commits()-commits)
	}
	if _, err := a.Release(t.Context(), owner("a")); err != nil {
		t.Fatal(err)
	}
	setRanges(t, a, "10.1.0.0/16")
}

// TestRangesAreThoseOnTheDiskAfterACommitThatFailed proves INV-16.
func TestRangesAreThoseOnTheDiskAfterACommitThatFailed(t *testing.T) {
	for _, written := range []bool{false, true} {
		m := ipamtest.NewMemory()
		a, _ := start(t, m, ipam.Options{Stored: true})
		setRanges(t, a, "10.1.0.0/24")
		allocate(t, a, ipam.Request{Owner: owner("a")})
		m.Fail(func(*ipam.Changes) (bool, error) { return written, ipamtest.ErrDisk })
		if err := a.SetRanges(t.Context(), prefixes("10.2.0.0/24")); !errors.Is(err, ipam.ErrStore) {
			t.Errorf("written %v: SetRanges says %v", written, err)
		}
		m.Fail(nil)
		want := "10.1.0.0/24"
		if written {
			want = "10.1.0.0/24 drains, 10.2.0.0/24"
		}
		if got := ranges(a); got != want {
			t.Errorf("written %v: the ranges are %q, want %q", written, got, want)
		}
	}
}

// TestABurstAcrossAChangeOfRanges allocates from many goroutines while the ranges
// change: nobody gets an address twice, of a range that never served, or none.
func TestABurstAcrossAChangeOfRanges(t *testing.T) {
	a, _ := start(t, ipamtest.NewMemory(), ipam.Options{Stored: true})
	sets := [][]string{{"10.1.0.0/22"}, {"10.2.0.0/22", "10.1.0.0/22"}, {"10.2.0.0/22"}, {"10.3.0.0/22"}}
	setRanges(t, a, sets[0]...)
	var (
		mu   sync.Mutex
		held = map[netip.Addr]string{} // guarded by mu
		wg   sync.WaitGroup
	)
	for w := range 8 {
		wg.Go(func() {
			for i := range 125 {
				o := owner(fmt.Sprintf("%d-%d", w, i))
				got, err := a.Allocate(t.Context(), ipam.Request{Owner: o})
				if err != nil {
					t.Errorf("%s: %v", o, err)
					return
				}
				mu.Lock()
				if other, ok := held[got.Addresses[0].Addr]; ok {
					t.Errorf("%s and %s have %s", o, other, got.List())
				}
				held[got.Addresses[0].Addr] = o.String()
				mu.Unlock()
			}
		})
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		setRanges(t, a, sets[random.IntN(len(sets))]...)
	}
	wg.Wait()
	setRanges(t, a, "10.4.0.0/24")
	for _, f := range a.Summary().Pools {
		n := uint64(0)
		for addr := range held {
			if f.Prefix.Contains(addr) {
				n++
			}
		}
		if f.Leased != n || f.Draining != (f.Prefix.String() != "10.4.0.0/24") {
			t.Errorf("%s has %d addresses, of which %d were given: %+v", f.Prefix, f.Leased, n, f)
		}
	}
	if got, err := a.List(t.Context()); err != nil || len(got) != 1000 || len(held) != 1000 {
		t.Errorf("%d owners hold %d addresses, %v; want 1000", len(got), len(held), err)
	}
}
