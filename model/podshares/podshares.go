// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package podshares divides limits among the pods of a node, for tables in which a pod pays for each entry that it
// causes and other pods can take entries from it.
//
// Each tenant that pays for an entry has the same part of one half of a limit, and its pods have the same part of that.
// This part is the guarantee of a pod. The other half is given out in the order of the requests; once it is used up,
// only pods above their guarantee are refused.
//
// The package counts. The table that uses it has the entries and removes them.
package podshares

import (
	"iter"
	"maps"
)

// evictions divides a limit: a table evicts at least this part of its entries at a time, so that it rarely has to
// search for entries to evict.
const evictions = 1024

// Accounts counts what the pods of a node pay for, by endpoint. It must be used by one goroutine at a time.
type Accounts struct {
	limits   []limit
	accounts map[uint32]*account
	tenants  map[string]int // number of accounts of each tenant
	unpaid   uint32
}

type limit struct {
	size, used int
}

type account struct {
	tenant string
	used   []int // by limit
	open   bool
}

// New returns accounts for limits of these sizes. Methods identify a limit by its index. unpaid is the number of an
// account without a guarantee, for entries that no pod pays for any more. It must not be the number of an endpoint.
func New(unpaid uint32, sizes ...int) *Accounts {
	a := &Accounts{
		limits: make([]limit, len(sizes)), unpaid: unpaid,
		accounts: make(map[uint32]*account), tenants: make(map[string]int),
	}
	for i, size := range sizes {
		a.limits[i].size = size
	}
	a.accounts[unpaid] = &account{used: make([]int, len(sizes))}
	return a
}

// Open begins a request of an endpoint. During the request, the endpoint counts as a pod of its tenant although it
// may pay for nothing. The tenant of an endpoint can change, because its namespace moved to another tenant, or its
// number belongs to another pod now. Call Close at the end of the request.
func (a *Accounts) Open(endpoint uint32, tenant string) {
	if endpoint == a.unpaid {
		return
	}
	acc := a.accounts[endpoint]
	if acc == nil {
		acc = &account{tenant: tenant, used: make([]int, len(a.limits))}
		a.accounts[endpoint] = acc
		a.tenants[tenant]++
	} else if acc.tenant != tenant {
		a.leave(acc.tenant)
		acc.tenant = tenant
		a.tenants[tenant]++
	}
	acc.open = true
}

// Close ends a request of an endpoint.
func (a *Accounts) Close(endpoint uint32) {
	if acc := a.accounts[endpoint]; acc != nil {
		acc.open = false
		a.settle(endpoint, acc)
	}
}

// settle removes an account that pays for nothing, so that it does not reduce the guarantees of other accounts.
func (a *Accounts) settle(endpoint uint32, acc *account) {
	if acc.open || endpoint == a.unpaid {
		return
	}
	for _, n := range acc.used {
		if n != 0 {
			return
		}
	}
	delete(a.accounts, endpoint)
	a.leave(acc.tenant)
}

func (a *Accounts) leave(tenant string) {
	if a.tenants[tenant]--; a.tenants[tenant] == 0 {
		delete(a.tenants, tenant)
	}
}

// Charge makes an endpoint pay for n more entries; n may be negative. The endpoint must have an account: it pays for
// something, or a request of it is open.
func (a *Accounts) Charge(endpoint uint32, limit, n int) {
	acc := a.accounts[endpoint]
	acc.used[limit] += n
	a.limits[limit].used += n
	if n < 0 {
		a.settle(endpoint, acc)
	}
}

// Move makes another endpoint pay for one entry.
func (a *Accounts) Move(from, to uint32, limit int) {
	a.Charge(to, limit, 1)
	a.Charge(from, limit, -1)
}

// Has reports whether there is an account of the endpoint.
func (a *Accounts) Has(endpoint uint32) bool { return a.accounts[endpoint] != nil }

// All returns the endpoints that have accounts, and unpaid, in no particular order.
func (a *Accounts) All() iter.Seq[uint32] { return maps.Keys(a.accounts) }

// Tenant returns the tenant of an endpoint that has an account.
func (a *Accounts) Tenant(endpoint uint32) string { return a.accounts[endpoint].tenant }

// Used returns how many entries an endpoint that has an account pays for.
func (a *Accounts) Used(endpoint uint32, limit int) int { return a.accounts[endpoint].used[limit] }

// Total returns how many entries all endpoints together pay for.
func (a *Accounts) Total(limit int) int { return a.limits[limit].used }

// Size returns the size of a limit.
func (a *Accounts) Size(limit int) int { return a.limits[limit].size }

// Missing returns how many entries must be removed before n more fit into a limit.
func (a *Accounts) Missing(limit, n int) int {
	l := a.limits[limit]
	return max(0, l.used+n-l.size)
}

// Guarantee returns the guarantee of an endpoint that has an account; for unpaid it is 0.
func (a *Accounts) Guarantee(endpoint uint32, limit int) int {
	if endpoint == a.unpaid {
		return 0
	}
	return Part(a.limits[limit].size/2, len(a.tenants), a.tenants[a.accounts[endpoint].tenant])
}

// Part returns the part of a pod: each of the tenants has the same part of size, and the pods of a tenant have the same
// part of that.
func Part(size, tenants, pods int) int { return size / (tenants * pods) }

// above returns how far an endpoint is above its guarantee with n more entries.
func (a *Accounts) above(endpoint uint32, limit, n int) int {
	return max(0, a.accounts[endpoint].used[limit]+n-a.Guarantee(endpoint, limit))
}

// Within reports whether an endpoint stays within its guarantee with n more entries.
func (a *Accounts) Within(endpoint uint32, limit, n int) bool {
	return a.above(endpoint, limit, n) == 0
}

// Admits reports whether an endpoint may add n entries. If not enough entries are free, other endpoints must lose
// some first: see Victim. This happens only if the endpoint stays within its guarantee.
func (a *Accounts) Admits(endpoint uint32, limit, n int) bool {
	l := a.limits[limit]
	common := l.size - l.size/2
	switch more := a.above(endpoint, limit, n); {
	case more == 0 || l.used+n <= common:
		return true
	case l.used+n > l.size:
		return false
	default:
		taken := more - a.above(endpoint, limit, 0)
		for e := range a.accounts {
			taken += a.above(e, limit, 0)
		}
		return taken <= common
	}
}

// Victim returns the endpoint that is furthest above its guarantee, and how many entries to remove from it so that n
// more fit. Call it again until none is missing. The count may exceed the number of missing entries; it is 0 if no
// endpoint is above its guarantee.
func (a *Accounts) Victim(limit, n int) (endpoint uint32, count int) {
	above := 0
	for e := range a.accounts {
		if n := a.above(e, limit, 0); n > above || n == above && n > 0 && e < endpoint {
			endpoint, above = e, n
		}
	}
	return endpoint, min(above, max(a.Missing(limit, n), a.limits[limit].size/evictions, 1))
}
