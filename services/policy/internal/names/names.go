// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package names implements the table of learned DNS names and their addresses. It decides which addresses are removed
// when the table has no capacity. It also removes addresses whose TTL and grace period are over and which no connection
// uses.
//
// It changes only the table. The caller applies the results to the engine and to stable storage.
package names

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/expiryqueue"
	"github.com/sluice-net/sluice/services/policy/internal/record"
)

// Limits of the TTL of a DNS answer.
const (
	minTTL = time.Minute
	MaxTTL = 7 * 24 * time.Hour
)

// maxPerName limits the addresses of one name, so that a name whose addresses change continually does not use up the
// capacity for all others.
const maxPerName = 1024

// HoldFor is the minimum time for which an address is kept after its TTL and after each report of a connection to it,
// once a datapath has reported. It is longer than several intervals between reports, and than a restart of the
// datapath.
const HoldFor = 5 * time.Minute

// maxExpiring limits the number of addresses that one call of Hold returns.
const maxExpiring = 16_384

// Limits are fixed for the lifetime of a table.
type Limits struct {
	Names     int
	Addresses int // for all names together
	// Grace is how long an address is kept after its TTL has ended.
	Grace time.Duration
}

// Table holds names and their addresses. It must be used by one goroutine.
type Table struct {
	limits    Limits
	names     map[string]map[netip.Addr]time.Time // end of each address's TTL
	ending    expiryqueue.Queue                   // names, ordered by the time when their first address ends
	ended     expiryqueue.Queue                   // names, ordered by the time when their last address ends
	addresses int
	// used is the time of the last reported connection to an address with an expired TTL. asked holds the addresses
	// that Hold returned last; nil: Hold was never called.
	used  map[netip.Addr]time.Time
	asked map[netip.Addr]struct{}
}

// New returns an empty table.
func New(l Limits) *Table {
	return &Table{
		limits: l, names: make(map[string]map[netip.Addr]time.Time), used: make(map[netip.Addr]time.Time),
	}
}

// Len returns the number of names.
func (t *Table) Len() int { return len(t.names) }

// Addresses returns the number of addresses of all names.
func (t *Table) Addresses() int { return t.addresses }

// FreeCapacity frees capacity for addresses of a name. It returns the addresses that are new, and the addresses that it
// has removed. Even if it returns an error, it may have removed addresses.
func (t *Table) FreeCapacity(name string, addrs []netip.Addr, now time.Time) (
	fresh []netip.Addr, gone []engine.Name, err error,
) {
	known := t.names[name]
	seen := make(map[netip.Addr]bool)
	for _, a := range addrs {
		a = a.Unmap()
		if _, ok := known[a]; !ok && !seen[a] {
			fresh = append(fresh, a)
		}
		seen[a] = true
	}
	// Evict addresses that are kept only for old connections: first those without a known connection, oldest first.
	evict := func(name string, need int) {
		var over []netip.Addr
		known := t.names[name]
		for a, until := range known {
			if until.Before(now) && !seen[a] {
				over = append(over, a)
			}
		}
		slices.SortFunc(over, func(a, b netip.Addr) int {
			return cmp.Or(t.used[a].Compare(t.used[b]), known[a].Compare(known[b]), a.Compare(b))
		})
		over = over[:max(0, min(need, len(over)))]
		if len(over) > 0 {
			gone = append(gone, t.forget(name, over))
		}
	}
	if over := len(known) + len(fresh) - maxPerName; over > 0 {
		evict(name, over)
	}
	if known == nil && len(t.names) >= t.limits.Names {
		// Remove the name whose last TTL expired first, if there is one.
		if last, at, ok := t.ended.First(t.endsLast); ok && at.Before(now) {
			gone = append(gone, t.forget(last, slices.Collect(maps.Keys(t.names[last]))))
		}
	}
	var skipped []string // names from which no address can be removed
	for t.addresses+len(fresh) > t.limits.Addresses {
		other, at, ok := t.ending.First(t.endsFirst)
		if !ok || !at.Before(now) {
			break
		}
		had := t.addresses
		if evict(other, had+len(fresh)-t.limits.Addresses); t.addresses == had {
			t.ending.Drop()
			skipped = append(skipped, other)
		}
	}
	for _, other := range skipped {
		t.noteTimes(other)
	}
	known = t.names[name]
	switch {
	case known == nil && len(t.names) >= t.limits.Names:
		err = fmt.Errorf("the maximum of %d DNS names is reached", len(t.names))
	case len(known)+len(fresh) > maxPerName:
		err = fmt.Errorf("%s has %d valid addresses, the limit is %d", name, len(known)+len(fresh), maxPerName)
	case t.addresses+len(fresh) > t.limits.Addresses:
		err = fmt.Errorf("the maximum of %d addresses of DNS names is reached", t.addresses)
	}
	return fresh, gone, err
}

// Add stores the addresses of a name for their TTL. Call FreeCapacity before. Add returns the time at which
// to call Expire, and whether the stored record of the name must be updated.
func (t *Table) Add(name string, addrs []netip.Addr, ttl time.Duration, now time.Time) (wake time.Time, changed bool) {
	until := now.Add(min(max(ttl, minTTL), MaxTTL))
	known := t.names[name]
	if known == nil {
		known = make(map[netip.Addr]time.Time)
		t.names[name] = known
	}
	before := len(known)
	for _, a := range addrs {
		a = a.Unmap()
		if until.After(known[a]) {
			known[a] = until
			changed = true
		}
	}
	t.addresses += len(known) - before
	t.noteTimes(name)
	return until.Add(t.grace()), changed
}

