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

// Each parses the documents of a stream one by one and gives each to take with
// its text as it came. Empty documents are skipped. The bounds are those of one
// document: the stream may have any number.
func Each(data []byte, take func(d Document, text []byte) error) error {
	i, directives := 0, -1
	for _, c := range chunked(data) {
		text := data[c.begin:c.end]
		if empty, directive := nothing(text); empty && c.end < len(data) {
			if directive && directives < 0 {
				directives = c.begin // they are of the next document
			}
			continue
		}
		if err := Check(text); err != nil {
			return fmt.Errorf("document %d: %w", i, err)
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
		docs, err := parse(whole, i)
		if err != nil && line > 1 { // once more, for the lines in the message
			_, err = parse(append(bytes.Repeat([]byte("\n"), line-1), whole...), i)
		}
		switch {
		case err != nil:
			return err
		case len(docs) > 1:
			return fmt.Errorf("document %d: has no marker of its own (a line of ---) before it", i+1)
		case len(docs) == 1:
			if err := take(docs[0], text); err != nil {
				return err
			}
			i++
		}
	}
	return nil
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
