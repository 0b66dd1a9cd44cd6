// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package names implements the table of learned DNS names and their addresses.
//
// The table decides which addresses of an answer are learned: no special addresses, such as loopback, and not more
// than the share of the pod that asked. It records until when sluice-policy enforces each address, so that an answer
// is held only if the kernel does not have its addresses yet. sluice-policy has its own table, by which it evaluates
// connections. So an address that this table drops stays allowed.
//
// An address stays in this table for its TTL, at least for a minute. sluice-policy keeps it longer if connections use
// it, which only sluice-policy knows.
package names

import (
	"bytes"
	"container/heap"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-net/sluice/model/podshares"
	"github.com/sluice-net/sluice/proxy/pods"
)

// Limits of the TTL of a learned address, as in sluice-policy.
const (
	MinTTL = time.Minute
	MaxTTL = 7 * 24 * time.Hour
)

// MaxPerName limits the addresses of one name, as in sluice-policy.
const MaxPerName = 1024

// maxChain limits the text of the chain that is kept for one name, in bytes.
const maxChain = 512

// maxRefusals limits the refused addresses that are kept for explanations.
const maxRefusals = 1024

// Limits are fixed for the lifetime of a table.
type Limits struct {
	Names     int
	Addresses int // addresses of all names together
}

// Asker is the pod whose DNS query was answered. The learned addresses count for its share, and the pods of its
// namespace may use them. The table stores neither namespace nor identity of the pods that pay.
type Asker = pods.Client

// unpaid is the endpoint that pays for addresses which were learned by pods that no longer exist, or by root.
const unpaid = 0

// The limits that pods share, as package podshares numbers them.
const (
	ofNames = iota
	ofAddresses
)

// Address is an address in an answer.
type Address struct {
	Addr netip.Addr
	TTL  time.Duration
}

// Pair is an address of a name. All names of a Table are texts of dnsname.Learned.
type Pair struct {
	Name string
	Addr netip.Addr
}

// Result tells the caller of Learn what to do. With the zero value, the caller can release the answer.
type Result struct {
	// Enforce lists the addresses that sluice-policy must learn before the answer is released. When it has, the
	// caller must call Enforced.
	Enforce []Address
	// Refused is the number of addresses that were not learned.
	Refused int
	// Evicted lists valid addresses that were taken from other pods above their guarantee. The caller should make
	// sluice-policy remove them, to free capacity there, too.
	Evicted []Pair
}

// Table holds names and their addresses. It is safe for concurrent use.
type Table struct {
	base time.Time // times in the table are whole seconds since base, by the monotonic clock

	mu         sync.Mutex
	exclusions *Exclusions         // guarded by mu
	names      map[string]*name    // guarded by mu
	expiring   expiring            // guarded by mu
	shares     *podshares.Accounts // guarded by mu
	refusals   refusals            // guarded by mu
	// changed contains the changed names that TakeChanges has not returned yet; the value tells whether the name may
	// be in the file. A name that was added and removed in the meantime is not in it. So even while nothing can be
	// written, it has no more names than the table and the file.
	changed map[string]bool // guarded by mu
}

// name is one name. There may be many addresses, so each needs only 32 bytes and contains no pointer.
type name struct {
	text    string
	chain   string // targets of the CNAME records of the last answer, each with its final dot, separated by spaces
	payer   uint32
	first   uint32  // when its first address expires
	index   int     // index in the heap
	dirty   bool    // Learn changed it
	filed   bool    // the file may contain the name
	entries []entry // sorted by address
}

type entry struct {
	addr     [16]byte
	payer    uint32
	expires  uint32
	enforced uint32 // until when sluice-policy enforces the address; 0: unknown
}

// New returns an empty table.
func New(l Limits, now time.Time) *Table {
	return &Table{
		base: now, names: make(map[string]*name), shares: podshares.New(unpaid, l.Names, l.Addresses),
		changed: make(map[string]bool),
	}
}

