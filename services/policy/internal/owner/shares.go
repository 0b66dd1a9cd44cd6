// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kube/tenants"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/record"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// Names of the limits that tenants share.
const (
	LimitPolicies  = "policies"
	LimitManifests = "manifests"
	// LimitIsolations and LimitIsolationBytes bound the policies that exceed a share and
	// isolate one by one, and the bytes that are kept of them.
	LimitIsolations     = "isolations"
	LimitIsolationBytes = "isolationBytes"
)

// isolationPart is the part of MaxManifestBytes that policies may use which exceed a share.
const isolationPart = 8

// maxReduced is how many bytes are kept of the manifest of a policy of an API server that
// exceeds its tenant's share. A longer one is reduced to its selectors, and the source has
// to deliver it again once there is room.
const maxReduced = 4 << 10

// newLedger returns the ledger of policies. All fields of the configuration are set.
func newLedger(c *Config) *shares.Ledger[policy.Key] {
	return shares.NewLedger[policy.Key](c.Tenants.Settings(),
		shares.Limit{Name: LimitPolicies, Size: c.MaxPolicies},
		shares.Limit{Name: LimitManifests, Size: c.MaxManifestBytes})
}

// asks is what a policy needs of the limits.
func (o *Owner) asks(p *Policy) shares.Object {
	units := []int{1, cmp.Or(p.size, len(p.Manifest))}
	if p.Key.Kind == policy.KindNamespaceIsolation { // it stands for policies without a place
		units = []int{0, 0}
	}
	return shares.Object{
		Tenant: o.config.Tenants.Of(p.Key.Namespace),
		Order: shares.Order{
			Created: p.Created, Namespace: p.Key.Namespace, Name: p.Key.Name, UID: cmp.Or(p.UID, p.Key.Kind),
		},
		Local: !p.source().Shared,
		Units: units,
	}
}

// divide gives the policies of a change their places in the ledger, and computes the levels
// anew if the change requests that. A policy without a place isolates what it selects, or the
// call that brought it fails.
func (o *Owner) divide(e *edit, p *plan) error {
	if len(o.policies)+len(o.folded) == 0 && o.listed() && o.ledger.Next().IsZero() {
		o.ledger.Level(o.config.Now()) // of nothing, so that the first call can use a whole share
		o.isolations.Level(o.config.Now())
		o.levels = true
	}
	named := make(map[policy.Key]bool, len(e.puts))
	for _, k := range slices.Concat(e.gone, e.unfolded) {
		p.places = append(p.places, o.placed(k))
		o.ledger.Delete(k)
		o.isolations.Delete(k)
	}
	for _, k := range e.unfolded {
		p.unfold[k] = struct{}{}
	}
	for _, x := range e.puts {
		named[x.Key] = true
		p.places = append(p.places, o.placed(x.Key))
		x.Created = o.created(x, o.policies[x.Key])
		if asks := o.asks(x); o.stays(x.Key, asks) {
			o.ledger.Restore(x.Key, asks, true)
		} else {
			o.ledger.Put(x.Key, asks)
		}
	}
	if next := o.nextLevel(); e.levels && !next.IsZero() && !next.After(o.config.Now()) {
		o.relevel(p, named)
	}
	puts := p.puts[:0]
	for _, x := range p.puts {
		old := o.policies[x.Key]
		switch {
		case o.ledger.Admitted(x.Key):
			o.isolations.Delete(x.Key)
			if x.Broken != "" {
				x.hold(old)
			}
		case e.answers:
			return fmt.Errorf("%w: %s %s", failure.ErrLimit, x.Key, o.exceeds(x.Key))
		default:
			if o.exceed(x, old); !o.isolates(x) {
				p.fold[x.Key] = struct{}{}
				if old != nil {
					p.gone = append(p.gone, x.Key)
				}
				continue
			}
		}
		if _, ok := o.folded[x.Key]; ok {
			p.unfold[x.Key] = struct{}{}
		}
		puts = append(puts, x)
	}
	p.puts = puts
	o.isolateNamespaces(p, e.spaces)
	return nil
}

