// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package podrange defines an annotation in which a node reports whether its pod ranges have free addresses.
// sluice-ipam on the node writes it to the Node object, and sluice-controller creates Events from it.
package podrange

import (
	"encoding/json"
	"fmt"
	"time"
)

// Annotation is the key of the annotation. A Node whose addresses have never run out does not have it.
const Annotation = "node.sluice.io/pod-addresses"

// maxText limits the bytes of an annotation that are read.
const maxText = 4096

// State reports whether the node has addresses for new pods.
type State string

// The states.
const (
	Exhausted State = "exhausted" // a pod was refused
	Available State = "available" // addresses are free again
)

// Note is the value of the annotation.
type Note struct {
	State   State     `json:"state"`
	Since   time.Time `json:"since"` // time of the change, with a resolution of seconds
	Message string    `json:"message"`
}

// String returns the text of the annotation.
func (n Note) String() string {
	n.Since = n.Since.UTC().Truncate(time.Second)
	text, err := json.Marshal(n)
	if err != nil {
		panic(err) // the year is above 9999
	}
	return string(text)
}

// Parse reads the text of an annotation. Anyone who may write the Node object may have written it.
func Parse(text string) (Note, error) {
	if len(text) > maxText {
		return Note{}, fmt.Errorf("%s has %d bytes, more than %d", Annotation, len(text), maxText)
	}
	var n Note
	if err := json.Unmarshal([]byte(text), &n); err != nil {
		return Note{}, fmt.Errorf("%s: %w", Annotation, err)
	}
	if n.State != Exhausted && n.State != Available || n.Since.IsZero() {
		return Note{}, fmt.Errorf("%s: invalid state %q or time %s", Annotation, n.State, n.Since)
	}
	n.Since = n.Since.UTC().Truncate(time.Second)
	return n, nil
}
