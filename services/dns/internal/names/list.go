// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package names

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/model/dnsname"
)

// Refusal is an address that was not learned, with the reason.
type Refusal struct {
	Pair
	Reason Reason
	Asker  Asker
	Time   time.Time
}

// refusals keeps the most recent refused addresses. Each pair of name and address occurs once.
type refusals struct {
	ring  []Refusal
	next  int
	index map[Pair]int
}

func (r *refusals) add(x Refusal) {
	if i, ok := r.index[x.Pair]; ok {
		x.Name = r.ring[i].Name
		r.ring[i] = x
		return
	}
	x.Name = strings.Clone(x.Name) // the text may be in a buffer of the caller
	if r.index == nil {
		r.index = make(map[Pair]int)
	}
	if len(r.ring) < maxRefusals {
		r.index[x.Pair] = len(r.ring)
		r.ring = append(r.ring, x)
		return
	}
	delete(r.index, r.ring[r.next].Pair)
	r.ring[r.next] = x
	r.index[x.Pair] = r.next
	r.next = (r.next + 1) % maxRefusals
}

// Entry is an address of a listed name.
type Entry struct {
	Addr     netip.Addr
	Expires  time.Time
	Enforced time.Time // until when sluice-policy enforces the address because of an answer; zero: unknown
	Payer    Asker     // the pod to whose share the address counts; endpoint 0: no pod
}

// Name is a listed name.
type Name struct {
	Name    string
	Chain   []string // targets of the CNAME records of the last answer
	Entries []Entry  // sorted
	Payer   Asker

	filed bool // the file may contain the name since before TakeChanges
}

