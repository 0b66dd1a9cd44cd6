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

// ErrHeld means that a subscriber still enforces an earlier state and waits for a confirmation.
var ErrHeld = errors.New("an earlier state stays enforced")

// Goal is the condition for which a caller waits: that subscribers acknowledge a barrier.
type Goal struct {
	Barrier Barrier         // its policy and address revisions
	Current uint64          // policy revision at the start of the wait
	Who     map[string]bool // enforcing subscribers by name; true: wait for the subscriber
	// Subjects are the subjects whose refused tables end the wait; none: all subjects.
	Subjects []identity.Numeric
}

// Progress is the progress of subscribers.
type Progress struct {
	Revision uint64             // policy revision that all awaited subscribers enforce
	Store    peer.StoreRevision // revision of the identities that they have; zero: unknown, or several stores
	// Disconnected contains the enforcing subscribers that are disconnected. Enforcing contains the connected
	// subscribers that the caller waits for and that have reached the goal.
	Disconnected, Enforcing []string
}

// Reached returns the progress of the subscribers, and whether all connected subscribers for which the caller waits
// have reached the goal. It returns ErrRefused if one of these subscribers refused a table, and ErrHeld if one waits
// for a confirmation, because waiting longer would not help.
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
					"%w: %s keeps the %s from before table %d: %s; the largest share of the table is from %s",
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
