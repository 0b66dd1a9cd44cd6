// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package managed says who may change which objects of a service of desired state, on
// what condition, and what a deletion does.
//
// A source brings objects: files, the objects of an API server, or calls. Calls name
// their manager, and a manager changes its own objects alone. The functions run in the
// loop that owns the objects, and change nothing.
package managed

import (
	"fmt"
	"iter"
	"slices"

	"github.com/sluice-net/sluice/kit/desired/failure"
)

// Names of the sources.
const (
	SourceGRPC = "grpc"
	SourceFile = "file"
	// SourceKubernetes gives the objects of an API server, one by one.
	SourceKubernetes = "kubernetes"
)

// By says who brought an object.
type By struct {
	Source  string
	Origin  string // within the source, such as a file
	Manager string // of SourceGRPC; empty: calls without one
}

// Holder names who has an object that a manager may not touch; empty: the manager may.
// An object of a source that is not configured any more belongs to every caller: its own
// source will not come.
func (b By) Holder(manager string, configured func(source string) bool) string {
	switch {
	case b.Source != SourceGRPC && configured(b.Source):
		return b.Source + " " + b.Origin
	case b.Source != SourceGRPC || b.Manager == manager:
		return ""
	case b.Manager == "":
		return "calls without a manager"
	}
	return fmt.Sprintf("the manager %q", b.Manager)
}

// ChangeType is what was done to an object.
type ChangeType int

// The types.
const (
	Created ChangeType = iota + 1
	Replaced
	Unchanged
	Deleted
	Absent
)

// Changed is what became of one object.
type Changed[K comparable, N any] struct {
	Key     K
	Type    ChangeType
	Dropped []string
	Notes   N
}

// Outcome is the answer of a change.
type Outcome[K comparable, N any] struct {
	Revision uint64
	Changes  []Changed[K, N]
}

// Caller is who asks for a change of the source "grpc", and on what condition.
type Caller struct {
	Manager      string  // empty: that of calls without one
	IfRevision   *uint64 // nil: whatever the revision is
	ValidateOnly bool    // check, but change nothing
	AllowEmpty   bool    // the manager may lose every object that it has
}

// Check returns ErrChanged if the revision is not the one that the caller expects.
func (c *Caller) Check(revision uint64) error {
	if c.IfRevision != nil && *c.IfRevision != revision {
		return fmt.Errorf("%w: the revision is %d, not %d", failure.ErrChanged, revision, *c.IfRevision)
	}
	return nil
}

// CheckRun returns ErrChanged if this run of the service is not the one that took the
// listing which the caller completes.
func (c *Caller) CheckRun(listed, run [16]byte) error {
	if listed != run {
		return fmt.Errorf("%w: this is another run of the service than the one that took the listing of %q",
			failure.ErrChanged, c.Manager)
	}
	return nil
}

// Objects are the objects of a service.
type Objects[K comparable] struct {
	// By returns who brought an object; false: there is none.
	By func(K) (By, bool)
	// All are all objects.
	All iter.Seq2[K, By]
	// Configured reports whether a source is configured.
	Configured func(source string) bool
	// Compare orders keys.
	Compare func(a, b K) int
}

// Put returns nil if the caller may create or replace an object, and whether it exists.
// ErrOwned: another source or manager has it.
func (o *Objects[K]) Put(c *Caller, k K) (exists bool, err error) {
	by, exists := o.By(k)
	if !exists {
		return false, nil
	}
	if who := by.Holder(c.Manager, o.Configured); who != "" {
		return true, fmt.Errorf("%w: %v is of %s", failure.ErrOwned, k, who)
	}
	return true, nil
}

// Delete returns which of the objects are there, each once. ErrForeign: another source
// or manager has one of them.
func (o *Objects[K]) Delete(c *Caller, keys []K) (gone []K, err error) {
	seen := make(map[K]struct{}, len(keys))
	for _, k := range keys {
		by, exists := o.By(k)
		if _, again := seen[k]; again || !exists {
			continue
		}
		if who := by.Holder(c.Manager, o.Configured); who != "" {
			return nil, fmt.Errorf("%w: %v is of %s", failure.ErrForeign, k, who)
		}
		seen[k] = struct{}{}
		gone = append(gone, k)
	}
	return gone, nil
}

// Prune returns the objects of the caller's manager that do not stay, in order. ErrEmpty:
// the manager would lose all that it has, which has to be allowed; added is how many
// objects the same change names.
func (o *Objects[K]) Prune(c *Caller, added int, stays func(K) bool) (gone []K, err error) {
	kept := added
	for k, by := range o.All {
		switch {
		case by.Source != SourceGRPC || by.Manager != c.Manager:
		case stays(k):
			kept++
		default:
			gone = append(gone, k)
		}
	}
	if len(gone) > 0 && kept == 0 && !c.AllowEmpty {
		return nil, fmt.Errorf("%w: %d of the manager %q would be deleted", failure.ErrEmpty, len(gone), c.Manager)
	}
	slices.SortFunc(gone, o.Compare)
	return gone, nil
}

// Deletions says of each key what Delete does: Deleted for the first of those that go,
// Absent for the others.
func Deletions[K comparable, N any](keys, gone []K) []Changed[K, N] {
	left := make(map[K]struct{}, len(gone))
	for _, k := range gone {
		left[k] = struct{}{}
	}
	out := make([]Changed[K, N], 0, len(keys))
	for _, k := range keys {
		c := Changed[K, N]{Key: k, Type: Absent}
		if _, ok := left[k]; ok {
			delete(left, k)
			c.Type = Deleted
		}
		out = append(out, c)
	}
	return out
}
