// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/services/policy/internal/dnsname"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
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
func (n *Node) Learn(ctx context.Context, name string, addrs []netip.Addr, ttl time.Duration) (used bool, err error) {
	name = dnsname.Canonical(name)
	if _, err := dnsname.Name(name); err != nil {
		return false, fmt.Errorf("%w: name: %w", ErrInvalid, err)
	}
	_, err = n.await(ctx, nil, func() (stream.Barrier, error) {
		n.operation = opLearn
		if err := n.learn(name, addrs, min(max(ttl, minTTL), maxTTL)); err != nil {
			return stream.Barrier{}, err
		}
		if used = n.engine.Wants(name); !used {
			return stream.Barrier{}, nil
		}
		return stream.Barrier{Address: n.barrier.Address}, nil
	})
	return used, err
}

func (n *Node) learn(name string, addrs []netip.Addr, ttl time.Duration) error {
	now := n.config.Now()
	until := now.Add(ttl)
	known := n.names[name]
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
		for a, t := range n.names[name] {
			if len(gone) < need && t.Before(now) && !seen[a] {
				gone = append(gone, a)
			}
		}
		if len(gone) > 0 {
			n.forget(name, gone)
		}
	}
	if over := len(known) + len(fresh) - maxPerName; over > 0 {
		evict(name, over)
	}
	if known == nil && len(n.names) >= n.config.MaxNames {
		n.evictName(now)
	}
	var skipped []string // nothing of them may go
	for n.addresses+len(fresh) > n.config.MaxAddresses {
		other, at, ok := n.ending.first(n.endsFirst)
		if !ok || !at.Before(now) {
			break
		}
		had := n.addresses
		if evict(other, had+len(fresh)-n.config.MaxAddresses); n.addresses == had {
			n.ending.drop()
			skipped = append(skipped, other)
		}
	}
	for _, other := range skipped {
		n.noteTimes(other)
	}
	known = n.names[name]
	switch {
	case known == nil && len(n.names) >= n.config.MaxNames:
		return fmt.Errorf("%w: %d DNS names are remembered", ErrLimit, len(n.names))
	case len(known)+len(fresh) > maxPerName:
		return fmt.Errorf("%w: %s has %d addresses that are valid, the limit is %d", ErrLimit, name, len(known)+len(fresh), maxPerName)
	case n.addresses+len(fresh) > n.config.MaxAddresses:
		return fmt.Errorf("%w: %d addresses of DNS names are remembered", ErrLimit, n.addresses)
	}
	if len(fresh) > 0 {
		learnt := []engine.Name{{Name: name, Addrs: fresh}}
		if err := n.apply(engine.Change{Learn: learnt}); err != nil {
			n.problem("learned addresses", n.apply(engine.Change{Forget: learnt}))
			n.barrier.Address++
			return err
		}
		n.barrier.Address++
	}
	if known == nil {
		known = make(map[netip.Addr]time.Time)
		n.names[name] = known
	}
	n.addresses += len(fresh)
	changed := len(fresh) > 0
	for a := range seen {
		if until.After(known[a]) {
			known[a] = until
			changed = true
		}
	}
	n.noteTimes(name)
	n.wakeAt(until.Add(n.config.NameGrace))
	if changed {
		n.save(journal.Change{Names: []journal.Name{nameRecord(name, known)}})
	}
	return nil
}

// endsFirst is when the first address of a name ends.
func (n *Node) endsFirst(name string) (time.Time, bool) {
	return n.ends(name, func(a, b time.Time) bool { return a.Before(b) })
}

// endsLast is when all addresses of a name have ended.
func (n *Node) endsLast(name string) (time.Time, bool) {
	return n.ends(name, func(a, b time.Time) bool { return a.After(b) })
}

func (n *Node) ends(name string, better func(a, b time.Time) bool) (at time.Time, ok bool) {
	for _, until := range n.names[name] {
		if !ok || better(until, at) {
			at, ok = until, true
		}
	}
	return at, ok
}

// noteTimes puts a name into the agendas.
func (n *Node) noteTimes(name string) {
	if at, ok := n.endsFirst(name); ok {
		n.ending.note(name, at)
	}
	if at, ok := n.endsLast(name); ok {
		n.ended.note(name, at)
	}
}

// evictName drops the name whose time is over since longest, if there is one.
func (n *Node) evictName(now time.Time) {
	if name, at, ok := n.ended.first(n.endsLast); ok && at.Before(now) {
		n.forget(name, slices.Collect(maps.Keys(n.names[name])))
	}
}

// forget drops addresses of a name.
func (n *Node) forget(name string, addrs []netip.Addr) {
	for _, a := range addrs {
		delete(n.names[name], a)
	}
	n.addresses -= len(addrs)
	n.barrier.Address++
	n.problem("learned addresses", n.apply(engine.Change{Forget: []engine.Name{{Name: name, Addrs: addrs}}}))
	if len(n.names[name]) == 0 {
		delete(n.names, name)
		n.save(journal.Change{GoneNames: []string{name}})
		return
	}
	n.save(journal.Change{Names: []journal.Name{nameRecord(name, n.names[name])}})
}

// sweepNames drops addresses whose time and grace are over.
func (n *Node) sweepNames(now time.Time) {
	for {
		name, at, ok := n.ending.first(n.endsFirst)
		if !ok {
			return
		}
		if end := at.Add(n.config.NameGrace); end.After(now) {
			n.wakeAt(end)
			return
		}
		var gone []netip.Addr
		for a, until := range n.names[name] {
			if !until.Add(n.config.NameGrace).After(now) {
				gone = append(gone, a)
			}
		}
		n.forget(name, gone)
	}
}
