// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package learned

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// policy answers with the same addresses, or with an error.
type policy struct {
	expiring []netip.Addr
	err      error
	calls    [][]netip.Addr
}

func (p *policy) HoldAddresses(_ context.Context, inUse []netip.Addr) ([]netip.Addr, error) {
	p.calls = append(p.calls, inUse)
	return p.expiring, p.err
}

// passOver plays one pass of a collector that finds connections to some addresses.
func passOver(r *Reporter, connections ...netip.Addr) {
	wanted, passed := r.Wanted()
	passed(slices.DeleteFunc(slices.Clone(connections), func(a netip.Addr) bool { _, ok := wanted[a]; return !ok }))
}

func TestAddressesInUseAreReported(t *testing.T) {
	busy, idle := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")
	other := netip.MustParseAddr("192.0.2.3")
	synctest.Test(t, func(t *testing.T) {
		p := &policy{expiring: []netip.Addr{busy, idle}}
		r := New(p, slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		step := func() {
			passOver(r, busy, other)
			time.Sleep(MinInterval)
			synctest.Wait()
		}

		_, early := r.Wanted() // a pass that is under way while the first answer comes
		step()
		if len(p.calls) != 1 || len(p.calls[0]) != 0 {
			t.Fatalf("the first report is %v, want one without addresses", p.calls)
		}
		wanted, _ := r.Wanted()
		if got := slices.Collect(maps.Keys(wanted)); len(got) != 2 {
			t.Errorf("looks for %v, want what the service asked about", got)
		}
		early(nil)
		time.Sleep(time.Hour)
		synctest.Wait()
		if len(p.calls) != 1 {
			t.Errorf("a pass that began before the answer was reported as %v", p.calls[1])
		}
		step()
		if len(p.calls) != 2 || !slices.Equal(p.calls[1], []netip.Addr{busy}) {
			t.Errorf("reports %v, want %s", p.calls[1:], busy)
		}

		// Without an answer the addresses stay wanted: the service may be back in time.
		p.err = errors.New("away")
		step()
		p.err = nil
		step()
		if len(p.calls) != 4 || !slices.Equal(p.calls[3], []netip.Addr{busy}) {
			t.Errorf("after an error it reports %v, want %s", p.calls[2:], busy)
		}

		p.err = ErrUnsupported
		step()
		for range 10 {
			step()
		}
		if len(p.calls) != 5 {
			t.Errorf("an earlier version was called %d times in %s", len(p.calls)-4, 11*MinInterval)
		}
		time.Sleep(unsupportedPause)
		step()
		if len(p.calls) != 6 {
			t.Errorf("a service that may have been upgraded was not called")
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
