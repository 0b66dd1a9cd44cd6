// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package decode parses documents with policies, from calls, files, an API server and the stored state. It decides
// whether a mistake is an error, which depends on where the document comes from, and reports the field with the
// mistake.
package decode

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/kit/nearest"
	"github.com/sluice-net/sluice/kit/yamlstream"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// Decoded is a document that was decoded.
type Decoded struct {
	Object   *policy.Object // immutable
	Text     []byte
	Document int // index of the document that it is or belongs to
	// Created and UID come from the object of an API server.
	Created time.Time
	UID     string
	Line    int // first line; 0: unknown

	item string // path of the document within a list, with a final dot
}

// Violation is one mistake in a document.
type Violation struct {
	Document int // index, not counting empty documents
	Line     int // first line of the document or list item, counted from 1
	Name     string
	Path     string
	Text     string
}

// Where implements rpcerr.Violation.
func (v Violation) Where() (document int, path, mistake string) { return v.Document, v.Path, v.Text }

// String returns "document 2 (line 9): kind name: path: text".
func (v Violation) String() string {
	text := fmt.Sprintf("document %d (line %d): ", v.Document+1, v.Line)
	if v.Line == 0 {
		text = fmt.Sprintf("document %d: ", v.Document+1)
	}
	if v.Name != "" {
		text += v.Name + ": "
	}
	return text + manifest.Problem{Path: v.Path, Text: v.Text}.String()
}

// Error reports the mistakes in manifests.
type Error struct {
	Violations []Violation
	Others     []Decoded // the other documents, which are valid
	Whole      error     // why the whole text is rejected: too large, or no document
}

// ErrEmpty means that the manifests contain no document, such as a file from which all policies were removed.
var ErrEmpty = errors.New("there is no document in the manifests")

// Unwrap returns the error about the whole text.
func (e *Error) Unwrap() error { return e.Whole }

// Error returns the first problems.
func (e *Error) Error() string {
	if e.Whole != nil {
		return e.Whole.Error()
	}
	var b strings.Builder
	for i, v := range e.Violations {
		if i == 5 {
			fmt.Fprintf(&b, "; and %d more", len(e.Violations)-i)
			break
		}
		if i > 0 {
			b.WriteString("; ")
		}
		b.WriteString(v.String())
	}
	return b.String()
}

// Options determine how documents are decoded.
type Options struct {
	Rules     rule.Options
	Namespace string // for documents without a namespace; empty: default
	// AllowUnknown drops fields that a kind does not have. By default they are errors: if a misspelt field for peers
	// or ports were dropped, the rule would apply to all peers or ports.
	AllowUnknown bool
	// Held is set if the objects come from an API server, which has accepted them already, so that they cannot be
	// rejected: see policy.DecodeHeld.
	Held bool
	// Stored accepts a policy that by itself exceeds the limits of every table. An earlier version may have stored
	// the policy without this check. If it were rejected now, no pod that it selects could start.
	Stored bool
	// Large applies the size limits of manifests to each document. Otherwise the limits apply to all documents
	// together, which bounds the memory that one caller can use.
	Large bool
}

// named is the name of a document, and the Violation to report if the name is used twice.
type named struct {
	Violation
	refused bool // another document has the same name
}

// one is a document, or an item of a document that is a list.
type one struct {
	manifest.Document
	path string // path of the item in its document, with a final dot; empty: the whole document
}

// violation returns a Violation for the document.
func (d one) violation(name, path, text string) Violation {
	return Violation{d.Number, d.Line, name, strings.TrimSuffix(d.path+path, "."), text}
}

// policy decodes one document. name is empty if it could not be read.
func (r Options) policy(d one) (object policy.Object, name string, bad []Violation) {
	doc := d.Document
	if policy.Namespaced(doc.Kind) {
		doc = doc.WithNamespace(cmp.Or(r.Namespace, "default"))
	}
	if r.Stored {
		doc = doc.PlainWords()
	}
	decode := policy.Decode
	if r.Held {
		decode = policy.DecodeHeld
	}
	object, err := decode(doc, r.Rules)
	if object.Key.Name != "" {
		name = object.Key.String()
	}
	if !r.AllowUnknown && !r.Held {
		for _, path := range object.Unknown {
			bad = append(bad, d.violation(name, path, unknownField(doc.Kind, path)))
		}
	}
	var problems manifest.Problems
	switch {
	case errors.As(err, &problems):
		for _, p := range problems {
			bad = append(bad, d.violation(name, p.Path, p.Text))
		}
	case err != nil:
		bad = append(bad, d.violation(name, "kind", err.Error()))
	case !r.Stored && !r.Held: // a pod that a held policy selects could not start if the policy were rejected
		if err := engine.Check(object); err != nil {
			bad = append(bad, d.violation(name, "spec", err.Error()))
		}
	}
	return object, name, bad
}