// at converts a time to the form in the table. It never returns 0, which means that a time is unknown.
func (t *Table) at(now time.Time) uint32 {
	return uint32(max(1, now.Sub(t.base)/time.Second+1)) //nolint:gosec // 136 years
}

func (t *Table) time(at uint32) time.Time { return t.base.Add(time.Duration(at-1) * time.Second) }

func bound(ttl time.Duration) time.Duration { return min(max(ttl, MinTTL), MaxTTL) }

// Len returns the number of names and of addresses.
func (t *Table) Len() (names, addresses int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.shares.Total(ofNames), t.shares.Total(ofAddresses)
}

// Learn stores the addresses of an answer to a query of a pod. chain contains the targets of the CNAME records from
// the name to its addresses. If the table has the addresses already, Learn allocates no memory. It copies the text of
// the name, which may be in a buffer of the caller.
func (t *Table) Learn(by Asker, text string, chain []string, addrs []Address, now time.Time) (out Result) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expire(now)
	n := t.names[text]
	if n == nil && len(addrs) == 0 {
		return out
	}
	t.shares.Open(by.Endpoint, by.Tenant)
	defer t.shares.Close(by.Endpoint)
	second := t.at(now)
	for _, a := range addrs {
		a.Addr = a.Addr.Unmap()
		reason := t.exclusions.Reason(a.Addr)
		if reason == Learned {
			n, reason = t.learn(by, n, text, a, second, &out)
		}
		if reason != Learned {
			out.Refused++
			t.refusals.add(Refusal{Pair: Pair{text, a.Addr}, Reason: reason, Asker: by, Time: now})
		}
	}
	if n = t.names[text]; n != nil {
		t.order(n)
		t.noteChain(n, chain)
		if n.dirty {
			t.change(n)
			n.dirty = false
		}
	}
	return out
}

// learn stores one address. It returns the name. The name may be new, or removed to free capacity.
func (t *Table) learn(by Asker, n *name, text string, a Address, now uint32, out *Result) (*name, Reason) {
	ttl := uint32(bound(a.TTL) / time.Second)
	key := a.Addr.As16()
	if n == nil {
		if !t.admit(by.Endpoint, ofNames, now, out) {
			return nil, NamesShare
		}
		if !t.admit(by.Endpoint, ofAddresses, now, out) {
			return nil, AddressesShare
		}
		n = t.create(by, text)
	}
	i, known := n.find(key)
	if !known {
		if len(n.entries) >= MaxPerName && !t.yield(by.Endpoint, n, now, out) {
			return n, NameFull
		}
		if !t.admit(by.Endpoint, ofAddresses, now, out) {
			return t.kept(n), AddressesShare
		}
		if t.names[text] != n { // the name lost its last address to free capacity
			n = t.create(by, text)
		}
		i, _ = n.find(key)
		n.entries = slices.Insert(n.entries, i, entry{addr: key, payer: by.Endpoint})
		t.shares.Charge(by.Endpoint, ofAddresses, 1)
	}
	e := &n.entries[i]
	t.pay(by.Endpoint, n, e)
	if until := now + ttl; until > e.expires {
		e.expires, n.dirty = until, true
	}
	if e.enforced < renewal(now, ttl) {
		out.Enforce = append(out.Enforce, Address{a.Addr, bound(a.TTL)})
	}
	return n, Learned
}

// slack is the maximum number of seconds by which an address may expire in sluice-policy before it expires in a
// client. sluice-policy covers this time, because it keeps an address for names.grace after its TTL.
const slack = 300

// renewal returns until when an address must already be enforced so that an answer with this TTL need not wait.
func renewal(now, ttl uint32) uint32 { return now + ttl - min(ttl/2, slack) }

