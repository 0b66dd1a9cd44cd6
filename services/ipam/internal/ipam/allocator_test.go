// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/looptime"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/store"
	"github.com/sluice-net/sluice/services/ipam/internal/test/ipamtest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestMemoryPassesTheSuite(t *testing.T) {
	ipamtest.Suite(t, func(t *testing.T, old ipam.Store) ipam.Store {
		if old != nil {
			return old
		}
		return ipamtest.NewMemory()
	})
}

func prefixes(list ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(list))
	for i, s := range list {
		out[i] = netip.MustParsePrefix(s)
	}
	return out
}

func addrs(list ...string) []netip.Addr {
	out := make([]netip.Addr, len(list))
	for i, s := range list {
		out[i] = netip.MustParseAddr(s)
	}
	return out
}

func owner(id string) workload.Owner { return workload.Owner{ContainerID: id, Interface: "eth0"} }

// start runs an allocator; stop ends it and waits.
func start(t testing.TB, s ipam.Store, o ipam.Options) (a *ipam.Allocator, stop func() error) {
	t.Helper()
	if o.Lease == 0 {
		o.Lease = ipam.DefaultLease
	}
	o.Field = "pools"
	a, err := ipam.New(s, o)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- a.Run(ctx) }()
	var once sync.Once
	stop = func() (err error) {
		once.Do(func() { cancel(); err = <-done })
		return err
	}
	t.Cleanup(func() { _ = stop() })
	return a, stop
}

func allocate(t testing.TB, a *ipam.Allocator, r ipam.Request) *ipam.Allocation {
	t.Helper()
	got, err := a.Allocate(t.Context(), r)
	if err != nil {
		t.Fatalf("Allocate(%+v): %v", r, err)
	}
	return got
}

// TestAllocateGivesOneAddressOfEveryFamilyAndRepeatsItself proves INV-40.
func TestAllocateGivesOneAddressOfEveryFamilyAndRepeatsItself(t *testing.T) {
	a, _ := start(t, ipamtest.NewMemory(), ipam.Options{Ranges: prefixes("10.0.0.0/24", "fd00::/64")})
	first := allocate(t, a, ipam.Request{Owner: owner("a")})
	if got, want := first.List(), "10.0.0.2 and fd00::2"; got != want || first.State != ipam.Leased {
		t.Fatalf("got %s %s, want %s leased", got, first.State, want)
	}
	again := allocate(t, a, ipam.Request{Owner: owner("a"), Families: []ipam.Family{ipam.IPv6, ipam.IPv4}, Wanted: addrs("fd00::2")})
	if again.List() != first.List() || again.Expires.Before(first.Expires) {
		t.Errorf("the second answer is %s until %s, want %s renewed from %s",
			again.List(), again.Expires, first.List(), first.Expires)
	}
	confirmed, err := a.Confirm(t.Context(), owner("a"), addrs("fd00::2", "10.0.0.2"))
	if err != nil || confirmed.State != ipam.Confirmed || !confirmed.Expires.IsZero() {
		t.Fatalf("Confirm: %+v %v", confirmed, err)
	}
	if again := allocate(t, a, ipam.Request{Owner: owner("a")}); again.State != ipam.Confirmed || again.List() != first.List() {
		t.Errorf("after Confirm the answer is %+v", again)
	}
	if again, err := a.Confirm(t.Context(), owner("a"), addrs("10.0.0.2", "fd00::2")); err != nil || again.State != ipam.Confirmed {
		t.Errorf("the second Confirm: %+v %v", again, err)
	}
}

