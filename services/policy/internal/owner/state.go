// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"errors"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/names"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/record"
)

func policyRecord(p *Policy) record.Policy {
	r := record.Policy{
		Key: record.Key(p.Key), Source: p.Source, Origin: p.Origin, Manager: p.Manager, Manifest: p.Manifest, Revision: p.Revision, Updated: p.Updated.Unix(),
		Place: record.Place{
			Exceeds: p.Exceeds, Size: p.size, Sum: p.sum, Held: p.heldText,
		},
	}
	if p.source().Calls {
		r.Place.Known, r.Place.Dropped = p.known, p.allowed
	}
	// The object of a stamped source contains the time.
	if at := p.Created.Unix(); !p.source().Stamped && at != r.Updated {
		r.Place.Created = at
	}
	return r
}

// restore loads and compiles the state. cached is true if the state comes from the same boot. It then also contains
// identities, subscribers and learned names, which are needed to compile tables.
func (o *Owner) restore(dir string, table *names.Table) (cached bool, err error) {
	policies := make(map[policy.Key]record.Policy)
	subscribers := make(map[string]record.Subscriber)
	learned := make(map[dnsname.Learned]record.Name)
	var texts peer.Interner
	j, revision, cached, err := record.Open(dir, record.Contents{
		Name:   o.publisher.takeState,
		Policy: func(p record.Policy) error { policies[policy.Key(p.Key)] = p; return nil },
		Identity: func(r record.Identity) error {
			id, err := r.Peer(&texts)
			if err == nil {
				o.identities.all[id.Number] = id
			}
			return err
		},
		Subscriber: func(s record.Subscriber) error { subscribers[s.Name] = s; return nil },
		DNSName:    func(r record.Name) error { learned[r.Key()] = r; return nil },
	})
	if err != nil {
		return false, err
	}
	o.storage = newStorage(j, o.problems, o.config.Now)
	o.publisher.barrier.Policy = revision
	if name := o.publisher.nameState(); name != "" {
		if err := j.Commit(o.ctx, record.Change{State: record.StateName(name)}); err != nil {
			return false, errors.Join(err, j.Close())
		}
	}
	if err := o.compile(policies, subscribers, learned, table); err != nil {
		return false, errors.Join(err, j.Close())
	}
	o.markFields(policies)
	return cached, nil
}

// markFields stores for each policy that came from a call which of its fields this version does not know, if this
// differs from the stored record. An earlier version can then tell these fields from fields that only this version
// knows.
func (o *Owner) markFields(stored map[policy.Key]record.Policy) {
	var change record.Change
	for k, r := range stored {
		p := o.policies.all[k]
		if !p.source().Calls || p.known == r.Place.Known && slices.Equal(p.allowed, r.Place.Dropped) {
			continue
		}
		r.Place.Known, r.Place.Dropped = p.known, p.allowed
		change.Puts = append(change.Puts, r)
	}
	if len(change.Puts) > 0 {
		o.storage.stored(o.storage.journal.Commit(o.ctx, change))
	}
}

func (o *Owner) compile(
	policies map[policy.Key]record.Policy, subscribers map[string]record.Subscriber,
	learned map[dnsname.Learned]record.Name,
	table *names.Table,
) error {
	var change engine.Change
	for _, p := range o.forms.decodeAll(policies) {
		o.policies.put(p)
		o.places.restore(p)
		if p.inForce() {
			change.UpsertPolicies = append(change.UpsertPolicies, *p.object)
		}
		if p.Broken != "" {
			o.config.Log.Error("cannot decode a stored policy; the pods that it selects are isolated, if they are known",
				"policy", p.Key.String(), log.KeyError, p.Broken)
		}
	}
	for _, id := range o.identities.all {
		change.AddIdentities = append(change.AddIdentities, o.identities.complete(id))
	}
	for _, r := range learned {
		name, wake, err := table.Restore(r, o.config.Now())
		if err != nil {
			return err
		}
		o.alarm.set(wake)
		change.Learn = append(change.Learn, name)
	}
	var subjects []identity.Numeric
	for _, r := range subscribers {
		s, err := o.interests.restore(r)
		if err != nil {
			return err
		}
		if s == nil {
			continue
		}
		subjects = slices.AppendSeq(subjects, maps.Keys(s.subjects))
		for addr, x := range s.locations {
			change.Locate = append(change.Locate, engine.Location{Addr: addr, Identity: x})
		}
		o.alarm.set(s.until)
	}
	// Without subjects no table is compiled, so no table can exceed a limit.
	if err := o.compiler.apply(change); err != nil {
		return err
	}
	slices.Sort(subjects)
	o.compiler.addSubjects(slices.Compact(subjects))
	return nil
}
