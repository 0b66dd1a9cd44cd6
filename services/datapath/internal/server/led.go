// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/services/datapath/internal/observation/observe"
	"github.com/sluice-net/sluice/services/datapath/internal/service/servicemap"
)

// backends says which addresses are backends of some services. A socket is led to a backend
// before it sends anything: the events of its packets tell no more than that address.
type backends struct {
	services map[string]bool // "shop/web"
	list     func() ([]servicemap.Frontend, error)
	now      func() time.Time

	mu    sync.Mutex
	next  time.Time // when they are listed again
	known map[target]bool
}

type target struct {
	netip.AddrPort
	protocol uint8
}

// listPause is how long a list is used. A list that takes long is used for longer, so that
// one observer takes no more than a twentieth of a CPU.
const listPause, listShare = time.Second, 20

// has reports whether the address is a backend of one of the services now.
func (b *backends) has(at netip.AddrPort, protocol uint8) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if began := b.now(); !began.Before(b.next) {
		// What cannot be read stays as it was.
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

// findBackends has criteria about services hold for packets to their backends, too.
func (s *Server) findBackends(c *observe.Criteria) {
	if len(c.Services) == 0 || s.Services == nil {
		return
	}
	b := &backends{services: c.Services, list: s.Services.List, now: time.Now}
	c.Backend = b.has
}
