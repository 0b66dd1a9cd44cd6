// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"bytes"
	"fmt"
	"slices"
	"strconv"
	"strings"

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

// Item is an object of a list.
type Item struct {
	Document Document
	Text     []byte
}

// Items are the objects of a list: of v1 List, or of the list of one kind, whose
// items need not repeat version and kind. The error names the field. The
// document is no list if both are nil.
func (d Document) Items() ([]Item, error) {
	kind, ok := strings.CutSuffix(d.Kind, "List")
	if !ok {
		return nil, nil
	}
	var list struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Metadata   any    `json:"metadata"`
		Items      any    `json:"items"`
	}
	unknown, err := d.Decode(&list)
	if err != nil {
		return nil, err
	}
	var problems Problems
	for _, path := range unknown {
		problems.Add(path, "no such field of a list")
	}
	out := []Item{}
	at := index(d.node, "items")
	if at >= 0 && d.node.Content[at].Kind != yaml.SequenceNode && d.node.Content[at].ShortTag() != "!!null" {
		problems.Add("items", "must be a list, is %s", describe(d.node.Content[at]))
		at = -1
	}
	for i := 0; at >= 0 && i < len(d.node.Content[at].Content); i++ {
		path := "items[" + strconv.Itoa(i) + "]"
		node := d.node.Content[at].Content[i]
		switch {
		case refers(node):
			problems.Add(path, "has an anchor or an alias, which a list of objects may not have")
			continue
		case node.Kind != yaml.MappingNode:
			problems.Add(path, "must be an object, is %s", describe(node))
			continue
		}
		item := *node
		if kind != "" {
			item.Content = withDefaults(item.Content, "apiVersion", d.APIVersion, "kind", kind)
		}
		doc, err := newDocument(&item)
		if err != nil {
			problems.Add(path, "%v", err)
			continue
		}
		text, err := yaml.Marshal(&item)
		if err != nil {
			problems.Add(path, "%v", err)
			continue
		}
		out = append(out, Item{Document: doc, Text: text})
	}
	return out, problems.Err()
}

// refers reports whether a node, or one below it, is shared by others.
func refers(n *yaml.Node) bool {
	return n.Kind == yaml.AliasNode || n.Anchor != "" || slices.ContainsFunc(n.Content, refers)
}

// withDefaults adds keys with values to the front of a mapping that has none of
// that name.
func withDefaults(content []*yaml.Node, pairs ...string) []*yaml.Node {
	var add []*yaml.Node
	for i := 0; i < len(pairs); i += 2 {
		if index(&yaml.Node{Kind: yaml.MappingNode, Content: content}, pairs[i]) < 0 {
			for _, text := range pairs[i : i+2] {
				add = append(add, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: text})
			}
		}
	}
	return append(add, content...)
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
