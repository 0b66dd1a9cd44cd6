// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package managed decides who may change which objects of a desired-state service, under which
// conditions, and what a deletion removes.
//
// Objects come from sources: files, an API server, or calls. A call names its manager, and a
// manager may only change its own objects. The functions run in the loop that owns the objects, and
// change nothing.
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
	// SourceKubernetes delivers the objects of an API server one by one.
	SourceKubernetes = "kubernetes"
)

// By identifies who created an object.
type By struct {
	Source  string
	Origin  string // within the source, such as a file name
	Manager string // only with SourceGRPC; empty for calls without a manager
}

// Holder returns the owner of an object that the manager may not change, or "" if it may. An object
// of a source that is no longer configured may be changed by every caller, because its source will
// never update it.
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

// ChangeType is the effect of a change on an object.
type ChangeType int

// Values of ChangeType.
const (
	Created ChangeType = iota + 1
	Replaced
	Unchanged
	Deleted
	Absent
)

// Changed is the result for one object.
type Changed[K comparable, N any] struct {
	Key     K
	Type    ChangeType
	Dropped []string
	Notes   N
}

// Outcome is the result of a change.
type Outcome[K comparable, N any] struct {
	Revision uint64
	Changes  []Changed[K, N]
}

// Caller identifies the caller of a change through source "grpc", and the conditions of the change.
type Caller struct {
	Manager      string  // empty for calls without a manager
	IfRevision   *uint64 // expected revision; nil for any
	ValidateOnly bool    // check, but change nothing
	AllowEmpty   bool    // allow a change that deletes every object of the manager
}

// Check returns ErrChanged if the revision differs from the expected one.
func (c *Caller) Check(revision uint64) error {
	if c.IfRevision != nil && *c.IfRevision != revision {
		return fmt.Errorf("%w: the revision is %d, not %d", failure.ErrChanged, revision, *c.IfRevision)
	}
	return nil
}

// CheckRun returns ErrChanged if the service was restarted since the caller's listing began.
func (c *Caller) CheckRun(listed, run [16]byte) error {
	if listed != run {
		return fmt.Errorf("%w: the service was restarted since the listing of the manager %q began",
			failure.ErrChanged, c.Manager)
	}
	return nil
}

// Objects gives access to the objects of a service.
type Objects[K comparable] struct {
	// By returns who created an object; false if it does not exist.
	By func(K) (By, bool)
	// All yields all objects.
	All iter.Seq2[K, By]
	// Configured reports whether a source is configured.
	Configured func(source string) bool
	// Compare defines the order of keys.
	Compare func(a, b K) int
}

// Put returns nil if the caller may create or replace an object, and reports whether it exists.
// ErrOwned: another source or manager owns it.
func (o *Objects[K]) Put(c *Caller, k K) (exists bool, err error) {
	by, exists := o.By(k)
	if !exists {
		return false, nil
	}
	if who := by.Holder(c.Manager, o.Configured); who != "" {
		return true, fmt.Errorf("%w: %v belongs to %s", failure.ErrOwned, k, who)
	}
	return true, nil
}

// Delete returns the existing objects among keys, without duplicates. ErrForeign: another source or
// manager owns one of them.
func (o *Objects[K]) Delete(c *Caller, keys []K) (gone []K, err error) {
	seen := make(map[K]struct{}, len(keys))
	for _, k := range keys {
		by, exists := o.By(k)
		if _, again := seen[k]; again || !exists {
			continue
		}
		if who := by.Holder(c.Manager, o.Configured); who != "" {
			return nil, fmt.Errorf("%w: %v belongs to %s", failure.ErrForeign, k, who)
		}
		seen[k] = struct{}{}
		gone = append(gone, k)
	}
	return gone, nil
}

// Prune returns, in order, the objects of the caller's manager for which stays returns false.
// ErrEmpty: the manager would lose all its objects and the caller did not set AllowEmpty; added is
// the number of objects that the same change names.
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

// Deletions returns the result for each key of Delete: Deleted for the first occurrence of a
// removed object, Absent otherwise.
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
