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

// publisher has what subscribers are told: the log of steps, the revisions now, and which
// state of which sources the policies are. It belongs to the loop, but for the log.
type publisher struct {
	stream    *stream.Log
	barrier   stream.Barrier // revisions now
	published stream.Barrier
	pending   []policytable.Step // of the engine, that are not in the log

	stateID   stream.StateID
	confirmed bool // by an operator, in this run
	stateOf   stateBasis
}

func newPublisher(l stream.Limits) *publisher { return &publisher{stream: stream.NewLog(l)} }

// step takes a step of the engine, which publish puts into the log.
func (p *publisher) step(st policytable.Step) { p.pending = append(p.pending, st) }

// publish puts the steps and revisions since the last call into the log. policies and sources
// are those that the revisions are of.
func (p *publisher) publish(policies *policySet, sources *sources) {
	p.refreshState(policies, sources)
	if len(p.pending) == 0 && p.barrier == p.published {
		return
	}
	p.stream.Append(p.pending, p.barrier)
	p.pending, p.published = nil, p.barrier
}

// takeState takes the stored name of the state.
func (p *publisher) takeState(text string) error {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(p.stateID) {
		return fmt.Errorf("name of the state: %q, want %d hexadecimal digits", text, 2*len(p.stateID))
	}
	p.stateID = stream.StateID(b)
	return nil
}

// nameState gives a state without a name one. It returns the name, which has to be on stable
// storage before a subscriber hears it: it compares it with that of the state that it enforced
// before. Empty: the state has a name.
func (p *publisher) nameState() string {
	if p.stateID != (stream.StateID{}) {
		return ""
	}
	rand.Read(p.stateID[:]) //nolint:errcheck // never fails
	return hex.EncodeToString(p.stateID[:])
}

// sourceName is how subscribers remember where a policy came from.
func sourceName(p *Policy) string {
	if p.source().Calls && p.Manager != "" {
		return managerSource(p.Manager)
	}
	return p.Source
}

// stateBasis is what stream.Barrier.State was made of: the policies, which sources are
// complete, and whether an operator has confirmed that.
type stateBasis struct {
	made      bool
	policies  uint64 // their revision
	sources   int    // changes of which sources are complete
	confirmed bool
}

// refreshState puts the sources of the policies, and those that are complete,
// into the barrier.
func (p *publisher) refreshState(policies *policySet, sources *sources) {
	basis := stateBasis{made: true, policies: p.barrier.Policy, sources: sources.changes, confirmed: p.confirmed}
	if p.stateOf == basis {
		return
	}
	p.stateOf = basis
	has := make(map[string]struct{})
	for _, x := range policies.all {
		has[sourceName(x)] = struct{}{}
	}
	now := &stream.PolicyState{
		ID: p.stateID, Sources: slices.Sorted(maps.Keys(has)), Complete: sources.complete(), Confirmed: p.confirmed,
	}
	if !now.Equal(p.barrier.State) {
		p.barrier.State = now
	}
}

// held names the subscribers that hold an earlier state, with why.
func (p *publisher) held() (out []string) {
	states, _ := p.stream.States()
	for _, s := range states {
		if s.Hold != nil {
			out = append(out, s.Name+": "+s.Hold.Reason)
		}
	}
	return out
}

// confirm has the subscribers that hold an earlier state take over this one.
func (p *publisher) confirm() {
	p.stream.Release()
	p.confirmed = true
}