func TestRefusalsNameTheirReason(t *testing.T) {
	a, _ := start(t, ipamtest.NewMemory(), ipam.Options{Ranges: prefixes("10.0.0.0/24", "fd00::/64"), Exclude: prefixes("10.0.0.50/32"), Quarantine: time.Minute})
	only4, _ := start(t, ipamtest.NewMemory(), ipam.Options{Ranges: prefixes("10.0.0.0/24")})
	allocate(t, a, ipam.Request{Owner: owner("a"), Wanted: addrs("10.0.0.9")})
	allocate(t, a, ipam.Request{Owner: owner("four"), Families: []ipam.Family{ipam.IPv4}})
	confirm(t, a, allocate(t, a, ipam.Request{Owner: owner("gone"), Wanted: addrs("10.0.0.10")}))
	if _, err := a.Release(t.Context(), owner("gone")); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		on   *ipam.Allocator
		req  ipam.Request
		want error
		says string
	}{
		{"in use", a, ipam.Request{Owner: owner("b"), Wanted: addrs("10.0.0.9")}, ipam.ErrUnavailable, "held by a/eth0"},
		{"rests", a, ipam.Request{Owner: owner("b"), Wanted: addrs("10.0.0.10")}, ipam.ErrUnavailable, "is in quarantine until"},
		{"gateway", a, ipam.Request{Owner: owner("b"), Wanted: addrs("10.0.0.1")}, ipam.ErrUnavailable, "reserved"},
		{"excluded", a, ipam.Request{Owner: owner("b"), Wanted: addrs("10.0.0.50")}, ipam.ErrUnavailable, "reserved"},
		{"in no pool", a, ipam.Request{Owner: owner("b"), Wanted: addrs("192.0.2.1")}, ipam.ErrNoPool, "requested_addresses[0]"},
		{"two of a family", a, ipam.Request{Owner: owner("b"), Wanted: addrs("10.0.0.20", "10.0.0.21")}, ipam.ErrBadRequest, "requested_addresses[1]"},
		{"mapped", a, ipam.Request{Owner: owner("b"), Wanted: addrs("::ffff:10.0.0.20")}, ipam.ErrBadRequest, "IPv4-mapped"},
		{"invalid", a, ipam.Request{Owner: owner("b"), Wanted: []netip.Addr{{}}}, ipam.ErrBadRequest, "requested_addresses[0]"},
		{"family not asked for", a, ipam.Request{Owner: owner("b"), Families: []ipam.Family{ipam.IPv4}, Wanted: addrs("fd00::9")}, ipam.ErrBadRequest, "IPv6"},
		{"family without a pool", only4, ipam.Request{Owner: owner("b"), Families: []ipam.Family{ipam.IPv6}}, ipam.ErrNoPool, "families"},
		{"other wanted address", a, ipam.Request{Owner: owner("a"), Wanted: addrs("10.0.0.20")}, ipam.ErrOtherContent, "10.0.0.9"},
		{"fewer families", a, ipam.Request{Owner: owner("a"), Families: []ipam.Family{ipam.IPv4}}, ipam.ErrOtherContent, "families"},
		{"more families", a, ipam.Request{Owner: owner("four"), Families: []ipam.Family{ipam.IPv4, ipam.IPv6}}, ipam.ErrOtherContent, "families"},
		{"no owner", a, ipam.Request{}, ipam.ErrBadRequest, "owner"},
		{"owner with NUL", a, ipam.Request{Owner: workload.Owner{ContainerID: "a\x00b", Interface: "eth0"}}, ipam.ErrBadRequest, "owner"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, validate := range []bool{true, false} {
				c.req.ValidateOnly = validate
				before := *c.on.Summary()
				got, err := c.on.Allocate(t.Context(), c.req)
				if !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) {
					t.Errorf("validate %v: got %+v, %v; want %v saying %q", validate, got, err, c.want, c.says)
				}
				if after := *c.on.Summary(); !reflect.DeepEqual(before, after) {
					t.Errorf("validate %v: a refused call changed the figures from %+v to %+v", validate, before, after)
				}
			}
		})
	}
	if _, err := a.Confirm(t.Context(), owner("nobody"), addrs("10.0.0.9")); !errors.Is(err, ipam.ErrNotHeld) {
		t.Errorf("Confirm of nobody: %v", err)
	}
	for _, wrong := range [][]netip.Addr{addrs("10.0.0.9"), addrs("10.0.0.9", "fd00::3"), addrs("10.0.0.9", "10.0.0.9"), nil} {
		if _, err := a.Confirm(t.Context(), owner("a"), wrong); !errors.Is(err, ipam.ErrMismatch) {
			t.Errorf("Confirm(%v): %v, want ErrMismatch", wrong, err)
		}
	}
}

func TestValidateOnlySaysTheAnswerAndLeasesNothing(t *testing.T) {
	m := ipamtest.NewMemory()
	a, _ := start(t, m, ipam.Options{Ranges: prefixes("10.0.0.0/24")})
	said := allocate(t, a, ipam.Request{Owner: owner("a"), ValidateOnly: true})
	if m.Commits() != 0 || a.Summary().Owners != 0 {
		t.Fatalf("validate_only made %d commits and %d owners", m.Commits(), a.Summary().Owners)
	}
	if got := allocate(t, a, ipam.Request{Owner: owner("a")}); got.List() != said.List() {
		t.Errorf("holds %s, but the answer was %s", got.List(), said.List())
	}
}

func TestExhaustionCarriesTheFiguresAndSaysWhenOnlyRestingIsLeft(t *testing.T) {
	a, _ := start(t, ipamtest.NewMemory(), ipam.Options{Ranges: prefixes("10.0.0.0/30", "10.1.0.0/29", "fd00::/64"), Quarantine: time.Minute})
	for i := range 1 + 5 {
		allocate(t, a, ipam.Request{Owner: owner(fmt.Sprint(i))})
	}
	if _, err := a.Confirm(t.Context(), owner("5"), addrs("10.1.0.6", "fd00::7")); err != nil {
		t.Fatal(err)
	}
	var full *ipam.ExhaustedError
	_, err := a.Allocate(t.Context(), ipam.Request{Owner: owner("late")})
	if !errors.As(err, &full) || full.Family != ipam.IPv4 || len(full.Pools) != 2 || strings.Contains(err.Error(), "only quarantined") {
		t.Fatalf("got %v", err)
	}
	if f := full.Pools[1]; f.Size != 8 || f.Reserved != 3 || f.Leased != 4 || f.Confirmed != 1 || f.Free != 0 {
		t.Errorf("figures %+v", f)
	}
	if v6 := a.Summary().Pools[2]; v6.Leased != 5 || v6.Confirmed != 1 {
		t.Errorf("the refused call left something in %+v", v6)
	}
	if _, err := a.Release(t.Context(), owner("5")); err != nil {
		t.Fatal(err)
	}
	_, err = a.Allocate(t.Context(), ipam.Request{Owner: owner("late")})
	if !errors.Is(err, ipam.ErrExhausted) || !strings.Contains(err.Error(), "only quarantined") {
		t.Errorf("got %v, want it to say that only quarantined addresses are left", err)
	}
}

