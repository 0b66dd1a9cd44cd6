// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
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

// place is a request of a service for units of the limit of frontends. A service requests the units of its addresses
// separately. All addresses of a tenant have priority over all other frontends, because packets to an address without
// an element would leave the node.
type place struct {
	of        service.Name
	addresses bool
}

// places divides the capacity for frontends and backends among tenants. It belongs to the loop.
type places struct {
	index    *index
	sources  *sources
	quota    *quota // has the same tenants and levels
	limits   Limits
	settings shares.Settings

	frontends *shares.Parts[place]
	backends  *shares.Parts[service.Name] // by slice
	elements  bool                        // frontends counts elements of maps

	reported map[string]frontend.Capacity // by subscriber
	moved    bool                         // tenants of namespaces may have changed
	counting bool                         // elements must change at the next levels
	asked    int                          // the value of perService with which backends were requested
}

func newPlaces(config *Config, ix *index, s *sources, q *quota) *places {
	p := &places{
		index: ix, sources: s, quota: q, limits: config.Limits, settings: config.Shares,
		reported: make(map[string]frontend.Capacity),
	}
	p.frontends = shares.NewParts[place](p.settings, shares.Limit{Name: LimitFrontends, Size: p.limits.Frontends})
	p.backends = shares.NewParts[service.Name](p.settings, shares.Limit{Name: LimitBackends, Size: p.limits.Backends})
	p.asked = p.perService()
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

// resize sets the limits to the smallest capacity that the configuration and the subscribers allow. The next levels
// divide them.
func (p *places) resize() {
	f, b := p.limits.Frontends, p.limits.Backends
	for _, c := range p.reported {
		f = min(f, c.Frontends)
		// For each port of a service, a backend may be in two lists: the list of all backends, and the list of
		// backends on this node.
		b = min(b, c.Backends, c.Members/2)
	}
	p.frontends.Resize(f)
	p.backends.Resize(b)
	p.counting = p.elements != (len(p.reported) > 0)
}

// perService returns the maximum number of backends of one service.
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

// shared holds how many frontends and backends of a service fit within the share of its tenant; slices omits
// EndpointSlices that get all of their backends.
type shared struct {
	share  *int // of joined
	slices map[*object]int
}

// ask requests capacity for a service and its slices.
func (p *places) ask(j *joined) shared {
	var out shared
	if j.object == nil || !j.object.service.HasFrontends() {
		p.deleteFrontends(j.name)
		for _, x := range j.slices {
			p.backends.Delete(x.slice.Name)
		}
		return out
	}
	if got, all := p.askFrontends(p.frontends, &p.index.node, j); got < all {
		out.share = &got
	}
	out.slices = p.askBackends(j)
	return out
}

// askBackends requests capacity for the backends of a service. It returns the slices that do not get enough for all
// their backends, with the number that they get.
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

// century is the number of years by which requests for addresses are backdated. This puts them before all other
// requests of the tenant.
const century = 100

// askFrontends requests capacity for the frontends of a service, and returns how many units it gets and how many it
// needs.
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

// within returns how many units the frontends of a service may use. addresses and rest are the units that the share
// of the tenant grants. rest can be used only if every address has its units.
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

// set stores in the service and its slices how much fits into the share.
func (s shared) set(j *joined) {
	j.share = s.share
	for _, x := range j.slices {
		x.share, x.cut = s.slices[x]
	}
}

// admission is the effect of an edit on what fits into shares.
type admission struct {
	after map[service.Name]*joined // the affected services in their future state
	got   map[service.Name]shared
}

// admit determines how much of an edit's services fits into the shares once the edit is applied.
func (p *places) admit(e *edit) *admission {
	a := &admission{after: e.after, got: make(map[service.Name]shared, len(e.after))}
	if e.levels != nil {
		p.enforce(e.levels)
	}
	for name := range e.touched {
		if now := p.index.service(name); now != nil && a.after[name] == nil {
			j := *now
			a.after[name] = &j
		}
	}
	for _, k := range e.gone {
		if k.Kind == service.KindSlice {
			p.backends.Delete(k.Name)
		} else {
			p.deleteFrontends(k.Name)
		}
	}
	for _, j := range p.byOrder(a.after) {
		got := p.ask(j)
		j.share = got.share
		a.got[j.name] = got
	}
	return a
}

// byOrder sorts services by priority: the cluster's own services first, and then the oldest.
func (p *places) byOrder(all map[service.Name]*joined) []*joined {
	type asker struct {
		*joined
		others  int // 0: a service of the cluster itself
		created int64
	}
	askers := make([]asker, 0, len(all))
	for _, j := range all {
		a := asker{joined: j, others: 1}
		if p.index.tenant(j.name) == shares.System {
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

// set applies the admission to the services. It must be called after the edit was applied.
func (a *admission) set(ix *index) {
	for name, got := range a.got {
		if j := ix.service(name); j != nil {
			got.set(j)
		}
	}
}

// restore requests the capacity for all services at the start. If an earlier run listed every source, restore also
// computes the levels: these depend only on the objects.
func (p *places) restore(names map[service.Name]struct{}, now func() time.Time) {
	all := make(map[service.Name]*joined, len(names))
	for name := range names {
		all[name] = p.index.service(name)
	}
	for _, j := range p.byOrder(all) {
		p.ask(j).set(j)
	}
	if !p.canLevel() {
		return
	}
	l := p.planLevels(now())
	p.enforce(l)
	for name := range l.touched {
		if j := p.index.service(name); j != nil {
			p.ask(j).set(j)
		}
	}
}

// findShare returns ErrLimit if the services of a call would exceed the share of their tenant.
func (p *places) findShare(after map[service.Name]*joined) error {
	if p.surelyFit(after) {
		return nil
	}
	services, parts := make([]service.Name, 0, len(after)), make([]service.Name, 0, len(after))
	for name, j := range after {
		services = append(services, name)
		for _, x := range j.slices {
			parts = append(parts, x.slice.Name)
		}
		if now := p.index.service(name); now != nil {
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
			err = fmt.Errorf("%w: service %s needs %d %s (limits.%s) and can get %d: %s needs %d in total, and its share is %d",
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
			for _, j := range p.byOrder(after) {
				p.ask(j)
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

// surelyFit is a cheap check before findShare. True means that the services get all that they request. False means
// that findShare must decide: if little capacity is left, for the tenant "system", and for rendezvous tables.
func (p *places) surelyFit(after map[service.Name]*joined) bool {
	frontends, backends := make(map[shares.Tenant]int), make(map[shares.Tenant]int)
	for name, j := range after {
		if j.object == nil || !j.object.service.HasFrontends() {
			continue
		}
		s := j.object.service
		if s.Table {
			return false
		}
		needs, tenant := p.index.node.Needs(s), p.index.tenant(name)
		frontends[tenant] += p.frontends.Lacks(place{name, true}, needs.Addresses) +
			p.frontends.Lacks(place{name, false}, needs.All-needs.Addresses)
		ports := compile.PortsOf(s)
		for _, x := range j.slices {
			backends[p.index.tenant(x.slice.Name)] += p.backends.Lacks(x.slice.Name, ports.Count(x.slice))
		}
	}
	return p.frontends.SurelyFit(frontends) && p.backends.SurelyFit(backends)
}

// exceeding is the part of a service that exceeds the share of its tenant.
type exceeding struct {
	frontends, backends int
	notes               []string
}

// exceeding computes the part of a service that exceeds the share of its tenant.
func (p *places) exceeding(j *joined) (out exceeding) {
	if j.share != nil {
		tenant, share, _, _ := p.frontends.Of(place{j.name, false})
		all, within := p.index.node.Count(j.object.service), 0
		for _, f := range p.index.node.Within(compile.View{Service: j.object.service}, j.share, nil) {
			if !f.ExceedsShare {
				within++
			}
		}
		out.frontends = max(0, all-within)
		out.notes = append(out.notes, fmt.Sprintf("%s: %d of %d frontends exceed the share: %s asks for %d of %d "+
			"(limits.frontends) and gets %d. Cluster IPs, load balancer addresses and node ports refuse connections there; "+
			"external addresses are not served", ExceedsShare, out.frontends, all, tenant, share.Asked,
			p.frontends.Limit().Size, share.Admitted))
	}
	if j.object != nil && j.object.refuses() {
		out.frontends = p.index.node.Count(j.object.service)
	}
	for _, x := range j.slices {
		if !x.cut || j.object == nil {
			continue
		}
		all := compile.PortsOf(j.object.service).Count(x.slice)
		out.backends += all - x.share
		why := fmt.Sprintf("a service can have %d (limits.backendsPerService)", p.perService())
		if tenant, share, asked, got := p.backends.Of(x.slice.Name); got < asked {
			why = fmt.Sprintf("%s asks for %d of %d (limits.backends) and gets %d", tenant, share.Asked,
				p.backends.Limit().Size, share.Admitted)
		}
		out.notes = append(out.notes, fmt.Sprintf("%s: %d of %d backends of %s are not used: %s",
			ExceedsShare, all-x.share, all, x.key(), why))
	}
	return out
}

func (p *places) usage() []shares.Usage {
	return append([]shares.Usage{p.frontends.Usage(), p.backends.Usage()}, p.quota.usage()...)
}

// SharedLimit is the state of a limit that tenants share.
type SharedLimit struct {
	Name              string
	Size, Used, Asked int
	Exceeding         int  // tenants that ask for more than they get
	System            bool // the tenant system is one of them
}

func (p *places) sharedLimits() []SharedLimit {
	var out []SharedLimit
	for _, u := range p.usage() {
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
