// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package names has the table of the DNS names that were learned: until when each
// of their addresses is valid, and which go when there is no room, or when their
// time and grace are over and no connection uses them.
//
// It changes nothing but the table. The caller takes what it answers to the engine
// and to stable storage.
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

// How long an answer of the DNS may say that it is valid.
const (
	minTTL = time.Minute
	MaxTTL = 7 * 24 * time.Hour
)

// maxPerName is how many addresses one name may have, so that one whose
// addresses change all the time does not use up the room of all others.
const maxPerName = 1024

// HoldFor is how long an address at least stays after its time, and after each report of
// a connection to it, once datapaths report. It covers several reports and a restart of the
// datapath.
const HoldFor = 5 * time.Minute

// maxExpiring bounds the addresses that one Hold returns.
const maxExpiring = 16_384

// Limits are fixed for the life of a table.
type Limits struct {
	Names     int
	Addresses int // of all names together
	// Grace is how long an address stays after its time.
	Grace time.Duration
}

// Table has the names with their addresses. It belongs to one goroutine.
type Table struct {
	limits    Limits
	names     map[string]map[netip.Addr]time.Time // until when each is valid
	ending    expiryqueue.Queue                   // names by the time of the address that ends first
	ended     expiryqueue.Queue                   // names by the time of the address that ends last
	addresses int
	// used says when a connection to an address was last reported, of addresses whose
	// time is over. asked are the addresses of the last answer of Hold; nil: it was never
	// called.
	used  map[netip.Addr]time.Time
	asked map[netip.Addr]struct{}
}

// New returns an empty table.
func New(l Limits) *Table {
	return &Table{
		limits: l, names: make(map[string]map[netip.Addr]time.Time), used: make(map[netip.Addr]time.Time),
	}
}

// Len is how many names there are.
func (t *Table) Len() int { return len(t.names) }

// Addresses is how many addresses all names have together.
func (t *Table) Addresses() int { return t.addresses }

// Room makes room for addresses of a name. It says which of them are fresh and
// what is gone from the table for them, which may be something even if there is
// no room in the end.
func (t *Table) Room(name string, addrs []netip.Addr, now time.Time) (
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
	// Addresses that are only kept for old connections make room: first those that no
	// connection is known to use, the oldest first.
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
		// The name whose time is over since longest goes, if there is one.
		if last, at, ok := t.ended.First(t.endsLast); ok && at.Before(now) {
			gone = append(gone, t.forget(last, slices.Collect(maps.Keys(t.names[last]))))
		}
	}
	var skipped []string // nothing of them may go
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
		err = fmt.Errorf("%d DNS names are remembered", len(t.names))
	case len(known)+len(fresh) > maxPerName:
		err = fmt.Errorf("%s has %d addresses that are valid, the limit is %d", name, len(known)+len(fresh), maxPerName)
	case t.addresses+len(fresh) > t.limits.Addresses:
		err = fmt.Errorf("%d addresses of DNS names are remembered", t.addresses)
	}
	return fresh, gone, err
}

// Add has the addresses of a name, for which Room has made room, for as long as
// they are valid. It says when Expire has something to do for them, and whether
// the record of the name is another.
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

// Restore takes a record over. It says which addresses the name has, and when
// Expire has something to do for them.
func (t *Table) Restore(r record.Name, now time.Time) (learned engine.Name, wake time.Time, err error) {
	// What is left of its time counts from now on, so that a wall clock which is set
	// while the process runs moves nothing. Nothing is valid for longer than MaxTTL,
	// unless the clock was ahead when it was learned.
	learned.Name = r.Name
	known := make(map[netip.Addr]time.Time, len(r.Addresses))
	for _, a := range r.Addresses {
		addr, err := netip.ParseAddr(a.Address)
		if err != nil {
			return learned, wake, fmt.Errorf("stored name %s: %w", r.Name, err)
		}
		known[addr] = now.Add(min(time.Unix(a.Expires, 0).Sub(now), MaxTTL))
		if known[addr].Before(now) {
			t.used[addr] = now // perhaps: no datapath has reported to this process yet
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

// Record is what has to be kept of a name.
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

// Expire drops the addresses whose time and grace are over and which no connection
// holds. It returns what is gone, and when it has to be called again; zero: never.
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

// Hold keeps addresses that connections use, of those that the call before returned,
// for HoldFor. It returns the addresses whose time is over, those that end first
// first, so that the caller looks for connections to them.
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

// end returns when the grace of an address begins: when its time is over, or when a
// connection to it was last reported.
func (t *Table) end(a netip.Addr, until time.Time) time.Time {
	if used := t.used[a]; used.After(until) {
		return used
	}
	return until
}

// grace returns how long addresses stay after their end.
func (t *Table) grace() time.Duration {
	if t.asked == nil && len(t.used) == 0 {
		return t.limits.Grace
	}
	return max(t.limits.Grace, HoldFor)
}

// endsFirst is when the first address of a name ends.
func (t *Table) endsFirst(name string) (time.Time, bool) {
	return t.ends(name, func(a, b time.Time) bool { return a.Before(b) })
}

// endsLast is when all addresses of a name have ended.
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

// noteTimes puts a name into the expiry queues.
func (t *Table) noteTimes(name string) {
	if at, ok := t.endsFirst(name); ok {
		t.ending.Note(name, at)
	}
	if at, ok := t.endsLast(name); ok {
		t.ended.Note(name, at)
	}
}

// forget drops addresses of a name.
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
