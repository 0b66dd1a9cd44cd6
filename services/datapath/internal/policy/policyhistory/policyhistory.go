// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policyhistory remembers which policy evaluated each endpoint, and from
// which epoch on. Events lie in buffers for a while before somebody asks what
// they mean.
package policyhistory

import (
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
)

// Policy is what evaluates an endpoint.
type Policy struct {
	// Revision of the policies that its tables belong to; 0: not known.
	Revision        uint64
	Egress, Ingress nodetable.ID
	Epoch           uint32
	// Refusal says why a newer policy is not in force; empty: there is none.
	Refusal string
	Audit   bool
	Rules   [2][][]policytable.Source
	// Proxies are the kinds of proxy of the rules that redirect, by rule.
	Proxies [2]map[uint16]uint16
}

// Pending says whether the endpoint in a slot waits for its first policy.
func (p Policy) Pending() bool {
	return p.Egress == nodetable.Pending || p.Ingress == nodetable.Pending
}

// For how long, and how many, past policies are remembered.
const (
	keepFor  = time.Minute
	keepMost = 64 // epochs of one slot
)

// epoch is the policy of a slot from an epoch on. Epochs come from one
// counter of the node, so an endpoint that has the slot later has later ones.
type epoch struct {
	first  uint32
	until  time.Time // when the next one began; zero: not yet
	policy Policy
	gone   bool // nobody has the slot
}

// History has the policies of endpoints by slot. The zero value is empty.
type History struct {
	mu    sync.Mutex
	slots map[uint16][]epoch // guarded by mu; oldest first
}

// Set notes the policy of a slot from its epoch on. With the epoch of
// the last one it replaces that.
func (h *History) Set(slot uint16, p Policy, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.set(slot, p, now)
}

// Flip notes the policy that flip gives a slot. Events with the new epoch have
// to wait until it is known.
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

// Drop notes that nobody has the slot any more.
func (h *History) Drop(slot uint16, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if list := h.slots[slot]; len(list) > 0 && !list[len(list)-1].gone {
		list[len(list)-1].until, list[len(list)-1].gone = now, true
	}
}

// Forget drops what nobody can ask for any more.
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

// at is the policy of a slot at an epoch.
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

// RuleSources are the places that a rule of an endpoint's table was written in,
// as of an epoch; none if that is not known any more. Rules count from 1.
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

// Proxy is the kind of proxy that a rule of an endpoint's table redirects to, as
// of an epoch; 0 if it redirects to none, or that is not known any more.
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

// Revision is the policy revision of an endpoint's tables as of an epoch, if
// it is known.
func (h *History) Revision(slot uint16, epoch uint32) (revision uint64, ok bool) {
	p, ok := h.at(slot, epoch)
	return p.Revision, ok && p.Revision != 0
}

// Last is the policy of the endpoint in a slot.
func (h *History) Last(slot uint16) (Policy, bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	list := h.slots[slot]
	if len(list) == 0 || list[len(list)-1].gone {
		return Policy{}, false
	}
	return list[len(list)-1].policy, true
}