// unknownField returns the message for a field that its kind does not have.
func unknownField(kind, path string) string {
	switch at := strings.LastIndexByte(path, '.'); {
	case strings.HasSuffix(path[:max(at, 0)], ".rules") &&
		slices.Contains([]string{"kafka", "l7proto", "l7"}, path[at+1:]):
		return "no such field: rules of other protocols than HTTP and DNS, which Cilium had up to 1.19, are not implemented"
	default:
		return "no such field" + nearest.Hint(path[at+1:], fieldsBeside(kind, path))
	}
}

// fieldsBeside returns the names of all fields of the object that contains the field at path.
func fieldsBeside(kind, path string) []string {
	t := policy.Struct(kind)
	if t == nil {
		return nil
	}
	parents := strings.Split(path, ".")
	for _, parent := range parents[:len(parents)-1] {
		name, _, _ := strings.Cut(parent, "[") // the parent is an item of a list
		all := manifest.Fields(t)
		i := slices.IndexFunc(all, func(f manifest.Field) bool { return f.Name == name && f.Of != nil })
		if i < 0 {
			return nil
		}
		t = all[i].Of
	}
	var names []string
	for _, f := range manifest.Fields(t) {
		names = append(names, f.Name)
	}
	return names
}

// Decode decodes all documents, or none if one of them has a mistake.
func (r Options) Decode(data []byte) ([]Decoded, error) {
	if !r.Large {
		if err := manifest.Check(data); err != nil {
			return nil, &Error{Whole: err}
		}
	}
	var out []Decoded
	var bad Error
	seen := make(map[policy.Key]*named)
	take := func(d one) {
		object, name, wrong := r.policy(d)
		bad.Violations = append(bad.Violations, wrong...)
		if len(wrong) > 0 && object.Specs == nil && object.Group == nil {
			return
		}
		its := &named{Violation: d.violation(name, "metadata.name", "another document has the same kind and name")}
		if other := seen[object.Key]; other == nil {
			seen[object.Key] = its
		} else {
			if !other.refused {
				bad.Violations = append(bad.Violations, other.Violation)
			}
			other.refused = true
			bad.Violations = append(bad.Violations, its.Violation)
		}
		out = append(out, Decoded{Object: &object, Text: trim(d.Text), Document: d.Number, Line: d.Line, item: d.path})
	}
	manifest.Each(data, func(doc manifest.Document) {
		if doc.Err != nil {
			bad.Violations = append(bad.Violations, one{Document: doc}.violation("", "", doc.Err.Error()))
			return
		}
		items, err := doc.Items()
		var problems manifest.Problems
		errors.As(err, &problems) //nolint:errcheck // Items returns no other errors
		for _, p := range problems {
			bad.Violations = append(bad.Violations, one{Document: doc}.violation("", p.Path, p.Text))
		}
		if items == nil && err == nil {
			take(one{Document: doc})
		}
		for _, item := range items {
			d := one{item.Document, item.Path + "."}
			if item.Err != nil {
				bad.Violations = append(bad.Violations, d.violation("", "", item.Err.Error()))
				continue
			}
			take(d)
		}
	})
	if len(bad.Violations) > 0 {
		refused := map[int]bool{}
		for _, v := range bad.Violations {
			refused[v.Document] = true
		}
		bad.Others = slices.DeleteFunc(out, func(d Decoded) bool { return refused[d.Document] })
		return nil, &bad
	}
	if len(out) == 0 {
		return nil, &Error{Whole: ErrEmpty}
	}
	return out, nil
}

// trim removes the separator before a document and the surrounding white space, so that the text does not depend on the
// document's position in the stream.
func trim(text []byte) []byte {
	if first, rest, ok := bytes.Cut(text, []byte("\n")); ok {
		if f := strings.TrimSpace(string(first)); f == "---" || f == "..." {
			text = rest
		}
	}
	return bytes.Clone(append(bytes.TrimSpace(text), '\n'))
}

// Same compares a file with the documents that an earlier reading of the file found. If the file still contains
// exactly these documents, Same returns known. Otherwise it returns nil, and the caller must decode the file.
func Same(data []byte, known []Decoded) []Decoded {
	if len(known) == 0 {
		return nil
	}
	left := make(map[string]Decoded, len(known))
	for _, d := range known {
		left[string(d.Text)] = d
	}
	var out []Decoded
	n := 0
	for _, chunk := range yamlstream.Chunks(data) {
		text := string(trim(chunk))
		if text == "\n" {
			continue // only a separator
		}
		d, ok := left[text]
		if !ok {
			return nil
		}
		delete(left, text)
		d.Document = n
		n++
		out = append(out, d)
	}
	if len(left) > 0 {
		return nil
	}
	return out
}
