// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

// ProgramID is the kernel's number of a loaded program.
type ProgramID uint32

// Program is one loaded program. The Kernel keeps it open; a filter that was
// attached with FD keeps it alive after Close.
type Program struct {
	// Name of the tc filter: sluice_from_pod or sluice_to_pod.
	Name string
	// FD to attach, valid until Close.
	FD int
	// ID and Tag as the kernel reports them. The tag covers the instructions
	// only: neither the maps nor the constants. Audit covers all three.
	ID  ProgramID
	Tag string
}

// Audit is the difference between a program in a filter and ours.
type Audit struct {
	// SameCode: both have the same instructions.
	SameCode bool
	// SameMaps: it uses exactly the maps that are pinned for this instance.
	SameMaps bool
	// SameConfig: it was loaded with the same constants.
	SameConfig bool
	// Differences in words, for a log line. Empty if all are equal.
	Differences []string
}

// Current says that the filter need not be replaced.
func (a Audit) Current() bool { return a.SameCode && a.SameMaps && a.SameConfig }
