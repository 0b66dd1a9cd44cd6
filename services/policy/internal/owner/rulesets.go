// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"time"

	"github.com/sluice-net/sluice/kit/desired/problem"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/ruleset"
)

// ruleSets holds the numbers of the sets of layer 7 rules. It belongs to the loop.
type ruleSets struct {
	registry *ruleset.Registry
	file     *ruleset.File
	problems *problem.Set
	now      func() time.Time
	retryAt  time.Time // when to write again what could not be written; zero: everything is written
}

// newRuleSets returns the numbers that an earlier run of the same boot has stored in dir.
func newRuleSets(config *Config, dir string, p *problem.Set) (*ruleSets, error) {
	r := &ruleSets{
		registry: ruleset.New(ruleset.Config{Shares: config.Tenants.Settings(), Now: config.Now}),
		problems: p, now: config.Now,
	}
	var err error
	r.file, err = ruleset.OpenFile(dir, r.registry.Restore)
	return r, err
}

// publish stores the numbers that have changed. It runs before tables with the numbers are published, so that another
// process never gives a number that a connection carries to another set.
func (r *ruleSets) publish() {
	if !r.registry.Pending() {
		return
	}
	r.write(r.registry.Changes())
}

func (r *ruleSets) write(changes []ruleset.Change) {
	err := r.file.Write(changes)
	r.problems.Note("numbers of rule sets", err)
	r.retryAt = time.Time{}
	if err != nil {
		r.retryAt = r.now().Add(retryStorage)
	}
}

// next returns when sweep is due; zero: never, unless something changes.
func (r *ruleSets) next() time.Time {
	at := r.registry.Next()
	if !r.retryAt.IsZero() && (at.IsZero() || r.retryAt.Before(at)) {
		return r.retryAt
	}
	return at
}

// sweep frees unused numbers, gives free numbers to sets without one, and repeats a failed write.
func (r *ruleSets) sweep(now time.Time, e *engine.Engine) {
	if !r.retryAt.IsZero() && !r.retryAt.After(now) {
		r.write(nil)
	}
	r.registry.Expire()
	e.Renumber()
}
