// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package frontendtx has transactions: the changes of frontends that the kernel carries out
// together, and their result.
package frontendtx

import (
	"fmt"
	"slices"

	"github.com/sluice-net/sluice/model/frontend"
)

// Closed returns a frontend that refuses connections. The kernel keeps the kind and the
// Service that the frontend of the key has. If no frontend has the key, nothing changes.
func Closed(k frontend.Key) *frontend.Frontend {
	return &frontend.Frontend{Key: k, Inside: &frontend.List{}}
}

// Transaction is a set of changes that lead from one state to another. It keeps the last
// change of each key.
type Transaction struct {
	// Partial says that the kernel may have frontends that are unknown to the caller:
	// backends that one of them may drain stay.
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

// Remove removes a frontend. Removing one that does not exist is no error.
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
	// Refused are the frontends that the kernel does not have as the transaction asked,
	// including those that were closed because of their source ranges.
	Refused []frontend.Refusal
}

// SortRefusals sorts refusals by key.
func SortRefusals(rs []frontend.Refusal) {
	slices.SortFunc(rs, func(a, b frontend.Refusal) int { return a.Key.Compare(b.Key) })
}

// NoRoomError says that a frontend does not fit into a map. None of its backends was written.
type NoRoomError struct {
	// Map is the name of the map that is too small.
	Map string
	// Need is the number of elements that the change needs, Free the number that is free,
	// and Limit how many elements one list may have: a quarter of the map.
	Need, Free, Limit int
	// Run is how many elements are needed in one run, if enough are free and they are not in
	// one run; else 0. Aligned says that the run has to begin at a multiple of its length.
	Run     int
	Aligned bool
	// Resting is how many elements that Tenant removed are not free yet, if the tenant leaves
	// elements to others for that reason; else Tenant is empty.
	Resting int
	Tenant  string
	// Open says that not even an element that refuses connections fits. Packets to the frontend
	// reach another socket of the node, or leave the node.
	Open bool
}

// Error names the map and the figures.
func (e *NoRoomError) Error() string {
	text := fmt.Sprintf("map %s: %d elements needed, %d free, at most %d for one list", e.Map, e.Need, e.Free, e.Limit)
	if e.Run > 0 {
		text += "; they are not in one piece"
	}
	if e.Tenant != "" {
		text += fmt.Sprintf("; %s has removed %d that are not free yet, and leaves others to other tenants", e.Tenant, e.Resting)
	}
	if e.Open {
		text += "; nor is there room to refuse connections: packets pass as if there were no frontend"
	}
	return text
}
