// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ipam

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/workload"
	"github.com/sluice-net/sluice/services/ipam/internal/pool"
)

// ledger contains the state in memory, and the rules for changing it. It does not write to the store: takeChanges
// returns the changes since its last call, which the caller commits. Only one goroutine may use it.
type ledger struct {
	lease, rest time.Duration
	families    []Family // default for requests without families; empty: the families of the serving ranges
	pools       []*poolState
	held        map[workload.Owner]*entry
	all         []*entry // the entries of held, in any order, so that a listing is one copy
	addrs       map[netip.Addr]use
	leases      agenda[workload.Owner]
	rests       agenda[netip.Addr]
	primary     []netip.Prefix // at most one per family, IPv4 first; not all of them need be in pools
	moved       bool           // primary differs from the primary ranges in the store
	outside     uint64
	changes     Changes
	// asks means that an address is not free at the end of its quarantine, but waits until reuse is called.
	asks    bool
	waiting agenda[netip.Addr] // sorted by the end of their quarantine
	why     string             // why the addresses in waiting may not be reused, for messages
	spaces  *quarantines
}

type poolState struct {
	*pool.Pool
	draining                       bool
	refused                        string     // why the cluster refuses the range; empty: it does not
	kept                           bool       // the range belongs to the node although it is refused
	stored                         netip.Addr // search position in the store
	leased, confirmed, quarantined uint64
	// free addresses that were used before, sorted by the end of their quarantine
	rested agenda[netip.Addr]
}

type entry struct {
	*Allocation
	expiry *deadline[workload.Owner] // nil if confirmed
	index  int                       // in ledger.all
}

// use is the state of an address that has or had an owner.
type use struct {
	owner  workload.Owner
	rest   *deadline[netip.Addr] // set while the address is in quarantine or waits after that
	rested *deadline[netip.Addr] // set if the address is free and was used before
}

// newLedger builds the index of the stored content and the leases, which are not stored. It omits leases whose owner
// or address is in the store. The former pools drain.
//
// Stored times are wall clock times, and the clock may have been set while the process was down. A deadline is not
// extended by a restart, and is never later than the configuration allows. A later deadline was written with another
// clock or configuration; it is moved to the earlier time, also in the store.
func newLedger(
	serving, former []*pool.Pool, c *Contents, leases []*Allocation, lease, rest time.Duration, now time.Time,
) (*ledger, error) {
	l := &ledger{
		lease: lease, rest: rest, primary: c.Primary, rests: ofAddresses(), waiting: ofAddresses(),
		spaces: newQuarantines(),
		held:   make(map[workload.Owner]*entry, len(c.Allocations)),
		addrs:  make(map[netip.Addr]use, 2*len(c.Allocations)+len(c.Quarantined)),
	}
	for i, p := range slices.Concat(serving, former) {
		if at, ok := c.Cursors[p.Prefix()]; ok && p.Contains(at) {
			p.SetCursor(at)
		}
		s := &poolState{Pool: p, draining: i >= len(serving), stored: p.Cursor(), rested: ofAddresses()}
		for _, r := range c.Refused {
			if r.Prefix == p.Prefix() {
				s.refused, s.kept = r.Reason, r.Kept
			}
		}
		l.pools = append(l.pools, s)
	}
	for _, a := range c.Allocations {
		if _, ok := l.held[a.Owner]; ok {
			return nil, fmt.Errorf("%w: owner %s is listed twice", ErrInconsistent, a.Owner)
		}
		for _, x := range a.Addresses {
			if u, ok := l.addrs[x.Addr]; ok {
				return nil, fmt.Errorf("%w: %s is held by %s and by %s", ErrInconsistent, x.Addr, u.owner, a.Owner)
			}
		}
		l.hold(a)
	}
	for _, r := range c.Quarantined {
		if u, ok := l.addrs[r.Addr]; ok {
			return nil, fmt.Errorf("%w: %s is in quarantine and is held by %s", ErrInconsistent, r.Addr, u.owner)
		}
		until, late := soonest(r.Until, now, rest)
		if late {
			l.changed().Quarantined[r.Addr] = until
		}
		if p := l.poolFor(r.Addr); p != nil {
			p.Take(r.Addr)
		}
		l.lay(r.Addr, until)
	}
	for _, a := range leases {
		taken := slices.ContainsFunc(a.Addresses, func(x Address) bool { _, ok := l.addrs[x.Addr]; return ok })
		if taken || l.held[a.Owner] != nil {
			continue
		}
		expires, _ := soonest(a.Expires, now, lease)
		l.hold(&Allocation{Owner: a.Owner, Addresses: a.Addresses, State: Leased, Expires: expires, Manager: a.Manager})
	}
	l.dropEmptied()
	l.choosePrimary()
	return l, nil
}

