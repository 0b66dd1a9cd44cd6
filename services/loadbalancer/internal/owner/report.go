// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/source"
)

// Exceeding is a service of an API server that exceeds the share of its tenant.
type Exceeding struct {
	Name  service.Name
	Limit string // the name of a limit that it exceeds
	// Reason is for people; empty after the first services. It changes only if the excess of this service changes.
	Reason string
}

// Exceeding returns the services of API servers that exceed the share of their tenant, tenants in turn. The first
// detailed ones have a reason.
func (r *Reader) Exceeding(ctx context.Context, detailed int) ([]Exceeding, error) {
	found, lacking := make(map[service.Name]string), make(map[service.Name]int)
	err := r.loop.Do(ctx, opRead, func() {
		for k, w := range r.places.quota.waiting {
			switch {
			case !source.Of(w.source).Shared || r.places.quota.ledger.Admitted(k):
			case k.Kind == service.KindService:
				found[k.Name] = LimitServices
			case w.Slice != nil && w.Slice.Of().Name != "":
				found[w.Slice.Of()] = LimitSlices
				lacking[w.Slice.Of()]++
			}
		}
		for j := range r.index.all() {
			if j.object == nil || !source.Of(j.object.by.Source).Shared {
				continue
			}
			switch {
			case j.object.refuses():
				found[j.name] = LimitServices
			case j.share != nil:
				found[j.name] = r.places.frontends.Limit().Name
			case slices.ContainsFunc(j.slices, func(x *object) bool { return x.cut }):
				found[j.name] = r.places.backends.Limit().Name
			}
		}
	})
	if err != nil || len(found) == 0 {
		return nil, err
	}
	names := shares.InTurns(slices.Collect(maps.Keys(found)), service.Name.Compare, r.index.tenant)
	out := make([]Exceeding, len(names))
	for i, name := range names {
		out[i] = Exceeding{Name: name, Limit: found[name]}
	}
	err = r.loop.Do(ctx, opRead, func() {
		for i := range out[:min(detailed, len(out))] {
			out[i].Reason = r.places.excess(r.index.service(out[i].Name), lacking[out[i].Name])
		}
	})
	return out, err
}

// excess describes what a service lacks. j may be nil. lacking is the number of its slices that wait for space.
func (p *places) excess(j *joined, lacking int) string {
	var parts []string
	say := func(count int, format, limit string) {
		if count > 0 {
			parts = append(parts, fmt.Sprintf(format+" (limits.%s)", count, limit))
		}
	}
	switch {
	case j == nil || j.object == nil:
		parts = append(parts, "it is not served (limits."+LimitServices+")")
	case j.object.refuses():
		parts = append(parts, "its cluster IPs, load balancer addresses and node ports refuse connections "+
			"(limits."+LimitServices+")")
	default:
		say(p.exceeding(j).frontends, "%d frontends refuse connections", p.frontends.Limit().Name)
		var share, own int
		for _, x := range j.slices {
			if !x.cut {
				continue
			}
			lost := compile.PortsOf(j.object.service).Count(x.slice) - x.share
			if _, _, asked, got := p.backends.Of(x.slice.Name); got < asked {
				share += lost
			} else {
				own += lost
			}
		}
		say(share, "%d backends are not used", p.backends.Limit().Name)
		say(own, "%d backends are not used", "backendsPerService")
	}
	say(lacking, "%d EndpointSlices are not used", LimitSlices)
	return strings.Join(parts, ", ")
}
