// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package translation

import (
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/count"
)

// pods counts the translations by endpoint in one pass.
type pods struct {
	passes [2]*bound.Pass // IPv4 and IPv6
	now    uint32
	local  map[netip.Addr]endpointmap.ID
	// crowded holds the translations of a family by endpoint ID, if little capacity is left.
	crowded [2]map[uint32][]*held
}

// held is a translation of an endpoint.
type held struct {
	entry
	idle uint32 // seconds for which neither it nor its connection has been used
	gone bool   // removed by this pass
}

// families are the bounds of translations, for IPv4 and IPv6.
var families = [2]bound.Bound{bound.Translations4, bound.Translations6}

// relaxed returns the number of translations above which a pass removes idle UDP flows: three quarters of the bound.
func relaxed(size int) int { return size - size/4 }

// idleUDP is for how many seconds a UDP flow must have been idle, so that a pass may remove it before its timeout.
const idleUDP = 10

func (m *Maps) beginPods(now uint32) (*pods, error) {
	p := &pods{now: now}
	for f, of := range families {
		p.passes[f] = m.bounds.Begin(of)
		if m.bounds.Total(of) > relaxed(m.bounds.Size(of)) {
			p.crowded[f] = map[uint32][]*held{}
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
	s, ok = p.local[t.initiator()]
	return s, ok && s != endpointmap.HostID
}

// initiator returns the address of the end that began the connection.
func (t *Translation) initiator() netip.Addr {
	if t.Record && !t.Back {
		return t.Asked.Addr()
	}
	return t.Source.Addr()
}

// add counts a translation. last is its connection, if it has one.
func (p *pods) add(e entry, last conntrack.Connection) {
	f := 1
	if e.Source.Addr().Is4() {
		f = 0
	}
	s, ok := p.owner(e.Translation)
	if e.outside || !ok {
		if e.outside && !e.copies {
			p.passes[f].AddOutside()
		}
		return
	}
	p.passes[f].Add(s, 1)
	if p.crowded[f] != nil {
		idle := p.now - e.LastSeen
		if last.Tuple != (conntrack.Tuple{}) {
			idle = min(idle, p.now-last.LastSeen)
		}
		p.crowded[f][uint32(s)] = append(p.crowded[f][uint32(s)], &held{e, idle, false})
	}
}

// isIdleUDP reports whether the entry belongs to a UDP flow that can be removed before its timeout. Its next packet
// selects a backend again: the same one, unless the list of the Service has changed. Flows of a pod to itself stay,
// because they have two translations.
func (h *held) isIdleUDP() bool {
	toItself := h.Back || !h.Record && h.Source.Addr() == h.Backend.Addr()
	return h.Protocol == protocolUDP && !toItself && h.idle >= idleUDP
}

// finish removes translations if little capacity is left, corrects the counts, and returns the number of removed
// translations. It removes the longest idle translations of the largest users: first idle UDP flows, while all
// endpoints together have more than relaxed allows; then any translations, while they have more than the bound. An
// endpoint that has used up the whole common half loses translations when others need them.
func (p *pods) finish(m *Maps) (removals int, err error) {
	for f, of := range families {
		size := m.bounds.Size(of)
		udp, err := p.trim(f, relaxed(size), (*held).isIdleUDP)
		removals += udp
		if err != nil {
			return removals, err
		}
		all, err := p.trim(f, size, func(*held) bool { return true })
		removals += all
		if err != nil {
			return removals, err
		}
		p.passes[f].Finish()
		m.left[f].Store(int64(m.bounds.Total(of)))
	}
	return removals, nil
}

// trim removes translations of family f until the endpoints have no more than keep. It only removes translations for
// which may returns true.
func (p *pods) trim(f, keep int, may func(*held) bool) (removals int, err error) {
	idle := func(h *held) (uint32, bool) { return h.idle, may(h) }
	for _, h := range count.Surplus(p.crowded[f], keep, idle) {
		what, err := h.remove()
		if err != nil {
			return removals, fmt.Errorf("remove %v: %w", h.Translation, err)
		}
		if what == removed {
			s, _ := p.owner(h.Translation)
			p.passes[f].Add(s, -1)
			h.gone = true
			removals++
		}
	}
	for s, of := range p.crowded[f] {
		p.crowded[f][s] = slices.DeleteFunc(of, func(h *held) bool { return h.gone })
	}
	return removals, nil
}

// fills reports whether the endpoints have little capacity left for translations of a family and have used much of what
// the last pass left, so that the next pass should not wait.
func (m *Maps) fills(f int) bool {
	size, total := m.bounds.Size(families[f]), m.bounds.Total(families[f])
	return total >= size-size/8 && total-int(m.left[f].Load()) >= size/16
}
