// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"bytes"
	"fmt"
	"slices"

	"go.yaml.in/yaml/v3"
)

// Split parses a stream of documents like Parse and returns the text of each
// beside it, as it came.
func Split(data []byte) ([]Document, [][]byte, error) {
	docs, err := Parse(data)
	if err != nil {
		return nil, nil, err
	}
	chunks := chunked(data)
	raw := make([][]byte, len(docs))
	c, last := 0, -1
	for i, d := range docs {
		for c+1 < len(chunks) && chunks[c+1].line <= d.node.Line {
			c++
		}
		if c == last {
			return nil, nil, fmt.Errorf("document %d: has no marker of its own (a line of ---) before it", i)
		}
		last = c
		raw[i] = data[chunks[c].begin:chunks[c].end]
	}
	return docs, raw, nil
}

// chunk is a part of a stream that begins with a marker, or at the beginning.
type chunk struct{ line, begin, end int }

// chunked divides a stream. A line that begins with a marker ends a document
// wherever it stands, in quotes and blocks of text too.
func chunked(data []byte) []chunk {
	var chunks []chunk
	line, begin := 1, 0
	for at, n := 0, 1; at < len(data); n++ {
		end := len(data)
		if i := bytes.IndexByte(data[at:], '\n'); i >= 0 {
			end = at + i + 1
		}
		if marker(data[at:end]) && at > begin {
			chunks = append(chunks, chunk{line, begin, at})
			line, begin = n, at
		}
		at = end
	}
	return append(chunks, chunk{line, begin, len(data)})
}

// Chunks are the parts of a stream of which each has a document at most.
func Chunks(data []byte) [][]byte {
	var out [][]byte
	for _, c := range chunked(data) {
		out = append(out, data[c.begin:c.end])
	}
	return out
}

func marker(line []byte) bool {
	if len(line) < 3 || !bytes.Equal(line[:3], []byte("---")) && !bytes.Equal(line[:3], []byte("...")) {
		return false
	}
	return len(line) == 3 || bytes.IndexByte([]byte(" \t\r\n"), line[3]) >= 0
}

// WithNamespace returns the document with that namespace if it names none.
func (d Document) WithNamespace(namespace string) Document {
	at := index(d.node, "metadata")
	if at < 0 {
		return d
	}
	meta := d.node.Content[at]
	if meta.Kind == yaml.AliasNode {
		meta = meta.Alias
	}
	if meta.Kind != yaml.MappingNode {
		return d
	}
	value := &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: namespace}
	// The nodes may be others' too, through an alias: they are not changed.
	root, inner := *d.node, *meta
	root.Content, inner.Content = slices.Clone(root.Content), slices.Clone(inner.Content)
	switch i := index(meta, "namespace"); {
	case i < 0:
		inner.Content = append(inner.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: "namespace"}, value)
	case meta.Content[i].Kind == yaml.ScalarNode && meta.Content[i].ShortTag() == "!!null":
		inner.Content[i] = value
	default:
		return d
	}
	root.Content[at] = &inner
	d.node = &root
	return d
}

// index is the place of a key's value in the content of a mapping; -1 if there
// is none.
func index(n *yaml.Node, key string) int {
	for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == key {
			return i + 1
		}
	}
	return -1
}
