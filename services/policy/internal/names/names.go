// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package names implements the table of learned DNS names and their addresses. Pods share the capacity of the table.
// When the table is full, it decides which addresses are removed. It also removes addresses that no connection uses
// after their TTL and grace period.
//
// The package changes only the table. The caller applies the results to the engine and to stable storage.
package names

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/podshares"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/expiryqueue"
	"github.com/sluice-net/sluice/services/policy/internal/record"
)

// Limits of the TTL of a DNS answer.
const (
	minTTL = time.Minute
	MaxTTL = 7 * 24 * time.Hour
)

// maxPerName limits the addresses of one name, so that a name with continually changing addresses cannot use up the
// capacity.
const maxPerName = 1024

// HoldFor is the minimum time for which an address is kept after its TTL has ended and after each report of a
// connection to it. It applies as soon as a datapath has reported connections. It is longer than several report
// intervals and longer than a restart of the datapath.
const HoldFor = 5 * time.Minute

// reportedWithin is the time after the end of its TTL in which a connection to an address is reported.
const reportedWithin = 2 * time.Minute

// maxNoneBefore limits the namespaces that FreeTables remembers.
const maxNoneBefore = 1024

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
	limits Limits
	names  map[string]map[netip.Addr]time.Time // end of each address's TTL; by the text of a dnsname.Learned
	ending expiryqueue.Queue                   // names, ordered by the time when their first address ends
	ended  expiryqueue.Queue                   // names, ordered by the time when their last address ends
	payers map[string]*payers                  // by name
	shares *podshares.Accounts
	// used contains the time of the last reported connection to each address with an expired TTL. asked contains the
	// addresses that the last call of Hold returned; nil: Hold was never called.
	used  map[netip.Addr]time.Time
	asked map[netip.Addr]struct{}
	// noneBefore is when FreeTables looks again for addresses of a namespace in which it has found none.
	noneBefore map[string]time.Time
}

// New returns an empty table.
func New(l Limits) *Table {
	return &Table{
		limits: l, names: make(map[string]map[netip.Addr]time.Time), used: make(map[netip.Addr]time.Time),
		payers: make(map[string]*payers), noneBefore: make(map[string]time.Time),
		shares: podshares.New(unpaid, l.Names, l.Addresses),
	}
}

// Len returns the number of names.
func (t *Table) Len() int { return len(t.names) }

// Addresses returns the number of addresses of all names.
func (t *Table) Addresses() int { return t.shares.Total(ofAddresses) }

// maxPassedOver limits how many names one call visits to find expired addresses that it may remove.
const maxPassedOver = 64

// FreeCapacity frees capacity for addresses of a name; the asker pays for them. name is the text of a
// dnsname.Learned. FreeCapacity returns the addresses that the name does not have yet, and the addresses that it has
// removed. It may have removed addresses even if it returns an error.
func (t *Table) FreeCapacity(by Asker, name string, addrs []netip.Addr, now time.Time) (
	fresh []netip.Addr, gone []engine.Name, err error,
) {
	t.shares.Open(by.Endpoint, by.Tenant)
	defer t.shares.Close(by.Endpoint)
	f := freeing{Table: t, by: by.Endpoint, seen: make(map[netip.Addr]bool), now: now}
	known := t.names[name]
	for _, a := range addrs {
		a = a.Unmap()
		if _, ok := known[a]; !ok && !f.seen[a] {
			fresh = append(fresh, a)
		}
		f.seen[a] = true
	}
	n := len(fresh)
	if over := len(known) + n - maxPerName; over > 0 {
		f.evictExpired(name, over, func(uint32) bool { return true })
	}
	if n > 0 {
		f.freeExpired(ofAddresses, n)
	}
	if t.names[name] == nil {
		f.freeExpired(ofNames, 1)
	}
	switch {
	case t.names[name] == nil && !t.shares.Admits(by.Endpoint, ofNames, 1):
		err = t.exhausted(ofNames, "DNS names")
	case n > 0 && !t.shares.Admits(by.Endpoint, ofAddresses, n):
		err = t.exhausted(ofAddresses, "addresses of DNS names")
	case !f.shrink(name, n):
		err = fmt.Errorf("%s has %d valid addresses, the limit is %d", name, len(t.names[name]), maxPerName)
	case !f.evict(ofAddresses, n) || t.names[name] == nil && !f.evict(ofNames, 1):
		err = fmt.Errorf("%d DNS names have %d addresses, and none of them can be removed at present",
			t.shares.Total(ofNames), t.shares.Total(ofAddresses))
	}
	return fresh, f.gone, err
}

