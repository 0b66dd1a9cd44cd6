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
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// policy is a fake service that returns fixed addresses, or an error.
type policy struct {
	expiring []netip.Addr

	mu    sync.Mutex
	err   error          // guarded by mu
	calls [][]netip.Addr // guarded by mu
}

func (p *policy) HoldAddresses(_ context.Context, inUse []netip.Addr) ([]netip.Addr, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.calls = append(p.calls, inUse)
	return p.expiring, p.err
}

func (p *policy) fail(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = err
}

func (p *policy) called() [][]netip.Addr {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.calls)
}

// passOver simulates one pass of a collector that finds connections to some addresses.
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

		_, early := r.Wanted() // a pass that is in progress when the first answer arrives
		step()
		if len(p.called()) != 1 || len(p.called()[0]) != 0 {
			t.Fatalf("the first report is %v, want one without addresses", p.called())
		}
		wanted, _ := r.Wanted()
		if got := slices.Collect(maps.Keys(wanted)); len(got) != 2 {
			t.Errorf("looks for %v, want the addresses of the service", got)
		}
		early(nil)
		time.Sleep(time.Hour)
		synctest.Wait()
		if len(p.called()) != 1 {
			t.Errorf("a pass that began before the answer was reported as %v", p.called()[1])
		}
		step()
		if len(p.called()) != 2 || !slices.Equal(p.called()[1], []netip.Addr{busy}) {
			t.Errorf("reports %v, want %s", p.called()[1:], busy)
		}

		// After an error the addresses stay wanted: the service may return in time.
		p.fail(errors.New("away"))
		step()
		p.fail(nil)
		step()
		if len(p.called()) != 4 || !slices.Equal(p.called()[3], []netip.Addr{busy}) {
			t.Errorf("after an error it reports %v, want %s", p.called()[2:], busy)
		}

		p.fail(ErrUnsupported)
		step()
		for range 10 {
			step()
		}
		if len(p.called()) != 5 {
			t.Errorf("an earlier version was called %d times in %s", len(p.called())-4, 11*MinInterval)
		}
		time.Sleep(unsupportedPause)
		step()
		if len(p.called()) != 6 {
			t.Errorf("a service that may have been upgraded was not called")
		}
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
