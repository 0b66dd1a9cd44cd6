// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/services/policy/internal/record"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// takeState takes the stored name of the state.
func (o *Owner) takeState(text string) error {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(o.stateID) {
		return fmt.Errorf("name of the state: %q, want %d hexadecimal digits", text, 2*len(o.stateID))
	}
	o.stateID = stream.StateID(b)
	return nil
}

// nameState gives a state without a name one, on stable storage: a subscriber
// compares it with that of the state that it enforced before.
func (o *Owner) nameState() error {
	if o.stateID != (stream.StateID{}) {
		return nil
	}
	rand.Read(o.stateID[:]) //nolint:errcheck // never fails
	return o.storage.journal.Commit(o.ctx, record.Change{State: record.StateName(hex.EncodeToString(o.stateID[:]))})
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
func (o *Owner) refreshState() {
	basis := stateBasis{made: true, policies: o.barrier.Policy, sources: o.sources.changes, confirmed: o.confirmed}
	if o.stateOf == basis {
		return
	}
	o.stateOf = basis
	has := make(map[string]struct{})
	for _, p := range o.policies.all {
		has[sourceName(p)] = struct{}{}
	}
	now := &stream.PolicyState{
		ID: o.stateID, Sources: slices.Sorted(maps.Keys(has)), Complete: o.sources.complete(), Confirmed: o.confirmed,
	}
	if !now.Equal(o.barrier.State) {
		o.barrier.State = now
	}
}

// Confirmation is the answer of Confirm.
type Confirmation struct {
	Revision uint64
	Policies int
	Held     []string // subscribers that held an earlier state, with why
}

// Confirm says that what the owner has is what shall be enforced, whatever its
// subscribers enforced before. To validate changes nothing.
func (o *Owner) Confirm(ctx context.Context, validateOnly bool) (Confirmation, error) {
	return loop.Ask(ctx, o.loop, opOther, func() (Confirmation, error) {
		out := Confirmation{Revision: o.barrier.Policy, Policies: len(o.policies.all)}
		states, _ := o.stream.States()
		for _, s := range states {
			if s.Hold != nil {
				out.Held = append(out.Held, s.Name+": "+s.Hold.Reason)
			}
		}
		if validateOnly {
			return out, nil
		}
		o.config.Log.Warn("policies confirmed: subscribers that hold an earlier state take them over", "revision", out.Revision, "policies", out.Policies, "held", out.Held)
		o.publish() // what was before has entries of its own
		o.stream.Release()
		o.confirmed = true
		o.sources.gate.Open()
		return out, nil
	})
}
