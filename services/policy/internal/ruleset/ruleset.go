// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package ruleset numbers the sets of layer 7 rules of a node.
//
// A connection carries the number of its set in 16 bits. Therefore equal sets have the same number. A number must not
// get another set while a connection may carry it: while a table refers to the number, and for Grace afterwards.
//
// Tenants share the numbers and the memory for sets, because a small policy can cause many large unions with other
// policies. An unused number counts for the tenant that used it last, until the number is free. A set without a
// number has 0, and its packets must be dropped: to a proxy, 0 means that the side of the connection redirects
// nothing.
package ruleset

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/model/shares"
)

// Size is the number of numbers: 1 to 65,534. 65,535 is SL_SET_HELD: a connection that a proxy has, and that no rule
// redirects any more.
const Size = 65_534

// Bytes limits the memory for sets, as the sum of their Size. A set counts while a table uses it, because each proxy
// then has a copy. The union of several policies also counts while the compiler keeps it.
const Bytes = 64 << 20

// Grace is how long a number is kept after the last table that used it was removed. Time counts only while the
// process that enforces tables is connected. A process that has not read the removal of the table within Grace is
// disconnected as too slow. Proxies have re-read the numbers of their connections by then.
const Grace = 5 * time.Minute

// Config is fixed for the lifetime of a registry.
type Config struct {
	Size   int // 0: the constant Size
	Bytes  int // 0: the constant Bytes
	Shares shares.Settings
	Now    func() time.Time
	// Store stores changes, and earlier changes that it could not store; nil: the numbers are not stored, and end
	// with the process. A set gets a number only after it was stored. Otherwise a table could have a number that
	// another set gets after a restart.
	Store func([]Change) error
}

// Registry holds the numbers. It must be used by one goroutine.
type Registry struct {
	config  Config
	numbers map[layer7.Digest]*numbered
	taken   map[policytable.RuleSet]*numbered
	next    policytable.RuleSet // where the search for a free number starts
	users   map[user]int        // number of tables that use the set or need the union
	content map[layer7.Digest]*content
	ledger  *shares.Ledger[user]
	// lacking contains the admitted users that have no number, because no number is free.
	lacking map[user]struct{}
	refused int // users that the ledger has refused
	order   int // counts users, because the earliest users of a tenant get numbers first
	changes map[policytable.RuleSet]Change
	// unstored contains the numbers that could not be stored.
	unstored map[policytable.RuleSet]*numbered
	// changed is set when a user gets or loses a number. Divide reports and resets it.
	changed bool
	// expires is the earliest time at which an unused number may become free; zero: none does.
	expires time.Time
	held    bool
	// blocked is the time at which Block was called; zero: numbers are available.
	blocked time.Time
}

// user is a tenant whose tables use a set.
type user struct {
	tenant shares.Tenant
	digest layer7.Digest
	union  bool // the set is a union that the compiler builds; digest identifies its parts
}

// content is a set that tables use, and the number of its users.
type content struct {
	*layer7.Set
	users int
}

// numbered is a number that has content.
type numbered struct {
	number policytable.RuleSet
	digest layer7.Digest
	users  int       // users that have the number
	since  time.Time // when the last user ended, if there are none
	// payer is the last user. An unused number counts for the payer until the number is free; zero: it counts for no
	// user. Otherwise a tenant that changes its rules continually would take all numbers.
	payer user
}

// Change assigns a set to a number, or frees the number.
type Change struct {
	Number policytable.RuleSet
	Digest layer7.Digest
	Set    *layer7.Set // nil: the number is free again
}

