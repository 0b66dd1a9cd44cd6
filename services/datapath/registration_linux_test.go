// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
)

// registered keeps the last registration.
type registered struct {
	mu   sync.Mutex
	last cluster.Underlay
	n    int
}

func (r *registered) Register(_ context.Context, u cluster.Underlay) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.last, r.n = u, r.n+1
	return nil
}

func (r *registered) want(t *testing.T, what string, addresses, overlay []string) {
	t.Helper()
	texts := func(list []netip.Addr) (out []string) {
		for _, a := range list {
			out = append(out, a.String())
		}
		return out
	}
	servicetest.EventuallyNil(t, what, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if !slices.Equal(texts(r.last.Addresses), addresses) || !slices.Equal(texts(r.last.Overlay), overlay) || r.n == 0 {
			return fmt.Errorf("registered %+v, want addresses %v and overlay addresses %v", r.last, addresses, overlay)
		}
		return nil
	})
}

// ip runs the command in the node's namespace, once per line.
func (w *world) ip(lines ...string) {
	w.t.Helper()
	for _, line := range lines {
		var out []byte
		if err := w.home.Do(func() (err error) {
			out, err = exec.CommandContext(w.t.Context(), "ip", strings.Fields(line)...).CombinedOutput()
			return err
		}); err != nil {
			w.t.Fatalf("ip %s: %v: %s", line, err, out)
		}
	}
}

// TestKernelNodeIsRegisteredAsItChanges expects the addresses of the uplinks to be registered, and registered again
// when addresses, default routes and pod ranges change.
func TestKernelNodeIsRegisteredAsItChanges(t *testing.T) {
	w, r, ranges := newWorld(t), &registered{}, newAnnounced()
	w.registry, w.ranges = r, ranges
	w.start(true)
	r.want(t, "a node without uplinks", nil, nil)
	for name, addr := range map[string]string{
		"up0": "192.0.2.10/24", "up1": "198.51.100.10/24",
		"other": "203.0.113.10/24",
	} {
		w.ip("link add "+name+" type bridge", "link set "+name+" up", "address add "+addr+" dev "+name)
	}
	w.ip("address add 169.254.3.3/16 dev up0", "route add default dev up1 metric 100",
		"route add default dev up0 metric 200")
	r.want(t, "the uplinks", []string{"198.51.100.10", "192.0.2.10"}, nil)
	low, high, six := netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("10.2.0.0/24"), netip.MustParsePrefix("fd01::/64")
	ranges.only(high)
	r.want(t, "a range", []string{"198.51.100.10", "192.0.2.10"}, []string{"10.2.0.1"})
	ranges.only(high, low, six)
	r.want(t, "more ranges", []string{"198.51.100.10", "192.0.2.10"}, []string{"10.2.0.1", "fd01::1"})
	w.ip("route delete default dev up0 metric 200")
	r.want(t, "after a default route was removed", []string{"198.51.100.10"}, []string{"10.2.0.1", "fd01::1"})
	w.ip("address add 198.51.100.11/24 dev up1")
	r.want(t, "an address more", []string{"198.51.100.10", "198.51.100.11"}, []string{"10.2.0.1", "fd01::1"})
	w.stop()
	w.underlay = UnderlayConfig{Devices: []string{"oth*", "up0"}}
	w.start(true)
	r.want(t, "other devices", []string{"203.0.113.10", "192.0.2.10"}, []string{"10.2.0.1", "fd01::1"})
	w.stop()
	w.underlay = UnderlayConfig{Addresses: []netip.Addr{netip.MustParseAddr("203.0.113.99")}}
	w.start(true)
	r.want(t, "other addresses", []string{"203.0.113.99"}, []string{"10.2.0.1", "fd01::1"})
}
