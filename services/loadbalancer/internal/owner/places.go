// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/kit/desired/managed"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/source"
)

// Names of the limits that tenants share.
const (
	LimitFrontends = "frontends"
	LimitBackends  = "backends"
	LimitServices  = "services"
	LimitSlices    = "endpointSlices"
)

// ExceedsShare is the reason for requests beyond a tenant's share.
const ExceedsShare = "ExceedsShare"

// waiting is an object that waits for space in its share.
type waiting struct {
	manifest.Object
	source  string
	created int64 // when it was first given, if its author does not set a creation time
}

// place is a request of a service for units of the limit of frontends. A service requests the units
// of its addresses separately: all addresses of a tenant come before any other frontend, because
// packets to an address without an element leave the node.
type place struct {
	of        service.Name
	addresses bool
}

// places divides the frontends and backends that the kernel can hold among tenants.
type places struct {
	index    *index
	limits   Limits
	settings shares.Settings

	frontends *shares.Parts[place]
	backends  *shares.Parts[service.Name] // by slice
	elements  bool                        // frontends counts elements of maps

	// objects divides limits.services and limits.endpointSlices. Objects of the API server that are
	// not admitted wait.
	objects  *shares.Ledger[service.ObjectKey]
	waiting  map[service.ObjectKey]waiting
	levelled bool // the levels of objects were computed once

	reported map[string]frontend.Capacity // by subscriber
	moved    bool                         // tenants of namespaces may have changed
	counting bool                         // elements has to change
	asked    int                          // the value of perService used in requests for backends
}

func newPlaces(o *Owner) *places {
	p := &places{
		index: o.index, limits: o.config.Limits, settings: o.config.Shares,
		reported: make(map[string]frontend.Capacity),
	}
	p.frontends = shares.NewParts[place](p.settings, shares.Limit{Name: LimitFrontends, Size: p.limits.Frontends})
	p.backends = shares.NewParts[service.Name](p.settings, shares.Limit{Name: LimitBackends, Size: p.limits.Backends})
	p.asked = p.perService()
	p.objects = shares.NewLedger[service.ObjectKey](p.settings, shares.Limit{Name: LimitServices, Size: p.limits.Services},
		shares.Limit{Name: LimitSlices, Size: p.limits.Slices})
	p.waiting = make(map[service.ObjectKey]waiting)
	return p
}

// connected records the capacity of a subscriber. A subscriber that reports none can hold what the
// configuration allows.
func (p *places) connected(s Subscription) {
	if !s.Enforces || s.Capacity == nil {
		p.forget(s.Name)
		return
	}
	p.reported[s.Name] = *s.Capacity
	p.resize()
}

// forget removes the capacity of a subscriber.
func (p *places) forget(name string) {
	if _, ok := p.reported[name]; ok {
		delete(p.reported, name)
		p.resize()
	}
}

// resize sets the limits to the smallest capacity of the configuration and the subscribers. The
// next levels divide them.
func (p *places) resize() {
	f, b := p.limits.Frontends, p.limits.Backends
	for _, c := range p.reported {
		f = min(f, c.Frontends)
		// Each backend is in up to two lists of a service's port: the list of all backends,
		// and the list of the node's own backends.
		b = min(b, c.Backends, c.Members/2)
	}
	p.frontends.Resize(f)
	p.backends.Resize(b)
	p.counting = p.elements != (len(p.reported) > 0)
}

// perService is the largest number of backends of one service.
func (p *places) perService() int {
	n := p.limits.BackendsPerService
	for _, c := range p.reported {
		n = min(n, c.BackendsPerList)
	}
	return n
}

func orderOf(x *object, n service.Name) shares.Order {
	return shares.Order{Created: time.Unix(0, x.created), Namespace: n.Namespace, Name: n.Name}
}

func (p *places) part(x *object, n service.Name, units, reserved int) shares.Part {
	return shares.Part{
		Tenant: p.index.tenant(n), Order: orderOf(x, n), Local: !source.Of(x.by.Source).Shared,
		Units: units, Reserved: reserved,
	}
}

