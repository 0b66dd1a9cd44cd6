// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package confirmed finds the revision of the store up to which every node with mappings has applied their removals.
// Addresses removed up to that revision may be reused early. Without it, they wait until every node's stale mappings
// have expired.
//
// A node that needs a revision confirmed asks for it in its report. The collecting node reads all reports and
// publishes which revision is needed. Each node then reports the revision that it has applied, at a random moment of
// an interval. The collecting node publishes the lowest of them. While no node needs a confirmation, none writes
// reports.
package confirmed

import (
	"context"
	"errors"

	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// ErrDenied: the role of this node in the store lacks a grant.
var ErrDenied = errors.New("the store refuses the write")

// Report is the report of one node.
type Report struct {
	// Incarnation of the node: another machine of the same name has another one.
	Incarnation string `json:"incarnation"`
	Cluster     uint64 `json:"cluster,string"`
	// Revision up to which the node has every removal of a mapping.
	Revision int64 `json:"revision"`
	// Wants is the revision that the node wants all nodes to confirm; 0: none.
	Wants int64 `json:"wants,omitempty"`
}

// Summary is published by the collecting node for all nodes.
type Summary struct {
	Cluster uint64 `json:"cluster,string"`
	// Revision up to which every node that may have mappings has confirmed; 0: not known.
	Revision int64 `json:"revision"`
	// Wanted: the revision that nodes must confirm; 0 means no request.
	Wanted int64 `json:"wanted,omitempty"`
}

// Store keeps reports and summary.
type Store interface {
	// Report replaces the report of this node. It ends with the lease of the node.
	// ErrDenied if the role of the node lacks the grant.
	Report(ctx context.Context, r Report) error
	// Publish replaces the summary if this node is the collecting one. ErrDenied as
	// Report.
	Publish(ctx context.Context, s Summary) error
	// FollowSummary calls sink with the summary and after every change, until ctx ends or
	// the store fails. listed is true for the first call, and after the store lost its
	// history.
	FollowSummary(ctx context.Context, sink func(s Summary, listed bool)) error
	// FollowNodes passes the living nodes to the tracker, until ctx ends or the store fails.
	FollowNodes(ctx context.Context, t *Tracker) error
	// FollowReports passes the nodes' reports to the tracker, as FollowNodes does.
	FollowReports(ctx context.Context, t *Tracker) error
}

// Node gives an Exchange the state of this node.
type Node interface {
	// Applied returns the point up to which the node has every removal of a mapping, so
	// that it does not go back behind it after a restart; zero: not known.
	Applied() cluster.Point
	// Wants returns the revision that all nodes should confirm; 0: none.
	Wants() int64
	// Nodes returns how many nodes the cluster has.
	Nodes() int
	// SetConfirmed takes the published summary.
	SetConfirmed(Summary)
}
