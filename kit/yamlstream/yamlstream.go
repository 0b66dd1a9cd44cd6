// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package yamlstream divides a stream of YAML or JSON documents, as files of
// manifests are. It knows where each stands, and nothing of what is in it.
package yamlstream

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"unicode/utf16"

	"go.yaml.in/yaml/v3"
)

// Document is one document of a stream.
type Document struct {
	Number int        // from 0; empty documents are not counted
	Before int        // lines of the stream before those that Root counts
	Line   int        // of the stream at which the document begins, 1 first
	Text   []byte     // as it came, with its marker
	Root   *yaml.Node // not null; nil if Err is set
	// Err is why the document cannot be read. It names a line of the stream.
	Err error
}

// Each parses the documents of a stream one by one and passes each to take, whose
// error ends it. It calls check, if there is one, before it parses a text. A
// document that cannot be read is passed with Err, and those behind it are read.
// Text in UTF-16 is converted, and byte order marks are removed.
func Each(data []byte, check func(text []byte) error, take func(Document) error) error {
	data = clean(data)
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
		d := Document{Number: n, Line: c.line + blank(text), Text: text}
		if check != nil {
			d.Err = check(text)
		}
		if d.Err == nil {
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
			d.read(whole, line)
		}
		directives = -1
		if d.Err == nil && d.Root == nil {
			continue
		}
		if err := take(d); err != nil {
			return err
		}
		n++
	}
	return nil
}

// read parses the text of a document, which begins at a line of the stream.
func (d *Document) read(text []byte, line int) {
	roots, err := Parse(text)
	if err != nil && line > 1 { // once more, for the lines in the message
		_, err = Parse(append(bytes.Repeat([]byte("\n"), line-1), text...))
	}
	d.Before = line - 1
	switch {
	case err != nil:
		d.Err = err
	case len(roots) > 1:
		d.Err = fmt.Errorf("line %d: a second document begins without a marker (a line of ---) before it",
			d.Before+roots[1].Line)
	case len(roots) == 1:
		d.Root, d.Line = roots[0], d.Before+roots[0].Line
	}
}

// blank counts the lines before the first one that has more than a marker or a
// comment.
func blank(text []byte) (n int) {
	for line := range bytes.Lines(text) {
		if empty, _ := nothing(line); !empty {
			return n
		}
		n++
	}
	return 0
}

// byteOrderMark begins a text in UTF-8 that some editors write.
var byteOrderMark = []byte("\ufeff")

// clean converts UTF-16 to UTF-8, and removes the byte order marks at the
// beginning of the stream and of each document: files with marks may have been
// joined.
func clean(data []byte) []byte {
	var order binary.ByteOrder
	switch {
	case bytes.HasPrefix(data, []byte{0xff, 0xfe}):
		order = binary.LittleEndian
	case bytes.HasPrefix(data, []byte{0xfe, 0xff}):
		order = binary.BigEndian
	}
	if order != nil {
		units := make([]uint16, 0, len(data)/2)
		for i := 2; i+1 < len(data); i += 2 {
			units = append(units, order.Uint16(data[i:]))
		}
		data = []byte(string(utf16.Decode(units)))
	}
	if !bytes.Contains(data, byteOrderMark) {
		return data
	}
	out, begins := make([]byte, 0, len(data)), true
	for line := range bytes.Lines(data) {
		rest := bytes.TrimPrefix(line, byteOrderMark)
		if begins || marker(rest) {
			line = rest
		}
		out, begins = append(out, line...), marker(line)
	}
	return out
}

// Parse returns the values of the documents of a stream. Empty documents are
// skipped.
func Parse(data []byte) ([]*yaml.Node, error) {
	var roots []*yaml.Node
	for dec := yaml.NewDecoder(bytes.NewReader(clean(data))); ; {
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

// Word reports whether a value is written as one of the words that YAML 1.1, by
// which kubectl and API servers read, has as true and false, and YAML 1.2 as text.
func Word(n *yaml.Node) (is, ok bool) {
	if n.Kind != yaml.ScalarNode || n.Style != 0 || n.ShortTag() != "!!str" {
		return false, false
	}
	switch n.Value {
	case "y", "Y", "yes", "Yes", "YES", "on", "On", "ON":
		return true, true
	case "n", "N", "no", "No", "NO", "off", "Off", "OFF":
		return false, true
	}
	return false, false
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
	data = clean(data)
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