// yield removes an address of a name that has the maximum number of addresses, so that one pod cannot fill a name. It
// takes the address that expires first from the pod that pays for most of them. It returns false if the asker pays
// for about as many.
func (t *Table) yield(asker uint32, n *name, now uint32, out *Result) bool {
	paid := make(map[uint32]int)
	for i := range n.entries {
		paid[n.entries[i].payer]++
	}
	most := asker
	for payer, count := range paid {
		if count > paid[most] || count == paid[most] && most != asker && payer < most {
			most = payer
		}
	}
	if paid[most] <= paid[asker]+1 {
		return false
	}
	first := -1
	for i := range n.entries {
		if n.entries[i].payer == most && (first < 0 || n.entries[i].expires < n.entries[first].expires) {
			first = i
		}
	}
	t.remove(n, first, now, out)
	return true
}

// create adds a name without addresses.
func (t *Table) create(by Asker, text string) *name {
	text = strings.Clone(text) // the text may be in a buffer of the caller
	n := &name{text: text, payer: by.Endpoint, index: -1, filed: t.changed[text]}
	t.names[text] = n
	t.shares.Charge(by.Endpoint, ofNames, 1)
	return n
}

// kept returns a name if it is still in the table.
func (t *Table) kept(n *name) *name {
	if t.names[n.text] == n {
		return n
	}
	return nil
}

// pay charges an address and its name to another pod that uses them, if they fit into the guarantee of this pod. So a
// name that modest pods use is not evicted because the pod that asked first exceeds its share.
func (t *Table) pay(endpoint uint32, n *name, e *entry) {
	if e.payer != endpoint && t.shares.Within(endpoint, ofAddresses, 1) {
		t.move(&e.payer, endpoint, ofAddresses)
		n.dirty = true
	}
	if n.payer != endpoint && t.shares.Within(endpoint, ofNames, 1) {
		t.move(&n.payer, endpoint, ofNames)
		n.dirty = true
	}
}

func (t *Table) move(payer *uint32, to uint32, bound int) {
	t.shares.Move(*payer, to, bound)
	*payer = to
}

// admit reports whether an endpoint may add a name or an address. It frees capacity if needed.
func (t *Table) admit(endpoint uint32, bound int, now uint32, out *Result) bool {
	if !t.shares.Admits(endpoint, bound, 1) {
		return false
	}
	if t.shares.Missing(bound, 1) == 0 {
		return true
	}
	// The endpoint is within its guarantee, so another endpoint must be above its own.
	return t.evict(bound, now, out)
}

// evict removes the name or address that ends first, from the endpoint that is furthest above its guarantee.
func (t *Table) evict(bound int, now uint32, out *Result) bool {
	victim, count := t.shares.Victim(bound, 1)
	if count == 0 {
		return false
	}
	var least soonest
	for _, n := range t.names {
		if bound == ofNames {
			if n.payer == victim {
				least.add(candidate{n: n, at: last(n)}, count)
			}
			continue
		}
		for i := range n.entries {
			if e := &n.entries[i]; e.payer == victim {
				least.add(candidate{n, e.addr, e.expires}, count)
			}
		}
	}
	for _, c := range least {
		if bound == ofNames {
			for len(c.n.entries) > 0 {
				t.remove(c.n, len(c.n.entries)-1, now, out)
			}
			t.order(c.n)
			continue
		}
		i, ok := c.n.find(c.addr)
		if ok {
			t.remove(c.n, i, now, out)
			t.order(c.n)
		}
	}
	return len(least) > 0
}

// last returns when the last address of a name expires.
func last(n *name) (at uint32) {
	for i := range n.entries {
		at = max(at, n.entries[i].expires)
	}
	return at
}

// candidate is an address or a name that may be removed.
type candidate struct {
	n    *name
	addr [16]byte
	at   uint32
}

// soonest is a heap of the candidates that end first. Its root is the candidate among them that ends last.
type soonest []candidate

