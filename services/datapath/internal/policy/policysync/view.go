// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"slices"
	"sync"

	"github.com/sluice-net/sluice/services/datapath/internal/policy/policyhistory"
)

// summary is what others ask of the applier while it works.
type summary struct {
	mu       sync.Mutex
	revision uint64   // guarded by mu
	refusals []string // guarded by mu
	waiting  int      // guarded by mu
	held     string   // guarded by mu; why an earlier state stays enforced
}

// Of is what evaluates the endpoint in a slot.
func (a *Applier) Of(slot uint16) (policyhistory.Policy, bool) {
	p, ok := a.History.Last(slot)
	if p.Revision != 0 && p.Refusal == "" {
		// what was not changed by later revisions is theirs too
		a.view.mu.Lock()
		defer a.view.mu.Unlock()
		p.Revision = max(p.Revision, a.view.revision)
	}
	return p, ok
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
	st.Connected, st.Err = a.session.State()
	select {
	case <-a.synced:
		st.Synced = true
	default:
	}
	a.view.mu.Lock()
	defer a.view.mu.Unlock()
	st.Revision, st.Refusals, st.Waiting = a.view.revision, slices.Clone(a.view.refusals), a.view.waiting
	st.Held, st.Unsaved = a.view.held, a.past.Unsaved()
	return st
}