// FreeTables removes at most n expired addresses without a known connection, the oldest first. Call it if the table of
// a subject is full. It removes only addresses of the answer's families, and of names that only pods of the asker's
// namespace use, so other namespaces lose nothing. It returns nil if it has removed no address.
func (t *Table) FreeTables(by Asker, answer []netip.Addr, n int, now time.Time) (gone []engine.Name) {
	if by.Namespace == nil || now.Before(t.noneBefore[*by.Namespace]) {
		return nil
	}
	before := now
	if t.asked != nil { // datapaths report connections
		before = now.Add(-reportedWithin)
	}
	keep, families := make(map[netip.Addr]bool), [2]bool{}
	for _, a := range answer {
		a = a.Unmap()
		keep[a] = true
		families[a.BitLen()/128] = true
	}
	var all []candidate
	for name, addrs := range t.names {
		if own, limited := dnsname.Learned(name).Namespace(); !limited || own != *by.Namespace {
			continue
		}
		for a, until := range addrs {
			if _, used := t.used[a]; until.Before(before) && !used && !keep[a] && families[a.BitLen()/128] {
				all = append(all, candidate{name, a, until})
			}
		}
	}
	delete(t.noneBefore, *by.Namespace)
	if len(all) == 0 {
		if len(t.noneBefore) >= maxNoneBefore {
			clear(t.noneBefore)
		}
		t.noneBefore[*by.Namespace] = now.Add(time.Second)
		return nil
	}
	slices.SortFunc(all, candidate.compare)
	addrs := make(map[string][]netip.Addr)
	for _, c := range all[:min(n, len(all))] {
		addrs[c.name] = append(addrs[c.name], c.addr)
	}
	for _, name := range slices.Sorted(maps.Keys(addrs)) {
		gone = append(gone, t.forget(name, addrs[name]))
	}
	return gone
}

// exhausted returns the error for an asker that has used up its share of a limit.
func (t *Table) exhausted(bound int, what string) error {
	if total := t.shares.Total(bound); total < t.shares.Size(bound) {
		return fmt.Errorf("the pod's share of the maximum of %d %s is used up; %d are in use",
			t.shares.Size(bound), what, total)
	}
	return fmt.Errorf("the maximum of %d %s is reached", t.shares.Size(bound), what)
}

// freeing is a call of FreeCapacity.
type freeing struct {
	*Table
	by   uint32
	seen map[netip.Addr]bool // the addresses of the answer itself, which must not be removed
	now  time.Time
	gone []engine.Name
}

// spares reports whether the caller may remove expired addresses for which an endpoint pays.
func (f *freeing) spares(payer uint32) bool { return payer == f.by || payer == unpaid }

// evictExpired removes addresses of a name that are kept only for old connections, if may returns true for their
// payers. It removes addresses without a known connection first, and the oldest of them first.
func (f *freeing) evictExpired(name string, need int, may func(payer uint32) bool) {
	var over []netip.Addr
	known := f.names[name]
	for a, until := range known {
		if until.Before(f.now) && !f.seen[a] && may(f.payers[name].of(a)) {
			over = append(over, a)
		}
	}
	slices.SortFunc(over, func(a, b netip.Addr) int {
		return cmp.Or(f.used[a].Compare(f.used[b]), known[a].Compare(known[b]), a.Compare(b))
	})
	f.remove(name, over[:min(need, len(over))])
}

func (f *freeing) remove(name string, addrs []netip.Addr) {
	if len(addrs) > 0 {
		f.gone = append(f.gone, f.forget(name, addrs))
	}
}