// relevel computes the levels anew and adds the policies to a plan that gain or lose a place.
// The plan has those that are named already.
func (o *Owner) relevel(p *plan, named map[policy.Key]bool) {
	withdrawn, admitted := o.ledger.Level(o.config.Now())
	folds, unfolds := o.isolations.Level(o.config.Now())
	o.levels = true
	for i, k := range slices.Concat(withdrawn, admitted) {
		if named[k] {
			continue
		}
		before, old := o.placed(k), o.policies[k]
		before.admitted = i < len(withdrawn)
		p.places = append(p.places, before)
		switch {
		case old != nil && before.admitted:
			p.puts = append(p.puts, old.copy())
		case old != nil && old.sum == nil:
			p.puts = append(p.puts, o.decode(old.record()))
		default: // its text was not kept
			o.again[k] = struct{}{}
		}
	}
	for _, k := range folds {
		if o.policies[k] == nil || named[k] || o.ledger.Admitted(k) {
			continue
		}
		before := o.placed(k)
		before.isolation.admitted = true
		p.places, p.gone = append(p.places, before), append(p.gone, k)
		p.fold[k] = struct{}{}
	}
	for _, k := range unfolds {
		if _, ok := o.folded[k]; ok {
			o.again[k] = struct{}{}
		}
	}
	o.deliverAgain()
}

// OnAgain sets what the owner calls to get the objects of a kind from the API server again,
// of which it has not kept the text. f must not block.
func (o *Owner) OnAgain(f func(kind string)) { o.onAgain.Store(&f) }

// deliverAgain requests the kinds of admitted policies of which the text was not kept.
func (o *Owner) deliverAgain() {
	deliver := o.onAgain.Load()
	if deliver == nil {
		return
	}
	kinds := make(map[string]struct{})
	for k := range o.again {
		kinds[k.Kind] = struct{}{}
	}
	for kind := range kinds {
		(*deliver)(kind)
	}
}

// created is when a policy was created: for one of a file or a call, when its first form
// was accepted.
func (o *Owner) created(p, old *Policy) time.Time {
	switch {
	case p.source().Stamped:
		return p.Created
	case old != nil && !old.source().Stamped:
		return old.Created
	}
	return p.Updated.Truncate(time.Second)
}

// stays reports whether a policy keeps the place that it has: it does if it needs no more of
// any limit, or if the levels were not computed yet in this run.
func (o *Owner) stays(k policy.Key, asks shares.Object) bool {
	before, admitted, _ := o.ledger.Object(k)
	if !admitted || !o.levels {
		return admitted
	}
	for i, n := range asks.Units {
		if n > before.Units[i] {
			return false
		}
	}
	return true
}

// exceeds says which limit has no place for a policy.
func (o *Owner) exceeds(k policy.Key) string {
	limit, tenant, _, _ := o.ledger.Refused(k)
	return fmt.Sprintf("exceeds the share of %s of limits.%s (%d)", tenant, limit.Name, limit.Size)
}

// exceed makes a policy isolate what it selects, and what its last admitted form selects.
func (o *Owner) exceed(p, old *Policy) {
	why := o.exceeds(p.Key)
	o.isolate(p, why)
	p.hold(old)
}

// hold also isolates what the last form of a policy selects that was in force as written:
// the new form is not known, or not in force.
func (p *Policy) hold(old *Policy) {
	switch {
	case old == nil || !old.inForce() || old.Source != p.Source:
		return
	case old.object.Group != nil:
		p.heldLabels, p.heldText = old.object.Group.Labels, policy.Reduced(p.Key, old.Manifest, maxReduced)
	case old.Exceeds == "" && old.Broken == "":
		p.held, p.heldText = isolationOf(old.object.Specs), old.Manifest
		if p.source().Redelivers {
			p.heldText = policy.Reduced(p.Key, old.Manifest, maxReduced)
		}
	default:
		p.held, p.heldText = old.held, old.heldText
	}
	p.addHeld()
}

// restoreHeld is hold after a start, from what the journal kept.
func (o *Owner) restoreHeld(p *Policy, text []byte) {
	if len(text) == 0 {
		return
	}
	if p.object.Group != nil {
		form := policy.Written{Key: p.Key, APIVersion: policy.Versions(p.Key.Kind)[0], Text: text}
		if ob, err := policy.DecodeHeld(form, o.config.Rules); err == nil {
			p.heldLabels, p.heldText = ob.Group.Labels, text
		}
	}
	p.held, p.heldText = decode.Options{Rules: o.config.Rules}.Isolated(p.Key, text, errors.New("held")).Specs, text
	p.addHeld()
}

// isolate replaces what a policy does by the isolation of what it selects.
func (o *Owner) isolate(p *Policy, why string) {
	p.Exceeds = why
	if p.source().Redelivers && len(p.Manifest) > maxReduced {
		sum := sha256.Sum256(p.Manifest)
		p.size, p.sum = len(p.Manifest), sum[:]
		p.Manifest = policy.Reduced(p.Key, p.Manifest, maxReduced)
	}
	if p.read.Group != nil {
		p.read = p.read.CloseGroup(errors.New(why))
	} else {
		p.read = decode.Options{Rules: o.config.Rules}.Isolated(p.Key, p.Manifest, errors.New(why))
	}
	p.Dropped, p.Broken = nil, ""
	p.filter(o.filter.Load())
}