// New returns an empty registry.
func New(c Config) *Registry {
	c.Size, c.Bytes = cmp.Or(c.Size, Size), cmp.Or(c.Bytes, Bytes)
	if c.Now == nil {
		c.Now = time.Now
	}
	return &Registry{
		config: c, numbers: make(map[layer7.Digest]*numbered), taken: make(map[policytable.RuleSet]*numbered), next: 1,
		users: make(map[user]int), content: make(map[layer7.Digest]*content), lacking: make(map[user]struct{}),
		ledger: shares.NewLedger[user](c.Shares, shares.Limit{Name: "rule-sets", Size: c.Size},
			shares.Limit{Name: "rule-set-bytes", Size: c.Bytes}),
		changes: make(map[policytable.RuleSet]Change), unstored: make(map[policytable.RuleSet]*numbered),
	}
}

// Restore adds a number that an earlier run stored for a set. If no table uses the set within Grace, the number
// becomes free. Restore ignores invalid numbers, and numbers that are already assigned.
func (r *Registry) Restore(n policytable.RuleSet, d layer7.Digest) {
	if n == 0 || int(n) > r.config.Size || r.taken[n] != nil || r.numbers[d] != nil {
		return
	}
	x := &numbered{number: n, digest: d}
	r.taken[n], r.numbers[d] = x, x
	r.idle(x)
}

// Block makes all unassigned numbers unavailable for Grace, because connections may carry them. The owner calls it if
// the stored numbers are lost.
func (r *Registry) Block() {
	r.blocked = r.config.Now()
	r.expires = r.blocked.Add(Grace) // other unused numbers do not become free earlier
}

// Hold keeps unused numbers from becoming free while hold is set. When hold ends, their Grace starts again. The owner
// sets hold while a process that enforces tables is disconnected: the kernel may then use tables that this process
// has already removed.
func (r *Registry) Hold(hold bool) {
	if r.held == hold {
		return
	}
	r.held = hold
	if hold || r.expires.IsZero() {
		return
	}
	now := r.config.Now()
	r.expires = now.Add(Grace)
	for _, x := range r.taken {
		if x.users == 0 {
			x.since = now
		}
	}
	if !r.blocked.IsZero() {
		r.blocked = now
	}
}

// idle records that a number has no users any more.
func (r *Registry) idle(x *numbered) {
	x.users, x.since = 0, r.config.Now()
	if r.expires.IsZero() {
		r.expires = x.since.Add(Grace) // numbers that become unused later do not become free earlier
	}
}

// Use records that a table of a tenant uses a set. The set gets a number if the tenant's share permits.
func (r *Registry) Use(t shares.Tenant, s *layer7.Set) {
	u := user{tenant: t, digest: s.Digest()}
	if r.users[u]++; r.users[u] > 1 {
		return
	}
	c := r.content[u.digest]
	if c == nil {
		c = &content{Set: s}
		r.content[u.digest] = c
	}
	c.users++
	r.order++
	x := r.numbers[u.digest]
	switch {
	case s.TooLarge():
	case x != nil && x.payer == u: // the ledger already counts the number for this user
		r.assign(u)
	case r.ledger.Put(u, shares.Object{Tenant: t, Order: shares.Order{Index: r.order}, Units: []int{1, s.Size()}}):
		r.assign(u)
	default:
		r.refused++
	}
}

// Release records that a table of a tenant no longer uses the sets.
func (r *Registry) Release(t shares.Tenant, sets []layer7.Digest) {
	for _, d := range sets {
		u := user{tenant: t, digest: d}
		if r.users[u]--; r.users[u] > 0 {
			continue
		}
		delete(r.users, u)
		_, admitted, ok := r.ledger.Object(u)
		var unused *numbered
		if ok && admitted {
			unused = r.unassign(u)
		} else if ok {
			r.refused--
		}
		if unused != nil {
			unused.payer = u
		} else {
			r.ledger.Delete(u)
		}
		if c := r.content[d]; c.users > 1 {
			c.users--
		} else {
			delete(r.content, d)
		}
	}
}