// hold adds an allocation, and marks its addresses as taken.
func (l *ledger) hold(a *Allocation) {
	l.enter(a)
	for _, x := range a.Addresses {
		l.addrs[x.Addr] = use{owner: a.Owner}
		if p := l.poolFor(x.Addr); p != nil {
			p.Take(x.Addr)
		}
	}
}

// goOn restores the search position of each pool, and the order in which its released addresses are reused.
func (l *ledger) goOn(pools []*poolState) {
	for _, p := range l.pools {
		for _, q := range pools {
			if p.Prefix() != q.Prefix() {
				continue
			}
			p.SetCursor(q.Cursor())
			for d := q.rested.first(); d != nil; d = q.rested.first() {
				q.rested.remove(d)
				if _, used := l.addrs[d.key]; !used && p.Take(d.key) {
					l.addrs[d.key] = use{rested: p.rested.add(d.at, d.key)}
				}
			}
		}
	}
}

// leased returns the allocations that are not confirmed.
func (l *ledger) leased() (leases []*Allocation) {
	for _, e := range l.all {
		if e.State == Leased {
			leases = append(leases, e.Allocation)
		}
	}
	return leases
}

// serving returns the ranges from which new addresses are allocated, unless the cluster refuses them.
func (l *ledger) serving() (ranges []netip.Prefix) {
	ranges = []netip.Prefix{}
	for _, p := range l.pools {
		if !p.draining {
			ranges = append(ranges, p.Prefix())
		}
	}
	return ranges
}

// setRanges stores the ranges that new addresses are allocated from. It returns an error if one of them overlaps
// another range that has addresses in use.
func (l *ledger) setRanges(field string, pools []*pool.Pool) error {
	ranges := make([]netip.Prefix, 0, len(pools))
	for i, p := range pools {
		ranges = append(ranges, p.Prefix())
		for _, q := range l.pools {
			if q.Prefix() != p.Prefix() && q.held() > 0 && q.Prefix().Overlaps(p.Prefix()) {
				return fmt.Errorf("%s[%d]: %s overlaps %s, of which %d addresses are in use",
					field, i, p.Prefix(), q.Prefix(), q.held())
			}
		}
	}
	if l.changes.Serving != nil || !slices.Equal(ranges, l.serving()) {
		l.changed().Serving = ranges
	}
	return nil
}

// retire removes a serving range that is not primary and has no address in use or in quarantine. From now on no
// address of it is allocated.
func (l *ledger) retire(prefix netip.Prefix) bool {
	for _, p := range l.pools {
		if p.Prefix() == prefix && !p.draining && p.held() == 0 && p.quarantined == 0 && !l.isPrimary(p) {
			p.draining = true
			l.changed().Serving = l.serving()
			return true
		}
	}
	return false
}

// choosePrimary chooses the primary range of each family. The present one stays primary while the node has it.
// Otherwise the first serving range in the order of use becomes primary, or else a draining one. If a family has no
// range, its primary range is kept in case it comes back. The choice depends only on stored and configured data, so it
// needs no commit of its own.
func (l *ledger) choosePrimary() {
	var next []netip.Prefix
	for _, f := range []Family{IPv4, IPv6} {
		i := slices.IndexFunc(l.primary, func(p netip.Prefix) bool { return FamilyOf(p.Addr()) == f })
		kept := func(p *poolState) bool { return i >= 0 && p.Prefix() == l.primary[i] && !p.lost() }
		serves := func(p *poolState) bool { return p.serves(f) }
		drains := func(p *poolState) bool { return p.Is4() == (f == IPv4) && !p.lost() }
		at := -1
		for _, good := range []func(*poolState) bool{kept, serves, drains} {
			if at < 0 {
				at = slices.IndexFunc(l.pools, good)
			}
		}
		switch {
		case at >= 0:
			next = append(next, l.pools[at].Prefix())
		case i >= 0:
			next = append(next, l.primary[i])
		}
	}
	l.moved = l.moved || !slices.Equal(next, l.primary)
	l.primary = next
}

