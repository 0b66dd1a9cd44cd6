// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package podrange spells what a node says of the addresses of its pod ranges in an
// annotation of its Node: sluice-ipam on the node writes it, and the process that
// writes status for the cluster makes Events of it.
package podrange

import (
	"encoding/json"
	"fmt"
	"time"
)

// Annotation is the key of the annotation. A Node whose addresses never ran out does
// not have it.
const Annotation = "node.sluice.io/pod-addresses"

// maxText is how many bytes of an annotation are read.
const maxText = 4096

// State says whether the node has addresses for new pods.
type State string

// The states.
const (
	Exhausted State = "exhausted" // a pod was refused
	Available State = "available" // again
)

// Note is the value of the annotation.
type Note struct {
	State   State     `json:"state"`
	Since   time.Time `json:"since"` // in seconds: when the state changed
	Message string    `json:"message"`
}

// String is the text of the annotation.
func (n Note) String() string {
	n.Since = n.Since.UTC().Truncate(time.Second)
	text, err := json.Marshal(n)
	if err != nil {
		panic(err) // a year beyond 9999
	}
	return string(text)
}

// Parse reads the text of an annotation, which anyone who may write the Node may
// have written.
func Parse(text string) (Note, error) {
	if len(text) > maxText {
		return Note{}, fmt.Errorf("%s has %d bytes, more than %d", Annotation, len(text), maxText)
	}
	var n Note
	if err := json.Unmarshal([]byte(text), &n); err != nil {
		return Note{}, fmt.Errorf("%s: %w", Annotation, err)
	}
	if n.State != Exhausted && n.State != Available || n.Since.IsZero() {
		return Note{}, fmt.Errorf("%s: no state %q since %s", Annotation, n.State, n.Since)
	}
	n.Since = n.Since.UTC().Truncate(time.Second)
	return n, nil
}
