// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package decode understands the documents that say policies: those of a call, of
// a file, of an API server, and those that were stored. It decides what is an
// error where, and names the fields.
package decode

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-net/sluice/kit/yamlstream"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// Decoded is a document that was understood.
type Decoded struct {
	Object   policy.Object
	Text     []byte
	Document int // that it is, or is an item of; from 0
	// Created and UID are those of the object of an API server.
	Created time.Time
	UID     string
	Line    int // at which it begins; 0: that is not known

	item string // its path in a list, with a dot
}

// Violation is one thing that is wrong with a document.
type Violation struct {
	Document int // from 0, empty documents not counted
	Line     int // at which the document, or the item of a list, begins; 1 first
	Name     string
	Path     string
	Text     string
}

// Where implements rpcerr.Violation.
func (v Violation) Where() (document int, path, mistake string) { return v.Document, v.Path, v.Text }

// String is "document 2 (line 9): kind name: path: text".
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

// Error says what is wrong with manifests.
type Error struct {
	Violations []Violation
	Others     []Decoded // of the documents that have none
	Whole      error     // the text as a whole is too large, or has no document
}

// ErrEmpty: as a file is whose policies were all removed.
var ErrEmpty = errors.New("there is no document in the manifests")

// Unwrap gives the error of the whole.
func (e *Error) Unwrap() error { return e.Whole }

// Error names the first problems.
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

// Options say how manifests are understood.
type Options struct {
	Rules     rule.Options
	Namespace string // of documents that name none; empty: default
	// AllowUnknown drops fields that a kind does not have. Without it they are
	// errors: a peer or a port that is misspelt would be one that was left out,
	// which is all of them.
	AllowUnknown bool
	// Held says that the documents are objects of an API server, which cannot be
	// refused: see policy.DecodeHeld.
	Held bool
	// Stored takes a policy that alone is too large for any table: it may be from
	// a version that did not look, and no pod that it selects starts without it.
	Stored bool
	// Large says that the bounds of manifests are those of each document. Else they
	// are those of all together, which is what one caller may take of the memory.
	Large bool
}

// named is the name of a document, as what is wrong with it if another has it
// too.
type named struct {
	Violation
	refused bool // another has it
}

// one is a document, or an item of one that is a list.
type one struct {
	manifest.Document
	path string // of the item in its document, with a dot; empty: it is the document
}

// violation is one of the document.
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
			bad = append(bad, d.violation(name, path, unknownField(path)))
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
	case !r.Stored && !r.Held: // as a pod that a held one selects cannot start
		if err := engine.Check(object); err != nil {
			bad = append(bad, d.violation(name, "spec", err.Error()))
		}
	}
	return object, name, bad
}

// unknownField says of a field that its kind does not have what it may be.
func unknownField(path string) string {
	switch at := strings.LastIndexByte(path, '.'); {
	case strings.HasSuffix(path[:max(at, 0)], ".rules") &&
		slices.Contains([]string{"kafka", "l7proto", "l7"}, path[at+1:]):
		return "no such field: rules of other protocols than HTTP and DNS, which Cilium had up to 1.19, are not implemented"
	default:
		return "no such field"
	}
}

// Decode understands documents, all of them or none.
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
		out = append(out, Decoded{Object: object, Text: trim(d.Text), Document: d.Number, Line: d.Line, item: d.path})
	}
	manifest.Each(data, func(doc manifest.Document) {
		if doc.Err != nil {
			bad.Violations = append(bad.Violations, one{Document: doc}.violation("", "", doc.Err.Error()))
			return
		}
		items, err := doc.Items()
		var problems manifest.Problems
		errors.As(err, &problems) //nolint:errcheck // Items returns nothing else
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

// trim takes off the marker before a document and the blanks around it, so
// that its place among others does not change it.
func trim(text []byte) []byte {
	if first, rest, ok := bytes.Cut(text, []byte("\n")); ok {
		if f := strings.TrimSpace(string(first)); f == "---" || f == "..." {
			text = rest
		}
	}
	return bytes.Clone(append(bytes.TrimSpace(text), '\n'))
}

// Same are the documents of a file, if its text is that of the given ones and
// nothing else; nil if it has to be understood.
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
			continue // a marker alone
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