func (l *ledger) isPrimary(p *poolState) bool { return slices.Contains(l.primary, p.Prefix()) }

// setRefused records which ranges the cluster refuses.
func (l *ledger) setRefused(list []Refusal) {
	same := func(p *poolState) bool {
		for _, r := range list {
			if r.Prefix == p.Prefix() {
				return p.refused == r.Reason && p.kept == r.Kept
			}
		}
		return p.refused == ""
	}
	for _, p := range l.pools {
		if !same(p) {
			l.changed().Refused = append([]Refusal{}, list...)
			return
		}
	}
}

// dropEmptied removes draining ranges that have no allocated addresses, and reports whether it removed one.
func (l *ledger) dropEmptied() bool {
	n := len(l.pools)
	l.pools = slices.DeleteFunc(l.pools, func(p *poolState) bool { return p.draining && p.held() == 0 })
	return len(l.pools) < n
}

// soonest converts a stored time to the clock of this process. If it is later than the latest allowed time, soonest
// returns that time and true.
func soonest(stored, now time.Time, most time.Duration) (time.Time, bool) {
	if limit := now.Add(most); stored.After(limit) {
		return limit, true
	}
	// Add the duration to the current time, so that the monotonic clock counts and not the wall clock.
	return now.Add(stored.Sub(now)), false
}

func (l *ledger) changed() *Changes {
	if l.changes.Allocations == nil {
		l.changes = Changes{
			Allocations: map[workload.Owner]*Allocation{},
			Quarantined: map[netip.Addr]time.Time{},
			Cursors:     map[netip.Prefix]netip.Addr{},
		}
	}
	return &l.changes
}

// takeChanges returns the changes to commit. It adds the search positions and primary ranges that have changed since
// the last call, but these do not require a commit by themselves.
func (l *ledger) takeChanges() *Changes {
	c := l.changes
	l.changes = Changes{}
	if c.Empty() {
		return &c
	}
	if l.moved {
		c.Primary, l.moved = l.primary, false
	}
	for _, p := range l.pools {
		if at := p.Cursor(); at != p.stored {
			c.Cursors[p.Prefix()], p.stored = at, at
		}
	}
	return &c
}

// poolFor returns the pool from which an address may be allocated, or nil.
func (l *ledger) poolFor(a netip.Addr) *poolState {
	for _, p := range l.pools {
		if p.Contains(a) {
			if p.Reserved(a) {
				return nil
			}
			return p
		}
	}
	return nil
}

// enter adds an allocation to the index.
func (l *ledger) enter(a *Allocation) {
	e := &entry{Allocation: a, index: len(l.all)}
	l.all = append(l.all, e)
	if a.State == Leased {
		e.expiry = l.leases.add(a.Expires, a.Owner)
	}
	l.held[a.Owner] = e
	l.count(a, 1)
}

// leave removes an allocation from the index. Its addresses stay taken.
func (l *ledger) leave(e *entry) {
	l.leases.remove(e.expiry)
	delete(l.held, e.Owner)
	delete(l.spaces.owners, e.Owner)
	last := l.all[len(l.all)-1]
	l.all[e.index], last.index = last, e.index
	l.all[len(l.all)-1] = nil
	l.all = l.all[:len(l.all)-1]
	l.count(e.Allocation, ^uint64(0))
}

// count adds n, which is 1 or -1, to the counts of an allocation's addresses.
func (l *ledger) count(a *Allocation, n uint64) {
	for _, x := range a.Addresses {
		switch p := l.poolFor(x.Addr); {
		case p == nil:
			l.outside += n
		case a.State == Leased:
			p.leased += n
		default:
			p.confirmed += n
		}
	}
}

// replace replaces an allocation in the index by a new version.
func (l *ledger) replace(a *Allocation) {
	namespace := l.spaces.owners[a.Owner]
	if e := l.held[a.Owner]; e != nil {
		l.leave(e)
	}
	l.enter(a)
	l.spaces.holds(a.Owner, namespace)
}

