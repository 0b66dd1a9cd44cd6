// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"errors"
	"maps"
	"time"

	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// canLevel reports whether levels can be computed: every source and the Namespaces were listed once.
func (p *places) canLevel() bool { return p.sources.complete() && p.index.tenants.Complete() }

// due reports whether levels are due.
func (p *places) due(now time.Time) bool {
	if !p.canLevel() || !p.frontends.Due(now) && !p.backends.Due(now) &&
		!p.counting && !p.moved && p.asked == p.perService() &&
		!p.quota.due() {
		return false
	}
	last := p.frontends.Computed()
	return last.IsZero() || !now.Before(last.Add(shares.LevelInterval))
}

// tenantsMoved records that tenants of namespaces may have changed.
func (p *places) tenantsMoved() { p.moved = true }

// levels contains computed levels that are not applied yet.
type levels struct {
	touched   map[service.Name]struct{} // services that change
	frontends *shares.Plan[place]
	backends  *shares.Plan[service.Name]
	counted   *shares.Parts[place] // frontends counted in the other unit; nil: in the same
}

// planLevels computes the levels.
func (p *places) planLevels(now time.Time) *levels {
	l := &levels{touched: make(map[service.Name]struct{})}
	if p.moved {
		p.frontends.Reassign(func(x place) shares.Tenant { return p.index.tenant(x.of) })
		p.backends.Reassign(p.index.tenant)
		p.quota.reassign()
		p.moved = false
	}
	bound := make(map[service.Name]struct{})
	if p.asked != p.perService() {
		p.askAgain(bound)
	}
	frontends := p.frontends
	if p.counting {
		node := p.index.node
		node.CountElements = !p.elements
		l.counted = shares.NewParts[place](p.settings, p.frontends.Limit())
		frontends = l.counted
		for j := range p.index.all() {
			if j.object != nil && node.Needs(j.object.service).All > 0 {
				p.askFrontends(l.counted, &node, j)
			}
		}
	}
	l.frontends, l.backends = frontends.Plan(now), p.backends.Plan(now)
	for x := range l.frontends.Changed {
		l.touched[x.of] = struct{}{}
	}
	if l.counted != nil {
		clear(l.touched)
		for j := range p.index.all() {
			exceeds := j.share != nil
			for _, x := range []place{{j.name, true}, {j.name, false}} {
				_, _, asked, got := l.counted.Of(x)
				if n, ok := l.frontends.Changed[x]; ok {
					got = n
				}
				exceeds = exceeds || got < asked
			}
			if exceeds {
				l.touched[j.name] = struct{}{}
			}
		}
	}
	maps.Copy(l.touched, bound)
	for name := range l.backends.Changed {
		if x := p.index.object(service.ObjectKey{Kind: service.KindSlice, Name: name}); x != nil {
			l.touched[x.of()] = struct{}{}
		}
	}
	return l
}

// enforce applies the computed levels. The caller then updates the shares of the services in l.touched.
func (p *places) enforce(l *levels) {
	if l.counted != nil {
		p.frontends, p.elements, p.counting = l.counted, !p.elements, false
		p.index.countElements(p.elements)
	}
	p.frontends.Enforce(l.frontends)
	p.backends.Enforce(l.backends)
	p.resize() // another subscriber may have connected since the levels were computed
}

// askAgain requests backends again for the services with more backends than the former or the new maximum per
// service. It adds these services to touched.
func (p *places) askAgain(touched map[service.Name]struct{}) {
	least := min(p.asked, p.perService())
	p.asked = p.perService()
	for j := range p.index.all() {
		if j.object == nil || !j.object.service.HasFrontends() || len(j.slices) == 0 {
			continue
		}
		ports, all := compile.PortsOf(j.object.service), 0
		for _, x := range j.slices {
			all += ports.Count(x.slice)
		}
		if all > least {
			p.askBackends(j)
			touched[j.name] = struct{}{}
		}
	}
}

// wakeLevels wakes runLevels if levels are due.
func (o *Owner) wakeLevels(now time.Time) {
	if !o.places.due(now) {
		return
	}
	select {
	case o.level <- struct{}{}:
	default:
	}
}

// runLevels computes the levels when they are due, until ctx is done.
func (o *Owner) runLevels(ctx context.Context) {
	for {
		select {
		case <-o.level:
		case <-ctx.Done():
			return
		}
		err := o.computeLevels(ctx)
		if err != nil && ctx.Err() == nil {
			o.config.Log.Warn("cannot apply the new shares of tenants; retrying", "error", err)
		}
	}
}

// computeLevels computes the levels and applies them to the frontends.
func (o *Owner) computeLevels(ctx context.Context) error {
	undo := func() {}
	_, err := o.revise(ctx, func() (*edit, error) {
		e := &edit{}
		if !o.places.canLevel() {
			return e, nil
		}
		end, now := o.loop.Part(opLevel), o.config.Now()
		l := o.places.planLevels(now)
		undo = o.quota.level(e, now)
		end()
		if len(l.touched) == 0 && l.counted == nil {
			o.places.enforce(l)
		} else {
			e.levels = l
		}
		return e, nil
	}, func(*edit) {})
	if err != nil {
		err = errors.Join(err, o.loop.Do(context.WithoutCancel(ctx), opOther, func() { undo() }))
	}
	return err
}

// TenantsChanged reports that tenants of namespaces may have changed, or that all Namespaces are
// listed now.
func (o *Owner) TenantsChanged(ctx context.Context) error {
	return o.loop.Do(ctx, opOther, func() {
		o.places.tenantsMoved()
		o.wakeLevels(o.config.Now())
	})
}