// TestUnconfirmedLeaseIsFreedByTimeAlone proves INV-11.
func TestUnconfirmedLeaseIsFreedByTimeAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		expired := 0
		a, stop := start(t, ipamtest.NewMemory(), ipam.Options{
			Ranges: prefixes("10.0.0.0/30"), Lease: 2 * time.Minute, Quarantine: time.Hour,
			Observe: ipam.Observer{Expired: func(n int) { expired += n }},
		})
		defer stop() //nolint:errcheck // inside the bubble
		allocate(t, a, ipam.Request{Owner: owner("a")})
		time.Sleep(90 * time.Second)
		allocate(t, a, ipam.Request{Owner: owner("a")}) // renews
		time.Sleep(119 * time.Second)
		synctest.Wait()
		if n := a.Summary().Pools[0].Leased; n != 1 {
			t.Fatalf("a renewed lease is gone: %d", n)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if s := a.Summary(); s.Pools[0].Leased != 0 || s.Pools[0].Free != 1 || expired != 1 {
			t.Fatalf("an expired lease stays: %+v, %d expired", s, expired)
		}
		if _, err := a.Confirm(t.Context(), owner("a"), addrs("10.0.0.2")); !errors.Is(err, ipam.ErrNotHeld) {
			t.Errorf("Confirm of an expired lease: %v", err)
		}
	})
}

// TestReleasedLeaseIsFreeAtOnce: a booting node has more ADDs at once than the datapath serves. Each rolled-back ADD
// releases a lease that was never confirmed, and the runtime retries with a new sandbox, which is a new owner.
func TestReleasedLeaseIsFreeAtOnce(t *testing.T) {
	a, _ := start(t, ipamtest.NewMemory(), ipam.Options{Ranges: prefixes("10.244.0.0/24", "fd00:244::/64"), Quarantine: time.Minute})
	const pods = 110
	for wave := range 4 {
		for pod := range pods {
			allocate(t, a, ipam.Request{Owner: owner(fmt.Sprintf("p%d-%d", wave, pod))})
		}
		for pod := range pods {
			if _, err := a.Release(t.Context(), owner(fmt.Sprintf("p%d-%d", wave, pod))); err != nil {
				t.Fatal(err)
			}
		}
		if p := a.Summary().Pools[0]; p.Quarantined != 0 || p.Leased != 0 || p.Free != 253 {
			t.Fatalf("wave %d of %d leases that were given back: %+v, want every address free", wave, pods, p)
		}
	}
	// Beside a confirmed address of another owner, which is in quarantine.
	first := allocate(t, a, ipam.Request{Owner: owner("kept")})
	confirm(t, a, first)
	if _, err := a.Release(t.Context(), owner("kept")); err != nil {
		t.Fatal(err)
	}
	if p := a.Summary().Pools[0]; p.Quarantined != 1 || p.Free != 252 {
		t.Errorf("after the release of a confirmed address: %+v, want it to rest", p)
	}
}

func addresses(a *ipam.Allocation) (list []netip.Addr) {
	for _, x := range a.Addresses {
		list = append(list, x.Addr)
	}
	return list
}

func confirm(t testing.TB, a *ipam.Allocator, got *ipam.Allocation) {
	t.Helper()
	if _, err := a.Confirm(t.Context(), got.Owner, addresses(got)); err != nil {
		t.Fatal(err)
	}
}

