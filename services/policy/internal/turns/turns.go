// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package turns counts what the turns of the owner of policy took: time, processor
// time and tables that were compiled.
package turns

import (
	"maps"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/busy"
)

// Busy says for how long the owner was busy with operations of one kind: as
// long as one lasts, every other call waits.
type Busy struct {
	busy.Figures
	Tables int // the most that one of them compiled
	// Processor are the figures of the processor time that they took; empty if it is
	// not measured. The rest of its time the owner waited for the disk, or for a
	// processor.
	Processor busy.Figures
}

// Turn is when the owner began something.
type Turn struct {
	began time.Time
	used  time.Duration
}

// Record has the figures of one owner, and belongs to it.
type Record struct {
	processor func() time.Duration
	by        map[string]*Busy // operation
	compiled  int              // tables, before the turn
}

// NewRecord returns a record without figures. Processor is the processor time of
// the owner; nil: that is not measured.
func NewRecord(processor func() time.Duration) *Record {
	return &Record{processor: processor, by: make(map[string]*Busy)}
}

// Begin begins a turn, or a part of one.
func (r *Record) Begin() Turn {
	t := Turn{began: time.Now()}
	if r.processor != nil {
		t.used = r.processor()
	}
	return t
}

// Spent notes that the owner was busy with an operation in a turn, after which so
// many tables have been compiled since the start.
func (r *Record) Spent(operation string, t Turn, tables int) {
	b := r.SpentOn(operation, t)
	b.Tables, r.compiled = max(b.Tables, tables-r.compiled), tables
}

// SpentOn notes that an operation took the owner since the turn began.
func (r *Record) SpentOn(operation string, t Turn) *Busy {
	d := time.Since(t.began)
	b := r.by[operation]
	if b == nil {
		b = &Busy{Figures: busy.Figures{Operation: operation}}
		r.by[operation] = b
	}
	b.Add(d)
	if r.processor != nil {
		b.Processor.Add(r.processor() - t.used)
	}
	return b
}

// All is a copy of the figures, by operation.
func (r *Record) All() []Busy {
	out := make([]Busy, 0, len(r.by))
	for _, op := range slices.Sorted(maps.Keys(r.by)) {
		out = append(out, *r.by[op])
	}
	return out
}
