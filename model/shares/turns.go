// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package shares

import (
	"cmp"
	"maps"
)

// Turns orders tenants that wait for work that is done for one of them at a time. The groups of tenants take turns,
// then the tenants of a group. So a tenant waits for at most one piece of work of each other tenant, however much work
// that tenant has, and new namespaces without the label do not delay labelled tenants. It is not safe for concurrent
// use.
type Turns struct {
	served  uint64 // pieces of work so far; the other values are of it
	groups  [groups]uint64
	tenants map[Tenant]uint64
}

// NewTurns returns Turns without tenants.
func NewTurns() *Turns { return &Turns{tenants: make(map[Tenant]uint64)} }

// Join adds a waiting tenant. New tenants queue behind the others.
func (t *Turns) Join(of Tenant) {
	if _, ok := t.tenants[of]; !ok {
		t.tenants[of] = t.served
	}
}

// Compare is negative if a's turn comes before b's.
func (t *Turns) Compare(a, b Tenant) int {
	return cmp.Or(cmp.Compare(t.groups[a.group()], t.groups[b.group()]), cmp.Compare(t.tenants[a], t.tenants[b]),
		a.Compare(b))
}

// Serve ends the turn of a tenant and returns the number of turns so far.
func (t *Turns) Serve(of Tenant) uint64 {
	t.served++
	t.groups[of.group()], t.tenants[of] = t.served, t.served
	return t.served
}

// Served returns the number of turns so far.
func (t *Turns) Served() uint64 { return t.served }

// Len returns the number of tenants that Turns remembers.
func (t *Turns) Len() int { return len(t.tenants) }

// Keep forgets the tenants for which waits returns false.
func (t *Turns) Keep(waits func(Tenant) bool) {
	maps.DeleteFunc(t.tenants, func(of Tenant, _ uint64) bool { return !waits(of) })
}
