// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package confirmed finds a revision of the store: every node that uses mappings has applied all removals of mappings
// up to it. Addresses whose mappings were removed by then may be reused early. Without such a revision, an address
// stays in quarantine until every node's stale mapping has expired.
//
// A node that needs a confirmation asks for a revision in its report. The collector reads all reports and publishes the
// requested revision. Each node then reports, at a random time within an interval, up to which revision it has applied
// all removals. The collector publishes the lowest of these revisions. As long as no node needs a confirmation, no node
// writes reports.
package confirmed

import (
	"context"
	"errors"

	"github.com/sluice-net/sluice/services/identity/internal/cluster"
)

// ErrDenied: the etcd role of this node lacks a grant.
var ErrDenied = errors.New("the store refuses the write")

// Report is the report of one node.
type Report struct {
	// Incarnation of the node, which distinguishes machines with the same name.
	Incarnation string `json:"incarnation"`
	Cluster     uint64 `json:"cluster,string"`
	// Revision up to which the node has applied all removals of mappings.
	Revision int64 `json:"revision"`
	// Wants is the revision that the node wants all nodes to confirm; 0: none.
	Wants int64 `json:"wants,omitempty"`
}

// Summary is the collector's publication for all nodes.
type Summary struct {
	Cluster uint64 `json:"cluster,string"`
	// Revision up to which every node that may have mappings has confirmed the removals; 0: unknown.
	Revision int64 `json:"revision"`
	// Nodes must confirm the removals up to this revision; 0: none.
	Wanted int64 `json:"wanted,omitempty"`
}

// Store stores the reports and the summary.
type Store interface {
	// Report replaces the report of this node, which the store deletes when the node's lease ends. It returns ErrDenied
	// if the etcd role of the node lacks the grant.
	Report(ctx context.Context, r Report) error
	// Publish replaces the summary if this node is the collector. It returns ErrDenied like Report.
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

// Node gives an Exchange access to the state of this node.
type Node interface {
	// Applied returns the point up to which the node has applied all removals of mappings. After a restart, the node
	// does not go back to a state before this point. Zero: unknown.
	Applied() cluster.Point
	// Wants returns the revision that all nodes should confirm; 0: none.
	Wants() int64
	// Nodes returns the number of nodes in the cluster.
	Nodes() int
	// SetConfirmed receives the published summary.
	SetConfirmed(Summary)
}
