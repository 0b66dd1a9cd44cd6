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
	"sync/atomic"
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
	// Released addresses are in quarantine nevertheless.
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

// TestABurstAcrossAChangeOfRanges allocates from many goroutines while the ranges change: no address is allocated
// twice, each comes from a range that served, and each call returns an address.
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

// TestARefusedRangeGivesNoNewAddress proves INV-86, across a restart.
func TestARefusedRangeGivesNoNewAddress(t *testing.T) {
	for _, stored := range []bool{true, false} { // the ranges are of SetRanges, of the configuration
		m := ipamtest.NewMemory()
		o := ipam.Options{Stored: stored, Quarantine: time.Hour}
		list := []string{"10.1.0.0/24", "10.2.0.0/24", "fd01::/64"}
		if !stored {
			o.Ranges = prefixes(list...)
		}
		a, stop := start(t, m, o)
		if stored {
			setRanges(t, a, list...)
		}
		got := allocate(t, a, ipam.Request{Owner: owner("held")})
		if _, err := a.Confirm(t.Context(), owner("held"), addrs("10.1.0.2", "fd01::2")); err != nil {
			t.Fatal(err, got)
		}
		refuse := func(list ...ipam.Refusal) {
			t.Helper()
			if err := a.SetRefused(t.Context(), list); err != nil {
				t.Fatal(err)
			}
		}
		first := ipam.Refusal{Prefix: prefixes("10.1.0.0/24")[0], Reason: "node b has it"}
		second := ipam.Refusal{Prefix: prefixes("10.2.0.0/24")[0], Reason: "node c has it"}
		const both = "no IPv4; 10.1.0.0/24 is refused: node b has it; 10.2.0.0/24 is refused: node c has it"
		refuse(first, second, ipam.Refusal{Prefix: prefixes("10.7.0.0/24")[0], Reason: "is none of ours"})
		for range 2 { // the second time after a restart
			if got := ranges(a); got != "10.1.0.0/24 drains, fd01::/64" {
				t.Errorf("the ranges are %q", got)
			}
			for _, r := range []ipam.Request{{Owner: owner("new")}, {Owner: owner("new"), Families: []ipam.Family{ipam.IPv4}}} {
				_, err := a.Allocate(t.Context(), r)
				if !errors.Is(err, ipam.ErrNoRange) || !strings.Contains(err.Error(), both) {
					t.Errorf("a new owner: %v", err)
				}
			}
			wanted := ipam.Request{Owner: owner("new"), Wanted: addrs("10.2.0.9")}
			if _, err := a.Allocate(t.Context(), wanted); !errors.Is(err, ipam.ErrNoRange) {
				t.Errorf("a wanted address of a refused range: %v", err)
			}
			if got := allocate(t, a, ipam.Request{Owner: owner("held")}); got.List() != "10.1.0.2 and fd01::2" {
				t.Errorf("the owner has %s", got.List())
			}
			if f := a.Summary().Pools[1]; f.Refused != "node c has it" || f.Free != 0 || f.Serves() {
				t.Errorf("the figures of a refused range: %+v", f)
			}
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			a, stop = start(t, m, o)
		}
		commits := m.Commits()
		refuse(first, second)
		if m.Commits() != commits {
			t.Error("an unchanged refusal is written again")
		}
		refuse(first)
		if got := ranges(a); got != "10.1.0.0/24 drains, 10.2.0.0/24, fd01::/64" {
			t.Errorf("the ranges are %q", got)
		}
		if got := allocate(t, a, ipam.Request{Owner: owner("new")}); got.Addresses[0].Addr != addrs("10.2.0.2")[0] {
			t.Errorf("a new owner has %s", got.List())
		}
		if _, err := a.Release(t.Context(), owner("held")); err != nil {
			t.Fatal(err)
		}
		if got := ranges(a); got != "10.2.0.0/24, fd01::/64" {
			t.Errorf("the ranges are %q without the last owner", got)
		}
		refuse()
		if got := ranges(a); got != "10.1.0.0/24, 10.2.0.0/24, fd01::/64" {
			t.Errorf("the ranges are %q in the end", got)
		}
	}
}