// Restore adds a stored record. It returns the addresses of the name, and the time at which to call Expire.
func (t *Table) Restore(r record.Name, now time.Time) (learned engine.Name, wake time.Time, err error) {
	// The remaining TTL counts from now on, so that later changes of the wall clock have no effect. It exceeds
	// MaxTTL only if the wall clock was ahead when the address was learned.
	learned.Name = r.Name
	known := make(map[netip.Addr]time.Time, len(r.Addresses))
	for _, a := range r.Addresses {
		addr, err := netip.ParseAddr(a.Address)
		if err != nil {
			return learned, wake, fmt.Errorf("stored name %s: %w", r.Name, err)
		}
		known[addr] = now.Add(min(time.Unix(a.Expires, 0).Sub(now), MaxTTL))
		if known[addr].Before(now) {
			// assume that a connection exists, because no datapath has reported to this process yet
			t.used[addr] = now
		}
		learned.Addrs = append(learned.Addrs, addr)
	}
	t.names[r.Name] = known
	t.addresses += len(known)
	t.noteTimes(r.Name)
	if at, ok := t.endsFirst(r.Name); ok {
		wake = at.Add(t.grace())
	}
	return learned, wake, nil
}

// Record returns the record to store for a name.
func (t *Table) Record(name string) record.Cache {
	addrs, ok := t.names[name]
	if !ok {
		return record.Cache{GoneNames: []string{name}}
	}
	r := record.Name{Name: name}
	for a, until := range addrs {
		r.Addresses = append(r.Addresses, record.Address{Address: a.String(), Expires: until.Unix()})
	}
	return record.Cache{Names: []record.Name{r}}
}

// Expire removes the addresses whose TTL and grace period are over and which no connection uses. It returns the removed
// addresses, and the time at which to call it again; zero: never.
func (t *Table) Expire(now time.Time) (gone []engine.Name, wake time.Time) {
	grace := t.grace()
	defer maps.DeleteFunc(t.used, func(_ netip.Addr, used time.Time) bool { return !used.Add(grace).After(now) })
	for {
		name, at, ok := t.ending.First(t.endsFirst)
		if !ok {
			return gone, time.Time{}
		}
		if end := at.Add(grace); end.After(now) {
			return gone, end
		}
		var over []netip.Addr
		for a, until := range t.names[name] {
			if !t.end(a, until).Add(grace).After(now) {
				over = append(over, a)
			}
		}
		gone = append(gone, t.forget(name, over))
	}
}

// Hold extends the time of the addresses in inUse by HoldFor, because connections use them. It returns the addresses
// whose TTLs have expired, earliest first. The caller then looks for connections to these addresses, and passes the
// addresses that have connections to the next call.
func (t *Table) Hold(inUse []netip.Addr, now time.Time) (expiring []netip.Addr) {
	for _, a := range inUse {
		a = a.Unmap()
		if _, ok := t.asked[a]; ok {
			t.used[a] = now
		}
	}
	ends := make(map[netip.Addr]time.Time)
	for _, addrs := range t.names {
		for a, until := range addrs {
			if end := t.end(a, until); until.Before(now) && ends[a].Before(end) {
				ends[a] = end
			}
		}
	}
	expiring = slices.Collect(maps.Keys(ends))
	slices.SortFunc(expiring, func(a, b netip.Addr) int { return cmp.Or(ends[a].Compare(ends[b]), a.Compare(b)) })
	expiring = expiring[:min(len(expiring), maxExpiring)]
	maps.DeleteFunc(t.used, func(a netip.Addr, _ time.Time) bool { _, ok := ends[a]; return !ok })
	t.asked = make(map[netip.Addr]struct{}, len(expiring))
	for _, a := range expiring {
		t.asked[a] = struct{}{}
	}
	return expiring
}

// end returns when the grace period of an address begins: at the end of its TTL or at its last reported connection,
// whichever is later.
func (t *Table) end(a netip.Addr, until time.Time) time.Time {
	if used := t.used[a]; used.After(until) {
		return used
	}
	return until
}

// grace returns how long an address is kept after the time that end returns.
func (t *Table) grace() time.Duration {
	if t.asked == nil && len(t.used) == 0 {
		return t.limits.Grace
	}
	return max(t.limits.Grace, HoldFor)
}

// endsFirst returns when the first address of a name ends.
func (t *Table) endsFirst(name string) (time.Time, bool) {
	return t.ends(name, func(a, b time.Time) bool { return a.Before(b) })
}

// endsLast returns when the last address of a name ends.
func (t *Table) endsLast(name string) (time.Time, bool) {
	return t.ends(name, func(a, b time.Time) bool { return a.After(b) })
}

func (t *Table) ends(name string, better func(a, b time.Time) bool) (at time.Time, ok bool) {
	for a, until := range t.names[name] {
		if end := t.end(a, until); !ok || better(end, at) {
			at, ok = end, true
		}
	}
	return at, ok
}

// noteTimes adds a name to the expiry queues.
func (t *Table) noteTimes(name string) {
	if at, ok := t.endsFirst(name); ok {
		t.ending.Note(name, at)
	}
	if at, ok := t.endsLast(name); ok {
		t.ended.Note(name, at)
	}
}

// forget removes addresses of a name.
func (t *Table) forget(name string, addrs []netip.Addr) engine.Name {
	for _, a := range addrs {
		delete(t.names[name], a)
	}
	t.addresses -= len(addrs)
	if len(t.names[name]) == 0 {
		delete(t.names, name)
	}
	return engine.Name{Name: name, Addrs: addrs}
}