// TestReleaseTakesNoOtherAddressesThanThoseGiven: an owner that was released and has allocated again keeps its new
// addresses.
func TestReleaseTakesNoOtherAddressesThanThoseGiven(t *testing.T) {
	m := ipamtest.NewMemory()
	a, stop := start(t, m, ipam.Options{Ranges: prefixes("10.0.0.0/24", "fd00::/64"), Quarantine: time.Minute})
	defer stop() //nolint:errcheck // the test is over
	first := allocate(t, a, ipam.Request{Owner: owner("a")})
	confirm(t, a, first)
	if _, err := a.Release(t.Context(), owner("a")); err != nil {
		t.Fatal(err)
	}
	second := allocate(t, a, ipam.Request{Owner: owner("a")})
	confirm(t, a, second)
	for _, wrong := range [][]netip.Addr{addresses(first), addresses(second)[:1], {netip.MustParseAddr("10.9.9.9")}} {
		for _, release := range []func(context.Context, workload.Owner, ...netip.Addr) (*ipam.Allocation, error){
			a.Release, a.ValidateRelease,
		} {
			if _, err := release(t.Context(), owner("a"), wrong...); !errors.Is(err, ipam.ErrMismatch) {
				t.Errorf("release of %v: %v, want ErrMismatch", wrong, err)
			}
		}
	}
	if got := allocate(t, a, ipam.Request{Owner: owner("a")}); got.List() != second.List() || got.State != ipam.Confirmed {
		t.Errorf("the owner holds %s, %s", got.List(), got.State)
	}
	back := addresses(second)
	slices.Reverse(back)
	if got, err := a.Release(t.Context(), owner("a"), back...); err != nil || got.List() != second.List() {
		t.Errorf("release of what it holds: %v, %v", got, err)
	}
	if got, err := a.Release(t.Context(), owner("a"), back...); err != nil || got != nil {
		t.Errorf("once more: %v, %v", got, err)
	}
}

// TestReleasedAddressRests proves INV-12.
func TestReleasedAddressRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := ipamtest.NewMemory()
		o := ipam.Options{Ranges: prefixes("10.0.0.0/30"), Quarantine: time.Minute}
		a, stop := start(t, m, o)
		confirm(t, a, allocate(t, a, ipam.Request{Owner: owner("a")}))
		for range 2 {
			if _, err := a.Release(t.Context(), owner("a")); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(30 * time.Second)
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		a, stop = start(t, m, o) // a restart does not shorten the rest, nor begin it again
		time.Sleep(29 * time.Second)
		if _, err := a.Allocate(t.Context(), ipam.Request{Owner: owner("b")}); !errors.Is(err, ipam.ErrExhausted) {
			t.Fatalf("a quarantined address was allocated: %v", err)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		again := allocate(t, a, ipam.Request{Owner: owner("b")})
		if again.List() != "10.0.0.2" {
			t.Errorf("got %s", again.List())
		}
		confirm(t, a, again)
		stop() //nolint:errcheck // inside the bubble
		o.Quarantine = 0
		a, stop = start(t, m, o)
		defer stop() //nolint:errcheck // inside the bubble
		if _, err := a.Release(t.Context(), owner("b")); err != nil {
			t.Fatal(err)
		}
		if got := allocate(t, a, ipam.Request{Owner: owner("c")}); got.List() != "10.0.0.2" {
			t.Errorf("without a rest got %s", got.List())
		}
	})
}

const tenYears = 10 * 365 * 24 * time.Hour

func TestNoWaitOutlivesItsConfiguredLengthWhateverTheClockDid(t *testing.T) {
	for _, jump := range []time.Duration{-tenYears, -time.Hour, -time.Second, time.Second, time.Hour, tenYears} {
		t.Run(jump.String(), func(t *testing.T) {
			now := time.Unix(1_800_000_000, 0)
			m := ipamtest.NewMemory()
			o := ipam.Options{Ranges: prefixes("10.0.0.0/24"), Lease: time.Minute, Quarantine: time.Minute, Now: func() time.Time { return now }}
			a, stop := start(t, m, o)
			confirm(t, a, allocate(t, a, ipam.Request{Owner: owner("gone")}))
			if _, err := a.Release(t.Context(), owner("gone")); err != nil {
				t.Fatal(err)
			}
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			now = now.Add(jump)
			for range 3 { // restarts one after the other add nothing
				_, stop = start(t, m, o)
				if err := stop(); err != nil {
					t.Fatal(err)
				}
				now = now.Add(20 * time.Second)
			}
			a, _ = start(t, m, o)
			if _, err := a.List(t.Context()); err != nil { // lets the loop look at the clock
				t.Fatal(err)
			}
			if p := a.Summary().Pools[0]; p.Quarantined != 0 {
				t.Errorf("a minute after a jump by %s: %+v", jump, p)
			}
		})
	}
}

func TestFailedCommitChangesNothingAndIsUnavailable(t *testing.T) {
	for _, written := range []bool{false, true} {
		t.Run(fmt.Sprintf("written %v", written), func(t *testing.T) {
			m := ipamtest.NewMemory()
			a, _ := start(t, m, ipam.Options{Ranges: prefixes("10.0.0.0/24"), Quarantine: time.Minute})
			kept := allocate(t, a, ipam.Request{Owner: owner("kept")})
			b := allocate(t, a, ipam.Request{Owner: owner("b")})
			m.Fail(func(*ipam.Changes) (bool, error) { return written, ipamtest.ErrDisk })
			refused := func(err error) bool { return errors.Is(err, ipam.ErrStore) && errors.Is(err, ipamtest.ErrDisk) }
			if _, err := a.Confirm(t.Context(), b.Owner, addresses(b)); !refused(err) {
				t.Fatalf("Confirm: %v", err)
			}
			// Nothing begins that could not be confirmed.
			if _, err := a.Allocate(t.Context(), ipam.Request{Owner: owner("c")}); !refused(err) {
				t.Fatalf("Allocate: %v", err)
			}
			// Calls that need no commit are still answered.
			if got, err := a.List(t.Context()); err != nil || !slices.ContainsFunc(got, func(x *ipam.Allocation) bool { return x.Owner == kept.Owner }) {
				t.Fatalf("List: %v %v", got, err)
			}
			m.Fail(nil)
			seen := map[string]bool{}
			for _, o := range []string{"kept", "b", "c", "d"} {
				got := allocate(t, a, ipam.Request{Owner: owner(o)})
				if seen[got.List()] {
					t.Errorf("%s was allocated twice", got.List())
				}
				seen[got.List()] = true
				if o == "kept" && got.List() != kept.List() {
					t.Errorf("the lease of %s became %s", kept.List(), got.List())
				}
				confirm(t, a, got)
			}
		})
	}
}

