// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package dirwatch reports that something changed in a directory, so that a scan is due; it does
// not report the directory's content. The directory may be a symbolic link that is replaced, and
// may not exist yet.
package dirwatch

// What distinguishes the types of an Event.
type What uint8

// Types of events. Changed means any event that the others do not cover.
const (
	Changed  What = iota
	Written       // a file is open and was written to
	Closed        // a file that was open for writing was closed
	Arrived       // a complete file appeared through a rename
	Departed      // a file was removed, or renamed away
	Lost          // events were lost, so the set of open files is unknown
)

// Event is one change. Name is the name of a file in the directory, or empty for the directory
// itself.
type Event struct {
	What What
	Name string
	// Cookie is equal for the Departed and the Arrived event of one rename within the directory;
	// otherwise 0.
	Cookie uint32
}

// Watcher watches one directory.
type Watcher struct {
	Events <-chan Event
	// Renew checks whether the path now refers to another directory, and if so watches the new one. An error means
	// that no watch is available: until a later call succeeds, events may be missing, and the caller has to scan
	// periodically.
	Renew func(path string) (other bool, err error)
	// Close stops the watcher and waits until its goroutine has ended.
	Close func()
}

// None returns a watcher without events.
func None() Watcher {
	return Watcher{Events: make(chan Event), Renew: func(string) (bool, error) { return false, nil }, Close: func() {}}
}