// is reports whether the policy has this text.
func (p *Policy) is(text []byte) bool {
	if p.sum == nil {
		return string(p.Manifest) == string(text)
	}
	sum := sha256.Sum256(text)
	return len(text) == p.size && string(p.sum) == string(sum[:])
}

// isolationOf returns rules for the subjects of specs that allow nothing which the specs do
// not allow.
func isolationOf(specs []rule.Spec) []rule.Spec {
	out := make([]rule.Spec, 0, len(specs))
	for i := range specs {
		s := &specs[i]
		closed := rule.Spec{
			Subject: s.Subject, Namespace: s.Namespace, Host: s.Host, Selects: s.Selects, DefaultDeny: s.DefaultDeny,
		}
		for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
			var first *rule.Rule // that may take something away
			for _, r := range s.Rules {
				if r.Direction == d && (r.Action == policytable.Deny || r.Action == policytable.Pass) &&
					(first == nil || cmp.Or(cmp.Compare(r.Tier, first.Tier), cmp.Compare(r.Priority, first.Priority),
						cmp.Compare(r.Index, first.Index)) < 0) {
					first = r
				}
			}
			if first == nil {
				continue
			}
			r := &rule.Rule{
				Source: first.Source, Direction: d, Action: policytable.Deny,
				Tier: first.Tier, Priority: first.Priority, Index: first.Index,
				Peers: rule.Peers{Any: true, ExceptOwn: first.Tier == policytable.Isolation && first.Peers.ExceptOwn}, AllPorts: true,
			}
			r.Source.Path = "isolation"
			closed.Rules = append(closed.Rules, r.Seal())
		}
		out = append(out, closed)
	}
	return out
}

// entry is an entry of a ledger; there is false if the ledger has none.
type entry struct {
	object          shares.Object
	there, admitted bool
}

func entryOf(l *shares.Ledger[policy.Key], k policy.Key) entry {
	object, admitted, ok := l.Object(k)
	return entry{object, ok, admitted}
}

// put gives a policy the entry that it had.
func (e *entry) put(l *shares.Ledger[policy.Key], k policy.Key) {
	if e.there {
		l.Restore(k, e.object, e.admitted)
	} else {
		l.Delete(k)
	}
}

// place is the place of a policy in the ledgers before a change.
type place struct {
	key policy.Key
	entry
	isolation entry
}

// placed returns the place of a policy.
func (o *Owner) placed(k policy.Key) place {
	return place{k, entryOf(o.ledger, k), entryOf(o.isolations, k)}
}

// takeBack gives policies the places that they had before a change that is not made.
func (o *Owner) takeBack(places []place) {
	for _, x := range slices.Backward(places) {
		x.put(o.ledger, x.key)
		x.isolation.put(o.isolations, x.key)
	}
}

// listed reports whether every source of policies, and the list of Namespaces, were
// complete once.
func (o *Owner) listed() bool { return o.listedWith("") }

// listedWith is listed for the time when a source is complete, too.
func (o *Owner) listedWith(source string) bool {
	return o.sources.listed(source) && o.config.Tenants.Complete()
}

// levelAt returns when the levels of the limits are due; the zero time: they are not.
func (o *Owner) levelAt() time.Time {
	if o.leveling || !o.listed() {
		return time.Time{}
	}
	return o.nextLevel()
}

// level divides the limits anew, in a goroutine of its own, and changes the policies that gain or
// lose their place.
func (o *Owner) level(ctx context.Context) {
	_, err := o.revise(ctx, opLevel, func() (edit, error) { return edit{levels: true}, nil }, func(*edit) {})
	if ctx.Err() != nil {
		return
	}
	// The owner answers, or is gone, and then nothing matters.
	o.loop.Do(ctx, opOther, func() { //nolint:errcheck // above
		o.leveling = false
		o.problems.note("shares of limits", err)
		close(o.leveled)
		o.leveled = make(chan struct{})
	})
}

// copy returns a policy that can be changed.
func (p *Policy) copy() *Policy {
	c := *p
	return &c
}

// record is the policy as a journal has it that was in force.
func (p *Policy) record() record.Policy {
	r := policyRecord(p)
	r.Place = record.Place{Created: p.Created.Unix()}
	return r
}

// TenantsChanged says that namespaces may belong to other tenants, or that the list of
// Namespaces is complete. It does not block.
func (o *Owner) TenantsChanged() {
	select {
	case o.tenants <- struct{}{}:
	default:
	}
}

// assign gives each policy to the tenant that its namespace belongs to now.
func (o *Owner) assign() {
	of := func(k policy.Key) shares.Tenant { return o.config.Tenants.Of(k.Namespace) }
	o.ledger.Reassign(of)
	o.isolations.Reassign(of)
	o.engine.TenantsChanged()
}