func TestLostStoreEndsTheLoop(t *testing.T) {
	m := ipamtest.NewMemory()
	a, err := ipam.New(m, ipam.Options{Field: "pools", Ranges: prefixes("10.0.0.0/24"), Lease: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	m.Fail(func(*ipam.Changes) (bool, error) { return false, fmt.Errorf("sync: %w", ipam.ErrStoreLost) })
	done := make(chan error, 1)
	go func() { done <- a.Run(context.Background()) }()
	got := allocate(t, a, ipam.Request{Owner: owner("a")})
	if _, err := a.Confirm(t.Context(), got.Owner, addresses(got)); !errors.Is(err, ipam.ErrStore) {
		t.Errorf("Confirm: %v", err)
	}
	if err := <-done; !errors.Is(err, ipam.ErrStoreLost) {
		t.Errorf("Run: %v", err)
	}
	if _, err := a.Allocate(t.Context(), ipam.Request{Owner: owner("a")}); !errors.Is(err, ipam.ErrStopped) {
		t.Errorf("Allocate after the end: %v", err)
	}
}

func TestFullQueueRefusesAtOnce(t *testing.T) {
	m := ipamtest.NewMemory()
	hold, held := make(chan struct{}), make(chan struct{})
	var once sync.Once
	m.Fail(func(*ipam.Changes) (bool, error) { once.Do(func() { close(held); <-hold }); return true, nil })
	a, _ := start(t, m, ipam.Options{Ranges: prefixes("10.0.0.0/8")})
	results := make(chan error, 1100)
	leases := make([]*ipam.Allocation, cap(results))
	for i := range leases {
		leases[i] = allocate(t, a, ipam.Request{Owner: owner(fmt.Sprint(i))})
	}
	var wg sync.WaitGroup
	first := allocate(t, a, ipam.Request{Owner: owner("first")})
	wg.Go(func() { confirm(t, a, first) })
	<-held // the loop is busy
	for _, lease := range leases {
		wg.Go(func() {
			_, err := a.Confirm(t.Context(), lease.Owner, addresses(lease))
			results <- err
		})
	}
	for range cap(results) - 1024 {
		if err := <-results; !errors.Is(err, ipam.ErrBusy) {
			t.Errorf("got %v, want ErrBusy", err)
		}
	}
	close(hold)
	for range 1024 {
		if err := <-results; err != nil {
			t.Errorf("a call that waited got %v", err)
		}
	}
	wg.Wait()
	if n := m.Commits(); n > 10 {
		t.Errorf("1025 calls took %d commits, want them to share", n)
	}
}

func TestAddressesOutsideTheNewPoolsAreKept(t *testing.T) {
	m := ipamtest.NewMemory()
	a, stop := start(t, m, ipam.Options{Ranges: prefixes("10.0.0.0/24", "fd00::/64"), Quarantine: time.Minute})
	allocate(t, a, ipam.Request{Owner: owner("a")})
	allocate(t, a, ipam.Request{Owner: owner("b")})
	for o, list := range map[string][]netip.Addr{"a": addrs("10.0.0.2", "fd00::2"), "b": addrs("10.0.0.3", "fd00::3")} {
		if _, err := a.Confirm(t.Context(), owner(o), list); err != nil {
			t.Fatal(err)
		}
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	a, err := ipam.New(m, ipam.Options{Field: "pools", Ranges: prefixes("10.9.0.0/24", "fd00::/64"), Exclude: prefixes("fd00::3/128"), Lease: time.Minute, Quarantine: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	out := a.Outside()
	s := a.Summary()
	if len(out) != 1 || s.Outside != 1 || s.Pools[1].Confirmed != 1 || len(s.Pools) != 3 ||
		!s.Pools[2].Draining || s.Pools[2].Prefix.String() != "10.0.0.0/24" || s.Pools[2].Confirmed != 2 {
		t.Fatalf("outside %v, summary %+v", out, s)
	}
	a, stop = start(t, m, ipam.Options{Ranges: prefixes("10.9.0.0/24", "fd00::/64"), Exclude: prefixes("fd00::3/128"), Quarantine: time.Minute})
	if got := allocate(t, a, ipam.Request{Owner: owner("a"), Wanted: addrs("10.0.0.2")}); got.List() != "10.0.0.2 and fd00::2" {
		t.Errorf("the owner now holds %s", got.List())
	}
	if got := allocate(t, a, ipam.Request{Owner: owner("c")}); got.List() != "10.9.0.2 and fd00::4" {
		t.Errorf("a new owner got %s", got.List())
	}
	for _, o := range []string{"a", "b"} {
		if _, err := a.Release(t.Context(), owner(o)); err != nil {
			t.Fatal(err)
		}
	}
	if s := a.Summary(); s.Outside != 0 || s.Pools[1].Quarantined != 1 || len(s.Pools) != 2 {
		t.Errorf("after the release: %+v", s)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	// The old configuration comes back while the addresses rest.
	a, _ = start(t, m, ipam.Options{Ranges: prefixes("10.0.0.0/30"), Quarantine: time.Minute})
	if _, err := a.Allocate(t.Context(), ipam.Request{Owner: owner("d")}); !errors.Is(err, ipam.ErrExhausted) {
		t.Errorf("a quarantined address of a pool that came back: %v", err)
	}
}

func TestContradictingStateIsRefused(t *testing.T) {
	twice := func(second ipam.Allocation) *ipamtest.Memory {
		m := ipamtest.NewMemory()
		one := &ipam.Allocation{Owner: owner("a"), State: ipam.Confirmed, Addresses: []ipam.Address{{Addr: addrs("10.0.0.2")[0], PoolBits: 24}}}
		c := &ipam.Changes{Allocations: map[workload.Owner]*ipam.Allocation{one.Owner: one}, Quarantined: map[netip.Addr]time.Time{}}
		if second.Owner.ContainerID == "" {
			c.Quarantined[one.Addresses[0].Addr] = time.Now()
		} else {
			second.Addresses = one.Addresses
			c.Allocations[second.Owner] = &second
		}
		if err := m.Commit(c); err != nil {
			t.Fatal(err)
		}
		return m
	}
	for name, m := range map[string]*ipamtest.Memory{
		"held twice":           twice(ipam.Allocation{Owner: owner("b"), State: ipam.Confirmed}),
		"held and quarantined": twice(ipam.Allocation{}),
	} {
		if _, err := ipam.New(m, ipam.Options{Field: "pools", Ranges: prefixes("10.0.0.0/24"), Lease: time.Minute}); !errors.Is(err, ipam.ErrInconsistent) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestNoAddressIsHeldTwiceUnderConcurrency: 64 callers allocate more addresses than exist, with a real file.
func TestNoAddressIsHeldTwiceUnderConcurrency(t *testing.T) {
	s, err := store.Open(t.TempDir() + "/ipam")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() }) //nolint:errcheck // the test is over
	a, _ := start(t, s, ipam.Options{Ranges: prefixes("10.0.0.0/26", "fd00::/64")})
	var mu sync.Mutex
	holder := map[netip.Addr]string{}
	var wg sync.WaitGroup
	for g := range 64 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(uint64(g), 3))
			for i := range 20 {
				o := owner(fmt.Sprintf("c%d-%d", g, i))
				got, err := a.Allocate(t.Context(), ipam.Request{Owner: o})
				if errors.Is(err, ipam.ErrExhausted) {
					continue
				}
				if err != nil {
					t.Errorf("Allocate: %v", err)
					return
				}
				var list []netip.Addr
				mu.Lock()
				for _, x := range got.Addresses {
					list = append(list, x.Addr)
					if other, ok := holder[x.Addr]; ok {
						t.Errorf("%s is held by %s and was given to %s", x.Addr, other, o)
					}
					holder[x.Addr] = o.String()
				}
				mu.Unlock()
				if r.IntN(2) == 0 {
					if _, err := a.Confirm(t.Context(), o, list); err != nil {
						t.Errorf("Confirm: %v", err)
					}
				}
				mu.Lock() // before the release: from then on others may get it
				for _, x := range list {
					delete(holder, x)
				}
				mu.Unlock()
				if _, err := a.Release(t.Context(), o); err != nil {
					t.Errorf("Release: %v", err)
				}
			}
		})
	}
	wg.Wait()
	if s := a.Summary(); s.Owners != 0 || s.Pools[0].Free != 61 {
		t.Errorf("something is left: %+v", s)
	}
}

func TestTheOwnersTimeIsCountedByOperation(t *testing.T) {
	a, _ := start(t, ipamtest.NewMemory(), ipam.Options{Ranges: prefixes("10.0.0.0/24"), Lease: time.Minute})
	for _, id := range []string{"a", "b"} {
		confirm(t, a, allocate(t, a, ipam.Request{Owner: owner(id)}))
	}
	if _, err := a.Release(t.Context(), owner("b")); err != nil {
		t.Fatal(err)
	}
	for range 2 { // an answer comes before the end of its turn
		if _, err := a.List(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	got := map[string]looptime.Figures{}
	for _, b := range a.Busy() {
		if b.Longest > b.Sum || b.Count == 0 {
			t.Errorf("got %+v", b)
		}
		got[b.Operation] = b
	}
	for operation, want := range map[string]uint64{"allocate": 2, "confirm": 2, "release": 1, "list": 2, "commit": 3} {
		if n := got[operation].Count; n != want {
			t.Errorf("%q was counted %d times, want %d", operation, n, want)
		}
	}
	for _, operation := range []string{"expire", "summarize", "turn"} {
		if n := got[operation].Count; n < 6 {
			t.Errorf("%q was counted %d times, want 6 times or more, once for each call", operation, n)
		}
	}
	parts := got["allocate"].Sum + got["confirm"].Sum + got["release"].Sum
	if turn := got["turn"].Sum; turn < parts {
		t.Errorf("the turns took %s, and what was decided in them %s", turn, parts)
	}
}

// sizes is a store that knows its largest commit.
type sizes struct {
	ipam.Store
	most atomic.Int64
}

func (s *sizes) Commit(c *ipam.Changes) error {
	s.most.Store(max(s.most.Load(), int64(len(c.Allocations)+len(c.Quarantined))))
	return s.Store.Commit(c)
}

// TestWhatEndsTogetherEndsInSmallCommits: thousands of addresses leave quarantine at the same time. A concurrent call
// waits for one commit of some of them, not for all.
func TestWhatEndsTogetherEndsInSmallCommits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const owners = 5000
		s := &sizes{Store: ipamtest.NewMemory()}
		a, stop := start(t, s, ipam.Options{Ranges: prefixes("10.0.0.0/16", "fd00::/64"), Quarantine: time.Minute})
		for i := range owners {
			confirm(t, a, allocate(t, a, ipam.Request{Owner: owner(fmt.Sprint(i))}))
			if _, err := a.Release(t.Context(), owner(fmt.Sprint(i))); err != nil {
				t.Fatal(err)
			}
		}
		if p := a.Summary().Pools[0]; p.Quarantined != owners {
			t.Fatalf("%d addresses rest, want %d", p.Quarantined, owners)
		}
		synctest.Wait() // the loop waits for the clock
		s.most.Store(0)
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if n := s.most.Load(); n == 0 || n > 256 {
			t.Errorf("one commit had %d changes, want 1 to 256", n)
		}
		if p := a.Summary().Pools[0]; p.Quarantined != 0 {
			t.Errorf("%d addresses rest, want none", p.Quarantined)
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
	})
}

// TestAnADDCostsOneCommit: the lease is in memory. The confirmation stores it, together with the search position.
func TestAnADDCostsOneCommit(t *testing.T) {
	m := ipamtest.NewMemory()
	o := ipam.Options{Ranges: prefixes("10.0.0.0/24", "fd00::/64"), Quarantine: time.Minute}
	a, stop := start(t, m, o)
	for i, step := range []struct {
		name    string
		commits int
		do      func()
	}{
		{"lease", 0, func() { allocate(t, a, ipam.Request{Owner: owner("a")}) }},
		{"renew", 0, func() { allocate(t, a, ipam.Request{Owner: owner("a")}) }},
		{"confirm", 1, func() { confirm(t, a, allocate(t, a, ipam.Request{Owner: owner("a")})) }},
		{"confirm again", 0, func() { confirm(t, a, allocate(t, a, ipam.Request{Owner: owner("a")})) }},
		{"lease and release", 0, func() {
			allocate(t, a, ipam.Request{Owner: owner("b")})
			if _, err := a.Release(t.Context(), owner("b")); err != nil {
				t.Fatal(err)
			}
		}},
		{"release", 1, func() {
			if _, err := a.Release(t.Context(), owner("a")); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		before := m.Commits()
		step.do()
		if n := m.Commits() - before; n != step.commits {
			t.Errorf("step %d, %s: %d commits, want %d", i, step.name, n, step.commits)
		}
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	a, _ = start(t, m, o)
	if got := allocate(t, a, ipam.Request{Owner: owner("c")}).List(); got != "10.0.0.4 and fd00::4" {
		t.Errorf("after a restart the search gives %s, want it behind the addresses that were given", got)
	}
}

// TestALeaseEndsWithItsProcess proves the other half of INV-10: the addresses leased by a former process may be leased
// to another owner, and only one of the two owners can confirm them.
func TestALeaseEndsWithItsProcess(t *testing.T) {
	m := ipamtest.NewMemory()
	o := ipam.Options{Ranges: prefixes("10.0.0.0/24"), Lease: time.Hour, Quarantine: time.Hour}
	a, stop := start(t, m, o)
	first := allocate(t, a, ipam.Request{Owner: owner("first")})
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	a, _ = start(t, m, o)
	if p := a.Summary().Pools[0]; p.Leased != 0 || p.Quarantined != 0 || p.Free != 253 {
		t.Errorf("a lease of a process that ended left %+v, want every address free", p)
	}
	if _, err := a.Confirm(t.Context(), first.Owner, addresses(first)); !errors.Is(err, ipam.ErrNotHeld) {
		t.Errorf("Confirm of a free address: %v, want ErrNotHeld", err)
	}
	second := allocate(t, a, ipam.Request{Owner: owner("second")})
	if second.List() != first.List() {
		t.Fatalf("the second owner got %s, want %s", second.List(), first.List())
	}
	for range 2 { // leased to the other, then confirmed
		if _, err := a.Confirm(t.Context(), first.Owner, addresses(first)); !errors.Is(err, ipam.ErrNotHeld) {
			t.Errorf("Confirm of another's address: %v, want ErrNotHeld", err)
		}
		confirm(t, a, second)
	}
	again := allocate(t, a, ipam.Request{Owner: owner("first")})
	if again.List() == first.List() {
		t.Fatalf("both owners have %s", again.List())
	}
	if _, err := a.Confirm(t.Context(), first.Owner, addresses(first)); !errors.Is(err, ipam.ErrMismatch) {
		t.Errorf("Confirm of the former lease: %v, want ErrMismatch", err)
	}
	confirm(t, a, again)
}

// TestLeasesThatTheVersionBeforeWroteGoOn: a node is updated during an ADD.
func TestLeasesThatTheVersionBeforeWroteGoOn(t *testing.T) {
	m := ipamtest.NewMemory()
	now := time.Unix(1_800_000_000, 0)
	lease := func(id, addr string, end time.Duration) *ipam.Allocation {
		return &ipam.Allocation{
			Owner: owner(id), State: ipam.Leased, Expires: now.Add(end), Manager: "nomad",
			Addresses: []ipam.Address{{Addr: addrs(addr)[0], PoolBits: 24}},
		}
	}
	c := &ipam.Changes{Allocations: map[workload.Owner]*ipam.Allocation{}}
	for _, x := range []*ipam.Allocation{
		lease("a", "10.0.0.2", time.Minute), lease("late", "10.0.0.3", 1000*time.Hour), lease("over", "10.0.0.4", -time.Second),
	} {
		c.Allocations[x.Owner] = x
	}
	if err := m.Commit(c); err != nil {
		t.Fatal(err)
	}
	o := ipam.Options{Ranges: prefixes("10.0.0.0/24"), Lease: 2 * time.Minute, Now: func() time.Time { return now }}
	a, stop := start(t, m, o)
	all, err := a.List(t.Context())
	if err != nil || len(all) != 2 ||
		all[0].Expires != now.Add(time.Minute) || all[1].Expires != now.Add(2*time.Minute) {
		t.Fatalf("the leases are %+v, %v; want a's lease, and late's lease cut to two minutes", all, err)
	}
	if got, err := a.Confirm(t.Context(), owner("a"), addrs("10.0.0.2")); err != nil || got.Manager != "nomad" {
		t.Errorf("Confirm: %+v, %v", got, err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	kept, err := m.Load()
	if err != nil || ipamtest.Describe(kept) != "a/eth0 [{10.0.0.2 24}] confirmed of nomad\n10.0.0.0/24 is primary\n" {
		t.Errorf("the store has\n%s%v\nwant the confirmed allocation alone", ipamtest.Describe(kept), err)
	}
}

// TestOnlyLeasesAreAnsweredBeforeTheCommit proves INV-10: of calls in one batch, a call that confirms an address waits
// for the store.
func TestOnlyLeasesAreAnsweredBeforeTheCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := ipamtest.NewMemory()
		a, stop := start(t, m, ipam.Options{Ranges: prefixes("10.0.0.0/24")})
		defer stop() //nolint:errcheck // inside the bubble
		blocked := allocate(t, a, ipam.Request{Owner: owner("blocked")})
		held := allocate(t, a, ipam.Request{Owner: owner("held")})
		commit := make(chan struct{})
		m.Fail(func(*ipam.Changes) (bool, error) { <-commit; return true, nil })
		var wg sync.WaitGroup
		defer wg.Wait()
		wg.Go(func() { confirm(t, a, blocked) })
		synctest.Wait() // the loop is in a commit; what comes now is decided together
		var confirmed, again, lease atomic.Bool
		wg.Go(func() { confirm(t, a, held); confirmed.Store(true) })
		synctest.Wait()
		wg.Go(func() { allocate(t, a, ipam.Request{Owner: owner("held")}); again.Store(true) })
		wg.Go(func() { allocate(t, a, ipam.Request{Owner: owner("new")}); lease.Store(true) })
		synctest.Wait()
		commit <- struct{}{}
		synctest.Wait() // in the next commit
		if confirmed.Load() || again.Load() || !lease.Load() {
			t.Errorf("before the commit: answered Confirm %v, Allocate of its owner %v, of another %v; want the last alone",
				confirmed.Load(), again.Load(), lease.Load())
		}
		close(commit)
	})
}