// counted returns the object's entry in the limits of services and slices.
func (p *places) counted(x *object, created int64) shares.Object {
	k := x.key()
	o := shares.Object{
		Tenant: p.index.tenant(k.Name), Local: !source.Of(x.by.Source).Shared, Units: []int{1, 0},
		Order: shares.Order{Created: time.Unix(0, created), Namespace: k.Namespace, Name: k.Name.Name},
	}
	if x.slice != nil {
		o.Units = []int{0, 1}
	}
	return o
}

// count admits a new object of a source whose objects wait, or returns why it has to wait.
func (p *places) count(m *manifest.Object, x *object, now time.Time) (why string) {
	k := x.key()
	created := cmp.Or(x.createdByAuthor(), p.waiting[k].created, now.UnixNano())
	p.waiting[k] = waiting{*m, x.by.Source, created} // until it is applied
	if p.objects.Put(k, p.counted(x, created)) {
		return ""
	}
	return p.whyWaiting(k)
}

func (p *places) whyWaiting(k service.ObjectKey) string {
	limit, tenant, share, _ := p.objects.Refused(k)
	return fmt.Sprintf("%s: %s asks for %d of %d (limits.%s) and has %d", ExceedsShare, tenant, share.Asked, limit.Size,
		limit.Name, share.Admitted)
}

// uncount removes an object from the counts.
func (p *places) uncount(k service.ObjectKey) {
	p.objects.Delete(k)
	delete(p.waiting, k)
}

// tryCount checks that objects of a file or a call are within the share of their tenant.
func (o *Owner) tryCount(e *edit) error {
	p := o.places
	var tried []service.ObjectKey
	for _, k := range e.gone {
		p.objects.Delete(k)
	}
	defer func() {
		for _, k := range tried {
			p.objects.Delete(k)
		}
		for _, k := range e.gone {
			x := o.index.object(k)
			p.objects.Restore(k, p.counted(x, x.created), true)
		}
	}()
	for _, x := range e.puts {
		k := x.key()
		if o.index.object(k) != nil || p.objects.Admitted(k) {
			continue
		}
		tried = append(tried, k)
		if !p.objects.Put(k, p.counted(x, x.created)) {
			return fmt.Errorf("%w: %s: %s", failure.ErrLimit, k, p.whyWaiting(k))
		}
	}
	return nil
}

// levelObjects computes the levels of services and slices, and adds the objects that lose or get
// space to an edit. undo reverts the levels.
func (o *Owner) levelObjects(e *edit, now time.Time) (undo func()) {
	p := o.places
	if p.levelled && len(p.waiting) == 0 {
		return func() {} // everything fits
	}
	p.levelled = true
	withdrawn, admitted := p.objects.Level(now)
	var changed []func()
	for _, k := range withdrawn {
		x := o.index.object(k)
		if x == nil || !source.Of(x.by.Source).Waits {
			continue
		}
		if x.refuses() {
			continue
		}
		if x.slice != nil {
			e.gone = append(e.gone, k)
		} else {
			e.puts = append(e.puts, x.refusing())
		}
		m := manifest.Object{Key: k, Service: x.service, Slice: x.slice, Notes: x.remarks.get().notes}
		e.waits = append(e.waits, waiting{m, x.by.Source, x.created})
		counted := p.counted(x, x.created)
		changed = append(changed, func() { p.objects.Restore(k, counted, true) })
	}
	for _, k := range admitted {
		m, ok := p.waiting[k]
		if !ok {
			continue
		}
		x := newObject(&m.Object, &managed.By{Source: m.source})
		if other := o.index.object(k); other != nil && (!other.refuses() || other.by.Source != m.source) {
			continue // another source has it by now
		}
		e.puts = append(e.puts, x)
		counted := p.counted(x, m.created)
		changed = append(changed, func() { p.objects.Restore(k, counted, false) })
	}
	slices.SortFunc(e.gone, service.ObjectKey.Compare)
	slices.SortFunc(e.puts, func(a, b *object) int { return a.key().Compare(b.key()) })
	return func() {
		for _, f := range changed {
			f()
		}
	}
}

