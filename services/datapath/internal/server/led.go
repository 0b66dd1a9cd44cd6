// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/model/flow"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
)

// backends tracks the addresses of some services' backends. A socket selects a backend before it sends anything, so
// that events of its packets only have the backend's address.
type backends struct {
	services map[string]bool // "shop/web"
	list     func() ([]servicemap.Frontend, error)
	now      func() time.Time

	mu    sync.Mutex
	next  time.Time // time of the next listing
	known map[target]bool
}

type target struct {
	netip.AddrPort
	protocol uint8
}

// listPause is the minimum time between two listings. After a slow listing it is longer, so that one observer uses at
// most a twentieth of a CPU.
const listPause, listShare = time.Second, 20

// has reports whether the address is currently a backend of one of the services.
func (b *backends) has(at netip.AddrPort, protocol uint8) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if began := b.now(); !began.Before(b.next) {
		// If listing fails, the previous list stays.
		if fs, err := b.list(); err == nil {
			b.known = targetsOf(fs, b.services)
		}
		took := b.now().Sub(began)
		b.next = began.Add(max(listPause, listShare*took))
	}
	return b.known[target{at, protocol}]
}

func targetsOf(fs []servicemap.Frontend, services map[string]bool) map[target]bool {
	targets := map[target]bool{}
	for _, f := range fs {
		name, _, _ := strings.Cut(f.Service, ":")
		if !services[name] {
			continue
		}
		for _, front := range []*servicemap.Front{f.Inside, f.Outside} {
			if front == nil {
				continue
			}
			for _, b := range front.Backends {
				targets[target{b.AddrPort, uint8(f.Key.Protocol)}] = true
			}
		}
	}
	return targets
}

// findBackends extends criteria about services, so that they also match packets to the backends of the services.
func (s *Server) findBackends(c *flow.Criteria) {
	if len(c.Services) == 0 || s.services == nil {
		return
	}
	b := &backends{services: c.Services, list: s.services.ListFrontends, now: time.Now}
	c.Backend = b.has
}
