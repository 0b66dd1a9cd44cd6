// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package summary defines the summary of the service's state for GetStatus and the metrics. The owner fills it in one
// turn.
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
	Store       peer.StoreRevision // revision of the identities
	Policies    int
	Refused     int
	Unsupported int // enforced policies with an unsupported field
	Exceeding   int // policies that isolate because they exceed the share of their tenant
	Limits      []shares.Usage
	Reduced     int // tables that lack rules of their subjects
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
	// Problems contains the first problems, and one entry with the number of the others.
	Problems     []Problem
	ProblemCount int
	// WaitsFor lists the incomplete sources. Subscribers get no tables until these sources are complete.
	WaitsFor []string
	// Skipped lists documents of files that are not policies.
	Skipped []string
}

// ProblemKind tells which part of the service a problem concerns.
type ProblemKind uint8

// The kinds of problems.
const (
	ProblemPolicy   ProblemKind = iota + 1 // a policy is refused or not enforced correctly
	ProblemStorage                         // the disk cannot be written
	ProblemSettings                        // settings contradict the state
)

// Problem is a condition that an operator must resolve.
type Problem struct {
	Kind ProblemKind
	Text string // one line
}

// MaxProblems limits the number of listed problems, because every file of a directory may have a problem, and the
// status must fit into a message.
const MaxProblems = 100

// SourceStatus is the state of a source.
type SourceStatus struct {
	Name     string
	Manager  string // a manager of SourceGRPC
	Synced   bool
	Error    string
	Policies int // number of enforced policies
}

// SubscriberStatus is the state of a subscriber.
type SubscriberStatus struct {
	Name      string
	Connected bool
	Enforces  bool
	Revision  uint64
	Store     peer.StoreRevision // revision of the identities that it enforces
	Behind    uint64
	Refusals  []string
	Held      string    // why the subscriber still enforces an earlier state
	Forgotten time.Time // when the subscriber is removed, unless it reconnects
}

// Note adds a problem.
func (s *Status) Note(kind ProblemKind, format string, args ...any) {
	s.Problems = append(s.Problems, Problem{kind, fmt.Sprintf(format, args...)})
}
