// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package poolevents

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/model/podrange"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// pools are a range of each family.
func pools(free4, free6 uint64) *ipam.Summary {
	return &ipam.Summary{Pools: []ipam.Figures{
		{Prefix: netip.MustParsePrefix("10.1.0.0/29"), Size: 8, Reserved: 3, Confirmed: 5 - free4, Free: free4},
		{Prefix: netip.MustParsePrefix("fd00:1::/125"), Size: 8, Reserved: 3, Confirmed: 5 - free6, Free: free6},
		{Prefix: netip.MustParsePrefix("10.2.0.0/29"), Size: 8, Draining: true},
	}}
}

// refused returns the error of an allocation on a full node.
func refused(quarantined uint64) error {
	f := ipam.Figures{
		Prefix: netip.MustParsePrefix("10.1.0.0/29"), Size: 8, Reserved: 3,
		Confirmed: 5 - quarantined, Quarantined: quarantined,
	}
	return fmt.Errorf("no block: %w", &ipam.ExhaustedError{Family: ipam.IPv4, Pools: []ipam.Figures{f}})
}

func TestShortageBeginsWithARefusalAndEndsWhenThereWasRoomForAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var now atomic.Pointer[ipam.Summary]
		now.Store(pools(0, 1))
		k := New(now.Load)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- k.Run(ctx) }()
		changes := 0
		state := func(after time.Duration, want podrange.State, what string) {
			t.Helper()
			changed := k.Changed()
			time.Sleep(after)
			synctest.Wait()
			select {
			case <-changed:
				changes++
			default:
			}
			if got := k.Note().State; got != want {
				t.Errorf("%s: %q, want %q", what, got, want)
			}
		}
		k.Answered(nil)
		k.Answered(errors.New("something else"))
		state(time.Hour, "", "full, but no pod was refused")
		k.Answered(refused(0))
		state(time.Hour, podrange.Exhausted, "a pod was refused")
		const want = "no IPv4 address is left for new pods: 10.1.0.0/29 has 5 of 8 addresses in use, 0 leased, 0 in " +
			"quarantine and 3 reserved; run fewer pods here, or give nodes larger ranges (docs/ipam.md, " +
			`"A node without free addresses")`
		if got := k.Note().Message; got != want {
			t.Errorf("it says %q, want %q", got, want)
		}
		since := k.Note().Since

		// A free address that is taken again at once, for an hour, is not a change.
		for range 60 {
			now.Store(pools(1, 1))
			state(30*time.Second, podrange.Exhausted, "an address came free")
			now.Store(pools(0, 1))
			state(30*time.Second, podrange.Exhausted, "and was taken")
		}
		now.Store(pools(1, 0))
		state(time.Hour, podrange.Exhausted, "the other family is full")
		now.Store(pools(2, 1))
		state(50*time.Second, podrange.Exhausted, "free addresses for less than a minute")
		k.Answered(refused(0)) // as figures that are older than the refusal may allow
		state(50*time.Second, podrange.Exhausted, "a refusal in between")
		if got := k.Note().Since; !got.Equal(since) {
			t.Errorf("the shortage is since %s, want %s", got, since)
		}
		state(20*time.Second, podrange.Available, "free addresses for a minute")
		const free = "addresses for new pods are available again: 10.1.0.0/29 has 2 of 8 addresses free, " +
			"fd00:1::/125 has 1 of 8 addresses free"
		if got := k.Note().Message; got != free {
			t.Errorf("it says %q, want %q", got, free)
		}
		if changes != 1 { // the first was made before
			t.Errorf("%d changes after the first, want 1", changes)
		}
		now.Store(pools(0, 0))
		state(time.Hour, podrange.Available, "full again, but no pod was refused")
		k.Answered(refused(1))
		state(0, podrange.Exhausted, "refused again")
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestStateOfAnEarlierProcessIsTakenOver(t *testing.T) {
	at := time.Date(2026, 11, 27, 12, 0, 0, 0, time.UTC)
	full := podrange.Note{State: podrange.Exhausted, Since: at, Message: "full"}
	k := New(func() *ipam.Summary { return pools(1, 1) })
	changed := k.Changed()
	k.Adopt(full)
	select {
	case <-changed:
	default:
		t.Error("the state that was taken over is not told")
	}
	if got := k.Note(); got != full {
		t.Errorf("%+v, want %+v", got, full)
	}
	k.Answered(refused(0))
	if got := k.Note(); got != full {
		t.Errorf("a refusal begins a second shortage: %+v", got)
	}
	k = New(func() *ipam.Summary { return pools(0, 0) })
	k.Answered(refused(0))
	k.Adopt(podrange.Note{State: podrange.Available, Since: at})
	if !k.Exhausted() {
		t.Error("an earlier state counts more than a refusal")
	}
}

// TestAddressesReservedForOthersAreNoShortage: only one namespace gets no address.
func TestAddressesReservedForOthersAreNoShortage(t *testing.T) {
	k := New(func() *ipam.Summary { return pools(1, 1) })
	k.Answered(&ipam.ExhaustedError{Family: ipam.IPv4, Namespace: "shop", Quarantined: 9})
	if k.Exhausted() {
		t.Errorf("%+v", k.Note())
	}
}

func TestNodeWithoutARangeHasNoRoom(t *testing.T) {
	draining := &ipam.Summary{Pools: pools(1, 1).Pools[2:]}
	if allHaveRoom(draining) || allHaveRoom(&ipam.Summary{}) {
		t.Error("a node whose only range drains has capacity")
	}
	if !allHaveRoom(pools(1, 1)) {
		t.Error("a free address of each family is no capacity")
	}
}