// recount updates the counts after an edit was applied.
func (o *Owner) recount(e *edit) {
	p := o.places
	for _, k := range e.gone {
		p.uncount(k)
	}
	for _, m := range e.waits {
		x := newObject(&m.Object, &managed.By{Source: m.source})
		p.objects.Restore(m.Key, p.counted(x, m.created), false)
		p.waiting[m.Key] = m
		o.sources.refuse(Refused{Key: m.Key, Source: m.source, Origin: m.Key.String(), Err: p.whyWaiting(m.Key)})
	}
	for _, x := range e.puts {
		k := x.key()
		if x.refuses() {
			continue // it waits
		}
		p.objects.Restore(k, p.counted(x, x.created), true)
		if m, waited := p.waiting[k]; waited {
			delete(p.waiting, k)
			o.sources.accept(m.source, k.String())
		}
	}
}

// shared holds how many frontends and backends of a service fit within the share of its tenant; slices omits
// EndpointSlices that get all of their backends.
type shared struct {
	share  *int // of joined
	slices map[*object]int
}

// ask requests space for a service and its slices.
func (p *places) ask(n *compile.Node, j *joined) shared {
	var out shared
	if j.object == nil || !j.object.service.HasFrontends() {
		p.deleteFrontends(j.name)
		for _, x := range j.slices {
			p.backends.Delete(x.slice.Name)
		}
		return out
	}
	if got, all := p.askFrontends(p.frontends, n, j); got < all {
		out.share = &got
	}
	out.slices = p.askBackends(j)
	return out
}

// askBackends requests the backends of a service, and returns the slices that do not get all of them, with what they
// get.
func (p *places) askBackends(j *joined) (cut map[*object]int) {
	shorten := func(x *object, to int) {
		if cut == nil {
			cut = make(map[*object]int)
		}
		cut[x] = to
	}
	ports, charge := compile.PortsOf(j.object.service), compile.ChargeOf(j.object.service)
	left := p.asked
	for _, x := range byAge(j.slices) {
		all := ports.Count(x.slice)
		within := min(all, left)
		left -= within
		if within == 0 {
			p.backends.Delete(x.slice.Name)
			if all > 0 {
				shorten(x, 0)
			}
			continue
		}
		units := charge.Units(x.slice, within)
		if got := p.backends.Put(x.slice.Name, p.part(x, x.slice.Name, units, 0)); got < units {
			within = charge.Within(x.slice, within, got)
		}
		charge.Add(x.slice, within)
		if within < all {
			shorten(x, within)
		}
	}
	return cut
}