// Shares returns what the tenants have of each limit.
func (o *Owner) Shares(ctx context.Context) ([]shares.Usage, error) {
	return loop.Ask(ctx, o.loop, opRead, func() ([]shares.Usage, error) {
		return append(append(o.ledger.Usage(), o.isolations.Usage()...), o.splits()...), nil
	})
}

// splits returns what tenants have of the limits of split classes.
func (o *Owner) splits() []shares.Usage {
	classes, _ := o.engine.Splits()
	rows, ok := o.engine.SplitRows()
	if !ok {
		return []shares.Usage{classes}
	}
	return []shares.Usage{classes, rows}
}

// withoutTenants is the set of a node that no API server tells about namespaces.
func withoutTenants() *tenants.Set { return tenants.WithoutKubernetes(shares.Settings{}) }

// says reports whether a policy is what a source delivers, and nothing needs to change for
// it. It notes when the object was created, and its UID, which change no rule.
func (o *Owner) says(p *Policy, d decode.Decoded) bool {
	switch {
	case !p.is(d.Text) || o.closed[p.Key] != nil:
		return false
	case p.sum != nil && o.ledger.Admitted(p.Key): // the source delivers it again
		return false
	case p.Exceeds == "" && p.Broken != d.Object.Isolates:
		return false
	}
	if p.source().Stamped && (!p.Created.Equal(d.Created) || p.UID != d.UID) {
		p.Created, p.UID = d.Created, d.UID
		o.ledger.Restore(p.Key, o.asks(p), o.ledger.Admitted(p.Key))
	}
	return true
}

// closedForm is a policy that could not be stored, as the engine has it meanwhile.
type closedForm struct {
	policy.Object
	of *Policy // that was to be stored; nil: the policy was to be removed
}

// closeChanged isolates what the former and the new forms of changed policies select, and
// notes that the source failed: the change could not be stored, so the new forms cannot be
// in force, and the former ones may allow what the new ones deny. The next change of the
// policies that is stored ends it.
func (o *Owner) closeChanged(ctx context.Context, l *listing, why error) error {
	_, err := loop.Ask(ctx, o.loop, opOther, func() (struct{}, error) {
		o.sources.all[l.source].err = why.Error()
		var c engine.Change
		shut := func(k policy.Key, p *Policy) {
			if before := o.closed[k]; before != nil && (before.of == nil) == (p == nil) && (p == nil || before.of.same(p)) {
				return
			}
			form := &closedForm{Object: policy.Object{Key: k}, of: p}
			add := func(x *policy.Object) {
				form.Specs = append(form.Specs, isolationOf(x.Specs)...)
				if x.Group != nil {
					labels := x.Group.Labels.All()
					if form.Group != nil {
						labels = append(labels, form.Group.Labels.All()...)
					}
					form.Group = &policy.Group{Name: x.Group.Name, Labels: label.NewSet(labels...), Closed: true}
				}
			}
			if old := o.policies[k]; old != nil && old.inForce() {
				add(&old.object)
			}
			if p != nil {
				add(&p.object)
			}
			o.closed[k] = form
			c.UpsertPolicies = append(c.UpsertPolicies, form.Object)
		}
		for _, f := range l.fresh {
			for _, p := range f.policies {
				shut(p.Key, p)
			}
		}
		for _, k := range l.gone {
			shut(k, nil)
		}
		if len(c.UpsertPolicies) == 0 {
			return struct{}{}, nil
		}
		o.barrier.Policy++
		return struct{}{}, o.apply(c)
	})
	return err
}

// StorageFailure returns why the state cannot be stored; empty: it can.
func (o *Owner) StorageFailure(ctx context.Context) (string, error) {
	return loop.Ask(ctx, o.loop, opRead, func() (string, error) {
		return o.storage.failure(), nil
	})
}

// Unenforced are the policies that this node does not enforce as written, with the reasons:
// tables are too large, or a change could not be stored. What all nodes do not enforce, such
// as policies that exceed a share, is not among them.
func (o *Owner) Unenforced(ctx context.Context) (map[policy.Key]string, error) {
	return loop.Ask(ctx, o.loop, opRead, func() (map[policy.Key]string, error) {
		out := make(map[policy.Key]string)
		for k, form := range o.closed {
			if form.of != nil { // else its object is gone
				out[k] = "the node cannot store it: " + cmp.Or(o.storage.failure(), "a write failed")
			}
		}
		for _, r := range o.engine.Reduced() {
			for _, k := range r.Policies {
				if out[k] == "" {
					out[k] = r.String()
				}
			}
		}
		return out, nil
	})
}
