// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package frontendtx defines transactions: changes of frontends that are applied to the kernel together, and their
// result.
package frontendtx

import (
	"fmt"
	"slices"

	"github.com/sluice-net/sluice/model/frontend"
)

// Closed returns a frontend that refuses connections. The kernel keeps the kind and the Service of the existing
// frontend. Without a frontend with the key, nothing changes.
func Closed(k frontend.Key) *frontend.Frontend {
	return &frontend.Frontend{Key: k, Inside: &frontend.List{}}
}

// Transaction is a set of changes. It keeps the last change of each key.
type Transaction struct {
	// Partial is set if the kernel may have frontends that the caller does not know. Backends that such a frontend
	// may still drain are kept.
	Partial bool

	changes []Change
	at      map[frontend.Key]int
}

// Change is the change of one frontend.
type Change struct {
	Key frontend.Key
	// Frontend is the new frontend; nil removes it.
	Frontend *frontend.Frontend
}

// Upsert creates or replaces a frontend.
func (t *Transaction) Upsert(f *frontend.Frontend) { t.set(Change{f.Key, f}) }

// Remove removes a frontend. A missing frontend is not an error.
func (t *Transaction) Remove(k frontend.Key) { t.set(Change{Key: k}) }

func (t *Transaction) set(c Change) {
	if i, ok := t.at[c.Key]; ok {
		t.changes[i] = c
		return
	}
	if t.at == nil {
		t.at = map[frontend.Key]int{}
	}
	t.at[c.Key] = len(t.changes)
	t.changes = append(t.changes, c)
}

// Changes returns the changes, each key once. The caller must not modify the slice.
func (t *Transaction) Changes() []Change { return t.changes }

// Has reports whether the transaction changes a key.
func (t *Transaction) Has(k frontend.Key) bool {
	_, ok := t.at[k]
	return ok
}

// Result is the result of a transaction.
type Result struct {
	// Changed is the number of frontends that were written or removed.
	Changed int
	// Refused are the frontends whose state in the kernel differs from the transaction, including frontends that were
	// closed because of their source ranges.
	Refused []frontend.Refusal
}

// SortRefusals sorts refusals by key.
func SortRefusals(rs []frontend.Refusal) {
	slices.SortFunc(rs, func(a, b frontend.Refusal) int { return a.Key.Compare(b.Key) })
}

// NoRoomError is returned if a frontend does not fit into a map. None of its backends was written.
type NoRoomError struct {
	// Map is the name of the map that is too small.
	Map string
	// Need is the number of elements that the change needs, Free the number of free elements, and Limit the maximum for
	// one list: a quarter of the map.
	Need, Free, Limit int
	// Run is the number of contiguous elements needed, if enough are free but not contiguous; otherwise 0. Aligned: the
	// distance of the run from the end of the map must be a multiple of its length.
	Run     int
	Aligned bool
	// Resting is the number of elements that Tenant removed and that are not free yet, if this is the reason why the
	// tenant must leave free elements to others; otherwise Tenant is empty.
	Resting int
	Tenant  string
	// Open: not even an element that refuses connections fits. Packets to the frontend reach another socket of the node,
	// or leave the node.
	Open bool
}

// Error returns the map and the numbers.
func (e *NoRoomError) Error() string {
	text := fmt.Sprintf("map %s: %d elements needed, %d free, at most %d for one list", e.Map, e.Need, e.Free, e.Limit)
	if e.Run > 0 {
		text += "; they are not contiguous"
	}
	if e.Tenant != "" {
		text += fmt.Sprintf("; %s has %d removed elements that are not free yet, and must leave the others to other tenants",
			e.Tenant, e.Resting)
	}
	if e.Open {
		text += "; no space even to refuse connections: packets pass as if there were no frontend"
	}
	return text
}