// askAgain requests the backends again for services that the number of backends per service bounds,
// or bounded before, and adds these services to touched.
func (o *Owner) askAgain(touched map[service.Name]struct{}) {
	p := o.places
	least := min(p.asked, p.perService())
	p.asked = p.perService()
	for j := range o.index.all() {
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

// century orders the addresses of all services before all other requests of a tenant.
const century = 100

// askFrontends requests the frontends of a service, and returns how many units it gets.
func (p *places) askFrontends(ledger *shares.Parts[place], n *compile.Node, j *joined) (got, all int) {
	needs := n.Needs(j.object.service)
	if needs.All == 0 {
		p.deleteFrontends(j.name)
		return 0, 0
	}
	addresses := p.part(j.object, j.name, needs.Addresses, 0)
	addresses.Order.Created = addresses.Order.Created.AddDate(-century, 0, 0)
	first := ledger.Put(place{j.name, true}, addresses)
	rest := ledger.Put(place{j.name, false}, p.part(j.object, j.name, needs.All-needs.Addresses, needs.NodePorts))
	return within(first, rest, needs), needs.All
}

// within returns how many units the frontends of a service may use.
func within(addresses, rest int, n compile.Needs) int {
	if addresses < n.Addresses {
		return addresses
	}
	return addresses + rest
}

func (p *places) deleteFrontends(of service.Name) {
	p.frontends.Delete(place{of, true})
	p.frontends.Delete(place{of, false})
}

// byAge returns the slices of a service, the oldest first.
func byAge(all []*object) []*object {
	if len(all) < 2 {
		return all
	}
	out := slices.Clone(all)
	slices.SortFunc(out, func(a, b *object) int { return cmp.Or(cmp.Compare(a.created, b.created), byName(a, b)) })
	return out
}

// set records the part of a service that is within the share.
func (s shared) set(j *joined) {
	j.share = s.share
	for _, x := range j.slices {
		x.share, x.cut = s.slices[x]
	}
}

// admission is the effect of an edit on shares.
type admission struct {
	after map[service.Name]*joined // touched services as they will be
	got   map[service.Name]shared
}

// admit determines which parts of an edit's services are within shares when the edit is applied.
func (o *Owner) admit(e *edit) *admission {
	a := &admission{after: e.after, got: make(map[service.Name]shared, len(e.after))}
	if e.levels != nil {
		e.levels.enforce(o)
	}
	for name := range e.touched {
		if now := o.index.service(name); now != nil && a.after[name] == nil {
			j := *now
			a.after[name] = &j
		}
	}
	for _, k := range e.gone {
		if k.Kind == service.KindSlice {
			o.places.backends.Delete(k.Name)
		} else {
			o.places.deleteFrontends(k.Name)
		}
	}
	for _, j := range o.byOrder(a.after) {
		got := o.places.ask(&o.index.node, j)
		j.share = got.share
		a.got[j.name] = got
	}
	return a
}

// byOrder returns services in the order in which they get space: the cluster's own services first,
// then the oldest.
func (o *Owner) byOrder(all map[service.Name]*joined) []*joined {
	type asker struct {
		*joined
		others  int // 0: of the cluster itself
		created int64
	}
	askers := make([]asker, 0, len(all))
	for _, j := range all {
		a := asker{joined: j, others: 1}
		if o.index.tenant(j.name) == shares.System {
			a.others = 0
		}
		if j.object != nil {
			a.created = j.object.created
		}
		askers = append(askers, a)
	}
	slices.SortFunc(askers, func(a, b asker) int {
		if c := cmp.Or(cmp.Compare(a.others, b.others), cmp.Compare(a.created, b.created)); c != 0 {
			return c
		}
		return a.name.Compare(b.name)
	})
	out := make([]*joined, len(askers))
	for i, a := range askers {
		out[i] = a.joined
	}
	return out
}

// set applies the admission to the services, after the edit was applied.
func (a *admission) set(o *Owner) {
	for name, got := range a.got {
		if j := o.index.service(name); j != nil {
			got.set(j)
		}
	}
}

// admitAll requests the space of all services at the start. If an earlier run listed every source,
// it also computes the levels, which depend on the objects alone.
func (o *Owner) admitAll(names map[service.Name]struct{}) {
	all := make(map[service.Name]*joined, len(names))
	for name := range names {
		all[name] = o.index.service(name)
	}
	o.index.objects(func(x *object) { o.places.objects.Restore(x.key(), o.places.counted(x, x.created), !x.refuses()) })
	for _, j := range o.byOrder(all) {
		o.places.ask(&o.index.node, j).set(j)
	}
	if !o.levelled() {
		return
	}
	l := o.planLevels(o.config.Now())
	l.enforce(o)
	for name := range l.touched {
		if j := o.index.service(name); j != nil {
			o.places.ask(&o.index.node, j).set(j)
		}
	}
}

// levels are computed levels that are not applied yet.
type levels struct {
	touched   map[service.Name]struct{} // services that change
	frontends *shares.Plan[place]
	backends  *shares.Plan[service.Name]
	counted   *shares.Parts[place] // frontends counted in the other unit; nil: in the same
}

// levelled reports whether levels can be computed: every source and the Namespaces were listed
// once.
func (o *Owner) levelled() bool { return o.sources.complete() && o.config.Tenants.Complete() }

// planLevels computes the levels.
func (o *Owner) planLevels(now time.Time) *levels {
	p := o.places
	l := &levels{touched: make(map[service.Name]struct{})}
	if p.moved {
		p.frontends.Reassign(func(x place) shares.Tenant { return p.index.tenant(x.of) })
		p.backends.Reassign(p.index.tenant)
		p.objects.Reassign(func(k service.ObjectKey) shares.Tenant { return p.index.tenant(k.Name) })
		p.moved = false
	}
	bound := make(map[service.Name]struct{})
	if p.asked != p.perService() {
		o.askAgain(bound)
	}
	frontends := p.frontends
	if p.counting {
		node := o.index.node
		node.CountElements = !p.elements
		l.counted = shares.NewParts[place](p.settings, p.frontends.Limit())
		frontends = l.counted
		for j := range o.index.all() {
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
		for j := range o.index.all() {
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
		if x := o.index.object(service.ObjectKey{Kind: service.KindSlice, Name: name}); x != nil {
			l.touched[x.of()] = struct{}{}
		}
	}
	return l
}

// enforce applies the computed levels. The caller then updates the shares of the services in l.touched.
func (l *levels) enforce(o *Owner) {
	if l.counted != nil {
		o.places.frontends, o.places.elements, o.places.counting = l.counted, !o.places.elements, false
		o.index.node.CountElements = o.places.elements
	}
	o.places.frontends.Enforce(l.frontends)
	o.places.backends.Enforce(l.backends)
	o.places.resize() // a subscriber may have connected since
}

// wakeLevels wakes runLevels if levels are due.
func (o *Owner) wakeLevels(now time.Time) {
	p := o.places
	if !o.levelled() || !p.frontends.Due(now) && !p.backends.Due(now) &&
		!p.counting && !p.moved && p.asked == p.perService() &&
		(p.levelled && len(p.waiting) == 0 || p.objects.Next().IsZero()) {
		return
	}
	if last := p.frontends.Computed(); !last.IsZero() && now.Before(last.Add(shares.LevelInterval)) {
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
			o.config.Log.Warn("levels of the shares not applied, trying again", "error", err)
		}
	}
}

// computeLevels computes the levels and changes the frontends accordingly.
func (o *Owner) computeLevels(ctx context.Context) error {
	undo := func() {}
	_, err := o.revise(ctx, func() (*edit, error) {
		e := &edit{}
		if !o.levelled() {
			return e, nil
		}
		end, now := o.loop.Part(opLevel), o.config.Now()
		l := o.planLevels(now)
		undo = o.levelObjects(e, now)
		end()
		if len(l.touched) == 0 && l.counted == nil {
			l.enforce(o)
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
		o.places.moved = true
		o.wakeLevels(o.config.Now())
	})
}

// findShare rejects a call whose services would exceed the share of their tenant.
func (o *Owner) findShare(after map[service.Name]*joined) error {
	p := o.places
	services, parts := make([]service.Name, 0, len(after)), make([]service.Name, 0, len(after))
	for name, j := range after {
		services = append(services, name)
		for _, x := range j.slices {
			parts = append(parts, x.slice.Name)
		}
		if now := o.index.service(name); now != nil {
			for _, x := range now.slices {
				parts = append(parts, x.slice.Name)
			}
		}
	}
	wanted := make([]place, 0, 2*len(services))
	for _, name := range services {
		wanted = append(wanted, place{name, true}, place{name, false})
	}
	var err error
	refuse := func(of service.Name, limit string, asked, got int, tenant shares.Tenant, share shares.Share) {
		if err == nil {
			err = fmt.Errorf("%w: service %s asks for %d %s (limits.%s) and could have %d: %s asks for %d, and its share is %d",
				failure.ErrLimit, of, asked, limit, limit, got, tenant, share.Asked, share.Admitted)
		}
	}
	p.frontends.Try(wanted, func() {
		p.backends.Try(parts, func() {
			before := make(map[service.Name]int, len(services))
			for _, x := range wanted {
				_, _, asked, _ := p.frontends.Of(x)
				before[x.of] += asked
			}
			beforeParts := make(map[service.Name]int, len(parts))
			for _, name := range parts {
				_, _, beforeParts[name], _ = p.backends.Of(name)
			}
			for _, j := range o.byOrder(after) {
				p.ask(&o.index.node, j)
			}
			for _, x := range wanted {
				tenant, share, asked, got := p.frontends.Of(x)
				if got < asked && asked > before[x.of] {
					refuse(x.of, LimitFrontends, asked, got, tenant, share)
				}
			}
			for name, j := range after {
				for _, x := range j.slices {
					tenant, share, asked, got := p.backends.Of(x.slice.Name)
					if got < asked && asked > beforeParts[x.slice.Name] {
						refuse(name, LimitBackends, asked, got, tenant, share)
					}
				}
			}
		})
	})
	return err
}

// exceeding is the part of a service that exceeds the share of its tenant.
type exceeding struct {
	frontends, backends int
	notes               []string
}

// exceeding computes the part of a service that exceeds the share of its tenant.
func (o *Owner) exceeding(j *joined) (out exceeding) {
	if j.share != nil {
		tenant, share, _, _ := o.places.frontends.Of(place{j.name, false})
		all, within := o.index.node.Count(j.object.service), 0
		for _, f := range o.index.node.Within(compile.View{Service: j.object.service}, j.share, nil) {
			if !f.ExceedsShare {
				within++
			}
		}
		out.frontends = max(0, all-within)
		out.notes = append(out.notes, fmt.Sprintf("%s: %d of %d frontends exceed the share: %s asks for %d of %d "+
			"(limits.frontends) and gets %d. Cluster IPs, load balancer addresses and node ports refuse connections there; "+
			"external addresses are not served", ExceedsShare, out.frontends, all, tenant, share.Asked,
			o.places.frontends.Limit().Size, share.Admitted))
	}
	if j.object != nil && j.object.refuses() {
		out.frontends = o.index.node.Count(j.object.service)
	}
	for _, x := range j.slices {
		if !x.cut || j.object == nil {
			continue
		}
		all := compile.PortsOf(j.object.service).Count(x.slice)
		out.backends += all - x.share
		why := fmt.Sprintf("a service can have %d (limits.backendsPerService)", o.places.perService())
		if tenant, share, asked, got := o.places.backends.Of(x.slice.Name); got < asked {
			why = fmt.Sprintf("%s asks for %d of %d (limits.backends) and gets %d", tenant, share.Asked,
				o.places.backends.Limit().Size, share.Admitted)
		}
		out.notes = append(out.notes, fmt.Sprintf("%s: %d of %d backends of %s are not used: %s",
			ExceedsShare, all-x.share, all, x.key(), why))
	}
	return out
}

// Usage returns the tenants' use of the limits that they share.
func (o *Owner) Usage(ctx context.Context) ([]shares.Usage, error) {
	return loop.Ask(ctx, o.loop, opRead, func() ([]shares.Usage, error) {
		return o.usage(), nil
	})
}

func (o *Owner) usage() []shares.Usage {
	return append([]shares.Usage{o.places.frontends.Usage(), o.places.backends.Usage()}, o.places.objects.Usage()...)
}

// SharedLimit is the state of a limit that tenants share.
type SharedLimit struct {
	Name              string
	Size, Used, Asked int
	Exceeding         int  // tenants that ask for more than they get
	System            bool // the tenant system is one of them
}

func (o *Owner) sharedLimits() []SharedLimit {
	var out []SharedLimit
	for _, u := range o.usage() {
		l := SharedLimit{Name: u.Limit.Name, Size: u.Limit.Size, Used: u.Used, Asked: u.Asked}
		for _, t := range u.Tenants {
			if t.Asked > t.Admitted {
				l.Exceeding++
				l.System = l.System || t.Tenant == shares.System
			}
		}
		out = append(out, l)
	}
	return out
}

// systemRefused returns why frontends of the cluster's own services are not applied; empty if all are.
func (o *Owner) systemRefused() string {
	for _, l := range o.sharedLimits() {
		if l.System {
			return fmt.Sprintf("services of the cluster itself exceed their share of the limit of %s, %d (limits.%s)", l.Name,
				l.Size, l.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(o.subscribers)) {
		s := o.subscribers[name]
		if !s.Enforces {
			continue
		}
		for k, r := range s.Progress().Refusals {
			if o.index.tenant(r.Service) == shares.System {
				return fmt.Sprintf("%s does not enforce %s of service %s: %s", name, compile.KeyText(k), r.Service, r.Reason)
			}
		}
	}
	return ""
}

// SystemRefused returns why frontends of the cluster's own services are not applied; nil if all are.
func (o *Owner) SystemRefused(ctx context.Context) error {
	text, err := loop.Ask(ctx, o.loop, opRead, func() (string, error) { return o.systemRefused(), nil })
	if err == nil && text != "" {
		err = errors.New(text)
	}
	return err
}
