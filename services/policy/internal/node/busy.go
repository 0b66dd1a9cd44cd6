// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"maps"
	"slices"
	"time"
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
)

// BusyBounds are the upper bounds of the histograms of Busy.
var BusyBounds = [...]time.Duration{
	100 * time.Microsecond, 250 * time.Microsecond, 500 * time.Microsecond,
	time.Millisecond, 2500 * time.Microsecond, 5 * time.Millisecond,
	10 * time.Millisecond, 25 * time.Millisecond, 50 * time.Millisecond,
	100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond,
	time.Second, 2500 * time.Millisecond,
}

// Busy says for how long the owner was busy with operations of one kind: as
// long as one lasts, every other call waits.
type Busy struct {
	Operation string
	Buckets   [len(BusyBounds)]uint64 // not cumulative
	Count     uint64
	Sum       time.Duration
	Longest   time.Duration
	Tables    int // the most that one of them compiled
}

// spent notes that the owner was busy with an operation since began.
func (n *Node) spent(began time.Time) {
	d := time.Since(began)
	b := n.busy[n.operation]
	if b == nil {
		b = &Busy{Operation: n.operation}
		n.busy[n.operation] = b
	}
	b.Count++
	b.Sum += d
	b.Longest = max(b.Longest, d)
	tables := n.engine.Counters().Tables
	b.Tables, n.compiled = max(b.Tables, tables-n.compiled), tables
	if i, _ := slices.BinarySearch(BusyBounds[:], d); i < len(BusyBounds) {
		b.Buckets[i]++
	}
}

// busyNow is a copy of the figures, by operation.
func (n *Node) busyNow() []Busy {
	out := make([]Busy, 0, len(n.busy))
	for _, op := range slices.Sorted(maps.Keys(n.busy)) {
		out = append(out, *n.busy[op])
	}
	return out
}
