// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"time"

	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kube/tenants"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// OnAgain sets the function that requests the objects of a kind from the API server again, because the owner has not
// kept their text. f must not block.
func (o *Owner) OnAgain(f func(kind string)) { o.onAgain.Store(&f) }

// deliverAgain requests the kinds of admitted policies whose text was not kept from the source.
func (o *Owner) deliverAgain() {
	deliver := o.onAgain.Load()
	if deliver == nil {
		return
	}
	for kind := range o.places.kindsAgain() {
		(*deliver)(kind)
	}
}

// listed reports whether every source of policies and the list of Namespaces were complete once.
func (o *Owner) listed() bool { return o.listedWith("") }

// listedWith is listed, but treats the given source as complete.
func (o *Owner) listedWith(source string) bool {
	return o.sources.listed(source) && o.config.Tenants.Complete()
}

// levelAt returns the time at which the limits must be divided among the tenants again. It returns zero if there is
// no need, if a division is in progress, or if a source or the list of tenants is not complete yet.
func (o *Owner) levelAt() time.Time {
	if o.leveling || !o.listed() {
		return time.Time{}
	}
	return o.places.nextLevel()
}

// level divides the limits in a separate goroutine, and changes the policies that gain or lose their admission.
func (o *Owner) level(ctx context.Context) {
	_, err := o.revise(ctx, opLevel, func() (edit, error) { return edit{levels: true}, nil }, func(*edit) {})
	if ctx.Err() != nil {
		return
	}
	// Do fails only if the owner has ended; its result then does not matter.
	o.loop.Do(ctx, opOther, func() { //nolint:errcheck // above
		o.leveling = false
		o.problems.Note("shares of limits", err)
		close(o.leveled)
		o.leveled = make(chan struct{})
	})
}

// TenantsChanged notifies the owner that namespaces may have moved to other tenants, or that the list of Namespaces is
// complete. It does not block.
func (o *Owner) TenantsChanged() {
	select {
	case o.tenants <- struct{}{}:
	default:
	}
}

// assign updates the tenant of each policy from its namespace.
func (o *Owner) assign() {
	o.places.reassign()
	o.engine.TenantsChanged()
}

// withoutTenants returns the set of tenants for a node without an API server.
func withoutTenants() *tenants.Set { return tenants.WithoutKubernetes(shares.Settings{}) }

// closeChanged is called if a change of policies could not be stored. The new versions then cannot be enforced, and
// the former versions may allow more than the new ones. So closeChanged isolates the pods that either version
// selects, and records that the source failed. The isolation ends when a later change of these policies is stored.
func (o *Owner) closeChanged(ctx context.Context, l *listing, why error) error {
	_, err := loop.Ask(ctx, o.loop, opOther, func() (struct{}, error) {
		o.sources.all[l.source].err = why.Error()
		var c engine.Change
		shut := func(k policy.Key, p *Policy) {
			if form, is := o.policies.close(k, p); is {
				c.UpsertPolicies = append(c.UpsertPolicies, form)
			}
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
		o.publisher.barrier.Policy++
		return struct{}{}, o.compiler.apply(c)
	})
	return err
}
