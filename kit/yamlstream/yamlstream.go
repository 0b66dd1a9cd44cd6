// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package yamlstream splits a stream of YAML or JSON documents, such as a file of manifests. It
// records the position of each document and does not interpret the content.
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
	Number int        // from 0, without empty documents
	Before int        // number of lines to add to the line numbers of Root
	Line   int        // first line of the document in the stream, from 1
	Text   []byte     // the original text, with its marker
	Root   *yaml.Node // never null; nil if Err is set
	// Err is why the document cannot be parsed. It names a line of the stream.
	Err error
}

// Each parses the documents of a stream one by one and passes each to take; an error of take ends
// it. If check is not nil, it is called with each text before it is parsed. A document that cannot
// be parsed is passed with Err, and the following documents are parsed. UTF-16 is converted, and
// byte order marks are removed.
func Each(data []byte, check func(text []byte) error, take func(Document) error) error {
	data = clean(data)
	n, directives := 0, -1
	for _, c := range divide(data) {
		text := data[c.begin:c.end]
		if empty, directive := nothing(text); empty && c.end < len(data) {
			if directive && directives < 0 {
				directives = c.begin // directives belong to the next document
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
				if end := bytes.IndexByte(text, '\n'); end >= 0 { // a marker without a newline is the document itself
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

// read parses the text of a document, which begins at the given line of the stream.
func (d *Document) read(text []byte, line int) {
	roots, err := Parse(text)
	if err != nil && line > 1 { // parse again, for correct line numbers in the message
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

// blank counts the lines before the first line that has more than a marker or a comment.
func blank(text []byte) (n int) {
	for line := range bytes.Lines(text) {
		if empty, _ := nothing(line); !empty {
			return n
		}
		n++
	}
	return 0
}

// byteOrderMark is the UTF-8 byte order mark, which some editors write.
var byteOrderMark = []byte("\ufeff")

// clean converts UTF-16 to UTF-8, and removes byte order marks at the start of the stream and of
// each document, because files with marks may have been concatenated.
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

// Parse returns the root values of the documents of a stream, without empty documents.
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

// Word reports whether a scalar is one of the words, such as yes and off, that YAML 1.1 (and so
// kubectl and API servers) reads as booleans and YAML 1.2 reads as text.
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

// Field returns the index of a key's value in the content of a mapping, -1 if the key does not
// exist.
func Field(n *yaml.Node, key string) int {
	for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return i + 1
		}
	}
	return -1
}

// WithDefaults returns the mapping with the missing ones of the given keys and values prepended.
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

// Chunks splits a stream into parts that contain at most one document each.
func Chunks(data []byte) [][]byte {
	var out [][]byte
	data = clean(data)
	for _, c := range divide(data) {
		out = append(out, data[c.begin:c.end])
	}
	return out
}

// chunk is a part of a stream that begins with a marker, or at the start of the stream.
type chunk struct{ line, begin, end int }

// divide splits a stream at its markers. A line that begins with a marker always separates two documents, even within
// quotes and block scalars.
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

// nothing reports whether a part of a stream contains no document, and whether it has directives
// for the next one.
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

// Marks returns an upper bound for the number of values in a text: it counts the characters that can precede a value,
// also within strings. A yaml.Node tree takes about 200 bytes per value, so three megabytes of "[[],[],…" become
// hundreds of megabytes. Callers limit the marks before they parse a text.
func Marks(text []byte) int {
	n := 0
	for i, c := range text {
		switch c {
		case ',', '[', '{':
			n++
		case ':', '-', '?': // counts only if it is followed by the end of a word
			if i+1 == len(text) || text[i+1] <= ' ' || i > 0 && (text[i-1] == '"' || text[i-1] == '\'') {
				n++
			}
		}
	}
	return n
}