// TestARangeIsRetiredOnlyWhenItIsEmpty races the end of a range with allocations:
// no address of a range that was retired is allocated or held.
func TestARangeIsRetiredOnlyWhenItIsEmpty(t *testing.T) {
	now := time.Now()
	var mu sync.Mutex
	m := ipamtest.NewMemory()
	a, stop := start(t, m, ipam.Options{Stored: true, Quarantine: time.Minute, Now: func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		return now
	}})
	first, second := prefixes("10.1.0.0/30")[0], prefixes("10.2.0.0/24")[0]
	retire := func(want bool) {
		t.Helper()
		if got, err := a.Retire(t.Context(), second); err != nil || got != want {
			t.Fatalf("Retire: %v, %v, want %v", got, err, want)
		}
	}
	setRanges(t, a, first.String(), second.String())
	allocate(t, a, ipam.Request{Owner: owner("fills")})
	lease := allocate(t, a, ipam.Request{Owner: owner("lease")})
	retire(false)
	if _, err := a.Confirm(t.Context(), owner("lease"), []netip.Addr{lease.Addresses[0].Addr}); err != nil {
		t.Fatal(err)
	}
	retire(false)
	if _, err := a.Release(t.Context(), owner("lease")); err != nil {
		t.Fatal(err)
	}
	retire(false) // its address is in quarantine
	mu.Lock()
	now = now.Add(2 * time.Minute)
	mu.Unlock()
	retire(true)
	retire(false) // it is gone
	if got := ranges(a); got != first.String() {
		t.Fatalf("the ranges are %q", got)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	a, _ = start(t, m, ipam.Options{Stored: true, Quarantine: time.Minute})
	if got := ranges(a); got != first.String() {
		t.Fatalf("the ranges are %q after a restart", got)
	}
	for i := range 100 {
		setRanges(t, a, first.String(), second.String())
		var wg sync.WaitGroup
		var got *ipam.Allocation
		var retired bool
		wg.Go(func() {
			got, _ = a.Allocate(t.Context(), ipam.Request{Owner: owner(fmt.Sprint("o", i))}) // or there is no address
		})
		wg.Go(func() {
			var err error
			if retired, err = a.Retire(t.Context(), second); err != nil {
				t.Error(err)
			}
		})
		wg.Wait()
		held := got != nil && second.Contains(got.Addresses[0].Addr)
		if held == retired {
			t.Fatalf("the range was retired: %v, and an address of it allocated: %v", retired, held)
		}
		if _, err := a.Release(t.Context(), owner(fmt.Sprint("o", i))); err != nil {
			t.Fatal(err)
		}
	}
}

// primaries returns the primary ranges in the hub, and checks that the summary has the same.
func primaries(t *testing.T, a *ipam.Allocator) string {
	t.Helper()
	var hub, sum []string
	for _, p := range a.Hub().Keys() {
		if r, _ := a.Hub().Get(p); r.Primary {
			hub = append(hub, p.String())
		}
	}
	for _, f := range a.Summary().Pools {
		if _, announced := a.Hub().Get(f.Prefix); f.Primary && announced {
			sum = append(sum, f.Prefix.String())
		}
	}
	slices.Sort(hub)
	slices.Sort(sum)
	if !slices.Equal(hub, sum) {
		t.Errorf("the hub has the primary ranges %v, the summary %v", hub, sum)
	}
	return strings.Join(hub, ", ")
}