// List returns copies of the names for whose texts match returns true, sorted by name. If has is valid, it returns
// only names with this address.
func (t *Table) List(match func(name string) bool, has netip.Addr, now time.Time) []Name {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expire(now)
	var out []Name
	for text, n := range t.names {
		if match(text) && (!has.IsValid() || n.has(has.Unmap())) {
			out = append(out, t.copyOf(n))
		}
	}
	slices.SortFunc(out, func(a, b Name) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// Get returns a copy of one name.
func (t *Table) Get(text string, now time.Time) (Name, bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expire(now)
	if n := t.names[text]; n != nil {
		return t.copyOf(n), true
	}
	return Name{}, false
}

// Has reports whether the table has an address of a name.
func (t *Table) Has(p Pair) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.names[p.Name]
	return n != nil && n.has(p.Addr.Unmap())
}

func (n *name) has(a netip.Addr) bool {
	_, ok := n.find(a.As16())
	return ok
}

func (t *Table) copyOf(n *name) Name {
	out := Name{Name: n.text, Chain: strings.Fields(n.chain), Payer: t.asker(n.payer)}
	for _, e := range n.entries {
		x := Entry{Addr: addrOf(e.addr), Expires: t.time(e.expires), Payer: t.asker(e.payer)}
		if e.enforced != 0 {
			x.Enforced = t.time(e.enforced)
		}
		out.Entries = append(out.Entries, x)
	}
	return out
}

func (t *Table) asker(endpoint uint32) Asker {
	return Asker{Endpoint: endpoint, Tenant: t.shares.Tenant(endpoint)}
}

// Refusals returns the addresses of a name that recently were not learned, in any namespace, latest first. It omits
// addresses that the table has now.
func (t *Table) Refusals(name string) []Refusal {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []Refusal
	for _, r := range t.refusals.ring {
		if dnsname.Learned(r.Name).Name() != name {
			continue
		}
		if n := t.names[r.Name]; n != nil && r.Reason != NotEnforced && n.has(r.Addr) {
			continue
		}
		out = append(out, r)
	}
	slices.SortStableFunc(out, func(a, b Refusal) int { return b.Time.Compare(a.Time) })
	return out
}

// Delete removes the names for which match returns true, or, if only is valid, only this address from each of them.
// It returns the removed addresses.
func (t *Table) Delete(match func(name string) bool, only netip.Addr, now time.Time) []Pair {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expire(now)
	var out []Pair
	for text, n := range t.names {
		if !match(text) {
			continue
		}
		for i := len(n.entries) - 1; i >= 0; i-- {
			if a := addrOf(n.entries[i].addr); !only.IsValid() || a == only.Unmap() {
				out = append(out, Pair{text, a})
				t.remove(n, i, 0, nil)
			}
		}
		t.order(n)
	}
	return out
}

// Would returns the result that Delete would return, without removing anything.
func (t *Table) Would(match func(name string) bool, only netip.Addr, now time.Time) (out []Pair) {
	for _, n := range t.List(match, only, now) {
		for _, e := range n.Entries {
			if !only.IsValid() || e.Addr == only.Unmap() {
				out = append(out, Pair{n.Name, e.Addr})
			}
		}
	}
	return out
}

// Remove removes one address of a name, if the table has it.
func (t *Table) Remove(text string, addr netip.Addr, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := t.names[text]
	if n == nil {
		return
	}
	if i, ok := n.find(addr.Unmap().As16()); ok {
		t.remove(n, i, t.at(now), nil)
		t.order(n)
	}
}

// Share is the part of a limit that one endpoint uses.
type Share struct {
	Asker
	Names, Addresses                   int
	NamesGuarantee, AddressesGuarantee int
}

// Shares returns the use of the limits by endpoint, sorted. Endpoint 0 contains the names and addresses that no pod
// pays for.
func (t *Table) Shares() []Share {
	t.mu.Lock()
	defer t.mu.Unlock()
	var out []Share
	for e := range t.shares.All() {
		out = append(out, Share{
			Asker: t.asker(e), Names: t.shares.Used(e, ofNames), Addresses: t.shares.Used(e, ofAddresses),
			NamesGuarantee: t.shares.Guarantee(e, ofNames), AddressesGuarantee: t.shares.Guarantee(e, ofAddresses),
		})
	}
	slices.SortFunc(out, func(a, b Share) int { return int(int64(a.Endpoint) - int64(b.Endpoint)) })
	return out
}

// TakeChanges returns the records of the names that have changed since the last call, and the names that were
// removed.
func (t *Table) TakeChanges() (records []Name, gone []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for text := range t.changed {
		if n := t.names[text]; n != nil {
			r := t.copyOf(n)
			r.filed, n.filed = n.filed, true
			records = append(records, r)
		} else {
			gone = append(gone, text)
		}
	}
	clear(t.changed)
	return records, gone
}

// Changed marks the names of a call of TakeChanges as changed again, because they could not be stored.
func (t *Table) Changed(records []Name, gone []string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	again := func(text string, filed bool) {
		switch n := t.names[text]; {
		case n != nil:
			n.filed = filed
			t.change(n)
		case filed:
			t.changed[text] = true
		default:
			delete(t.changed, text) // the name was removed since
		}
	}
	for i := range records {
		again(records[i].Name, records[i].filed)
	}
	for _, text := range gone {
		again(text, true)
	}
}

// Restore adds stored records as far as the limits allow. It marks their addresses as not known to be enforced by
// sluice-policy. It returns the number of omitted addresses.
func (t *Table) Restore(records []Name, now time.Time) (omitted int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, r := range records {
		n := &name{text: r.Name, payer: r.Payer.Endpoint, index: -1, filed: true}
		for _, e := range r.Entries {
			// The wall clock may have been ahead when the address was learned, so limit the TTL.
			left := min(e.Expires.Sub(now), MaxTTL)
			if left <= 0 {
				continue // the record below is stored without this address
			}
			if len(n.entries) >= MaxPerName || t.shares.Missing(ofAddresses, 1) > 0 || t.shares.Missing(ofNames, 1) > 0 ||
				t.exclusions.Reason(e.Addr) != Learned {
				omitted++
				continue
			}
			key := e.Addr.As16()
			i, known := n.find(key)
			if known {
				continue
			}
			t.restorePayer(e.Payer, ofAddresses)
			n.entries = slices.Insert(n.entries, i, entry{
				addr: key, payer: e.Payer.Endpoint, expires: t.at(now) + uint32((left+time.Second-1)/time.Second),
			})
		}
		if len(n.entries) != len(r.Entries) {
			t.changed[r.Name] = true
		}
		if len(n.entries) == 0 {
			continue
		}
		t.restorePayer(r.Payer, ofNames)
		t.names[r.Name] = n
		t.noteChain(n, r.Chain)
		t.order(n)
	}
	return omitted
}

// restorePayer charges one stored name or address to a pod.
func (t *Table) restorePayer(by Asker, limit int) {
	t.shares.Open(by.Endpoint, by.Tenant)
	t.shares.Charge(by.Endpoint, limit, 1)
	t.shares.Close(by.Endpoint)
}
