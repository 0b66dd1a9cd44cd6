// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// publisher contains the state that subscribers see: the log of steps, the current revisions, and the name of the
// policy state with its sources. It belongs to the loop, except for the log.
type publisher struct {
	stream    *stream.Log
	barrier   stream.Barrier // present revisions
	published stream.Barrier
	pending   []policytable.Step // steps of the engine that are not in the log yet

	stateID   stream.StateID
	confirmed bool // an operator has confirmed the policies in this run
	stateOf   stateBasis
}

func newPublisher(l stream.Limits) *publisher { return &publisher{stream: stream.NewLog(l)} }

// step adds a step of the engine; publish later appends it to the log.
func (p *publisher) step(st policytable.Step) { p.pending = append(p.pending, st) }

// publish appends the steps and revisions since the last call to the log. policies and sources must have the state of
// these revisions.
func (p *publisher) publish(policies *policySet, sources *sources) {
	p.refreshState(policies, sources)
	if len(p.pending) == 0 && p.barrier == p.published {
		return
	}
	p.stream.Append(p.pending, p.barrier)
	p.pending, p.published = nil, p.barrier
}

// takeState sets the stored name of the state.
func (p *publisher) takeState(text string) error {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(p.stateID) {
		return fmt.Errorf("name of the state is %q, want %d hexadecimal digits", text, 2*len(p.stateID))
	}
	p.stateID = stream.StateID(b)
	return nil
}

// If the state has no name, nameState generates one and returns it; otherwise it returns an empty string. The name must
// be on stable storage before a subscriber receives it, because the subscriber compares it with the name of the state
// that it enforced before.
func (p *publisher) nameState() string {
	if p.stateID != (stream.StateID{}) {
		return ""
	}
	rand.Read(p.stateID[:]) //nolint:errcheck // never fails
	return hex.EncodeToString(p.stateID[:])
}

// sourceName returns the name under which subscribers store the source of a policy.
func sourceName(p *Policy) string {
	if p.source().Calls && p.Manager != "" {
		return managerSource(p.Manager)
	}
	return p.Source
}

// stateBasis contains the values from which stream.Barrier.State was computed: the policies, the complete sources, and
// whether an operator has confirmed the state.
type stateBasis struct {
	made      bool
	policies  uint64 // revision of the policies
	sources   int    // number of changes of the set of complete sources
	confirmed bool
}

// refreshState updates the sources of the policies and the complete sources in the barrier.
func (p *publisher) refreshState(policies *policySet, sources *sources) {
	basis := stateBasis{made: true, policies: p.barrier.Policy, sources: sources.changes, confirmed: p.confirmed}
	if p.stateOf == basis {
		return
	}
	p.stateOf = basis
	now := &stream.PolicyState{
		ID: p.stateID, Sources: slices.Sorted(maps.Keys(policies.sources)), Complete: sources.complete(), Confirmed: p.confirmed,
	}
	if !now.Equal(p.barrier.State) {
		p.barrier.State = now
	}
}

// held returns the subscribers that still enforce an earlier state, with the reasons.
func (p *publisher) held() (out []string) {
	states, _ := p.stream.States()
	for _, s := range states {
		if s.Hold != nil {
			out = append(out, s.Name+": "+s.Hold.Reason)
		}
	}
	return out
}

// confirm makes the subscribers that hold an earlier state enforce the current one.
func (p *publisher) confirm() {
	p.stream.Release()
	p.confirmed = true
}