// TestThePrimaryRangeStaysWhileTheNodeHasIt proves INV-105, across a restart after each
// change.
func TestThePrimaryRangeStaysWhileTheNodeHasIt(t *testing.T) {
	m := ipamtest.NewMemory()
	o := ipam.Options{Stored: true}
	a, stop := start(t, m, o)
	want := func(text string) {
		t.Helper()
		for range 2 {
			if got := primaries(t, a); got != text {
				t.Fatalf("the primary ranges are %q, want %q", got, text)
			}
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			a, stop = start(t, m, o)
		}
	}
	refuse := func(list ...string) {
		t.Helper()
		refused := []ipam.Refusal{}
		for _, p := range prefixes(list...) {
			refused = append(refused, ipam.Refusal{Prefix: p, Reason: "node b has it"})
		}
		if err := a.SetRefused(t.Context(), refused); err != nil {
			t.Fatal(err)
		}
	}
	want("")
	setRanges(t, a, "10.5.0.0/24", "fd05::/64")
	want("10.5.0.0/24, fd05::/64")
	// Lower ranges come, and before it in the order of use.
	setRanges(t, a, "10.1.0.0/24", "fd01::/64", "10.5.0.0/24", "fd05::/64", "10.7.0.0/24")
	want("10.5.0.0/24, fd05::/64")
	for _, p := range prefixes("10.5.0.0/24", "fd05::/64") {
		if retired, err := a.Retire(t.Context(), p); retired || err != nil {
			t.Errorf("the primary range %s was retired: %v, %v", p, retired, err)
		}
	}
	if retired, err := a.Retire(t.Context(), prefixes("fd01::/64")[0]); !retired || err != nil {
		t.Errorf("another range was not retired: %v", err)
	}
	want("10.5.0.0/24, fd05::/64")
	// 10.5.0.0/24 leaves the settings while one of its addresses is in use: it drains.
	req := ipam.Request{Owner: owner("a"), Wanted: addrs("10.5.0.9"), Families: []ipam.Family{ipam.IPv4}}
	allocate(t, a, req)
	if _, err := a.Confirm(t.Context(), owner("a"), addrs("10.5.0.9")); err != nil {
		t.Fatal(err)
	}
	setRanges(t, a, "10.7.0.0/24", "10.1.0.0/24", "fd05::/64")
	want("10.5.0.0/24, fd05::/64")
	if _, err := a.Release(t.Context(), owner("a")); err != nil {
		t.Fatal(err)
	}
	want("10.7.0.0/24, fd05::/64")
	setRanges(t, a, "10.1.0.0/24", "fd05::/64", "10.7.0.0/24")
	want("10.7.0.0/24, fd05::/64")
	// A range of another node must not be primary.
	refuse("10.7.0.0/24")
	want("10.1.0.0/24, fd05::/64")
	refuse()
	want("10.1.0.0/24, fd05::/64")
	// No other range replaces it as primary: it is primary when it serves again.
	setRanges(t, a)
	want("")
	setRanges(t, a, "10.7.0.0/24", "10.1.0.0/24")
	want("10.1.0.0/24")
}

