// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package yamlstream divides a stream of YAML or JSON documents, as files of
// manifests are. It knows where each stands, and nothing of what is in it.
package yamlstream

import (
	"bytes"
	"errors"
	"fmt"
	"io"

	"go.yaml.in/yaml/v3"
)

// Document is one document of a stream.
type Document struct {
	Number int        // from 0; empty documents are not counted
	Before int        // lines of the stream before those that Root counts
	Text   []byte     // as it came, with its marker
	Root   *yaml.Node // not null
}

// Error says which document cannot be read.
type Error struct {
	Document int // from 0
	Err      error
}

// Error names the document, of which the first is number 1 for people.
func (e *Error) Error() string { return fmt.Sprintf("document %d: %v", e.Document+1, e.Err) }

// Unwrap gives the reason, which names a line of the stream.
func (e *Error) Unwrap() error { return e.Err }

// Each parses the documents of a stream one by one and gives each to take, whose
// error ends it. It asks check, if there is one, before it parses a text. A
// document that cannot be read is an *Error.
func Each(data []byte, check func(text []byte) error, take func(Document) error) error {
	n, directives := 0, -1
	for _, c := range divide(data) {
		text := data[c.begin:c.end]
		if empty, directive := nothing(text); empty && c.end < len(data) {
			if directive && directives < 0 {
				directives = c.begin // they are of the next document
				if bytes.HasPrefix(text, []byte("...")) {
					directives += bytes.IndexByte(text, '\n') + 1
				}
			}
			continue
		}
		if check != nil {
			if err := check(text); err != nil {
				return &Error{n, err}
			}
		}
		whole, line := text, c.line
		if directives >= 0 {
			whole, line = data[directives:c.end], 1+bytes.Count(data[:directives], []byte("\n"))
		} else if bytes.HasPrefix(text, []byte("...")) {
			if end := bytes.IndexByte(text, '\n'); end >= 0 { // without it, the text is no end but a document
				if empty, _ := nothing(text[:end]); empty {
					whole, line = text[end+1:], line+1
				}
			}
		}
		directives = -1
		roots, err := Parse(whole)
		if err != nil && line > 1 { // once more, for the lines in the message
			_, err = Parse(append(bytes.Repeat([]byte("\n"), line-1), whole...))
		}
		switch {
		case err != nil:
			return &Error{n, err}
		case len(roots) > 1:
			return &Error{n + 1, errors.New("has no marker of its own (a line of ---) before it")}
		case len(roots) == 1:
			if err := take(Document{n, line - 1, text, roots[0]}); err != nil {
				return err
			}
			n++
		}
	}
	return nil
}

// Parse returns the values of the documents of a stream. Empty documents are
// skipped.
func Parse(data []byte) ([]*yaml.Node, error) {
	var roots []*yaml.Node
	for dec := yaml.NewDecoder(bytes.NewReader(data)); ; {
		var doc yaml.Node
		switch err := dec.Decode(&doc); {
		case errors.Is(err, io.EOF):
			return roots, nil
		case err != nil:
			return roots, err
		case len(doc.Content) > 0 && doc.Content[0].Tag != "!!null":
			roots = append(roots, doc.Content[0])
		}
	}
}

// Field is the place of a key's value in the content of a mapping; -1 if there
// is none.
func Field(n *yaml.Node, key string) int {
	for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return i + 1
		}
	}
	return -1
}

// WithDefaults is a mapping with those keys and values in front that it does not
// have.
func WithDefaults(n *yaml.Node, pairs ...string) *yaml.Node {
	out := *n
	out.Content = nil
	for i := 0; i < len(pairs); i += 2 {
		if Field(n, pairs[i]) < 0 {
			for _, text := range pairs[i : i+2] {
				out.Content = append(out.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text})
			}
		}
	}
	out.Content = append(out.Content, n.Content...)
	return &out
}

// Chunks are the parts of a stream of which each has a document at most.
func Chunks(data []byte) [][]byte {
	var out [][]byte
	for _, c := range divide(data) {
		out = append(out, data[c.begin:c.end])
	}
	return out
}

// chunk is a part of a stream that begins with a marker, or at the beginning.
type chunk struct{ line, begin, end int }

// divide cuts a stream at its markers. A line that begins with a marker ends a
// document wherever it stands, in quotes and blocks of text too.
func divide(data []byte) []chunk {
	var chunks []chunk
	line, begin, at, n := 1, 0, 0, 1
	for text := range bytes.Lines(data) {
		if marker(text) && at > begin {
			chunks = append(chunks, chunk{line, begin, at})
			line, begin = n, at
		}
		at, n = at+len(text), n+1
	}
	return append(chunks, chunk{line, begin, len(data)})
}

func marker(line []byte) bool {
	if !bytes.HasPrefix(line, []byte("---")) && !bytes.HasPrefix(line, []byte("...")) {
		return false
	}
	return len(line) == 3 || bytes.IndexByte([]byte(" \t\r\n"), line[3]) >= 0
}

// nothing reports whether a part of a stream has no document, and whether it has
// directives for the next one.
func nothing(text []byte) (empty, directive bool) {
	for line := range bytes.Lines(text) {
		if marker(line) {
			line = line[3:]
		}
		switch line = bytes.TrimSpace(line); {
		case len(line) == 0, line[0] == '#':
		case line[0] == '%':
			directive = true
		default:
			return false, false
		}
	}
	return true, directive
}

// Marks counts the signs of which one stands before every value of a text, those
// in strings included. A tree of yaml.Node takes some 200 bytes per value: three
// megabytes of "[[],[],…" become hundreds, so a caller bounds the marks before it
// has the text parsed.
func Marks(text []byte) int {
	n := 0
	for i, c := range text {
		switch c {
		case ',', '[', '{':
			n++
		case ':', '-', '?': // with something after it that ends a word
			if i+1 == len(text) || text[i+1] <= ' ' || i > 0 && (text[i-1] == '"' || text[i-1] == '\'') {
				n++
			}
		}
	}
	return n
}
