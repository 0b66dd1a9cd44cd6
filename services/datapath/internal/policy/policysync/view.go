// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policysync

import (
	"slices"
	"sync"

	"github.com/sluice-net/sluice/services/datapath/internal/policy/policyhistory"
)

// summary is the part of the state that can be read while the applier works.
type summary struct {
	mu       sync.Mutex
	revision uint64   // guarded by mu
	refusals []string // guarded by mu
	waiting  int      // guarded by mu
	held     string   // guarded by mu; why an earlier state stays enforced
}

// Of returns the policy of an endpoint.
func (a *Applier) Of(slot uint16) (policyhistory.Policy, bool) {
	p, ok := a.History.Last(slot)
	if p.Revision != 0 && p.Refusal == "" {
		// If later revisions did not change the policy of the endpoint, they are enforced for it, too.
		a.view.mu.Lock()
		defer a.view.mu.Unlock()
		p.Revision = max(p.Revision, a.view.revision)
	}
	return p, ok
}

// Status is a summary of the applier's state.
type Status struct {
	// Revision that is enforced for every endpoint.
	Revision uint64
	// Refusals describes what exceeds the capacity, one line per subject.
	Refusals []string
	// Waiting is the number of identities kept unknown because the kernel has no capacity for them.
	Waiting int
	// Connected reports whether a subscription is open, and Err why not.
	Connected bool
	// Held is the reason why the kernel keeps enforcing an earlier state than the service's; empty if it does not.
	Held string
	// Unsaved is the reason why the enforced revision is not on stable storage; empty if it is.
	Unsaved string
	Err     error
	// Synced reports whether the service has sent a complete state at least once.
	Synced bool
}

// Status returns the summary.
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