// TestAKeptRangeGivesNoNewAddressAndStays: a node whose settings differ from the cluster's keeps its ranges, their
// gateways among them, across a restart, also the ranges in which no owner holds an address.
func TestAKeptRangeGivesNoNewAddressAndStays(t *testing.T) {
	m := ipamtest.NewMemory()
	o := ipam.Options{Stored: true, Quarantine: time.Hour}
	a, stop := start(t, m, o)
	setRanges(t, a, "10.1.0.0/24", "10.2.0.0/24")
	if err := a.SetRefused(t.Context(), []ipam.Refusal{
		{Prefix: prefixes("10.1.0.0/24")[0], Reason: "other settings", Kept: true},
		{Prefix: prefixes("10.2.0.0/24")[0], Reason: "node c has it"},
	}); err != nil {
		t.Fatal(err)
	}
	for _, when := range []string{"at first", "after a restart"} {
		if got := ranges(a); got != "10.1.0.0/24 drains" {
			t.Errorf("%s the ranges are %q", when, got)
		}
		if r, _ := a.Hub().Get(prefixes("10.1.0.0/24")[0]); !r.Primary {
			t.Errorf("%s the range that the node keeps is not its primary one: %+v", when, r)
		}
		if _, err := a.Allocate(t.Context(), ipam.Request{Owner: owner("new")}); !errors.Is(err, ipam.ErrNoRange) ||
			!strings.Contains(err.Error(), "10.1.0.0/24 is refused: other settings") {
			t.Errorf("%s a new owner: %v", when, err)
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		a, stop = start(t, m, o)
	}
	if err := a.SetRefused(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	if got := allocate(t, a, ipam.Request{Owner: owner("new")}); got.Addresses[0].Addr != addrs("10.1.0.2")[0] {
		t.Errorf("when the settings agree again a new owner has %s", got.List())
	}
}

// TestReleasedAddressWaitsUntilItMayBeReused: at the end of its quarantine, an address that other nodes may still know
// waits, across a restart, too. Meanwhile addresses that were never used are allocated first, then the address that was
// released longest ago.
func TestReleasedAddressWaitsUntilItMayBeReused(t *testing.T) {
	var now atomic.Pointer[time.Time]
	begin := time.Now()
	now.Store(&begin)
	m := ipamtest.NewMemory()
	o := ipam.Options{
		Ranges: prefixes("10.1.0.0/29"), Quarantine: time.Minute, AsksReuse: true, // .2 to .6
		Now: func() time.Time { return *now.Load() },
	}
	a, stop := start(t, m, o)
	hold := func(name, want string) {
		t.Helper()
		got := allocate(t, a, ipam.Request{Owner: owner(name)})
		if got.List() != want {
			t.Fatalf("%s has %s, want %s", name, got.List(), want)
		}
		if _, err := a.Confirm(t.Context(), owner(name), addrs(want)); err != nil {
			t.Fatal(err)
		}
	}
	pass := func(d time.Duration) {
		later := now.Load().Add(d)
		now.Store(&later)
		if _, err := a.List(t.Context()); err != nil { // which looks at the clock
			t.Fatal(err)
		}
	}
	reuse := func(asks bool, free ...string) {
		t.Helper()
		if err := a.SetReuse(t.Context(), asks, addrs(free...), "another node may still know it"); err != nil {
			t.Fatal(err)
		}
	}
	waiting := func(when string, want ...string) {
		t.Helper()
		got := a.Summary().Waiting
		slices.SortFunc(got, netip.Addr.Compare)
		if !slices.Equal(got, addrs(want...)) {
			t.Errorf("%s %v wait, want %v", when, got, want)
		}
	}
	hold("a", "10.1.0.2")
	hold("b", "10.1.0.3")
	for _, name := range []string{"b", "a"} { // b longest ago
		if _, err := a.Release(t.Context(), owner(name)); err != nil {
			t.Fatal(err)
		}
		pass(time.Second)
	}
	hold("c", "10.1.0.4")
	waiting("in quarantine")
	pass(time.Hour)
	waiting("after the quarantine", "10.1.0.2", "10.1.0.3")
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	a, stop = start(t, m, o)
	pass(0)
	waiting("after a restart", "10.1.0.2", "10.1.0.3")
	reuse(true)
	hold("d", "10.1.0.5")
	hold("e", "10.1.0.6")
	_, err := a.Allocate(t.Context(), ipam.Request{Owner: owner("f")})
	var full *ipam.ExhaustedError
	if !errors.As(err, &full) || full.Waiting != 2 || !strings.Contains(err.Error(),
		"2 released addresses may not be allocated again yet: another node may still know it") {
		t.Errorf("without a free address: %v", err)
	}
	_, err = a.Allocate(t.Context(), ipam.Request{Owner: owner("f"), Wanted: addrs("10.1.0.2")})
	if !errors.Is(err, ipam.ErrUnavailable) || !strings.Contains(err.Error(), "another node may still know it") {
		t.Errorf("a wanted address that waits: %v", err)
	}
	reuse(true, "10.1.0.2", "10.1.0.4", "10.9.9.9") // of which one is held, and one is none of this node's
	waiting("when one is free", "10.1.0.3")
	reuse(true, "10.1.0.3")
	if f := a.Summary().Pools[0]; f.Free != 2 || f.Quarantined != 0 {
		t.Errorf("the figures are %+v", f)
	}
	hold("f", "10.1.0.3")
	if _, err := a.Release(t.Context(), owner("c")); err != nil {
		t.Fatal(err)
	}
	pass(time.Hour)
	waiting("after another quarantine", "10.1.0.4")
	reuse(false)
	waiting("with a tunnel")
	hold("g", "10.1.0.2")
	hold("h", "10.1.0.4")
	if err := stop(); err != nil {
		t.Fatal(err)
	}
}
