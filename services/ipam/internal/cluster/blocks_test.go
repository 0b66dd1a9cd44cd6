// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
	"github.com/sluice-net/sluice/services/ipam/internal/test/ipamtest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// returns is a registry that notes which blocks come back.
type returns struct {
	Registry
	blocks []netip.Prefix
}

func (r *returns) Return(_ context.Context, p netip.Prefix) error {
	r.blocks = append(r.blocks, p)
	return nil
}

// TestEmptyBlockOfAnySizeGoesBack gives a node two blocks of one size, of which the second is not needed; the smallest
// blocks have one usable address.
func TestEmptyBlockOfAnySizeGoesBack(t *testing.T) {
	for _, c := range []struct {
		first, second string
		taken         int
		want          bool
	}{
		{first: "10.1.0.0/24", second: "10.1.1.0/24", want: true},
		{first: "10.1.0.0/28", second: "10.1.0.16/28", want: true},
		{first: "10.1.0.0/29", second: "10.1.0.8/29", want: true},
		{first: "10.1.0.0/30", second: "10.1.0.4/30", want: true},
		{first: "fd00:1::/120", second: "fd00:1::100/120", want: true},
		// five addresses each: with two taken less than half of the first is
		{first: "10.1.0.0/29", second: "10.1.0.8/29", taken: 2, want: true},
		{first: "10.1.0.0/29", second: "10.1.0.8/29", taken: 3, want: false},
	} {
		first, second := netip.MustParsePrefix(c.first), netip.MustParsePrefix(c.second)
		alloc, err := ipam.New(ipamtest.NewMemory(), ipam.Options{
			Ranges: []netip.Prefix{first, second}, Quarantine: time.Hour, Lease: ipam.DefaultLease, Field: "pools",
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		ran := make(chan error, 1)
		go func() { ran <- alloc.Run(ctx) }()
		for i := range c.taken {
			owner := workload.Owner{ContainerID: strconv.Itoa(i), Interface: "eth0"}
			if _, err := alloc.Allocate(t.Context(), ipam.Request{Owner: owner}); err != nil {
				t.Fatal(err)
			}
		}
		registry := &returns{}
		a := New(Options{
			Settings: Settings{Mode: Pool, Prefixes: []netip.Prefix{first}, MaxBlocks: 8},
			Registry: registry, Ranges: alloc, Report: func(error) {}, Log: slog.New(slog.DiscardHandler),
		})
		a.shrink(t.Context())
		if len(registry.blocks) > 0 {
			t.Errorf("%s: it went back at the first look", second)
		}
		a.shrink(t.Context())
		if got := slices.Contains(registry.blocks, second); got != c.want || slices.Contains(registry.blocks, first) {
			t.Errorf("%s with %d addresses taken: back went %v", second, c.taken, registry.blocks)
		}
		cancel()
		if err := <-ran; err != nil {
			t.Error(err)
		}
	}
}
