// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rules evaluates HTTP requests and TLS server names by the rule sets of sluice-policy.
//
// A connection carries the number of the rule set of its client's policies. A set that is not known yet allows nothing;
// the caller waits for it for a short time.
package rules

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
)

// Set evaluates by one rule set. It is immutable.
type Set struct {
	*layer7.Matcher
	// ServerNames is set if the set allows TLS servers by their names, or everything.
	ServerNames bool
}

// Rules holds the sets. It implements rulesets.Rules, and is safe for concurrent use.
type Rules struct {
	mu      sync.RWMutex
	sets    map[uint16]*Set // guarded by mu
	changed chan struct{}   // guarded by mu; closed and replaced when a set is added
}

// New returns rules without sets.
func New() *Rules { return &Rules{sets: make(map[uint16]*Set), changed: make(chan struct{})} }

// Upsert adds or replaces a set. A set that cannot be decoded allows nothing.
func (r *Rules) Upsert(number uint16, m *policyv1.RuleSet) error {
	content, err := decode(m)
	if err != nil {
		err = fmt.Errorf("rule set %d: %w", number, err)
		content = &layer7.Rules{}
	}
	all := m.GetAll() && err == nil
	set := &Set{
		Matcher:     layer7.NewMatcher(layer7.Union(policytable.ProxyHTTP, all, content)),
		ServerNames: all || len(content.ServerNames) > 0,
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sets[number] = set
	close(r.changed)
	r.changed = make(chan struct{})
	return err
}

func decode(m *policyv1.RuleSet) (*layer7.Rules, error) {
	out := &layer7.Rules{}
	for _, name := range m.GetServerNames() {
		p, err := dnsname.Parse(name)
		if err != nil {
			return nil, fmt.Errorf("server name %q: %w", name, err)
		}
		out.ServerNames = append(out.ServerNames, p)
	}
	for _, x := range m.GetHttp() {
		h := layer7.HTTP{Method: x.GetMethod(), Path: x.GetPath(), Host: x.GetHost()}
		for _, y := range x.GetHeaders() {
			h.Headers = append(h.Headers, layer7.Header{Name: y.GetName(), Value: y.GetValue(), HasValue: y.Value != nil})
		}
		for _, y := range x.GetHeaderMatches() {
			action, ok := mismatches[y.GetMismatch()]
			if !ok {
				return nil, fmt.Errorf("unknown action %d for header %s", y.GetMismatch(), y.GetName())
			}
			h.Matches = append(h.Matches, layer7.HeaderMatch{Name: y.GetName(), Value: y.GetValue(), Mismatch: action})
		}
		out.HTTP = append(out.HTTP, h)
	}
	if len(out.HTTP)+len(out.ServerNames) > layer7.MaxEntries {
		return nil, errors.New("too many rules")
	}
	return out, nil
}

var mismatches = map[policyv1.HeaderMismatch]layer7.Mismatch{
	policyv1.HeaderMismatch_HEADER_MISMATCH_UNSPECIFIED: layer7.Refuse,
	policyv1.HeaderMismatch_HEADER_MISMATCH_LOG:         layer7.Log,
	policyv1.HeaderMismatch_HEADER_MISMATCH_ADD:         layer7.Add,
	policyv1.HeaderMismatch_HEADER_MISMATCH_DELETE:      layer7.Delete,
	policyv1.HeaderMismatch_HEADER_MISMATCH_REPLACE:     layer7.Replace,
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

// Want implements rulesets.Rules. It does nothing: no names are learned here.
func (*Rules) Want(*policyv1.WantedNames) error { return nil }

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
