// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"fmt"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/compile"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// maxRepeats limits duplicates in the objects of a service: how often, on average, they may list each frontend or
// backend if the service has as many of them as the limits allow. A megabyte of slices with a hundred ports each
// lists millions of backends. The service is refused without computing all of these.
const maxRepeats = 4

// demand counts the frontends and backends that services will need.
type demand struct {
	index    *index
	keys     map[frontend.Key]int // how many more services need each frontend after the change
	places   map[uint64]int       // the same for backends
	winners  int                  // number of frontends after the change
	distinct int                  // number of backends after the change
}

// grown is the number of frontends or backends that the change of a service adds.
type grown struct {
	name service.Name
	by   int
}

// checkLimits checks that the frontends and backends of changed services are within the limits. If the change would
// exceed a limit, it returns an error that contains the limit and a service.
func (ix *index) checkLimits(l *Limits, after map[service.Name]*joined) error {
	if ix.surelyWithinLimits(l, after) {
		return nil
	}
	return ix.computeDemand(l, after)
}

// computeDemand does the work of checkLimits for services that may exceed a limit, by computing their frontends and
// backends.
func (ix *index) computeDemand(l *Limits, after map[service.Name]*joined) error {
	had := ix.counts()
	r := demand{ix, make(map[frontend.Key]int), make(map[uint64]int), had.frontends, had.backends}
	names := slices.SortedFunc(maps.Keys(after), service.Name.Compare)
	before, keys, backends := make([]compile.View, len(names)), make([]int, len(names)), make([]int, len(names))
	for i, name := range names {
		if now := ix.services[name]; now != nil {
			before[i] = now.whole()
		}
		keys[i], backends[i] = r.add(before[i], -1)
	}
	var most, mostBackends grown
	for i, name := range names {
		then := after[name].whole()
		if err := l.countNamed(name, before[i], then); err != nil {
			return err
		}
		k, b := r.add(then, 1)
		if b > l.BackendsPerService && b > backends[i] {
			return fmt.Errorf("%w: service %s would have %d backends, the limit is %d (limits.backendsPerService)",
				failure.ErrLimit, name, b, l.BackendsPerService)
		}
		if by := k - keys[i]; by > most.by {
			most = grown{name, by}
		}
		if by := b - backends[i]; by > mostBackends.by {
			mostBackends = grown{name, by}
		}
		switch {
		case r.winners > l.Frontends && r.winners > had.frontends:
			return fmt.Errorf("%w: there would be at least %d frontends, the limit is %d (limits.frontends); "+
				"service %s adds most, %d", failure.ErrLimit, r.winners, l.Frontends, most.name, most.by)
		case r.distinct > l.Backends && r.distinct > had.backends:
			return fmt.Errorf("%w: there would be at least %d backends, the limit is %d (limits.backends); "+
				"service %s adds most, %d", failure.ErrLimit, r.distinct, l.Backends, mostBackends.name, mostBackends.by)
		}
	}
	return nil
}

// surelyWithinLimits reports whether changed services are within the limits even if all frontends and backends that
// their objects list are distinct and new.
func (ix *index) surelyWithinLimits(l *Limits, after map[service.Name]*joined) bool {
	had := ix.counts()
	frontends, backends := had.frontends, had.backends
	for _, j := range after {
		f, b := j.whole().Named()
		if b > l.BackendsPerService {
			return false
		}
		frontends, backends = frontends+f, backends+b
	}
	return frontends <= l.Frontends && backends <= l.Backends
}

// countNamed rejects a service whose objects list too many frontends or backends, before these are computed.
func (l *Limits) countNamed(name service.Name, before, then compile.View) error {
	f0, b0 := before.Named()
	f1, b1 := then.Named()
	switch {
	case f1 > maxRepeats*l.Frontends && f1 > f0:
		return fmt.Errorf("%w: service %s would have up to %d frontends; the limit for all services is %d (limits.frontends)",
			failure.ErrLimit, name, f1, l.Frontends)
	case b1 > maxRepeats*l.BackendsPerService && b1 > b0:
		return fmt.Errorf("%w: service %s would have up to %d backends, the limit is %d (limits.backendsPerService)",
			failure.ErrLimit, name, b1, l.BackendsPerService)
	}
	return nil
}

// add adds the frontends and backends of a service to the demand; with by -1, it subtracts them.
func (r *demand) add(v compile.View, by int) (keys, backends int) {
	for _, k := range r.index.node.Keys(v.Service) {
		r.winners += change(r.keys, k, r.index.claims.wanted(k), by)
		keys++
	}
	for _, at := range r.index.node.Backends(v) {
		h := r.index.backends.hash(at)
		r.distinct += change(r.places, h, r.index.backends.of(h), by)
		backends++
	}
	return keys, backends
}

// change adds by to the number of additional services that need k, and returns the change of the number of needed
// keys.
func change[K comparable](more map[K]int, k K, had, by int) int {
	was := present(had + more[k])
	more[k] += by
	return present(had+more[k]) - was
}

func present(n int) int {
	if n > 0 {
		return 1
	}
	return 0
}
