// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam_test

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/test/ipamtest"
)

// TestShortLivedPodsOfOneNamespaceLeaveAddressesToOthers: an eighth of the addresses that no pod holds stays free for
// namespaces with few addresses in quarantine, whichever routing mode decides how long that lasts.
func TestShortLivedPodsOfOneNamespaceLeaveAddressesToOthers(t *testing.T) {
	for _, asks := range []bool{false, true} {
		store := ipamtest.NewMemory()
		options := ipam.Options{
			Field: "pools", Stored: true, Lease: ipam.DefaultLease, Quarantine: time.Hour, AsksReuse: asks,
		}
		a, stop := start(t, store, options)
		ranges := prefixes("10.0.0.0/25", "fd00::/120")
		if err := a.SetRanges(t.Context(), ranges); err != nil {
			t.Fatal(err)
		}
		pods := 0
		add := func(namespace string) (string, error) {
			pods++
			id := fmt.Sprintf("c%d", pods)
			got, err := a.Allocate(t.Context(), ipam.Request{Owner: owner(id), Namespace: namespace})
			if err != nil {
				return id, err
			}
			for range 2 { // a repeated call does not change the namespace
				got, err = a.Allocate(t.Context(), ipam.Request{Owner: owner(id), Namespace: namespace})
				if err != nil {
					return id, err
				}
			}
			_, err = a.Confirm(t.Context(), owner(id), addrs(got.Addresses[0].Addr.String(), got.Addresses[1].Addr.String()))
			return id, err
		}
		churn := func(namespace string) error {
			id, err := add(namespace)
			if err == nil {
				_, err = a.Release(t.Context(), owner(id))
			}
			return err
		}
		free := func() uint64 { return a.Summary().Pools[0].Free }
		refused := func(what, namespace string, err error) {
			t.Helper()
			var full *ipam.ExhaustedError
			if !errors.As(err, &full) || full.Namespace != namespace || full.Quarantined == 0 ||
				!strings.Contains(err.Error(), "reserved for other namespaces") {
				t.Fatalf("%s: %v", what, err)
			}
		}
		for range 30 {
			if _, err := add("busy"); err != nil { // pods that stay
				t.Fatal(err)
			}
		}
		unheld := free()
		var err error
		for range 1000 {
			if err = churn("a"); err != nil {
				break
			}
		}
		refused("one namespace", "a", err)
		if got := free(); got != (unheld-1)/8 && got != unheld/8 && got+1 != unheld/8 {
			t.Errorf("%d of %d addresses are free", got, unheld)
		}
		// The counts survive a change of the ranges, for which the state is read again.
		if err := a.SetRanges(t.Context(), append(ranges, prefixes("fd01::/120")...)); err != nil {
			t.Fatal(err)
		}
		refused("after a change of the ranges", "a", churn("a"))
		for _, namespace := range []string{"b", "c"} {
			for range 1000 {
				if err = churn(namespace); err != nil {
					break
				}
			}
			refused("namespace "+namespace, namespace, err)
		}
		left := free()
		if left < 2 {
			t.Fatalf("three namespaces leave %d addresses", left)
		}
		for range left - 1 {
			if _, err := add("busy"); err != nil {
				t.Errorf("a namespace without addresses in quarantine: %v", err)
			}
		}
		if err := churn(""); err != nil {
			t.Errorf("not a pod: %v", err)
		}
		_, err = add("busy")
		var full *ipam.ExhaustedError
		if !errors.As(err, &full) || full.Namespace != "" {
			t.Errorf("without free addresses: %v", err)
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
	}
}

// TestUserWithManyNamespacesTakesTheReservedAddresses shows the limit of the division by namespace: sluice-ipam does
// not know tenants. A new namespace has no address in quarantine, like the namespace of another tenant. With enough
// namespaces one user leaves no address. No address is reused earlier because of that: other nodes may still map it to
// the former pod, and would apply its policies to the new one. When the first quarantine ends, namespaces with few
// addresses in quarantine come first.
func TestUserWithManyNamespacesTakesTheReservedAddresses(t *testing.T) {
	var now atomic.Pointer[time.Time]
	at := time.Unix(1e9, 0)
	now.Store(&at)
	options := ipam.Options{
		Field: "pools", Ranges: prefixes("10.0.0.0/25"), Lease: ipam.DefaultLease, Quarantine: time.Minute,
		Now: func() time.Time { return *now.Load() },
	}
	a, stop := start(t, ipamtest.NewMemory(), options)
	pods := 0
	churn := func(namespace string) (netip.Addr, error) {
		pods++
		o := owner(fmt.Sprintf("c%d", pods))
		got, err := a.Allocate(t.Context(), ipam.Request{Owner: o, Namespace: namespace})
		if err != nil {
			return netip.Addr{}, err
		}
		addr := got.Addresses[0].Addr
		if _, err = a.Confirm(t.Context(), o, []netip.Addr{addr}); err == nil {
			_, err = a.Release(t.Context(), o)
		}
		return addr, err
	}
	used := make(map[netip.Addr]bool)
	for i := 0; a.Summary().Pools[0].Free > 0; i++ {
		if i == 100 {
			t.Fatalf("100 namespaces leave %d addresses", a.Summary().Pools[0].Free)
		}
		for {
			addr, err := churn(fmt.Sprint("noisy-", i))
			if err != nil {
				break
			}
			if used[addr] {
				t.Fatalf("%s is used again in its quarantine", addr)
			}
			used[addr] = true
		}
	}
	var full *ipam.ExhaustedError
	if _, err := churn("victim"); !errors.As(err, &full) || full.Namespace != "" {
		t.Errorf("without free addresses: %v", err)
	}
	later := at.Add(59 * time.Second)
	now.Store(&later)
	if _, err := churn("victim"); !errors.As(err, &full) {
		t.Errorf("before the end of the quarantine: %v", err)
	}
	end := at.Add(61 * time.Second)
	now.Store(&end)
	if _, err := churn("victim"); err != nil {
		t.Errorf("after the quarantine: %v", err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// TestLargePoolsReserveNothing: the free addresses of several IPv6 pools may exceed a uint64.
func TestLargePoolsReserveNothing(t *testing.T) {
	options := ipam.Options{Field: "pools", Stored: true, Lease: ipam.DefaultLease, Quarantine: time.Hour}
	a, stop := start(t, ipamtest.NewMemory(), options)
	if err := a.SetRanges(t.Context(), prefixes("fd00::/64", "fd01::/120")); err != nil {
		t.Fatal(err)
	}
	for i := range 300 {
		o := owner(fmt.Sprintf("c%d", i))
		got, err := a.Allocate(t.Context(), ipam.Request{Owner: o, Namespace: "a"})
		if err != nil {
			t.Fatalf("pod %d: %v", i, err)
		}
		if _, err := a.Confirm(t.Context(), o, addrs(got.Addresses[0].Addr.String())); err != nil {
			t.Fatal(err)
		}
		if _, err := a.Release(t.Context(), o); err != nil {
			t.Fatal(err)
		}
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}
