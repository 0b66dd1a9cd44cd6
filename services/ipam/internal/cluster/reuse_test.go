// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/test/ipamtest"
)

// answers is a registry that says which addresses may be allocated again.
type answers struct {
	Registry
	asked  [][]netip.Addr
	scarce bool // in the last call
	reuse  Reuse
	err    error
}

func (r *answers) CheckReuse(_ context.Context, addresses []netip.Addr, scarce bool) (Reuse, error) {
	r.asked, r.scarce = append(r.asked, addresses), scarce
	return r.reuse, r.err
}

// TestReleasedAddressesAreAskedAbout: the agent asks until the registry frees released addresses. An error frees none.
// Without native routing none waits, and a change of the routing mode takes effect.
func TestReleasedAddressesAreAskedAbout(t *testing.T) {
	alloc, err := ipam.New(ipamtest.NewMemory(), ipam.Options{
		Ranges: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/29")}, Lease: ipam.DefaultLease, Field: "pools",
		AsksReuse: true,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- alloc.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ran; err != nil {
			t.Error(err)
		}
	}()
	registry := &answers{}
	a := New(Options{
		Settings: Settings{Mode: Static}, Registry: registry, Ranges: alloc, Report: func(error) {},
		Log: slog.New(slog.DiscardHandler),
	})
	owner := func(name string) workload.Owner { return workload.Owner{ContainerID: name, Interface: "eth0"} }
	release := func(name string) netip.Addr {
		t.Helper()
		got, err := alloc.Allocate(t.Context(), ipam.Request{Owner: owner(name)})
		if err != nil {
			t.Fatal(err)
		}
		addresses := []netip.Addr{got.Addresses[0].Addr}
		if _, err := alloc.Confirm(t.Context(), owner(name), addresses); err != nil {
			t.Fatal(err)
		}
		if _, err := alloc.Release(t.Context(), owner(name)); err != nil {
			t.Fatal(err)
		}
		if _, err := alloc.List(t.Context()); err != nil { // the quarantine is over
			t.Fatal(err)
		}
		return addresses[0]
	}
	step := func(what string, r Reuse, err error, waiting ...netip.Addr) {
		t.Helper()
		registry.reuse, registry.err = r, err
		known, rerr := a.reuse(t.Context())
		if rerr != nil || known == r.Unknown {
			t.Fatalf("%s: how packets travel is known: %t, %v", what, known, rerr)
		}
		sum := alloc.Summary()
		slices.SortFunc(sum.Waiting, netip.Addr.Compare)
		if !slices.Equal(sum.Waiting, waiting) {
			t.Errorf("%s: %v wait, want %v", what, sum.Waiting, waiting)
		}
		why := r.Why
		if err != nil {
			why = err.Error()
		}
		if len(waiting) > 0 && !strings.Contains(sum.Why, why) {
			t.Errorf("%s: the reason is %q, want %q", what, sum.Why, why)
		}
	}
	first := release("a")
	registry.reuse = Reuse{Asks: true}
	if _, err := a.reuse(t.Context()); err != nil || registry.scarce {
		t.Errorf("with 4 of 5 addresses free, addresses are scarce: %t, %v", registry.scarce, err)
	}
	second := release("b")
	step("no answer", Reuse{}, errors.New("identity is unavailable"), first, second)
	step("none is free", Reuse{Asks: true, Why: "etcd is unavailable"}, nil, first, second)
	step("one is free", Reuse{Asks: true, Free: []netip.Addr{second}, Why: "it is too young"}, nil, first)
	step("the other one, too", Reuse{Asks: true, Free: []netip.Addr{first}}, nil)
	if last := registry.asked[len(registry.asked)-1]; !slices.Equal(last, []netip.Addr{first}) {
		t.Errorf("asked about %v", last)
	}
	for _, name := range []string{"f", "g", "h", "i", "j"} {
		if _, err := alloc.Allocate(t.Context(), ipam.Request{Owner: owner(name)}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := a.reuse(t.Context()); err != nil || !registry.scarce {
		t.Errorf("without a free address, addresses are scarce: %t, %v", registry.scarce, err)
	}
	for _, name := range []string{"f", "g", "h", "i", "j"} {
		if _, err := alloc.Release(t.Context(), owner(name)); err != nil {
			t.Fatal(err)
		}
	}
	step("in a tunnel", Reuse{}, nil)
	release("c")
	step("in a tunnel, after a release", Reuse{}, nil)
	step("no answer", Reuse{}, errors.New("identity is unavailable"))
	step("with native routing again", Reuse{Asks: true, Why: "it is too young"}, nil)
	third := release("d")
	step("with native routing, after a release", Reuse{Asks: true, Why: "it is too young"}, nil, third)
	step("in a tunnel again", Reuse{}, nil)
	step("the routing mode is unknown", Reuse{Asks: true, Unknown: true, Why: "not registered"}, nil)
}
