// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rules evaluates DNS queries by the rule sets of sluice-policy.
//
// A connection carries the numbers of up to two rule sets: one from the policies of the client, and one from the
// policies of the server. Both must allow a query. A rule set that is not known yet allows nothing; the caller waits
// for it for a short time.
package rules

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/sluice-net/sluice/model/dnsname"
)

// Tag contains the numbers of the rule sets of a connection. 0 means that the policies of this side do not restrict
// names.
type Tag struct{ Egress, Ingress uint16 }

// Content lists the queries that a set allows.
type Content struct {
	// All is set if every query is allowed.
	All bool
	// Names are names and patterns, as in matchPattern.
	Names []string
}

// set is a compiled Content.
type set struct {
	Content
	names *dnsname.Set
}

func (s *set) allows(name string) bool { return s.All || s.names.Every() || s.names.Matches(name) }

// Verdict is the result for a query.
type Verdict uint8

// The verdicts.
const (
	Allowed Verdict = iota + 1
	Refused         // refused by a set
	Unknown         // a set is unknown
)

// Decision is a verdict and its reason.
type Decision struct {
	Verdict Verdict
	Set     uint16 // the set that refuses, or is unknown
}

// Rules holds the sets. It is safe for concurrent use.
type Rules struct {
	mu      sync.RWMutex
	sets    map[uint16]*set // guarded by mu
	wanted  *dnsname.Set    // guarded by mu; nil: every name
	changed chan struct{}   // guarded by mu; closed and replaced when a set is added
}

// New returns rules without sets.
func New() *Rules { return &Rules{sets: make(map[uint16]*set), changed: make(chan struct{})} }

// Upsert adds or replaces a set. If a pattern of the set cannot be parsed, the whole set allows nothing.
func (r *Rules) Upsert(number uint16, c Content) error {
	if number == 0 {
		return fmt.Errorf("rule set 0: the number means that there is no set")
	}
	names, err := compile(c.Names)
	if err != nil {
		r.Delete(number)
		return fmt.Errorf("rule set %d: %w", number, err)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sets[number] = &set{Content{c.All, slices.Clone(c.Names)}, names}
	close(r.changed)
	r.changed = make(chan struct{})
	return nil
}

func compile(texts []string) (*dnsname.Set, error) {
	all := make([]dnsname.Pattern, 0, len(texts))
	for _, text := range texts {
		p, err := dnsname.Parse(text)
		if err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	return dnsname.NewSet(all), nil
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

// Want sets the patterns by which policies select names. Addresses of other names need not be learned. nil means that
// the patterns are unknown, so that every name may be selected.
func (r *Rules) Want(patterns []string) error {
	var wanted *dnsname.Set
	if patterns != nil {
		var err error
		if wanted, err = compile(patterns); err != nil {
			return fmt.Errorf("patterns of names: %w", err)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wanted = wanted
	return nil
}

// Wants reports whether a policy may select a name.
func (r *Rules) Wants(name string) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return r.wanted == nil || r.wanted.Matches(name)
}

// Len returns the number of sets.
func (r *Rules) Len() int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return len(r.sets)
}

// Decide evaluates a query for a name. The name must be in lower case and have a final dot.
func (r *Rules) Decide(tag Tag, name string) Decision {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, number := range [2]uint16{tag.Egress, tag.Ingress} {
		if number == 0 {
			continue
		}
		switch s := r.sets[number]; {
		case s == nil:
			return Decision{Unknown, number}
		case !s.allows(name):
			return Decision{Refused, number}
		}
	}
	return Decision{Verdict: Allowed}
}

// AllowEvery reports whether the sets of a connection are known and allow every query. The datapath lets packets of
// such a connection pass while this process does not run.
func (r *Rules) AllowEvery(tag Tag) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, number := range [2]uint16{tag.Egress, tag.Ingress} {
		if number == 0 {
			continue
		}
		if s := r.sets[number]; s == nil || !s.All && !s.names.Every() {
			return false
		}
	}
	return tag != Tag{}
}

// Wait waits until the sets of a connection are known, or ctx ends. It reports whether they are known.
func (r *Rules) Wait(ctx context.Context, tag Tag) bool {
	for {
		r.mu.RLock()
		known := r.knows(tag.Egress) && r.knows(tag.Ingress)
		changed := r.changed
		r.mu.RUnlock()
		if known {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

func (r *Rules) knows(number uint16) bool { return number == 0 || r.sets[number] != nil }

// Matching returns the numbers of the sets that allow a name and of the sets that do not, in ascending order.
func (r *Rules) Matching(name string) (allow, refuse []uint16) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for number, s := range r.sets {
		if s.allows(name) {
			allow = append(allow, number)
		} else {
			refuse = append(refuse, number)
		}
	}
	slices.Sort(allow)
	slices.Sort(refuse)
	return allow, refuse
}

// Refusal is the answer to refused queries.
type Refusal struct {
	mode    string
	domains map[string]bool // search domains, each with its final dot
}

// The modes of a Refusal.
const (
	Auto        = "auto"     // NXDOMAIN below search domains, and REFUSED elsewhere
	AsMissing   = "nxdomain" // always NXDOMAIN
	AsForbidden = "refused"  // always REFUSED
)

// NewRefusal returns the answer of a mode. At REFUSED, resolvers do not try the rest of their search domains.
// Therefore, in mode Auto, refused names below these domains are answered with NXDOMAIN.
func NewRefusal(mode string, searchDomains []string) (Refusal, error) {
	r := Refusal{mode: mode, domains: make(map[string]bool)}
	if mode != Auto && mode != AsMissing && mode != AsForbidden {
		return r, fmt.Errorf("%q is not %s, %s or %s", mode, Auto, AsMissing, AsForbidden)
	}
	for _, d := range searchDomains {
		if _, err := dnsname.Name(d); err != nil {
			return r, err
		}
		if d = dnsname.Canonical(d); d == "." || strings.Contains(d, "..") || d[0] == '.' {
			return r, fmt.Errorf("%q is not a domain", d)
		}
		r.domains[d] = true
	}
	return r, nil
}

// Missing reports whether a refused name is answered with NXDOMAIN, and in which zone.
func (r Refusal) Missing(name string) (zone string, missing bool) {
	if r.mode == AsForbidden {
		return "", false
	}
	for i := range len(name) {
		// Look for the longest domain first.
		if name[i] == '.' && r.domains[name[i+1:]] {
			return name[i+1:], true
		}
	}
	return ".", r.mode == AsMissing
}