// lay records that an address is in quarantine.
func (l *ledger) lay(a netip.Addr, until time.Time) {
	l.addrs[a] = use{rest: l.rests.add(until, a)}
	if p := l.poolFor(a); p != nil {
		p.quarantined++
	}
}

// free returns an address to its pool.
func (l *ledger) free(a netip.Addr) {
	delete(l.addrs, a)
	if p := l.poolFor(a); p != nil {
		p.Put(a)
	}
}

// allocate answers a request. If it fails or only validates, it changes nothing.
func (l *ledger) allocate(now time.Time, r Request) (*Allocation, error) {
	if err := r.Owner.Check(); err != nil {
		return nil, &FieldError{Field: "owner", Text: err.Error(), Kind: ErrBadRequest}
	}
	families, wanted, err := l.resolve(r)
	if err != nil {
		return nil, err
	}
	next := &Allocation{Owner: r.Owner, State: Leased, Expires: now.Add(l.lease), Manager: r.Manager}
	if e := l.held[r.Owner]; e != nil {
		if err := sameContent(e.Allocation, r); err != nil {
			return nil, err
		}
		if e.State == Confirmed {
			return e.Allocation, nil
		}
		next.Addresses = e.Addresses
		if !r.ValidateOnly {
			l.replace(next)
		}
		return next, nil
	}
	for _, f := range families {
		a, p, err := l.choose(f, wanted[f], r.Namespace)
		if err != nil {
			return nil, err
		}
		next.Addresses = append(next.Addresses, Address{Addr: a, PoolBits: p.Prefix().Bits()})
	}
	if r.ValidateOnly {
		return next, nil
	}
	for _, x := range next.Addresses {
		p := l.poolFor(x.Addr)
		p.rested.remove(l.addrs[x.Addr].rested)
		p.Take(x.Addr)
		l.addrs[x.Addr] = use{owner: r.Owner}
		// A requested address says nothing about where free addresses are, so the search position stays.
		if !wanted[FamilyOf(x.Addr)].IsValid() {
			p.Advance(x.Addr)
		}
	}
	l.replace(next)
	l.spaces.holds(next.Owner, r.Namespace)
	return next, nil
}

// resolve checks that a request is consistent and that pools for it exist. It returns the families in the order IPv4,
// IPv6.
func (l *ledger) resolve(r Request) ([]Family, map[Family]netip.Addr, error) {
	has := func(f Family) bool {
		return slices.ContainsFunc(l.pools, func(p *poolState) bool { return p.serves(f) })
	}
	if !has(IPv4) && !has(IPv6) && l.held[r.Owner] == nil {
		return nil, nil, l.noRange(0)
	}
	var families []Family
	for _, f := range []Family{IPv4, IPv6} {
		asked := slices.Contains(r.Families, f)
		switch {
		case !has(f) && l.held[r.Owner] == nil && l.expects(f) && (asked || len(r.Families) == 0):
			return nil, nil, l.noRange(f)
		case asked && !has(f) && l.held[r.Owner] == nil:
			return nil, nil, &FieldError{Field: "families", Text: fmt.Sprintf("this node has no %s pool", f), Kind: ErrNoPool}
		case asked, len(r.Families) == 0 && has(f):
			families = append(families, f)
		}
	}
	wanted := map[Family]netip.Addr{}
	for i, a := range r.Wanted {
		field := fmt.Sprintf("requested_addresses[%d]", i)
		bad := func(kind error, format string, args ...any) error {
			return &FieldError{Field: field, Text: fmt.Sprintf(format, args...), Kind: kind}
		}
		switch f := FamilyOf(a); {
		case !a.IsValid() || a.Zone() != "":
			return nil, nil, bad(ErrBadRequest, "not an address")
		case a.Is4In6():
			return nil, nil, bad(ErrBadRequest, "%s is IPv4-mapped; give the IPv4 address in 4 bytes", a)
		case wanted[f].IsValid():
			return nil, nil, bad(ErrBadRequest, "%s is the second %s address; one per family can be held", a, f)
		case len(r.Families) > 0 && !slices.Contains(families, f):
			return nil, nil, bad(ErrBadRequest, "%s is of %s, which families does not ask for", a, f)
		default:
			// Addresses that the owner already has need no pool, because the configuration may have changed
			// since.
			held := l.held[r.Owner]
			inPool := slices.ContainsFunc(l.pools, func(p *poolState) bool { return p.Contains(a) })
			if held == nil && !inPool {
				return nil, nil, bad(ErrNoPool, "%s is not in a pool of this node", a)
			}
			wanted[f] = a
		}
	}
	return families, wanted, nil
}

