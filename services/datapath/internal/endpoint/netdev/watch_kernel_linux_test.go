// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package netdev

import (
	"context"
	"errors"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// newNode opens a Netdev in a new network namespace.
func newNode(t *testing.T) *Netdev {
	t.Helper()
	n, err := Open(Options{Home: netnstest.New(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.Close)
	return n
}

// addBridge adds a bridge and returns its index.
func (n *Netdev) addBridge(t *testing.T, name string) int {
	t.Helper()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	if err := n.changes.LinkAdd(bridge); err != nil {
		t.Fatal(err)
	}
	return bridge.Attrs().Index
}

// overflown returns a subscription whose sockets have overflowed with events of a device, and the
// device's index.
func (n *Netdev) overflown(t *testing.T) (subscription, int) {
	t.Helper()
	dev := n.addBridge(t, "noise")
	s, err := n.subscribe(8 << 10)
	if err != nil {
		t.Fatal(err)
	}
	link := &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: dev}}
	for i := range 200 {
		if err := n.changes.LinkSetMTU(link, 1400+i); err != nil {
			t.Fatal(err)
		}
	}
	return s, dev
}

// TestKernelOverflowOfTheSocketLeadsToOneLookBehindIt: the kernel reports once that a socket was full, and drops events
// until the socket was empty. The check of everything must come after that, or it would miss changes.
func TestKernelOverflowOfTheSocketLeadsToOneLookBehindIt(t *testing.T) {
	n := newNode(t)
	s, _ := n.overflown(t)
	defer s.close()
	ctx, cancel := context.WithTimeout(t.Context(), servicetest.Patience)
	defer cancel()
	marker, all := -1, 0
	err := receive(ctx, s.route, func(c Change) {
		switch {
		case c.Everything && marker < 0:
			all++
			marker = n.addBridge(t, "marker")
		case c.Everything:
			all++
		case marker >= 0 && c.Ifindex == uint32(marker):
			cancel()
		}
	}, Change{Everything: true}, n.changesOf)
	if !errors.Is(err, context.Canceled) || all != 1 {
		t.Errorf("%v; %d overflows reported, want 1, followed by an event of device %d", err, all, marker)
	}
}

// TestKernelWatchBehindSubscribeBeginsWithTheNewsSince: it does not begin with Everything.
func TestKernelWatchBehindSubscribeBeginsWithTheNewsSince(t *testing.T) {
	n := newNode(t)
	if err := n.Subscribe(); err != nil {
		t.Fatal(err)
	}
	dev := n.addBridge(t, "between")
	for _, first := range []Change{{Addresses: true}, {Everything: true}} { // the second has no subscription
		ctx, cancel := context.WithTimeout(t.Context(), servicetest.Patience)
		var got []Change
		seen := false
		err := n.Watch(ctx, func(c Change) bool {
			got = append(got, c)
			seen = seen || c.Ifindex == uint32(dev)
			if c.Everything || seen {
				cancel()
			}
			return false
		})
		cancel()
		if !errors.Is(err, context.Canceled) || len(got) == 0 || got[0] != first {
			t.Errorf("%v; changes %+v, want first %+v", err, got, first)
		}
		if !first.Everything && !seen {
			t.Errorf("changes %+v, want one of device %d", got, dev)
		}
	}
}
