// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package podrange

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/watch"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// node is a fake of everything that a keeper uses, including its source. A test holds the lock except while it waits.
type node struct {
	mu      sync.Mutex
	hub     *watch.Hub[netip.Prefix, Range]
	set     *Set
	entries map[netip.Prefix]bool
	made    map[netip.Prefix]bool // ranges with rules and routes
	lives   netip.Addr            // address of an endpoint
	foreign netip.Addr            // address of another device
	fail    map[string]error
	steps   []string
}

func (n *node) Watch(ctx context.Context, token []byte) iter.Seq2[watch.Event[netip.Prefix, Range], error] {
	return func(yield func(watch.Event[netip.Prefix, Range], error) bool) {
		s, err := n.hub.Subscribe(token)
		for err == nil {
			var e watch.Event[netip.Prefix, Range]
			if e, err = s.Next(ctx); err == nil && !yield(e, nil) {
				break
			}
		}
		if s != nil {
			s.Close()
		}
		if err != nil {
			yield(watch.Event[netip.Prefix, Range]{}, err)
		}
	}
}

func (n *node) do(what string, p netip.Prefix) error {
	if err := n.fail[what]; err != nil {
		return err
	}
	n.steps = append(n.steps, fmt.Sprintf("%s %v", what, p))
	return nil
}

func (n *node) AddRange(p netip.Prefix) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	err := n.do("entry", p)
	n.entries[p] = n.entries[p] || err == nil
	return err
}

func (n *node) DropRange(p netip.Prefix) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	err := n.do("no entry", p)
	if err == nil {
		delete(n.entries, p)
	}
	return err
}

func (n *node) Repair() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.fail["repair"]; err != nil {
		return err
	}
	for _, p := range n.set.All() {
		if !n.made[p] {
			n.made[p] = true
			n.steps = append(n.steps, fmt.Sprintf("node %v", p))
		}
	}
	return nil
}

func (n *node) RemoveRange(p netip.Prefix) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if slices.Contains(n.set.All(), p) {
		return errors.New("it is in the set")
	}
	err := n.do("no node", p)
	if err == nil {
		delete(n.made, p)
	}
	return err
}

func (n *node) AddrIn(p netip.Prefix) (netip.Addr, string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if p.Contains(n.foreign) {
		return n.foreign, "eth7", nil
	}
	return netip.Addr{}, "", n.fail["list"]
}

func (n *node) CloseRange(p netip.Prefix) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if p.Contains(n.lives) {
		return false
	}
	n.set.Close(p)
	return true
}

