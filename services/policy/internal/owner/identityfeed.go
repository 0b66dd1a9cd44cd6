// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/desired/problem"
	"github.com/sluice-net/sluice/kit/durable"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/labelfilter"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/excludedlabels"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/source"
)

// IdentityFeed receives the identities and the label filter from the identity service. The exported methods may be
// called concurrently; all other methods and fields belong to the loop.
type IdentityFeed struct {
	loop       *loop.Loop
	revising   *loop.Lock // held while policies are compiled for a new filter
	log        *slog.Logger
	dir        string // directory of the state
	identities *identities
	compiler   *compiler
	publisher  *publisher
	storage    *storage
	forms      *forms
	policies   *policySet
	sources    *sources
	problems   *problem.Set
}

// newIdentityFeed returns the feed of an owner whose other fields are set.
func newIdentityFeed(o *Owner, dir string) *IdentityFeed {
	return &IdentityFeed{
		loop: o.loop, revising: o.revising, log: o.config.Log, dir: dir, identities: o.identities, compiler: o.compiler,
		publisher: o.publisher, storage: o.storage, forms: o.forms, policies: o.policies, sources: o.sources,
		problems: o.problems,
	}
}

// SetIdentities applies changes of the identity service.
func (f *IdentityFeed) SetIdentities(ctx context.Context, set []peer.Identity, gone []identity.Numeric) error {
	err := f.loop.Do(ctx, opIdentity, func() {
		f.setIdentities(set, gone)
	})
	return err
}

// setIdentities passes identity changes to the engine, and compiles subjects that waited for their identity.
func (f *IdentityFeed) setIdentities(set []peer.Identity, gone []identity.Numeric) {
	c, rec := f.identities.take(set, gone)
	if len(c.AddIdentities)+len(c.RemoveIdentities) == 0 {
		return
	}
	f.publisher.barrier.Identity += uint64(len(c.AddIdentities) + len(c.RemoveIdentities))
	f.problems.Note("identities", f.compiler.apply(c))
	subjects := make([]identity.Numeric, 0, len(c.AddIdentities))
	for _, id := range c.AddIdentities {
		subjects = append(subjects, id.Number)
	}
	f.compiler.addSubjects(subjects)
	f.storage.save(rec)
}

// TakeIdentities is like SetIdentities, and also records the revision of the identity service that the owner has
// reached; zero means unknown.
func (f *IdentityFeed) TakeIdentities(
	ctx context.Context, set []peer.Identity, gone []identity.Numeric, at peer.Revision,
) error {
	err := f.loop.Do(ctx, opOther, func() {
		f.setIdentities(set, gone)
		f.publisher.barrier.IdentityService = at
	})
	return err
}

// CompleteIdentities reports that identities that are not listed do not exist.
func (f *IdentityFeed) CompleteIdentities(ctx context.Context, listed map[identity.Numeric]struct{}) error {
	for more := true; more; {
		var err error
		if more, err = loop.Ask(ctx, f.loop, opIdentity, func() (bool, error) {
			gone := f.identities.others(listed)
			if len(gone) > identitiesAtOnce {
				f.setIdentities(nil, gone[:identitiesAtOnce])
				return true, nil
			}
			f.setIdentities(nil, gone)
			f.sources.completed(source.Identity)
			return false, nil
		}); err != nil {
			return err
		}
	}
	return nil
}

// SourceFailed records the reason for which the identity service delivers nothing; nil clears the failure.
func (f *IdentityFeed) SourceFailed(ctx context.Context, name string, why error) error {
	return f.loop.Do(ctx, opOther, func() { f.sources.failed(name, why) })
}

// SetLabelFilter stores the filter of the identity service. Policies whose selectors it affects are compiled again.
func (f *IdentityFeed) SetLabelFilter(ctx context.Context, workloads, nodes []labelfilter.Rule) error {
	r := filterRecord{Workloads: workloads, Nodes: nodes}
	filter, err := r.filter()
	if err != nil {
		return err
	}
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	release, err := f.revising.Hold(ctx)
	if err != nil {
		return err
	}
	defer release()
	_, err = loop.Ask(ctx, f.loop, opChange, func() (struct{}, error) {
		path := filepath.Join(f.dir, filterFile)
		if old, err := os.ReadFile(path); err != nil || !bytes.Equal(old, text) {
			f.problems.Note("filter of labels", durable.WriteFile(path, text, 0o600, durable.SyncAll))
		}
		return struct{}{}, f.refilter(&filter)
	})
	return err
}

// refilter compiles the policies that a new filter affects.
func (f *IdentityFeed) refilter(filter *excludedlabels.Filter) error {
	before := f.forms.filter.Load()
	f.forms.filter.Store(filter)
	changed := f.policies.filter(filter)
	if len(changed) == 0 {
		return nil
	}
	if err := f.compiler.apply(engine.Change{UpsertPolicies: changed}); err != nil {
		f.forms.filter.Store(before)
		f.policies.filter(before)
		return err
	}
	f.log.Info("label filter changed, compiling policies again", "policies", len(changed))
	return nil
}