// Reserve records that a table of a tenant needs the union of several sets. It reports whether the compiler may build
// the union, which takes at most the given number of bytes. If not, a later Divide may admit it.
func (r *Registry) Reserve(t shares.Tenant, union layer7.Digest, size int) bool {
	u := user{tenant: t, digest: union, union: true}
	if r.users[u]++; r.users[u] > 1 {
		return r.Reserved(t, union)
	}
	r.order++
	if r.ledger.Put(u, shares.Object{Tenant: t, Order: shares.Order{Index: r.order}, Units: []int{0, size}}) {
		return true
	}
	r.refused++
	return false
}

// Reserved reports whether the compiler may build a union that was passed to Reserve.
func (r *Registry) Reserved(t shares.Tenant, union layer7.Digest) bool {
	_, admitted, _ := r.ledger.Object(user{tenant: t, digest: union, union: true})
	return admitted
}

// Cancel records that a table of a tenant no longer needs the union of several rule sets.
func (r *Registry) Cancel(t shares.Tenant, union layer7.Digest) {
	u := user{tenant: t, digest: union, union: true}
	if r.users[u]--; r.users[u] > 0 {
		return
	}
	delete(r.users, u)
	if !r.Reserved(t, union) {
		r.refused--
	}
	r.ledger.Delete(u)
}

// assign gives an admitted user a number.
func (r *Registry) assign(u user) {
	x := r.numbers[u.digest]
	if x == nil {
		n, ok := r.free()
		if !ok {
			r.lacking[u] = struct{}{}
			return
		}
		x = &numbered{number: n, digest: u.digest}
		r.taken[n], r.numbers[u.digest] = x, x
		if !r.store(Change{Number: n, Digest: u.digest, Set: r.content[u.digest].Set}) {
			r.unstored[n] = x
		}
	}
	delete(r.lacking, u)
	if x.users++; x.users == 1 {
		r.changed = r.changed || r.content[u.digest].users > 1
		if x.payer != u {
			r.ledger.Delete(x.payer)
		}
		x.payer = user{}
		if r.unstored[x.number] == nil {
			r.changes[x.number] = r.contentOf(x)
		}
	}
}

// contentOf returns the change that gives a number the content of its set, which must be in use.
func (r *Registry) contentOf(x *numbered) Change {
	return Change{Number: x.number, Digest: x.digest, Set: r.content[x.digest].Set}
}

// store stores changes. If it succeeds, the earlier changes that could not be stored are stored, too.
func (r *Registry) store(changes ...Change) bool {
	if r.config.Store == nil {
		return true
	}
	if r.config.Store(changes) != nil {
		return false
	}
	for _, x := range r.unstored {
		if x.users > 0 {
			r.changes[x.number], r.changed = r.contentOf(x), true
		}
	}
	clear(r.unstored)
	return true
}

// Retry stores the changes that could not be stored. The tables of their sets get the numbers with the next Divide.
func (r *Registry) Retry() { r.store() }

// free returns a number without content.
func (r *Registry) free() (policytable.RuleSet, bool) {
	if len(r.taken) >= r.config.Size || !r.blocked.IsZero() {
		return 0, false
	}
	for r.taken[r.next] != nil {
		r.advance()
	}
	n := r.next
	r.advance() // prefer numbers that have been free for longer
	return n, true
}

func (r *Registry) advance() {
	if int(r.next) >= r.config.Size {
		r.next = 0
	}
	r.next++
}

// unassign takes the number from a user. It returns the number if it is unused now.
func (r *Registry) unassign(u user) *numbered {
	if _, ok := r.lacking[u]; ok {
		delete(r.lacking, u)
		return nil
	}
	x := r.numbers[u.digest]
	if x.users > 1 {
		x.users--
		return nil
	}
	r.idle(x)
	r.changed = r.changed || r.content[u.digest].users > 1 // users that the ledger refused had the number, too
	return x
}

// Number returns the number of a set; 0 if it has none, or if its number is not stored. If a set has a number for one
// tenant, all tenants use this number. It costs no further number, and a tenant above its share must not harm other
// tenants that use the same set.
func (r *Registry) Number(d layer7.Digest) policytable.RuleSet {
	if x := r.numbers[d]; x != nil && x.users > 0 && r.unstored[x.number] == nil {
		return x.number
	}
	return 0
}

