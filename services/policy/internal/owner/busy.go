// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"maps"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/busy"
)

// Operations that the owner's time is counted by; the rest is "other".
const (
	opChange    = "change policies"
	opPrepare   = "prepare a change"
	opFiles     = "take over files"
	opIdentity  = "set identities"
	opSubscribe = "subscribe"
	opInterest  = "change subjects"
	opLearn     = "learn names"
	opRead      = "read"
	opDraft     = "copy references"
	opSweep     = "sweep"
	opOther     = "other"
	// opCommit is the write of a change with its sync, a part of opChange and opFiles.
	opCommit = "commit"
)

// Busy says for how long the owner was busy with operations of one kind: as
// long as one lasts, every other call waits.
type Busy struct {
	busy.Figures
	Tables int // the most that one of them compiled
	// Processor are the figures of the processor time that they took; empty without
	// Config.Processor. The rest of its time the owner waited for the disk, or for
	// a processor.
	Processor busy.Figures
}

// turn is when the owner began something.
type turn struct {
	began time.Time
	used  time.Duration
}

func (o *Owner) begin() turn {
	t := turn{began: time.Now()}
	if o.config.Processor != nil {
		t.used = o.config.Processor()
	}
	return t
}

// spent notes that the owner was busy with n.operation in a turn.
func (o *Owner) spent(t turn) {
	b := o.spentOn(o.operation, t)
	tables := o.engine.Counters().Tables
	b.Tables, o.compiled = max(b.Tables, tables-o.compiled), tables
}

// spentOn notes that an operation took the owner since the turn began.
func (o *Owner) spentOn(operation string, t turn) *Busy {
	d := time.Since(t.began)
	b := o.busy[operation]
	if b == nil {
		b = &Busy{Figures: busy.Figures{Operation: operation}}
		o.busy[operation] = b
	}
	b.Add(d)
	if o.config.Processor != nil {
		b.Processor.Add(o.config.Processor() - t.used)
	}
	return b
}

// busyNow is a copy of the figures, by operation.
func (o *Owner) busyNow() []Busy {
	out := make([]Busy, 0, len(o.busy))
	for _, op := range slices.Sorted(maps.Keys(o.busy)) {
		out = append(out, *o.busy[op])
	}
	return out
}
