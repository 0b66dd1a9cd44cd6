// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import "context"

// Requirement is one thing that the programs need from the kernel or that the
// process needs to be allowed.
type Requirement struct {
	Name string // "helper bpf_redirect_peer", "capability CAP_BPF"
	// Missing is why it is not there, nil if it is.
	Missing error
	// Hint is what an operator can do about it.
	Hint string
}

// Report is the outcome of Probe.
type Report struct {
	Requirements []Requirement
}

// Probe checks everything that Open needs, without changing anything.
func Probe(ctx context.Context) Report { return probe(ctx) }

// Err is nil if nothing is missing, else one readable message that lists
// everything that is, each with its hint.
func (r Report) Err() error { return r.err() }