// Divide assigns the numbers again if a user has none. It reports whether users have got or lost a number.
func (r *Registry) Divide() (changed bool) {
	defer func() { r.changed = false }()
	if r.refused+len(r.lacking) == 0 {
		return r.changed
	}
	now := r.config.Now()
	if at := r.ledger.Next(); !at.IsZero() && !at.After(now) {
		withdrawn, admitted := r.ledger.Level(now)
		for _, u := range withdrawn {
			if u.union {
				r.refused++
				continue
			}
			if r.users[u] == 0 { // the tenant paid only for an unused number
				r.numbers[u.digest].payer = user{}
				r.ledger.Delete(u)
				continue
			}
			r.unassign(u)
			r.refused++
		}
		changed = len(withdrawn) > 0
		for _, u := range admitted {
			if r.refused--; u.union {
				changed = true
			} else {
				r.lacking[u] = struct{}{}
			}
		}
	}
	for _, u := range slices.SortedFunc(maps.Keys(r.lacking), func(a, b user) int {
		return cmp.Or(a.tenant.Compare(b.tenant), slices.Compare(a.digest[:], b.digest[:]))
	}) {
		r.assign(u)
		_, lacks := r.lacking[u]
		changed = changed || !lacks
	}
	return changed || r.changed
}

// Next returns when Expire and Divide are due; zero: never, unless something changes.
func (r *Registry) Next() time.Time {
	at := r.expires
	if r.held {
		at = time.Time{}
	}
	if r.refused+len(r.lacking) > 0 {
		if level := r.config.Now().Add(shares.LevelInterval); at.IsZero() || level.Before(at) {
			at = level
		}
	}
	return at
}

// Expire frees the numbers that have been unused for Grace, unless they are held.
func (r *Registry) Expire() {
	now := r.config.Now()
	if r.held || r.expires.IsZero() || r.expires.After(now) {
		return
	}
	r.expires = time.Time{}
	if end := r.blocked.Add(Grace); end.After(now) {
		r.expires = end
	} else {
		r.blocked = time.Time{}
	}
	var free []Change
	for n, x := range r.taken {
		if x.users > 0 {
			continue
		}
		if end := x.since.Add(Grace); end.After(now) {
			if r.expires.IsZero() || end.Before(r.expires) {
				r.expires = end
			}
			continue
		}
		delete(r.taken, n)
		delete(r.numbers, x.digest)
		r.ledger.Delete(x.payer)
		delete(r.unstored, n)
		r.changes[n] = Change{Number: n, Digest: x.digest}
		free = append(free, r.changes[n])
	}
	if len(free) > 0 {
		r.store(free...) // until this succeeds, a restart restores the old sets of the numbers, which is safe
	}
}

// Changes returns the changes since the last call, by number.
func (r *Registry) Changes() []Change {
	out := slices.SortedFunc(maps.Values(r.changes), func(a, b Change) int { return cmp.Compare(a.Number, b.Number) })
	clear(r.changes)
	return out
}

// Figures counts sets.
type Figures struct {
	Numbered int // sets that tables use and that have a number
	Idle     int // numbers that are kept although no table uses their sets
	// Without is the number of sets that tables use without a number, summed over tenants. Their connections are
	// refused.
	Without int
}

// Figures returns the present counts.
func (r *Registry) Figures() Figures {
	var f Figures
	for _, x := range r.taken {
		if x.users == 0 {
			f.Idle++
		} else if r.unstored[x.number] == nil {
			f.Numbered++
		}
	}
	for u := range r.users {
		if !u.union && r.Number(u.digest) == 0 {
			f.Without++
		}
	}
	return f
}

// Usage returns how tenants use the numbers, and the bytes.
func (r *Registry) Usage() []shares.Usage { return r.ledger.Usage() }