// expects reports whether the node should have a range of a family, even if no range of it serves now.
func (l *ledger) expects(f Family) bool {
	return slices.Contains(l.families, f) ||
		slices.ContainsFunc(l.pools, func(p *poolState) bool {
			return p.refused != "" && !p.draining && p.Is4() == (f == IPv4)
		})
}

// noRange returns an ErrNoRange that names the refused ranges of a family, or of all families if f is 0.
func (l *ledger) noRange(f Family) error {
	err := ErrNoRange
	if f != 0 {
		err = fmt.Errorf("%w: no %s", ErrNoRange, f)
	}
	for _, p := range l.pools {
		if p.refused != "" && (f == 0 || p.Is4() == (f == IPv4)) {
			err = fmt.Errorf("%w; %s is refused: %s", err, p.Prefix(), p.refused)
		}
	}
	return err
}

// sameContent returns an error if an owner's addresses do not satisfy its request.
func sameContent(a *Allocation, r Request) error {
	if a.Manager != r.Manager {
		return fmt.Errorf("%s is of the manager %q, not %q: %w", a.Owner, a.Manager, r.Manager, ErrOtherContent)
	}
	if len(r.Families) > 0 {
		for _, f := range []Family{IPv4, IPv6} {
			holds := slices.ContainsFunc(a.Addresses, func(x Address) bool { return FamilyOf(x.Addr) == f })
			if asks := slices.Contains(r.Families, f); holds != asks {
				return fmt.Errorf("%s has the addresses %s, but the request is for other address families: %w",
					a.Owner, a.List(), ErrOtherContent)
			}
		}
	}
	for _, w := range r.Wanted {
		if !a.Has(w) {
			return fmt.Errorf("%s holds %s and asks for %s: %w", a.Owner, a.List(), w, ErrOtherContent)
		}
	}
	return nil
}

// choose selects a free address of a family for a pod of a namespace, but does not allocate it.
func (l *ledger) choose(f Family, wanted netip.Addr, namespace string) (netip.Addr, *poolState, error) {
	if wanted.IsValid() {
		p := l.poolFor(wanted)
		if p == nil {
			return wanted, nil, fmt.Errorf("%s is reserved: %w", wanted, ErrUnavailable)
		}
		if p.draining {
			return wanted, nil, fmt.Errorf("%s is of %s, which drains: %w", wanted, p.Prefix(), ErrUnavailable)
		}
		if p.refused != "" {
			return wanted, nil, fmt.Errorf("%s is of %s, which the cluster refuses (%s): %w",
				wanted, p.Prefix(), p.refused, ErrUnavailable)
		}
		if u, ok := l.addrs[wanted]; ok && u.rested == nil {
			if u.rest != nil && l.asks && l.waiting.has(u.rest) {
				return wanted, nil, fmt.Errorf("%s was released and may not be allocated again yet: %s: %w", wanted,
					cmp.Or(l.why, notAsked), ErrUnavailable)
			}
			if u.rest != nil {
				until := u.rest.at.UTC().Format(time.RFC3339)
				return wanted, nil, fmt.Errorf("%s was released and is in quarantine until %s: %w", wanted, until, ErrUnavailable)
			}
			return wanted, nil, fmt.Errorf("%s is held by %s: %w", wanted, u.owner, ErrUnavailable)
		}
		if l.reserved(f, namespace) {
			return wanted, nil, l.exhausted(f, namespace)
		}
		return wanted, p, nil
	}
	if l.reserved(f, namespace) {
		return netip.Addr{}, nil, l.exhausted(f, namespace)
	}
	for _, p := range l.pools {
		if !p.serves(f) {
			continue
		}
		if a, ok := p.Next(); ok {
			return a, p, nil
		}
		// Every address was used before, so take the one that was released first.
		if d := p.rested.first(); d != nil {
			return d.key, p, nil
		}
	}
	return netip.Addr{}, nil, l.exhausted(f, "")
}

