// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package translation

import (
	"fmt"
	"net/netip"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/count"
)

// pods counts the translations by endpoint in one pass.
type pods struct {
	passes [2]*bound.Pass // IPv4 and IPv6
	keep   [2]int
	local  map[netip.Addr]endpointmap.ID
	// crowded holds the translations of a family by endpoint ID, if there are more than all endpoints together may have.
	crowded [2]map[uint32][]entry
}

func (m *Maps) beginPods() (*pods, error) {
	p := &pods{}
	for f, of := range [2]bound.Bound{bound.Translations4, bound.Translations6} {
		p.passes[f], p.keep[f] = m.bounds.Begin(of), m.bounds.Size(of)
		if m.bounds.Total(of) > p.keep[f] {
			p.crowded[f] = map[uint32][]entry{}
		}
	}
	var err error
	if p.local, err = m.endpoints.Local(); err != nil {
		return nil, fmt.Errorf("list the addresses of endpoints: %w", err)
	}
	return p, nil
}

// owner returns the endpoint whose connection created the translation. ok is false for external clients.
func (p *pods) owner(t Translation) (s endpointmap.ID, ok bool) {
	if t.Answer {
		return 0, false
	}
	of := t.Source
	if t.Record && !t.Back {
		of = t.Asked
	}
	s, ok = p.local[of.Addr()]
	return s, ok && s != endpointmap.HostID
}

func (p *pods) add(e entry) {
	f := 1
	if e.Source.Addr().Is4() {
		f = 0
	}
	s, ok := p.owner(e.Translation)
	if e.outside || !ok {
		if e.outside {
			p.passes[f].AddOutside()
		}
		return
	}
	p.passes[f].Add(s, 1)
	if p.crowded[f] != nil {
		p.crowded[f][uint32(s)] = append(p.crowded[f][uint32(s)], e)
	}
}

// finish removes the translations that exceed the endpoints' half of a map, corrects the counts, and returns the number
// of removed translations. A single endpoint may have used the whole half; it loses translations when others need some.
func (p *pods) finish(now uint32) (removals int, err error) {
	for f, held := range p.crowded {
		lastSeen := func(e entry) uint32 { return e.LastSeen }
		for _, e := range count.Surplus(held, p.keep[f], now, lastSeen) {
			what, err := e.remove()
			if err != nil {
				return removals, fmt.Errorf("remove %v: %w", e.Translation, err)
			}
			if what == removed {
				s, _ := p.owner(e.Translation)
				p.passes[f].Add(s, -1)
				removals++
			}
		}
	}
	for _, pass := range p.passes {
		pass.Finish()
	}
	return removals, nil
}
