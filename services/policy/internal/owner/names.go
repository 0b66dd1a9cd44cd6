// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/services/policy/internal/dnsname"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/failure"
	"github.com/sluice-net/sluice/services/policy/internal/journal"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// How long an answer of the DNS may say that it is valid.
const (
	minTTL = time.Minute
	maxTTL = 7 * 24 * time.Hour
)

// maxPerName is how many addresses one name may have, so that one whose
// addresses change all the time does not use up the room of all others.
const maxPerName = 1024

// Learn remembers the addresses of a name. When it returns, the kernel of every
// connected subscriber that enforces knows them, if any table wants the name.
func (o *Owner) Learn(ctx context.Context, name string, addrs []netip.Addr, ttl time.Duration) (used bool, err error) {
	name = dnsname.Canonical(name)
	if _, err := dnsname.Name(name); err != nil {
		return false, &failure.FieldError{Field: "name", Err: err}
	}
	_, err = o.await(ctx, nil, func() (stream.Barrier, error) {
		o.operation = opLearn
		if err := o.learn(name, addrs, min(max(ttl, minTTL), maxTTL)); err != nil {
			return stream.Barrier{}, err
		}
		if used = o.engine.Wants(name); !used {
			return stream.Barrier{}, nil
		}
		return stream.Barrier{Address: o.barrier.Address}, nil
	})
	return used, err
}

func (o *Owner) learn(name string, addrs []netip.Addr, ttl time.Duration) error {
	now := o.config.Now()
	until := now.Add(ttl)
	known := o.names[name]
	var fresh []netip.Addr
	seen := make(map[netip.Addr]bool)
	for _, a := range addrs {
		a = a.Unmap()
		if _, ok := known[a]; !ok && !seen[a] {
			fresh = append(fresh, a)
		}
		seen[a] = true
	}
	// Addresses that are only kept for old connections make room.
	evict := func(name string, need int) {
		var gone []netip.Addr
		for a, t := range o.names[name] {
			if len(gone) < need && t.Before(now) && !seen[a] {
				gone = append(gone, a)
			}
		}
		if len(gone) > 0 {
			o.forget(name, gone)
		}
	}
	if over := len(known) + len(fresh) - maxPerName; over > 0 {
		evict(name, over)
	}
	if known == nil && len(o.names) >= o.config.MaxNames {
		o.evictName(now)
	}
	var skipped []string // nothing of them may go
	for o.addresses+len(fresh) > o.config.MaxAddresses {
		other, at, ok := o.ending.First(o.endsFirst)
		if !ok || !at.Before(now) {
			break
		}
		had := o.addresses
		if evict(other, had+len(fresh)-o.config.MaxAddresses); o.addresses == had {
			o.ending.Drop()
			skipped = append(skipped, other)
		}
	}
	for _, other := range skipped {
		o.noteTimes(other)
	}
	known = o.names[name]
	switch {
	case known == nil && len(o.names) >= o.config.MaxNames:
		return fmt.Errorf("%w: %d DNS names are remembered", failure.ErrLimit, len(o.names))
	case len(known)+len(fresh) > maxPerName:
		return fmt.Errorf("%w: %s has %d addresses that are valid, the limit is %d", failure.ErrLimit, name, len(known)+len(fresh), maxPerName)
	case o.addresses+len(fresh) > o.config.MaxAddresses:
		return fmt.Errorf("%w: %d addresses of DNS names are remembered", failure.ErrLimit, o.addresses)
	}
	if len(fresh) > 0 {
		learnt := []engine.Name{{Name: name, Addrs: fresh}}
		if err := o.apply(engine.Change{Learn: learnt}); err != nil {
			o.problem("learned addresses", o.apply(engine.Change{Forget: learnt}))
			o.barrier.Address++
			return err
		}
		o.barrier.Address++
	}
	if known == nil {
		known = make(map[netip.Addr]time.Time)
		o.names[name] = known
	}
	o.addresses += len(fresh)
	changed := len(fresh) > 0
	for a := range seen {
		if until.After(known[a]) {
			known[a] = until
			changed = true
		}
	}
	o.noteTimes(name)
	o.wakeAt(until.Add(o.config.NameGrace))
	if changed {
		o.save(journal.Change{Names: []journal.Name{nameRecord(name, known)}})
	}
	return nil
}

// endsFirst is when the first address of a name ends.
func (o *Owner) endsFirst(name string) (time.Time, bool) {
	return o.ends(name, func(a, b time.Time) bool { return a.Before(b) })
}

// endsLast is when all addresses of a name have ended.
func (o *Owner) endsLast(name string) (time.Time, bool) {
	return o.ends(name, func(a, b time.Time) bool { return a.After(b) })
}

func (o *Owner) ends(name string, better func(a, b time.Time) bool) (at time.Time, ok bool) {
	for _, until := range o.names[name] {
		if !ok || better(until, at) {
			at, ok = until, true
		}
	}
	return at, ok
}

// noteTimes puts a name into the agendas.
func (o *Owner) noteTimes(name string) {
	if at, ok := o.endsFirst(name); ok {
		o.ending.Note(name, at)
	}
	if at, ok := o.endsLast(name); ok {
		o.ended.Note(name, at)
	}
}

// evictName drops the name whose time is over since longest, if there is one.
func (o *Owner) evictName(now time.Time) {
	if name, at, ok := o.ended.First(o.endsLast); ok && at.Before(now) {
		o.forget(name, slices.Collect(maps.Keys(o.names[name])))
	}
}

// forget drops addresses of a name.
func (o *Owner) forget(name string, addrs []netip.Addr) {
	for _, a := range addrs {
		delete(o.names[name], a)
	}
	o.addresses -= len(addrs)
	o.barrier.Address++
	o.problem("learned addresses", o.apply(engine.Change{Forget: []engine.Name{{Name: name, Addrs: addrs}}}))
	if len(o.names[name]) == 0 {
		delete(o.names, name)
		o.save(journal.Change{GoneNames: []string{name}})
		return
	}
	o.save(journal.Change{Names: []journal.Name{nameRecord(name, o.names[name])}})
}

// sweepNames drops addresses whose time and grace are over.
func (o *Owner) sweepNames(now time.Time) {
	for {
		name, at, ok := o.ending.First(o.endsFirst)
		if !ok {
			return
		}
		if end := at.Add(o.config.NameGrace); end.After(now) {
			o.wakeAt(end)
			return
		}
		var gone []netip.Addr
		for a, until := range o.names[name] {
			if !until.Add(o.config.NameGrace).After(now) {
				gone = append(gone, a)
			}
		}
		o.forget(name, gone)
	}
}