// keep runs a keeper in a synctest bubble, on a node that starts with ranges.
func keep(t *testing.T, begin []string, test func(n *node, k *Keeper)) {
	synctest.Test(t, func(t *testing.T) {
		n := &node{
			hub:     watch.NewHub[netip.Prefix](watch.Options[Range]{Loading: true}),
			entries: map[netip.Prefix]bool{}, made: map[netip.Prefix]bool{}, fail: map[string]error{},
		}
		for _, s := range begin {
			n.entries[netip.MustParsePrefix(s)], n.made[netip.MustParsePrefix(s)] = true, true
		}
		n.set = Of(slices.Collect(maps.Keys(n.entries)), true)
		k := New(Options{Set: n.set, Source: n, Entries: n, Host: n, Endpoints: n, Log: log.Discard()})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- k.Run(ctx) }()
		n.mu.Lock()
		n.later(0)
		test(n, k)
		n.mu.Unlock()
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

// later advances the time and returns after everything that is due has happened.
func (n *node) later(d time.Duration) {
	n.mu.Unlock()
	defer n.mu.Lock()
	time.Sleep(d)
	synctest.Wait()
}

// has announces exactly these ranges.
func (n *node) has(list ...string) {
	for _, p := range n.hub.Keys() {
		if !slices.Contains(list, p.String()) {
			n.hub.Delete(p)
		}
	}
	for _, s := range list {
		p := netip.MustParsePrefix(s)
		n.hub.Upsert(p, Range{Node: NodeAddr(p)})
	}
	n.hub.Loaded()
	n.later(0)
}

func (n *node) want(t *testing.T, list ...string) {
	t.Helper()
	for what, have := range map[string][]netip.Prefix{
		"set": n.set.All(), "entries": slices.Collect(maps.Keys(n.entries)), "node": slices.Collect(maps.Keys(n.made)),
	} {
		var texts []string
		for _, p := range have {
			texts = append(texts, p.String())
		}
		slices.Sort(texts)
		if !slices.Equal(texts, list) {
			t.Errorf("the %s has %v, want %v", what, texts, list)
		}
	}
}

func TestRangesComeAndGoInOrder(t *testing.T) {
	keep(t, nil, func(n *node, k *Keeper) {
		select {
		case <-k.Known():
			t.Error("a range is known before there is one")
		default:
		}
		if got := k.Problems(); len(got) != 1 || !strings.Contains(got[0], "no pod range is known") {
			t.Errorf("problems without a range: %q", got)
		}
		n.has("10.1.0.0/24", "fd01::/64")
		<-k.Known()
		n.want(t, "10.1.0.0/24", "fd01::/64")
		if len(k.Problems()) != 0 || !n.set.Open(netip.MustParseAddr("10.1.0.9")) {
			t.Errorf("problems: %q", k.Problems())
		}
		n.steps = nil
		n.has("fd01::/64", "10.2.0.0/24")
		n.want(t, "10.2.0.0/24", "fd01::/64")
		want := []string{"no node 10.1.0.0/24", "no entry 10.1.0.0/24", "entry 10.2.0.0/24", "node 10.2.0.0/24"}
		if !slices.Equal(n.steps, want) {
			t.Errorf("the steps are %q, want %q", n.steps, want)
		}
		if n.set.Open(netip.MustParseAddr("10.1.0.9")) || !n.set.Open(netip.MustParseAddr("10.2.0.9")) {
			t.Error("the former range is open, or the new one is not")
		}
	})
}

// TestARangeStaysWhileAnEndpointLivesInIt proves INV-16 for the datapath.
func TestARangeStaysWhileAnEndpointLivesInIt(t *testing.T) {
	keep(t, []string{"10.1.0.0/24", "10.7.0.0/24"}, func(n *node, k *Keeper) {
		<-k.Known()
		n.lives = netip.MustParseAddr("10.1.0.5")
		n.want(t, "10.1.0.0/24", "10.7.0.0/24") // before the source has sent anything
		n.has("10.2.0.0/24")
		n.want(t, "10.1.0.0/24", "10.2.0.0/24")
		n.later(10 * retryEvery)
		n.want(t, "10.1.0.0/24", "10.2.0.0/24")
		if !n.set.Open(n.lives) {
			t.Error("the range of a live endpoint is closed")
		}
		n.lives = netip.Addr{}
		n.later(2 * retryEvery)
		n.want(t, "10.2.0.0/24")
	})
}

func TestARangeThatCannotBeTheNodesIsRefusedByName(t *testing.T) {
	for text, s := range map[string]string{
		"10.1.0.0/16 overlaps the pod range 10.1.0.0/24":                        "10.1.0.0/16",
		"127.1.0.0/24 overlaps 127.0.0.0/8, which pods cannot use":              "127.1.0.0/24",
		"0.0.0.0/0 overlaps 0.0.0.0/8, which pods cannot use":                   "0.0.0.0/0",
		"10.9.0.0/24 holds 10.9.0.7, an address of eth7":                        "10.9.0.0/24",
		"10.3.0.0/31 is not a masked prefix that can hold a pod":                "10.3.0.0/31",
		"10.3.0.0/24: the source gives the node the address 10.3.0.9 in it":     "10.3.0.0/24",
		"::ffff:10.3.0.0/120 overlaps ::ffff:0.0.0.0/96, which pods cannot use": "::ffff:10.3.0.0/120",
		"fe80::/64 overlaps fe80::/10, which pods cannot use":                   "fe80::/64",
	} {
		keep(t, []string{"10.1.0.0/24"}, func(n *node, k *Keeper) {
			n.foreign = netip.MustParseAddr("10.9.0.7")
			if s == "10.3.0.0/24" {
				n.hub.Upsert(netip.MustParsePrefix(s), Range{Node: netip.MustParseAddr("10.3.0.9")})
				n.hub.Upsert(netip.MustParsePrefix("10.1.0.0/24"), Range{Node: netip.MustParseAddr("10.1.0.1")})
				n.hub.Loaded()
				n.later(0)
			} else {
				n.has("10.1.0.0/24", s)
			}
			n.want(t, "10.1.0.0/24")
			if got := k.Problems(); len(got) != 1 || !strings.Contains(got[0], text) {
				t.Errorf("%s: problems %q, want %q", s, got, text)
			}
			n.has("10.1.0.0/24")
			n.want(t, "10.1.0.0/24")
			if got := k.Problems(); len(got) != 0 {
				t.Errorf("%s: problems after it was removed: %q", s, got)
			}
		})
	}
}

func TestARangeIsTakenWhenWhatWasInItsWayHasGone(t *testing.T) {
	keep(t, []string{"10.1.0.0/24"}, func(n *node, k *Keeper) {
		n.lives = netip.MustParseAddr("10.1.0.200")
		n.has("10.1.0.0/25")
		n.want(t, "10.1.0.0/24")
		n.lives = netip.Addr{}
		n.later(2 * retryEvery)
		n.want(t, "10.1.0.0/25")
	})
}

func TestAStepThatFailsIsRepeated(t *testing.T) {
	for _, what := range []string{"entry", "repair", "list"} {
		keep(t, nil, func(n *node, k *Keeper) {
			n.fail[what] = errors.New("not now")
			n.has("10.1.0.0/24")
			if n.set.Open(netip.MustParseAddr("10.1.0.5")) || !strings.Contains(strings.Join(k.Problems(), "\n"), "not now") {
				t.Errorf("%s failed, and the range is open or no problem is reported: %q", what, k.Problems())
			}
			delete(n.fail, what)
			n.later(5 * time.Second)
			n.want(t, "10.1.0.0/24")
			if len(k.Problems()) != 0 {
				t.Errorf("%s: %q", what, k.Problems())
			}
		})
	}
	for _, what := range []string{"no node", "no entry"} {
		keep(t, []string{"10.1.0.0/24", "10.2.0.0/24"}, func(n *node, k *Keeper) {
			n.fail[what] = errors.New("not now")
			n.has("10.2.0.0/24")
			if n.set.Open(netip.MustParseAddr("10.1.0.5")) || !n.entries[netip.MustParsePrefix("10.1.0.0/24")] {
				t.Errorf("%s failed and the range is open, or forgotten", what)
			}
			delete(n.fail, what)
			n.later(5 * time.Second)
			n.want(t, "10.2.0.0/24")
		})
	}
}

// TestOverlayAddressesAreThoseOfThePrimaryRanges proves INV-105 for one process.
func TestOverlayAddressesAreThoseOfThePrimaryRanges(t *testing.T) {
	keep(t, []string{"10.5.0.0/24", "fd05::/64"}, func(n *node, k *Keeper) {
		ready := func(want bool) {
			t.Helper()
			select {
			case <-k.Overlay():
				if !want {
					t.Error("a node without an overlay address has one")
				}
			default:
				if want {
					t.Error("Overlay is not closed")
				}
			}
		}
		want := func(known bool, list ...string) {
			t.Helper()
			got, ok := n.set.OverlayAddrs()
			if texts := fmt.Sprint(got); ok != known || texts != fmt.Sprint(list) {
				t.Errorf("the overlay addresses are %v, known %v; want %v, %v", texts, ok, list, known)
			}
		}
		say := func(primary bool, list ...string) {
			for _, s := range list {
				p := netip.MustParsePrefix(s)
				n.hub.Upsert(p, Range{Node: NodeAddr(p), Primary: primary})
			}
			n.later(0)
		}
		want(false)
		say(false, "10.1.0.0/24", "fd01::/64", "fd05::/64")
		ready(false)
		say(true, "10.5.0.0/24")
		ready(true)
		n.hub.Loaded()
		n.later(0)
		want(true, "10.5.0.1")
		say(true, "fd05::/64")
		want(true, "10.5.0.1", "fd05::1")
		say(false, "10.0.0.0/24", "fd00::/64")
		want(true, "10.5.0.1", "fd05::1")
		say(true, "10.1.0.0/24") // before the former one is announced as not primary
		want(true, "10.1.0.1", "fd05::1")
		say(false, "10.5.0.0/24")
		want(true, "10.1.0.1", "fd05::1")
		say(true, "127.0.0.0/24") // cannot be the node's range
		want(true, "fd05::1")
	})
	fixed := Of([]netip.Prefix{netip.MustParsePrefix("10.5.0.0/24"), netip.MustParsePrefix("10.1.0.0/24")}, false)
	if got, known := fixed.OverlayAddrs(); !known || fmt.Sprint(got) != "[10.5.0.1]" {
		t.Errorf("configured ranges have the overlay addresses %v, known %v", got, known)
	}
	if got, known := Of(nil, true).OverlayAddrs(); !known || len(got) > 0 {
		t.Errorf("a node without a range has the overlay addresses %v, known %v", got, known)
	}
}

// TestEarlierOverlayAddressesStandUntilTheSourceSaysOthers: after a start while sluice-ipam is unavailable, packets
// keep the source address that the previous process used.
func TestEarlierOverlayAddressesStandUntilTheSourceSaysOthers(t *testing.T) {
	one, five := netip.MustParsePrefix("10.1.0.0/24"), netip.MustParsePrefix("10.5.0.0/24")
	six := netip.MustParsePrefix("fd01::/64")
	ranges := []netip.Prefix{one, five, six}
	earlier := []netip.Addr{
		NodeAddr(five), NodeAddr(six), netip.MustParseAddr("fd05::1"), netip.MustParseAddr("192.0.2.1"), {},
	}
	want := func(s *Set, when, addrs string, known bool) {
		t.Helper()
		if got, k := s.OverlayAddrs(); k != known || fmt.Sprint(got) != addrs {
			t.Errorf("%s the overlay addresses are %v, known %t; want %s, %t", when, got, k, addrs, known)
		}
	}
	s := Of(ranges, true)
	want(s, "before anything", "[]", false)
	s.Remember(earlier)
	want(s, "after a start", "[10.5.0.1 fd01::1]", false)
	if s.setPrimary(five) {
		t.Error("the range that was primary is a change")
	}
	if !s.setPrimary(one) {
		t.Error("another primary range is not reported as a change")
	}
	s.listed()
	want(s, "without a primary IPv6 range", "[10.1.0.1]", true)
	s.Remember(earlier)
	want(s, "after the source's listing", "[10.1.0.1]", true)

	fixed := Of(ranges, false)
	fixed.Remember(earlier)
	want(fixed, "with configured ranges", "[10.1.0.1 fd01::1]", true)
}
