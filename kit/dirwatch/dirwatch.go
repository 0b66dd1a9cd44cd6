// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package dirwatch says that something changed in a directory: that a look is due,
// never what there is. The directory may be a link that is exchanged, or come later.
package dirwatch

// What happened to a name.
type What uint8

// What can happen. Changed is everything that is none of the others.
const (
	Changed  What = iota
	Written       // it is open, and was written to
	Closed        // by who wrote to it
	Arrived       // whole, by a rename
	Departed      // removed, or renamed to another name
	Lost          // messages were lost: what is open is not known any more
)

// Event is what a watcher says. The name is that of a file of the directory, or empty
// for the directory itself.
type Event struct {
	What What
	Name string
	// Cookie joins the departure and the arrival of one rename within the directory; 0
	// for none.
	Cookie uint32
}

// Watcher watches one directory.
type Watcher struct {
	Events <-chan Event
	// Renew looks whether the path leads to another directory than before, and watches
	// that. An error says that the kernel has no room for a watch: until a later call
	// succeeds, events may be missing, and the caller has to look by itself.
	Renew func(path string) (other bool, err error)
	// Close ends the watcher and waits for it.
	Close func()
}

// None is a watcher that says nothing.
func None() Watcher {
	return Watcher{Events: make(chan Event), Renew: func(string) (bool, error) { return false, nil }, Close: func() {}}
}
