// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/failure"
	"github.com/sluice-net/sluice/services/policy/internal/journal"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/reading"
)

// Policy is a policy in force, or one of an earlier run that is not understood
// any more.
type Policy struct {
	Key      policy.Key
	Source   string
	Origin   string
	Manager  string // that brought it, of SourceGRPC
	Manifest []byte
	Revision uint64
	Updated  time.Time
	Rules    int
	Dropped  []string
	Notes    manifest.Notes
	// Broken is why the policy is not in force as it was written. What it selects
	// is isolated, unless that is not known.
	Broken string

	object policy.Object
	named  bool // by its manager in this run
}

// inForce reports whether the engine has the policy, as written or isolating.
func (p *Policy) inForce() bool { return p.object.Key.Kind != "" }

// ChangeType is what was done to a policy.
type ChangeType int

// The types.
const (
	Created ChangeType = iota + 1
	Replaced
	Unchanged
	Deleted
	Absent
)

// Changed is what became of one policy.
type Changed struct {
	Key     policy.Key
	Type    ChangeType
	Dropped []string
	Notes   manifest.Notes
}

// Outcome is the answer of a change.
type Outcome struct {
	Revision uint64
	Changes  []Changed
}

func (o *Owner) policy(d reading.Decoded, source, origin string) *Policy {
	p := &Policy{
		Key: d.Object.Key, Source: source, Origin: origin, Manifest: d.Text, Updated: o.config.Now(),
		Dropped: d.Object.Unknown, Notes: d.Object.Notes, Broken: d.Object.Isolates, object: d.Object,
	}
	for i := range d.Object.Specs {
		p.Rules += len(d.Object.Specs[i].Rules)
	}
	return p
}

// plan looks whether there is room for a change.
func (o *Owner) plan(puts []*Policy, gone []policy.Key) (plan, error) {
	out := plan{puts: puts, gone: gone, change: engine.Change{DeletePolicies: gone}, bytes: o.bytes, content: len(gone) > 0}
	count := len(o.policies)
	for _, p := range puts {
		old := o.policies[p.Key]
		out.bytes += len(p.Manifest)
		if old != nil {
			out.bytes -= len(old.Manifest)
		} else {
			count++
		}
		p.Revision = o.barrier.Policy + 1
		if old != nil && old.inForce() && old.Broken == p.Broken && bytes.Equal(old.Manifest, p.Manifest) {
			p.Revision, p.Updated = old.Revision, old.Updated // only its origin is another
			continue
		}
		out.content = true
		out.change.UpsertPolicies = append(out.change.UpsertPolicies, p.object)
		if old == nil || !old.inForce() {
			out.back.DeletePolicies = append(out.back.DeletePolicies, p.Key)
		} else {
			out.back.UpsertPolicies = append(out.back.UpsertPolicies, old.object)
		}
	}
	for _, k := range gone {
		old := o.policies[k]
		out.bytes -= len(old.Manifest)
		count--
		if old.inForce() {
			out.back.UpsertPolicies = append(out.back.UpsertPolicies, old.object)
		}
	}
	switch {
	case len(puts) > 0 && count > o.config.MaxPolicies:
		return plan{}, fmt.Errorf("%w: there would be %d policies, the limit is %d",
			failure.ErrLimit, count, o.config.MaxPolicies)
	case len(puts) > 0 && out.bytes > o.config.MaxManifestBytes:
		return plan{}, fmt.Errorf("%w: there would be %d bytes of manifests, the limit is %d",
			failure.ErrLimit, out.bytes, o.config.MaxManifestBytes)
	}
	return out, nil
}

// change replaces and deletes policies, all of it or nothing. The records are
// staged.
func (o *Owner) change(p plan, staged *journal.Staged) error {
	puts, gone := p.puts, p.gone
	if len(puts) == 0 && len(gone) == 0 {
		return nil
	}
	err := beforeCompile.Hit(o.ctx)
	if err == nil {
		err = o.apply(p.change)
	}
	if err != nil {
		return err
	}
	replaced := make([]*Policy, len(puts))
	for i, p := range puts {
		replaced[i] = o.policies[p.Key]
		o.policies[p.Key] = p
	}
	removed := make([]*Policy, len(gone))
	for i, k := range gone {
		removed[i] = o.policies[k]
		delete(o.policies, k)
	}
	before := o.bytes
	o.bytes = p.bytes
	if p.content {
		o.barrier.Policy++
	}
	if err = beforeJournal.Hit(o.ctx); err == nil {
		err = o.commit(staged)
	}
	if err != nil {
		// Nobody has seen the steps yet, and both ways together change nothing.
		for i, p := range puts {
			if replaced[i] == nil {
				delete(o.policies, p.Key)
			} else {
				o.policies[p.Key] = replaced[i]
			}
		}
		for i, k := range gone {
			o.policies[k] = removed[i]
		}
		o.bytes = before
		if p.content {
			o.barrier.Policy--
		}
		if berr := o.apply(p.back); berr != nil {
			o.fatal = fmt.Errorf("put back what storage did not take: %w", berr)
		}
		return err
	}
	o.retryCrowded()
	return beforeAnswer.Hit(o.ctx)
}

// retryCrowded tries again to give tables to subjects that had no room.
func (o *Owner) retryCrowded() {
	if len(o.overLimit) == 0 {
		return
	}
	o.addSubjects(slices.Sorted(maps.Keys(o.overLimit)))
}
