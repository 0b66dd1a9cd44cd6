// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import "fmt"

// NoteKind is the kind of a note.
type NoteKind uint8

// The kinds of notes.
const (
	// NoteUnsupported: a field of the kind is not supported. The part that contains it was converted so that it
	// allows less, never more.
	NoteUnsupported NoteKind = iota + 1
	// NoteCanonical: a value was normalised to another spelling.
	NoteCanonical
	// NoteIsolates: the object could not be converted, so the pods that it selects are isolated.
	NoteIsolates
	// NoteSelectsNothing: no endpoint is selected.
	NoteSelectsNothing
	// NoteNoEffect: a field of the kind is not supported, and no verdict depends on it.
	NoteNoEffect
	// NoteNoDNSRule: the policy allows DNS names, and no DNS rule selects its endpoints.
	NoteNoDNSRule
)

// String returns the name of the kind in messages.
func (k NoteKind) String() string {
	return [...]string{"", "unsupported", "canonical", "isolates", "selects-nothing", "no-effect", "no-dns-rule"}[k]
}

// Note is a remark about an accepted manifest for its author.
type Note struct {
	Kind NoteKind
	Path string // empty for the whole manifest
	Text string

	omitted int // on the last note: number of notes that were left out
}

// String returns "path: text".
func (n Note) String() string { return Problem{Path: n.Path, Text: n.Text}.String() }

// Notes are the notes on one manifest.
type Notes []Note

// maxNotes limits the notes that are kept for one manifest.
const maxNotes = 40

// Add appends a note. After maxNotes notes, it only counts further notes.
func (ns *Notes) Add(kind NoteKind, path, format string, args ...any) {
	if n := len(*ns); n >= maxNotes {
		(*ns)[n-1].omitted++
		return
	}
	text := shorten(fmt.Sprintf(format, args...), maxMessage)
	*ns = append(*ns, Note{Kind: kind, Path: shorten(path, maxPath), Text: text})
}

// Omitted returns the number of notes that Add has not kept.
func (ns Notes) Omitted() (n int) {
	for _, note := range ns {
		n += note.omitted
	}
	return n
}

// Unsupported appends a note about a field that is not supported.
func (ns *Notes) Unsupported(path, format string, args ...any) {
	ns.Add(NoteUnsupported, path, "not supported by Sluice: "+format, args...)
}
