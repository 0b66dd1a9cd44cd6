// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import "fmt"

// NoteKind says what a note is about.
type NoteKind uint8

// The kinds of notes.
const (
	// NoteUnsupported: a field of the kind that is not supported. What it
	// belongs to was converted so that it allows less, never more.
	NoteUnsupported NoteKind = iota + 1
	// NoteCanonical: a value was taken in another spelling than it was written in.
	NoteCanonical
	// NoteIsolates: the object could not be converted; what it selects is isolated.
	NoteIsolates
	// NoteSelectsNothing: no endpoint is selected.
	NoteSelectsNothing
	// NoteNoEffect: a field of the kind that is not supported, and on which no verdict depends.
	NoteNoEffect
)

// String is the name of the kind in messages.
func (k NoteKind) String() string {
	return [...]string{"", "unsupported", "canonical", "isolates", "selects-nothing", "no-effect"}[k]
}

// Note is something about an accepted manifest that its author should know.
type Note struct {
	Kind NoteKind
	Path string // empty for the whole
	Text string

	omitted int // how many were left out behind it
}

// String is "path: text".
func (n Note) String() string { return Problem{Path: n.Path, Text: n.Text}.String() }

// Notes are the notes on one manifest.
type Notes []Note

// maxNotes is how many are kept of one manifest.
const maxNotes = 40

// Add appends a note. Of many, the first are kept and the others counted.
func (ns *Notes) Add(kind NoteKind, path, format string, args ...any) {
	if n := len(*ns); n >= maxNotes {
		(*ns)[n-1].omitted++
		return
	}
	text := shorten(fmt.Sprintf(format, args...), maxMessage)
	*ns = append(*ns, Note{Kind: kind, Path: shorten(path, maxPath), Text: text})
}

// Omitted is how many notes Add has not kept.
func (ns Notes) Omitted() (n int) {
	for _, note := range ns {
		n += note.omitted
	}
	return n
}

// Unsupported appends a note on a field that is not supported.
func (ns *Notes) Unsupported(path, format string, args ...any) {
	ns.Add(NoteUnsupported, path, "not supported by Sluice: "+format, args...)
}
