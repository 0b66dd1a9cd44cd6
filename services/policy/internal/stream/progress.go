// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package stream

import (
	"errors"
	"fmt"
	"slices"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

// ErrHeld says that a subscriber goes on enforcing an earlier state.
var ErrHeld = errors.New("an earlier state stays enforced")

// Goal is what somebody waits for: that subscribers acknowledge a barrier.
type Goal struct {
	Barrier Barrier         // its policy and address revisions
	Current uint64          // policy revision when the wait began
	Who     map[string]bool // those that enforce, by name, and whether they are waited for
	// Subjects of which a refusal ends the wait; none: of all.
	Subjects []identity.Numeric
}

// Progress is how far subscribers are.
type Progress struct {
	Revision uint64             // that those waited for enforce; of the policies
	Store    peer.StoreRevision // up to which they have the identities; zero: not known, or of several stores
	// Names of the subscribers that enforce: those that are not connected, and
	// those that are, are waited for and have it in force.
	Disconnected, Enforcing []string
}

// Reached says how far subscribers are, and whether those that are connected have
// reached the goal. ErrRefused, ErrHeld: one of them will not by itself.
func (g Goal) Reached(states []State) (Progress, bool, error) {
	out := Progress{Revision: g.Current}
	waiting, connected := false, make(map[string]bool)
	for _, s := range states {
		connected[s.Name] = s.Connected
		if !s.Connected || !g.Who[s.Name] {
			continue
		}
		at := s.Enforced.IdentityService.Store
		switch {
		case len(out.Enforcing) == 0:
			out.Store = at
		case at.Cluster != out.Store.Cluster:
			out.Store = peer.StoreRevision{}
		default:
			out.Store.Revision = min(out.Store.Revision, at.Revision)
		}
		out.Enforcing = append(out.Enforcing, s.Name)
		for at, r := range s.Refusals {
			if r.Revision <= g.Barrier.Policy && (len(g.Subjects) == 0 || slices.Contains(g.Subjects, at.Subject)) {
				return Progress{}, false, fmt.Errorf(
					"%w: %s keeps the %s before table %d: %s; the largest share of the table is from %s",
					failure.ErrRefused, s.Name, at, r.Table, r.Reason, r.Policy)
			}
		}
		if s.Enforced.Policy < g.Barrier.Policy || s.Enforced.Address < g.Barrier.Address {
			if s.Hold != nil {
				return Progress{}, false, fmt.Errorf("%w: %s: %s", ErrHeld, s.Name, s.Hold.Reason)
			}
			waiting = true
		}
		out.Revision = min(out.Revision, s.Enforced.Policy)
	}
	if waiting {
		return Progress{}, false, nil
	}
	for name := range g.Who {
		if !connected[name] {
			out.Disconnected = append(out.Disconnected, name)
		}
	}
	slices.Sort(out.Disconnected)
	return out, true, nil
}