func (s soonest) Len() int           { return len(s) }
func (s soonest) Less(i, j int) bool { return s[i].at > s[j].at }
func (s soonest) Swap(i, j int)      { s[i], s[j] = s[j], s[i] }
func (s *soonest) Push(x any)        { *s = append(*s, x.(candidate)) } //nolint:forcetypeassert // called here only
func (s *soonest) Pop() any {
	x := (*s)[len(*s)-1]
	*s = (*s)[:len(*s)-1]
	return x
}

func (s *soonest) add(c candidate, most int) {
	switch {
	case len(*s) < most:
		heap.Push(s, c)
	case c.at < (*s)[0].at:
		(*s)[0] = c
		heap.Fix(s, 0)
	}
}

// remove removes an address, and the name if it has no other address. out is nil if sluice-policy need not remove the
// address. The caller must call order afterwards.
func (t *Table) remove(n *name, i int, now uint32, out *Result) {
	e := n.entries[i]
	if out != nil && e.enforced > now {
		out.Evicted = append(out.Evicted, Pair{n.text, addrOf(e.addr)})
	}
	t.shares.Charge(e.payer, ofAddresses, -1)
	n.entries = slices.Delete(n.entries, i, i+1)
	t.change(n)
	if len(n.entries) == 0 {
		delete(t.names, n.text)
		if !n.filed {
			delete(t.changed, n.text)
		}
		t.shares.Charge(n.payer, ofNames, -1)
	}
}

// find returns the position of an address, or the position at which it would be inserted.
func (n *name) find(key [16]byte) (i int, known bool) {
	return slices.BinarySearchFunc(n.entries, key, func(e entry, key [16]byte) int {
		return bytes.Compare(e.addr[:], key[:])
	})
}

func addrOf(a [16]byte) netip.Addr { return netip.AddrFrom16(a).Unmap() }

// noteChain stores the chain of the last answer, as much of it as fits.
func (t *Table) noteChain(n *name, chain []string) {
	size := 0
	for i, c := range chain {
		if size += len(c) + 1; size > maxChain {
			chain = chain[:i]
			break
		}
	}
	if sameChain(n.chain, chain) {
		return
	}
	text := make([]byte, 0, size)
	for i, c := range chain {
		if i > 0 {
			text = append(text, ' ')
		}
		text = append(text, c...)
	}
	n.chain = string(text)
	t.change(n)
}

// sameChain compares without allocating memory. Most answers repeat the chain of the previous answer.
func sameChain(text string, chain []string) bool {
	for i, c := range chain {
		if i > 0 {
			if text == "" || text[0] != ' ' {
				return false
			}
			text = text[1:]
		}
		if len(text) < len(c) || text[:len(c)] != c {
			return false
		}
		text = text[len(c):]
	}
	return text == ""
}

// Enforced records that sluice-policy enforces the addresses of a name for their TTL. enforce is Result.Enforce, or a
// part of it.
func (t *Table) Enforced(text string, enforce []Address, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.names[text]
	if n == nil {
		return
	}
	second := t.at(now)
	for _, a := range enforce {
		key := a.Addr.Unmap().As16()
		i, ok := n.find(key)
		if ok {
			n.entries[i].enforced = max(n.entries[i].enforced, second+uint32(bound(a.TTL)/time.Second))
		}
	}
}

// Missing returns the addresses that sluice-policy must still learn, by the same rule as Learn.
func (t *Table) Missing(text string, addrs []Address, now time.Time) (missing []Address) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.names[text]
	if n == nil {
		return nil
	}
	second := t.at(now)
	for _, a := range addrs {
		key := a.Addr.Unmap().As16()
		i, ok := n.find(key)
		if ok && n.entries[i].enforced < renewal(second, uint32(bound(a.TTL)/time.Second)) {
			missing = append(missing, a)
		}
	}
	return missing
}

// NotEnforced records addresses that sluice-policy could not learn, for explanations.
func (t *Table) NotEnforced(by Asker, text string, addrs []Address, now time.Time) {
	t.Refuse(by, text, addrs, NotEnforced, now)
}