// reserved reports whether the free addresses of a family are reserved for other namespaces.
func (l *ledger) reserved(f Family, namespace string) bool {
	own := l.spaces.counts[f][namespace]
	var free, in uint64
	for _, p := range l.pools {
		if !p.serves(f) {
			continue
		}
		n := p.NumFree() + uint64(len(p.rested.heap))
		if n > own { // the sum of several IPv6 pools may exceed a uint64
			return false
		}
		free += n
		in += p.quarantined
	}
	return refuses(own, free, in)
}

// exhausted returns the error for a family without an address; with a namespace, the free addresses are reserved for
// other namespaces.
func (l *ledger) exhausted(f Family, namespace string) *ExhaustedError {
	err := &ExhaustedError{Family: f, Namespace: namespace, Quarantined: l.spaces.counts[f][namespace]}
	for _, p := range l.pools {
		if p.serves(f) {
			err.Pools = append(err.Pools, p.figures())
		}
	}
	for _, d := range l.waiting.heap {
		if FamilyOf(d.key) == f {
			err.Waiting, err.Why = err.Waiting+1, cmp.Or(l.why, notAsked)
		}
	}
	err.NextFree, _ = l.next()
	return err
}

// confirm makes a lease permanent.
func (l *ledger) confirm(now time.Time, o workload.Owner, addrs []netip.Addr) (*Allocation, error) {
	next, err := l.confirmed(now, o, addrs)
	switch e := l.held[o]; {
	case err == nil && e.State == Leased:
		l.replace(next)
		l.changed().Allocations[o] = next
	case errors.Is(err, ErrNotHeld) && e != nil:
		l.drop(e)
	}
	return next, err
}

// confirmed returns the result that confirm would have. It changes nothing.
func (l *ledger) confirmed(now time.Time, o workload.Owner, addrs []netip.Addr) (*Allocation, error) {
	e := l.held[o]
	if e == nil || e.State == Leased && !now.Before(e.Expires) {
		return nil, fmt.Errorf("confirm %s: %w (its lease may have expired)", o, ErrNotHeld)
	}
	if !sameAddresses(e.Addresses, addrs) {
		return nil, fmt.Errorf("confirm %s: it holds %s, given were %v: %w", o, e.List(), addrs, ErrMismatch)
	}
	if e.State == Confirmed {
		return e.Allocation, nil
	}
	return &Allocation{Owner: o, Addresses: e.Addresses, State: Confirmed, Manager: e.Manager}, nil
}

func sameAddresses(held []Address, given []netip.Addr) bool {
	if len(held) != len(given) {
		return false
	}
	return !slices.ContainsFunc(held, func(x Address) bool { return !slices.Contains(given, x.Addr) })
}

// release removes an owner's allocation and returns it; nil if the owner has none. Confirmed addresses are then in
// quarantine. Leased addresses need no quarantine: a datapath confirms an address before it configures it, so no
// container has used them.
func (l *ledger) release(now time.Time, o workload.Owner) *Allocation {
	e := l.held[o]
	if e == nil {
		return nil
	}
	if e.State == Leased || l.rest <= 0 && !l.asks {
		l.drop(e)
		return e.Allocation
	}
	namespace := l.spaces.owners[o]
	l.leave(e)
	c := l.changed()
	c.Allocations[o] = nil
	until := now.Add(l.rest)
	for _, x := range e.Addresses {
		l.lay(x.Addr, until)
		l.spaces.begin(x.Addr, namespace)
		c.Quarantined[x.Addr] = until
	}
	return e.Allocation
}

// mayRelease returns ErrMismatch if addresses are given and the owner's addresses differ from them. If the owner has no
// addresses, it returns nil.
func (l *ledger) mayRelease(o workload.Owner, only []netip.Addr) error {
	if e := l.held[o]; e != nil && len(only) > 0 && !sameAddresses(e.Addresses, only) {
		return fmt.Errorf("release %s: it holds %s, given were %v: %w", o, e.List(), only, ErrMismatch)
	}
	return nil
}

