// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package refusals defines how nodes report the policies and Services that they do not enforce as written.
package refusals

import (
	"context"
	"errors"
)

// MaxBytes bounds the report of a node.
const MaxBytes = 64 << 10

// ErrTooLarge: a report is larger than MaxBytes.
var ErrTooLarge = errors.New("the report has more than 64 KiB")

// Subject says which objects a report is about. Each subject has a report of its own.
type Subject int

// Subjects.
const (
	Policies Subject = iota
	Services
)

// Refusal is an object that a node does not enforce as written.
type Refusal struct {
	Kind      string `json:"kind"`
	Namespace string `json:"namespace,omitempty"`
	Name      string `json:"name"`
	Reason    string `json:"reason,omitempty"`
}

// Report is the report of one node on a subject. The zero value removes it.
type Report struct {
	Refusals []Refusal `json:"refusals,omitempty"`
	Omitted  uint32    `json:"omitted,omitempty"` // number of further refusals that the report omits
	// OmittedReasons counts the omitted objects by reason code. Earlier versions ignore it.
	OmittedReasons map[string]uint32 `json:"omittedReasons,omitempty"`
	// Corrupt means that the store has a report of the node that cannot be decoded.
	Corrupt bool `json:"-"`
}

// Empty reports whether there is nothing to report.
func (r Report) Empty() bool { return len(r.Refusals) == 0 && r.Omitted == 0 }

// Sink takes the reports of all nodes.
type Sink struct {
	Begin    func()                                 // all reports are about to be sent again
	Node     func(node string, s Subject, r Report) // a report; empty: it was removed
	Complete func()                                 // each node's reports were sent since Begin
}

// Store keeps the reports of the cluster.
type Store interface {
	// ReportRefusals replaces the report of this node on a subject, unless it is the same. It ends with
	// the lease of the node.
	ReportRefusals(ctx context.Context, s Subject, r Report) error
	// FollowRefusals calls the sink until ctx ends or the store fails.
	FollowRefusals(ctx context.Context, s Sink) error
}
