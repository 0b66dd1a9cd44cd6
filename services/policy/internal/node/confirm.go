// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/services/policy/internal/journal"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// takeState takes the stored name of the state.
func (n *Node) takeState(text string) error {
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(n.stateID) {
		return fmt.Errorf("name of the state: %q, want %d hexadecimal digits", text, 2*len(n.stateID))
	}
	n.stateID = stream.StateID(b)
	return nil
}

// nameState gives a state without a name one, on stable storage: a subscriber
// compares it with that of the state that it enforced before.
func (n *Node) nameState() error {
	if n.stateID != (stream.StateID{}) {
		return nil
	}
	rand.Read(n.stateID[:]) //nolint:errcheck // never fails
	return n.journal.Commit(n.ctx, journal.Change{State: hex.EncodeToString(n.stateID[:])})
}

// sourceName is how subscribers remember where a policy came from.
func sourceName(p *Policy) string {
	if p.Source == SourceGRPC && p.Manager != "" {
		return p.Source + "/" + p.Manager
	}
	return p.Source
}

// refreshState puts the sources of the policies, and those that are complete,
// into the barrier.
func (n *Node) refreshState() {
	if !n.stateChanged && n.stateOf == n.barrier.Policy {
		return
	}
	n.stateChanged, n.stateOf = false, n.barrier.Policy
	has, complete := make(map[string]struct{}), make(map[string]struct{})
	for _, p := range n.policies {
		has[sourceName(p)] = struct{}{}
	}
	for name, s := range n.sources {
		if s.synced && name != SourceGRPC { // nothing lists what people apply
			complete[name] = struct{}{}
		}
	}
	for m := range n.managers {
		complete[SourceGRPC+"/"+m] = struct{}{}
	}
	now := &stream.PolicyState{
		ID: n.stateID, Sources: slices.Sorted(maps.Keys(has)), Complete: slices.Sorted(maps.Keys(complete)), Confirmed: n.confirmed,
	}
	if !now.Equal(n.barrier.State) {
		n.barrier.State = now
	}
}

// Confirmation is the answer of Confirm.
type Confirmation struct {
	Revision uint64
	Policies int
	Held     []string // subscribers that held an earlier state, with why
}

// Confirm says that what the node has is what shall be enforced, whatever its
// subscribers enforced before.
func (n *Node) Confirm(ctx context.Context) (Confirmation, error) {
	return ask(ctx, n, func() (Confirmation, error) {
		out := Confirmation{Revision: n.barrier.Policy, Policies: len(n.policies)}
		states, _ := n.stream.States()
		for _, s := range states {
			if s.Hold != nil {
				out.Held = append(out.Held, s.Name+": "+s.Hold.Reason)
			}
		}
		n.config.Log.Warn("policies confirmed: subscribers that hold an earlier state take them over", "revision", out.Revision, "policies", out.Policies, "held", out.Held)
		n.publish() // what was before has entries of its own
		n.stream.Release()
		n.confirmed, n.stateChanged = true, true
		return out, nil
	})
}
