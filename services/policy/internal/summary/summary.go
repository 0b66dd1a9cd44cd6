// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package summary is the state of the service as GetStatus and the metrics have
// it. The owner of policy fills it in one turn.
package summary

import (
	"fmt"
	"time"

	"github.com/sluice-net/sluice/kit/desired/loop"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
)

// Status is a summary.
type Status struct {
	Revision    uint64
	Store       peer.StoreRevision // of the identities
	Policies    int
	Refused     int
	Unsupported int // policies in force with a field that is not supported
	Exceeding   int // policies that isolate, since they exceed the share of their tenant
	Limits      []shares.Usage
	Reduced     int // tables that do not have all rules of their subjects
	Identities  int
	Waiting     int
	Size        engine.Size
	Counters    engine.Counters
	Names       int
	Addresses   int
	Journal     int64
	Busy        []loop.Figures
	Sources     []SourceStatus
	Subscribers []SubscriberStatus
	// Problems are the first of them, and a line about the rest.
	Problems     []Problem
	ProblemCount int
	// WaitsFor says why subscribers are not served yet.
	WaitsFor []string
	// Skipped are documents of files that are no policies.
	Skipped []string
}

// ProblemKind says where to look.
type ProblemKind uint8

// The kinds of problems.
const (
	ProblemPolicy   ProblemKind = iota + 1 // one is refused, or is not enforced as it should be
	ProblemStorage                         // the disk takes no writes
	ProblemSettings                        // they contradict the state
)

// Problem is one thing that needs an operator.
type Problem struct {
	Kind ProblemKind
	Text string // one line
}

// MaxProblems is how many are listed: every file of a directory can be one, and
// a status has to fit into a message.
const MaxProblems = 100

// SourceStatus is the state of a source.
type SourceStatus struct {
	Name     string
	Manager  string // of SourceGRPC
	Synced   bool
	Error    string
	Policies int // in force
}

// SubscriberStatus is the state of a subscriber.
type SubscriberStatus struct {
	Name      string
	Connected bool
	Enforces  bool
	Revision  uint64
	Store     peer.StoreRevision // of the identities that it enforces
	Behind    uint64
	Refusals  []string
	Held      string    // why it goes on enforcing an earlier state
	Forgotten time.Time // when, unless it comes back
}

// Note adds a problem.
func (s *Status) Note(kind ProblemKind, format string, args ...any) {
	s.Problems = append(s.Problems, Problem{kind, fmt.Sprintf(format, args...)})
}
