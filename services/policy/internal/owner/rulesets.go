// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"time"

	"github.com/sluice-net/sluice/kit/desired/problem"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/ruleset"
)

// WantedNames is the key of the DNS names that tables select, in RuleSets.
const WantedNames policytable.RuleSet = 0

// RuleSets distributes the sets of layer 7 rules by number, and under WantedNames the DNS names that tables select. The
// origin of an event is the policy revision whose sets it includes.
type RuleSets = watch.Hub[policytable.RuleSet, *layer7.Set]

// mergeRevisions is the maximum delay of the bookmark for a policy revision that changes no rule set.
const mergeRevisions = 100 * time.Millisecond

// ruleSets holds the numbers of the sets of layer 7 rules. It belongs to the loop, except for the hub.
type ruleSets struct {
	hub      *RuleSets
	registry *ruleset.Registry
	file     *ruleset.File
	problems *problem.Set
	now      func() time.Time
	revision uint64    // the last one that the hub has reached
	retryAt  time.Time // when to retry a failed write; zero: everything is written
}

// newRuleSets returns the numbers that an earlier run of the same boot has stored in dir.
func newRuleSets(config *Config, dir string, p *problem.Set) (*ruleSets, error) {
	r := &ruleSets{
		hub: watch.NewHub[policytable.RuleSet](watch.Options[*layer7.Set]{
			Loading: true, Quiet: mergeRevisions,
			Equal: func(a, b *layer7.Set) bool { return a.Digest() == b.Digest() },
		}),
		problems: p, now: config.Now,
	}
	r.registry = ruleset.New(ruleset.Config{Shares: config.Tenants.Settings(), Now: config.Now, Store: r.store})
	r.want(nil, false)
	r.registry.Hold(true) // no process is connected yet
	var err error
	if r.file, err = ruleset.OpenFile(dir, r.registry.Restore); err != nil {
		return nil, err
	}
	if r.file.Corrupt != nil {
		r.registry.Block()
		config.Log.Error("the stored numbers of layer 7 rule sets are corrupt; rule sets have no number, and their connections "+
			"are refused, until the datapath has been connected for the time in grace", "err", r.file.Corrupt,
			"grace", ruleset.Grace)
	}
	return r, nil
}

// want sends the name patterns that tables select to the DNS proxies, before the tables are published. If all is set,
// or if the patterns do not fit into a message, it sends a set that matches every name.
func (r *ruleSets) want(patterns []dnsname.Pattern, all bool) {
	set := layer7.Union(policytable.ProxyDNS, all, &layer7.Rules{DNS: patterns})
	if set.TooLarge() {
		set = layer7.Union(policytable.ProxyDNS, true)
	}
	r.hub.Upsert(WantedNames, set)
}

// publish passes the content of changed numbers to proxies. It runs before tables with the numbers are published, so
// that proxies know the sets of all connections. revision is the policy revision whose sets have all been numbered.
// enforced reports whether all processes that enforce tables are connected.
func (r *ruleSets) publish(revision uint64, enforced bool) {
	r.registry.Hold(!enforced)
	for _, c := range r.registry.Changes() {
		if c.Set != nil {
			r.hub.Upsert(c.Number, c.Set)
		} else {
			r.hub.Delete(c.Number)
		}
	}
	if r.revision != revision {
		r.revision = revision
		r.hub.Reach(policyRevisions, int64(revision)) //nolint:gosec // far below the maximum
	}
}

// policyRevisions is the store of the origins of events.
const policyRevisions = 1

// store stores changes of numbers, and earlier changes that could not be stored. Until a change is stored, tables
// have 0 in place of its number, and their redirected connections are refused.
func (r *ruleSets) store(changes []ruleset.Change) error {
	err := r.file.Write(changes)
	r.problems.Note("numbers of rule sets", err)
	r.retryAt = time.Time{}
	if err != nil {
		r.retryAt = r.now().Add(retryStorage)
	}
	return err
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
		r.registry.Retry()
	}
	r.registry.Expire()
	e.Renumber()
}