// Refuse records addresses that were not learned, for explanations.
func (t *Table) Refuse(by Asker, text string, addrs []Address, why Reason, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, a := range addrs {
		t.refusals.add(Refusal{Pair: Pair{text, a.Addr.Unmap()}, Reason: why, Asker: by, Time: now})
	}
}

// Unenforced records that sluice-policy has restarted with another state, so that it is unknown which addresses it
// enforces. The next answer for each name makes sluice-policy learn its addresses again.
func (t *Table) Unenforced() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, n := range t.names {
		for i := range n.entries {
			n.entries[i].enforced = 0
		}
	}
}

// Exclude sets the addresses that are never learned, and removes these addresses from the table. It returns the
// removed addresses that sluice-policy enforces.
func (t *Table) Exclude(x *Exclusions, now time.Time) []Pair {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.exclusions = x
	var out Result
	for _, n := range slices.Collect(maps.Values(t.names)) {
		for i := len(n.entries) - 1; i >= 0; i-- {
			if x.Reason(addrOf(n.entries[i].addr)) != Learned {
				t.remove(n, i, t.at(now), &out)
			}
		}
		t.order(n)
	}
	return out.Evicted
}

// Leave records that an endpoint no longer exists. Its names and addresses stay for their TTL, and are evicted first.
func (t *Table) Leave(endpoint uint32) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if endpoint == unpaid || !t.shares.Has(endpoint) {
		return
	}
	for _, n := range t.names {
		for i := range n.entries {
			if e := &n.entries[i]; e.payer == endpoint {
				t.move(&e.payer, unpaid, ofAddresses)
				t.change(n)
			}
		}
		if n.payer == endpoint {
			t.move(&n.payer, unpaid, ofNames)
			t.change(n)
		}
	}
}

// Expire removes expired addresses. It returns the time of the next call; zero: nothing will expire.
func (t *Table) Expire(now time.Time) (wake time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expire(now)
	if len(t.expiring) == 0 {
		return time.Time{}
	}
	return t.time(t.expiring[0].first)
}

func (t *Table) expire(now time.Time) {
	second := t.at(now)
	for len(t.expiring) > 0 && t.expiring[0].first <= second {
		n := t.expiring[0]
		for i := len(n.entries) - 1; i >= 0; i-- {
			if n.entries[i].expires <= second {
				t.remove(n, i, second, nil)
			}
		}
		t.order(n)
	}
}

// change records that the record of a name has changed.
func (t *Table) change(n *name) { t.changed[n.text] = n.filed }

// order moves a name to its position in the heap, or removes it from the heap if it has no address left.
func (t *Table) order(n *name) {
	first := uint32(0)
	for i := range n.entries {
		if at := n.entries[i].expires; first == 0 || at < first {
			first = at
		}
	}
	was := n.first
	n.first = first
	switch {
	case len(n.entries) == 0 && n.index >= 0:
		heap.Remove(&t.expiring, n.index)
	case len(n.entries) == 0:
	case n.index < 0:
		heap.Push(&t.expiring, n)
	case was != first:
		heap.Fix(&t.expiring, n.index)
	}
}

// expiring is a heap of the names by the time when their first address expires.
type expiring []*name

func (e expiring) Len() int           { return len(e) }
func (e expiring) Less(i, j int) bool { return e[i].first < e[j].first }
func (e expiring) Swap(i, j int) {
	e[i], e[j] = e[j], e[i]
	e[i].index, e[j].index = i, j
}

func (e *expiring) Push(x any) {
	n := x.(*name) //nolint:forcetypeassert // only called from here
	n.index = len(*e)
	*e = append(*e, n)
}

func (e *expiring) Pop() any {
	end := len(*e) - 1
	n := (*e)[end]
	(*e)[end], n.index = nil, -1
	*e = (*e)[:end]
	return n
}