// drop removes an allocation whose addresses need no quarantine.
func (l *ledger) drop(e *entry) {
	l.leave(e)
	if e.State == Confirmed {
		l.changed().Allocations[e.Owner] = nil
	}
	for _, x := range e.Addresses {
		l.free(x.Addr)
	}
}

// expire ends leases and quarantines that are due, at most n in total. It returns how many of each it ended, and
// whether all that were due are done.
func (l *ledger) expire(now time.Time, n int) (leases, rests int, done bool) {
	for ; n > 0; n-- {
		if d := l.leases.first(); d != nil && !now.Before(d.at) {
			l.drop(l.held[d.key])
			leases++
		} else if d := l.rests.first(); d != nil && !now.Before(d.at) {
			l.rests.remove(d)
			if l.asks {
				// The record of the address stays in the store, so that the address waits again after a restart.
				l.addrs[d.key] = use{rest: l.waiting.add(d.at, d.key)}
				continue
			}
			l.reuse(d)
			rests++
		} else {
			return leases, rests, true
		}
	}
	return leases, rests, false
}

// notAsked is the reason for messages about waiting addresses until the first call of SetReuse.
const notAsked = "sluice-identity has not answered yet whether other nodes still use released addresses"

// reuse frees an address after its quarantine.
func (l *ledger) reuse(d *deadline[netip.Addr]) {
	l.changed().Quarantined[d.key] = time.Time{}
	l.spaces.end(d.key)
	p := l.poolFor(d.key)
	if p == nil {
		l.free(d.key)
		return
	}
	p.quarantined--
	// The address is free, but stays taken in the pool, so that addresses that were never used are allocated first.
	l.addrs[d.key] = use{rested: p.rested.add(d.at, d.key)}
}

// setReuse sets whether addresses wait after their quarantine, and the reason. It frees the waiting addresses that are
// in free, or all of them if asks is false.
func (l *ledger) setReuse(asks bool, free []netip.Addr, why string) {
	l.asks, l.why = asks, why
	for _, a := range free {
		if d := l.addrs[a].rest; l.waiting.has(d) {
			l.waiting.remove(d)
			l.reuse(d)
		}
	}
	for d := l.waiting.first(); d != nil && !asks; d = l.waiting.first() {
		l.waiting.remove(d)
		l.reuse(d)
	}
}

// next returns the time of the next deadline; false without deadlines.
func (l *ledger) next() (time.Time, bool) {
	lease, rest := l.leases.first(), l.rests.first()
	switch {
	case lease == nil && rest == nil:
		return time.Time{}, false
	case rest == nil || lease != nil && lease.at.Before(rest.at):
		return lease.at, true
	}
	return rest.at, true
}

// serves reports whether new addresses of a family are allocated from the pool.
func (p *poolState) serves(f Family) bool {
	return !p.draining && p.refused == "" && p.Is4() == (f == IPv4)
}

// lost reports whether the range no longer belongs to the node.
func (p *poolState) lost() bool { return p.refused != "" && !p.kept }

// hidden reports whether the range is hidden from the datapath, because it is lost and no owner has an address of it.
func (p *poolState) hidden() bool { return p.lost() && p.held() == 0 }

// held returns the number of addresses that owners have.
func (p *poolState) held() uint64 { return p.leased + p.confirmed }

func (p *poolState) figures() Figures {
	f := Figures{
		Prefix: p.Prefix(), Gateway: p.Gateway(), Size: p.Size(), Reserved: p.NumReserved(),
		Leased: p.leased, Confirmed: p.confirmed, Quarantined: p.quarantined, Draining: p.draining,
		Free:    p.NumFree() + uint64(len(p.rested.heap)),
		Refused: p.refused,
	}
	if !f.Serves() {
		f.Free = 0
	}
	return f
}

func (l *ledger) summary() *Summary {
	s := &Summary{Outside: l.outside, Owners: uint64(len(l.held))}
	for _, p := range l.pools {
		f := p.figures()
		f.Primary = l.isPrimary(p)
		s.Pools = append(s.Pools, f)
	}
	for _, d := range l.waiting.heap {
		s.Waiting = append(s.Waiting, d.key)
	}
	s.Why = l.why
	return s
}

// list returns all entries in no order. The caller may read their allocations, which are immutable, but no other
// fields.
func (l *ledger) list() []*entry { return slices.Clone(l.all) }
