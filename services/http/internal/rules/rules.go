// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rules evaluates HTTP requests and TLS server names by the rule sets of sluice-policy.
//
// A connection carries the number of the rule set of its client's policies. A set that is not known yet allows nothing;
// the caller waits for it for a short time.
package rules

import (
	"context"
	"fmt"
	"sync"

	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
)

// Set evaluates by one rule set. It is immutable.
type Set struct {
	*layer7.Matcher
	// ServerNames is set if the set allows TLS servers by their names, or everything.
	ServerNames bool
}

// Rules holds the sets. It is safe for concurrent use.
type Rules struct {
	mu      sync.RWMutex
	sets    map[uint16]*Set // guarded by mu
	changed chan struct{}   // guarded by mu; closed and replaced when a set is added
}

// New returns rules without sets.
func New() *Rules { return &Rules{sets: make(map[uint16]*Set), changed: make(chan struct{})} }

// Upsert adds or replaces a set. With all, it allows everything; otherwise what one of the rules allows.
func (r *Rules) Upsert(number uint16, all bool, content *layer7.Rules) {
	set := &Set{
		Matcher:     layer7.NewMatcher(layer7.Union(policytable.ProxyHTTP, all, content)),
		ServerNames: all || len(content.ServerNames) > 0,
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sets[number] = set
	close(r.changed)
	r.changed = make(chan struct{})
}

// Delete removes a set.
func (r *Rules) Delete(number uint16) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.sets, number)
}

// Keep removes all sets whose numbers are not in listed, which contains a complete listing.
func (r *Rules) Keep(listed map[uint16]struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for number := range r.sets {
		if _, ok := listed[number]; !ok {
			delete(r.sets, number)
		}
	}
}

// Len returns the number of sets.
func (r *Rules) Len() int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return len(r.sets)
}

// Wait returns a set when it is known. The error wraps the error of ctx.
func (r *Rules) Wait(ctx context.Context, number uint16) (*Set, error) {
	for {
		r.mu.RLock()
		set, changed := r.sets[number], r.changed
		r.mu.RUnlock()
		if set != nil {
			return set, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, fmt.Errorf("rule set %d is not known: %w", number, ctx.Err())
		}
	}
}