// freeExpired removes expired addresses, or names with only expired addresses, until n more fit into the caller's
// share.
func (f *freeing) freeExpired(bound, n int) {
	full := func() bool { return !f.shares.Admits(f.by, bound, n) }
	if bound == ofAddresses {
		f.visit(&f.ending, f.endsFirst, full, func(name string) {
			f.evictExpired(name, max(1, f.shares.Missing(ofAddresses, n)), f.spares)
		})
		return
	}
	f.visit(&f.ended, f.endsLast, full, func(name string) {
		if f.spares(f.payers[name].name) {
			f.remove(name, slices.Collect(maps.Keys(f.names[name])))
		}
	})
}

// visit calls free for the expired names, in the order of their expiry, while full returns true.
func (f *freeing) visit(
	q *expiryqueue.Queue, when func(string) (time.Time, bool), full func() bool, free func(name string),
) {
	var passed []string // names from which nothing was removed
	for len(passed) < maxPassedOver && full() {
		name, at, ok := q.First(when)
		if !ok || !at.Before(f.now) {
			break
		}
		had := len(f.names[name])
		if free(name); len(f.names[name]) == had {
			q.Drop()
			passed = append(passed, name)
		}
	}
	for _, name := range passed {
		f.noteTimes(name)
	}
}

// evict removes names or addresses until n more fit. It takes them from the endpoints that are furthest above their
// guarantees, earliest expiry first. The caller is within its guarantee for n more; so if n do not fit, other
// endpoints are above theirs.
func (f *freeing) evict(bound, n int) (fits bool) {
	for f.shares.Missing(bound, n) > 0 {
		victim, count := f.shares.Victim(bound, n)
		all := f.paidBy(victim, bound)
		all = all[:min(count, len(all))]
		if len(all) == 0 {
			return false
		}
		addrs := make(map[string][]netip.Addr)
		for _, c := range all {
			if bound == ofNames {
				addrs[c.name] = slices.Collect(maps.Keys(f.names[c.name]))
			} else {
				addrs[c.name] = append(addrs[c.name], c.addr)
			}
		}
		for _, name := range slices.Sorted(maps.Keys(addrs)) {
			f.remove(name, addrs[name])
		}
	}
	return true
}

// paidBy returns the names or addresses for which an endpoint pays, earliest expiry first.
func (f *freeing) paidBy(endpoint uint32, bound int) (all []candidate) {
	for name, addrs := range f.names {
		p := f.payers[name]
		if bound == ofNames {
			if at, ok := f.endsLast(name); ok && p.name == endpoint {
				all = append(all, candidate{name: name, at: at})
			}
			continue
		}
		for a, until := range addrs {
			if p.of(a) == endpoint && !f.seen[a] {
				all = append(all, candidate{name, a, f.end(a, until)})
			}
		}
	}
	slices.SortFunc(all, candidate.compare)
	return all
}

// candidate is an address or a name that may be evicted.
type candidate struct {
	name string
	addr netip.Addr
	at   time.Time // when it ends
}

func (c candidate) compare(o candidate) int {
	return cmp.Or(c.at.Compare(o.at), strings.Compare(c.name, o.name), c.addr.Compare(o.addr))
}

// shrink makes capacity in a name that has the maximum number of addresses. It removes valid addresses if the caller
// pays for less than its part of the name. The tenants whose pods ask for the name have equal parts, which the pods
// of each tenant divide equally. Without this, one pod could fill a name so that no other pod can learn addresses of
// the name. shrink reports whether n more addresses fit.
func (f *freeing) shrink(name string, n int) (fits bool) {
	over := len(f.names[name]) + n - maxPerName
	if over <= 0 {
		return true
	}
	p := f.payers[name]
	count := map[uint32]int{f.by: 0}
	for a := range f.names[name] {
		count[p.of(a)]++
	}
	pods := make(map[string]int)
	for e := range count {
		if e != unpaid {
			pods[f.shares.Tenant(e)]++
		}
	}
	part := func(endpoint uint32) int {
		if endpoint == unpaid {
			return 0
		}
		return podshares.Part(maxPerName, len(pods), pods[f.shares.Tenant(endpoint)])
	}
	if count[f.by]+n > part(f.by) {
		return false
	}
	var all []candidate
	for a, until := range f.names[name] {
		if !f.seen[a] {
			all = append(all, candidate{name, a, until})
		}
	}
	slices.SortFunc(all, candidate.compare)
	var addrs []netip.Addr
	for _, c := range all {
		if e := p.of(c.addr); len(addrs) < over && count[e] > part(e) {
			addrs, count[e] = append(addrs, c.addr), count[e]-1
		}
	}
	if len(addrs) < over {
		return false
	}
	f.remove(name, addrs)
	return true
}

