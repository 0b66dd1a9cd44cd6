// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policyhistory records which policy evaluated each endpoint, and since which epoch. Events are decoded some
// time after they were sent, when the endpoint may have another policy.
package policyhistory

import (
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// Policy describes the tables that evaluate an endpoint.
type Policy struct {
	// Revision of the policies that the tables were made from; 0: unknown.
	Revision        uint64
	Egress, Ingress nodetable.ID
	Epoch           uint32
	// Refusal is the reason why a newer policy is not enforced; empty: no newer policy was refused.
	Refusal string
	Audit   bool
	Rules   [2][][]policytable.Source
	// Proxies maps each redirecting rule to its kind of proxy.
	Proxies [2]map[uint16]uint16
}

// Pending reports whether the endpoint waits for its first policy.
func (p Policy) Pending() bool {
	return p.Egress == nodetable.Pending || p.Ingress == nodetable.Pending
}

// How long, and how many, past policies are kept.
const (
	keepFor  = time.Minute
	keepMost = 64 // epochs of one endpoint ID
)

// epoch is the policy of an endpoint ID from an epoch on. Epochs come from one node-wide counter,
// so a later endpoint with the same ID has higher ones.
type epoch struct {
	first  uint32
	until  time.Time // when the next one began; zero: not yet
	policy Policy
	gone   bool // no endpoint has the ID
}

// History holds the policies of endpoints by endpoint ID. The zero value is empty.
type History struct {
	mu    sync.Mutex
	slots map[uint16][]epoch // guarded by mu; oldest first
}

// Set records the policy of an endpoint from its epoch on. If the epoch equals the last one's, it
// replaces that policy.
func (h *History) Set(slot uint16, p Policy, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.set(slot, p, now)
}

// Flip records the policy that flip returns. It holds the lock during flip, so that the decoding of
// events with the new epoch waits for the policy.
func (h *History) Flip(slot uint16, now time.Time, flip func() (Policy, error)) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	p, err := flip()
	if err == nil {
		h.set(slot, p, now)
	}
	return err
}

func (h *History) set(slot uint16, p Policy, now time.Time) {
	list := h.slots[slot]
	if last := len(list) - 1; last >= 0 {
		if list[last].first == p.Epoch && !list[last].gone {
			list[last].policy = p
			return
		}
		if list[last].until.IsZero() {
			list[last].until = now
		}
	}
	list = slices.DeleteFunc(list, func(e epoch) bool { return !e.until.IsZero() && now.Sub(e.until) > keepFor })
	if len(list) >= keepMost {
		list = slices.Delete(list, 0, len(list)-keepMost+1)
	}
	if h.slots == nil {
		h.slots = map[uint16][]epoch{}
	}
	h.slots[slot] = append(list, epoch{first: p.Epoch, policy: p})
}

// Drop records that no endpoint has the ID any more.
func (h *History) Drop(slot uint16, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if list := h.slots[slot]; len(list) > 0 && !list[len(list)-1].gone {
		list[len(list)-1].until, list[len(list)-1].gone = now, true
	}
}

// Forget removes policies that ended too long ago.
func (h *History) Forget(now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for slot, list := range h.slots {
		list = slices.DeleteFunc(list, func(e epoch) bool { return !e.until.IsZero() && now.Sub(e.until) > keepFor })
		if len(list) == 0 {
			delete(h.slots, slot)
		} else {
			h.slots[slot] = list
		}
	}
}

// at returns the policy of an endpoint ID at an epoch.
func (h *History) at(slot uint16, epoch uint32) (Policy, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := h.slots[slot]
	for i := len(list) - 1; i >= 0; i-- {
		// the counter may wrap around
		if int32(epoch-list[i].first) >= 0 { //nolint:gosec // meant
			return list[i].policy, true
		}
	}
	return Policy{}, false
}

// RuleSources returns the source locations of a rule of an endpoint's table at an epoch; none if
// they are no longer known. Rules are numbered from 1.
func (h *History) RuleSources(slot uint16, epoch uint32, egress bool, rule uint16) []string {
	p, ok := h.at(slot, epoch)
	d := direction(egress)
	if !ok || rule == 0 || int(rule) > len(p.Rules[d]) {
		return nil
	}
	var texts []string
	for _, src := range p.Rules[d][rule-1] {
		texts = append(texts, src.String())
	}
	return texts
}

// Proxy returns the kind of proxy that a rule of an endpoint's table redirects to, at an epoch; 0
// if it does not redirect, or is no longer known.
func (h *History) Proxy(slot uint16, epoch uint32, egress bool, rule uint16) uint16 {
	p, _ := h.at(slot, epoch)
	return p.Proxies[direction(egress)][rule]
}

func direction(egress bool) policytable.Direction {
	if egress {
		return policytable.Egress
	}
	return policytable.Ingress
}

// Revision returns the policy revision of an endpoint's tables at an epoch, if it is known.
func (h *History) Revision(slot uint16, epoch uint32) (revision uint64, ok bool) {
	p, ok := h.at(slot, epoch)
	return p.Revision, ok && p.Revision != 0
}

// Last returns the current policy of an endpoint.
func (h *History) Last(slot uint16) (Policy, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := h.slots[slot]
	if len(list) == 0 || list[len(list)-1].gone {
		return Policy{}, false
	}
	return list[len(list)-1].policy, true
}
