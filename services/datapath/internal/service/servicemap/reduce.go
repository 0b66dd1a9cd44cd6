// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package servicemap

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/frontend"
)

// reduce removes from an existing frontend what f does not have, after f as a whole was refused. Then the frontend
// allows only connections that both its previous state and f allow.
func (a *application) reduce(f *frontend.Frontend) {
	e := a.s.entries[f.Key]
	if e == nil {
		return
	}
	refused := e.refused
	for _, less := range e.reductions(f) {
		if a.set(less) == nil {
			e.refused = refused
			return
		}
	}
}

// reductions returns frontends that allow no more than both e and f, the most permissive first. The last one always
// fits.
func (e *entry) reductions(f *frontend.Frontend) []*frontend.Frontend {
	closed := e.closed()
	if closed.Kind == 0 {
		closed.Kind, closed.Service = f.Kind, f.Service // the kind of an adopted frontend is unknown
	}
	if f.Validate() != nil {
		return []*frontend.Frontend{closed}
	}
	inside, outside, reshape := plan(e, f)
	if reshape || outside.front == nil || inside != nil && inside.front == nil {
		return []*frontend.Frontend{closed}
	}
	less := *f
	less.SourceRanges = outside.front.narrowed(f)
	if f.Inside != nil {
		less.Inside = inside.front.common(f.Inside)
	}
	switch {
	case f.Outside != nil:
		less.Outside = outside.front.common(f.Outside)
	case outside != inside:
		less.Outside = outside.front.common(f.Inside)
	}
	out := []*frontend.Frontend{&less}
	if wantedTable(orEmpty(less.Inside)) > 0 || wantedTable(orEmpty(less.Outside)) > 0 {
		plain := less
		plain.Inside, plain.Outside = withoutTable(less.Inside), withoutTable(less.Outside)
		out = append(out, &plain)
	}
	return append(out, closed)
}

// closed returns the entry without backends: connections are refused.
func (e *entry) closed() *frontend.Frontend {
	f := &frontend.Frontend{
		Key: e.key, Kind: e.kindKnown(), Service: e.service, Tenant: e.tenant,
		Affinity: time.Duration(e.timeout) * time.Second,
	}
	if e.service == "" {
		f.Affinity = 0 // the affinity group of an adopted frontend is unknown
	}
	if e.inside != nil {
		f.Inside = &frontend.List{}
	}
	if e.outside != e.inside && e.outside != nil {
		f.Outside = &frontend.List{}
	}
	return f
}

// common returns the backends that both the front and want have.
func (f *front) common(want *frontend.List) *frontend.List {
	less := *want
	less.Backends = nil
	for _, b := range want.Backends {
		if f.list != nil && slices.ContainsFunc(f.list.backends, func(x *backend) bool { return x.addr == b.AddrPort }) {
			less.Backends = append(less.Backends, b)
		}
	}
	return &less
}

// narrowed returns the clients that both the front and want allow; empty: all.
func (f *front) narrowed(want *frontend.Frontend) []netip.Prefix {
	if f.flags&flagSources == 0 {
		return want.SourceRanges
	}
	wanted := sourcesOf(want)
	if len(want.SourceRanges) == 0 {
		wanted = []netip.Prefix{netip.PrefixFrom(frontend.Unspecified(want.Key.Addr), 0)}
	}
	var out []netip.Prefix
	for _, p := range f.sources {
		for _, q := range wanted {
			switch {
			case q.Bits() <= p.Bits() && q.Contains(p.Addr()):
				out = append(out, p)
			case p.Contains(q.Addr()):
				out = append(out, q)
			}
		}
	}
	if len(out) == 0 { // No client is allowed: no client matches a prefix of the other family.
		other := netip.IPv6Unspecified()
		if want.Key.Addr.Is6() {
			other = netip.IPv4Unspecified()
		}
		out = append(out, netip.PrefixFrom(other, other.BitLen()))
	}
	return out
}

func orEmpty(l *frontend.List) *frontend.List {
	if l == nil {
		return &frontend.List{}
	}
	return l
}

func withoutTable(l *frontend.List) *frontend.List {
	if l == nil {
		return nil
	}
	less := *l
	less.Table = false
	return &less
}
