// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"slices"
	"sync"
	"time"

	"github.com/sluice-net/sluice/services/datapath/internal/policytable"
)

// EndpointPolicy is what judges an endpoint.
type EndpointPolicy struct {
	// Revision of the policies that its tables belong to; 0: not known.
	Revision        uint64
	Egress, Ingress policytable.ID
	Generation      uint32
	// Refusal says why a newer policy is not in force; empty: there is none.
	Refusal string
	Audit   bool
	rules   [2][][]policytable.Source
}

// Events lie in buffers for a while before somebody asks what they mean.
const (
	keepFor  = time.Minute
	keepMost = 64 // generations of one slot
)

// view is what others ask of the applier while it works.
type view struct {
	mu       sync.Mutex
	slots    map[uint16][]epoch // guarded by mu; oldest first
	revision uint64             // guarded by mu
	refusals []string           // guarded by mu
	waiting  int                // guarded by mu
	held     string             // guarded by mu; why an earlier state stays enforced
	unsaved  string             // guarded by mu; why it is not on stable storage
}

// epoch is the policy of a slot from a generation on. Generations come from one
// counter of the node, so an endpoint that has the slot later has later ones.
type epoch struct {
	first  uint32
	until  time.Time // when the next one began; zero: not yet
	policy EndpointPolicy
	gone   bool // nobody has the slot
}

func (v *view) init() { v.slots = map[uint16][]epoch{} }

// set notes the policy of a slot. With the generation of the last one it
// replaces that.
func (v *view) set(slot uint16, gen uint32, p EndpointPolicy, now time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.setLocked(slot, gen, p, now)
}

func (v *view) setLocked(slot uint16, gen uint32, p EndpointPolicy, now time.Time) {
	list := v.slots[slot]
	if last := len(list) - 1; last >= 0 {
		if list[last].first == gen && !list[last].gone {
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
	v.slots[slot] = append(list, epoch{first: gen, policy: p})
}

// drop notes that nobody has the slot any more.
func (v *view) drop(slot uint16, now time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if list := v.slots[slot]; len(list) > 0 && !list[len(list)-1].gone {
		list[len(list)-1].until, list[len(list)-1].gone = now, true
	}
}

// forget drops what nobody can ask for any more.
func (v *view) forget(now time.Time) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for slot, list := range v.slots {
		list = slices.DeleteFunc(list, func(e epoch) bool { return !e.until.IsZero() && now.Sub(e.until) > keepFor })
		if len(list) == 0 {
			delete(v.slots, slot)
		} else {
			v.slots[slot] = list
		}
	}
}

// at is the policy of a slot at a generation.
func (v *view) at(slot uint16, gen uint32) (EndpointPolicy, bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	list := v.slots[slot]
	for i := len(list) - 1; i >= 0; i-- {
		// the counter may wrap around
		if int32(gen-list[i].first) >= 0 { //nolint:gosec // meant
			return list[i].policy, true
		}
	}
	return EndpointPolicy{}, false
}

// RuleSources are the places that a rule of an endpoint's table was written in,
// as of a generation; none if that is not known any more. Rules count from 1.
func (a *Applier) RuleSources(slot uint16, generation uint32, egress bool, rule uint16) []string {
	p, ok := a.view.at(slot, generation)
	d := policytable.Ingress
	if egress {
		d = policytable.Egress
	}
	if !ok || rule == 0 || int(rule) > len(p.rules[d]) {
		return nil
	}
	var texts []string
	for _, src := range p.rules[d][rule-1] {
		texts = append(texts, src.String())
	}
	return texts
}

// Revision is the policy revision of an endpoint's tables as of a generation, if
// it is known.
func (a *Applier) Revision(slot uint16, generation uint32) (revision uint64, ok bool) {
	p, ok := a.view.at(slot, generation)
	return p.Revision, ok && p.Revision != 0
}

// Of is what judges the endpoint in a slot.
func (a *Applier) Of(slot uint16) (EndpointPolicy, bool) {
	a.view.mu.Lock()
	defer a.view.mu.Unlock()
	list := a.view.slots[slot]
	if len(list) == 0 || list[len(list)-1].gone {
		return EndpointPolicy{}, false
	}
	p := list[len(list)-1].policy
	if p.Revision != 0 && p.Refusal == "" {
		// what was not changed by later revisions is theirs too
		p.Revision = max(p.Revision, a.view.revision)
	}
	return p, true
}

// Status is a summary.
type Status struct {
	// Revision that is in force for every endpoint.
	Revision uint64
	// Refusals are what has no room, one line per subject.
	Refusals []string
	// Waiting is how many identities are kept unknown because a table has no
	// room for them.
	Waiting int
	// Connected says whether a subscription is open, and Err why not.
	Connected bool
	// Held says why the kernel goes on enforcing an earlier state than that of the
	// service; empty: it does not.
	Held string
	// Unsaved says why the enforced revision is not on stable storage.
	Unsaved string
	Err     error
	// Synced says whether the service has said everything at least once.
	Synced bool
}

// Status gives the summary.
func (a *Applier) Status() Status {
	st := Status{}
	st.Connected, st.Err = a.session.state()
	select {
	case <-a.synced:
		st.Synced = true
	default:
	}
	a.view.mu.Lock()
	defer a.view.mu.Unlock()
	st.Revision, st.Refusals, st.Waiting = a.view.revision, slices.Clone(a.view.refusals), a.view.waiting
	st.Held, st.Unsaved = a.view.held, a.view.unsaved
	return st
}