// Add stores the addresses of a name for their TTL. The caller must call FreeCapacity first. Add returns the time at
// which to call Expire, and whether the stored record of the name must be updated.
func (t *Table) Add(by Asker, name string, addrs []netip.Addr, ttl time.Duration, now time.Time) (
	wake time.Time, changed bool,
) {
	t.shares.Open(by.Endpoint, by.Tenant)
	defer t.shares.Close(by.Endpoint)
	until := now.Add(min(max(ttl, minTTL), MaxTTL))
	known := t.names[name]
	if known == nil {
		known = make(map[netip.Addr]time.Time)
		t.create(by.Endpoint, name, known)
	}
	p := t.payers[name]
	for _, a := range addrs {
		a = a.Unmap()
		if _, ok := known[a]; !ok {
			t.shares.Charge(by.Endpoint, ofAddresses, 1)
			p.set(a, by.Endpoint)
		} else if e := p.of(a); e != by.Endpoint && t.shares.Within(by.Endpoint, ofAddresses, 1) {
			// A pod within its guarantee pays for the addresses that it uses. Otherwise these addresses could be
			// evicted because the pod that learned them first exceeds its share.
			t.shares.Move(e, by.Endpoint, ofAddresses)
			p.set(a, by.Endpoint)
		}
		if until.After(known[a]) {
			known[a] = until
			changed = true
		}
	}
	if p.name != by.Endpoint && t.shares.Within(by.Endpoint, ofNames, 1) {
		t.shares.Move(p.name, by.Endpoint, ofNames)
		p.rename(by.Endpoint, known)
	}
	t.noteTimes(name)
	return until.Add(t.grace()), changed
}

// create adds a name for which an endpoint pays.
func (t *Table) create(payer uint32, name string, addrs map[netip.Addr]time.Time) {
	t.names[name], t.payers[name] = addrs, &payers{name: payer}
	t.shares.Charge(payer, ofNames, 1)
}

// Restore adds a stored record. It returns the addresses of the name, and the time at which to call Expire.
func (t *Table) Restore(r record.Name, now time.Time) (learned engine.Name, wake time.Time, err error) {
	// Convert the stored time to a remaining TTL, so that later changes of the wall clock have no effect. The
	// remaining TTL exceeds MaxTTL only if the wall clock was ahead when the address was learned.
	name := string(r.Key())
	learned.Name = r.Key()
	known := make(map[netip.Addr]time.Time, len(r.Addresses))
	for _, a := range r.Addresses {
		addr, err := netip.ParseAddr(a.Address)
		if err != nil {
			return learned, wake, fmt.Errorf("stored name %s: %w", r.Name, err)
		}
		known[addr] = now.Add(min(time.Unix(a.Expires, 0).Sub(now), MaxTTL))
		if known[addr].Before(now) {
			// Assume that a connection exists, because no datapath has reported to this process yet.
			t.used[addr] = now
		}
		learned.Addrs = append(learned.Addrs, addr)
	}
	t.create(unpaid, name, known)
	t.shares.Charge(unpaid, ofAddresses, len(known))
	t.noteTimes(name)
	if at, ok := t.endsFirst(name); ok {
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
	r := record.NewName(dnsname.Learned(name))
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

// Hold keeps the addresses in inUse for another HoldFor, because connections use them. It returns the addresses whose
// TTLs have expired, earliest first. The caller then looks for connections to the returned addresses, and passes the
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
	p := t.payers[name]
	for _, a := range addrs {
		t.shares.Charge(p.of(a), ofAddresses, -1)
		delete(t.names[name], a)
		delete(p.others, a)
	}
	if len(t.names[name]) == 0 {
		t.shares.Charge(p.name, ofNames, -1)
		delete(t.names, name)
		delete(t.payers, name)
	}
	return engine.Name{Name: dnsname.Learned(name), Addrs: addrs}
}
