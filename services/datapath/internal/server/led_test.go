// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-net/sluice/model/flow"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
)

// TestBackendsOfAServiceAreThoseThatItHasNow tests that the list is read again after its pause, and kept if that fails.
func TestBackendsOfAServiceAreThoseThatItHasNow(t *testing.T) {
	first, second := netip.MustParseAddrPort("10.244.0.2:8080"), netip.MustParseAddrPort("10.244.0.3:8080")
	now, lists, fails := time.Unix(1000, 0), 0, false
	at := first
	b := &backends{services: map[string]bool{"shop/web": true}, now: func() time.Time { return now }}
	b.list = func() ([]servicemap.Frontend, error) {
		lists++
		if fails {
			return nil, errors.New("not now")
		}
		front := &servicemap.Front{Backends: []servicemap.Backend{{AddrPort: at}}}
		return []servicemap.Frontend{
			{Key: frontend.Key{Protocol: frontend.TCP}, Service: "shop/web:http", Inside: front},
			{Key: frontend.Key{Protocol: frontend.UDP}, Service: "shop/other:http", Outside: front},
		}, nil
	}
	want := func(when string, to netip.AddrPort, protocol uint8, want bool) {
		t.Helper()
		if got := b.has(to, protocol); got != want {
			t.Errorf("%s: %v by protocol %d is a backend: %t, want %t", when, to, protocol, got, want)
		}
	}
	want("at first", first, 6, true)
	want("at first", first, 17, false)
	want("at first", second, 6, false)
	at = second
	want("within the pause", second, 6, false)
	if lists != 1 {
		t.Errorf("listed %d times within the pause", lists)
	}
	now = now.Add(listPause)
	want("after it", second, 6, true)
	want("after it", first, 6, false)
	fails, now = true, now.Add(listPause)
	want("if it cannot be read", second, 6, true)
}

// TestObserveServiceShowsPacketsToItsBackends tests that criteria match the first packet and the replies of a
// connection whose socket selected a backend, and nothing that was sent to another service.
func TestObserveServiceShowsPacketsToItsBackends(t *testing.T) {
	backend, client := netip.MustParseAddrPort("10.244.0.2:8080"), netip.MustParseAddrPort("10.244.0.9:40000")
	c := flow.Criteria{
		Services: map[string]bool{"shop/web": true},
		Backend:  func(at netip.AddrPort, protocol uint8) bool { return at == backend && protocol == 6 },
	}
	asked := netip.MustParseAddrPort("10.96.0.1:80")
	for name, e := range map[string]struct {
		flow.Event
		want bool
	}{
		"to the backend":        {flow.Event{Source: client, Destination: backend, Protocol: 6}, true},
		"its answer":            {flow.Event{Source: backend, Destination: client, Protocol: 6, Reply: true}, true},
		"from the backend":      {flow.Event{Source: backend, Destination: client, Protocol: 6}, false},
		"by another protocol":   {flow.Event{Source: client, Destination: backend, Protocol: 17}, false},
		"asked for the service": {flow.Event{Destination: client, Original: asked, Service: "shop/web:http"}, true},
		"asked for another": {
			flow.Event{Destination: backend, Protocol: 6, Original: asked, Service: "shop/api"}, false,
		},
	} {
		if got := c.Match(e.Event, nil); got != e.want {
			t.Errorf("%s: %t, want %t", name, got, e.want)
		}
	}
}
