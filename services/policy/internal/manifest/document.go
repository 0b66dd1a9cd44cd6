// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/sluice-net/sluice/kit/yamlstream"
)

// Each parses the documents of a stream one by one and gives each to take with
// its text as it came. Empty documents are skipped. The bounds are those of one
// document: the stream may have any number.
func Each(data []byte, take func(d Document, text []byte) error) error {
	return yamlstream.Each(data, Check, func(y yamlstream.Document) error {
		d, err := newDocument(y.Root)
		if err != nil {
			return fmt.Errorf("document %d: %w", y.Number+1, err)
		}
		return take(d, y.Text)
	})
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
	at := yamlstream.Field(d.node, "items")
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
		item := node
		if kind != "" {
			item = yamlstream.WithDefaults(node, "apiVersion", d.APIVersion, "kind", kind)
		}
		doc, err := newDocument(item)
		if err != nil {
			problems.Add(path, "%v", err)
			continue
		}
		text, err := yaml.Marshal(item)
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

// WithNamespace returns the document with that namespace if it names none.
func (d Document) WithNamespace(namespace string) Document {
	at := yamlstream.Field(d.node, "metadata")
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
	switch i := yamlstream.Field(meta, "namespace"); {
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
