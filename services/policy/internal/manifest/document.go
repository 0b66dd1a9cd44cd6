// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/sluice-net/sluice/kit/yamlstream"
)

// Each parses the documents of a stream one by one and passes each to take. Empty documents are skipped. The limits
// apply to each document; the stream may have any number. A document that cannot be parsed is passed with its Err,
// and parsing continues after it.
func Each(data []byte, take func(Document)) {
	_ = yamlstream.Each(data, Check, func(y yamlstream.Document) error { // take returns no error
		d := Document{Err: y.Err}
		if d.Err == nil {
			d = newDocument(y.Root)
		}
		d.Number, d.Line, d.Text = y.Number, y.Line, y.Text
		take(d)
		return nil
	})
}

// Item is an object of a list.
type Item struct {
	Document Document
	Path     string // path in the list, such as items[3]
	// Err is set if the item is not an object, or if it has no text of its own because of an anchor or alias. In the
	// second case, its Document can still be decoded.
	Err error
}

// Items returns the objects of a v1 List, or of a list of one kind, such as NetworkPolicyList, whose items may omit
// version and kind. An error concerns the list itself and names the field; errors of items are in Item.Err. If both
// results are nil, the document is not a list.
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
	var problems Problems
	unknown, err := d.Decode(&list)
	errors.As(err, &problems) //nolint:errcheck // Decode returns no other errors
	// A mistake within an item is reported with the item.
	problems = slices.DeleteFunc(problems, func(p Problem) bool {
		return !p.Stops && p.Path != "items" && Within(p.Path, "items")
	})
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
		out = append(out, d.item(i, d.node.Content[at].Content[i], kind))
	}
	return out, problems.Err()
}

// item returns one object of a list of a kind.
func (d Document) item(i int, node *yaml.Node, kind string) Item {
	out := Item{Path: "items[" + strconv.Itoa(i) + "]"}
	if node.Kind == yaml.MappingNode && kind != "" {
		node = yamlstream.WithDefaults(node, "apiVersion", d.APIVersion, "kind", kind)
	}
	out.Document = newDocument(node)
	out.Document.plain = d.plain
	// Count lines from the start of the text that was passed to yamlstream.Each.
	out.Document.Number, out.Document.Line = d.Number, d.Line+node.Line-d.node.Line
	switch {
	case refers(node):
		out.Err = errors.New("has an anchor or an alias, which a list of objects may not have")
	case node.Kind != yaml.MappingNode:
		out.Err = fmt.Errorf("must be an object, is %s", describe(node))
	default:
		out.Document.Text, out.Err = yaml.Marshal(node)
	}
	return out
}

// refers reports whether a node, or a node below it, has an anchor or is an alias.
func refers(n *yaml.Node) bool {
	return n.Kind == yaml.AliasNode || n.Anchor != "" || slices.ContainsFunc(n.Content, refers)
}

// Has reports whether an object has a top-level field.
func (d Document) Has(field string) bool { return yamlstream.Field(d.node, field) >= 0 }

// Label returns the kind, namespace and name of an object, without missing parts.
func (d Document) Label() string {
	var meta struct {
		Metadata struct {
			Name      string `json:"name"`
			Namespace string `json:"namespace"`
		} `json:"metadata"`
	}
	_, _ = d.Decode(&meta) // mistakes are reported elsewhere
	name := meta.Metadata.Name
	if meta.Metadata.Namespace != "" {
		name = meta.Metadata.Namespace + "/" + name
	}
	return shorten(strings.TrimSpace(d.Kind+" "+name), maxPath)
}

// Namespace returns the namespace of an object, which is "default" if the object does not set it. It returns false if
// the namespace cannot be determined.
func (d Document) Namespace() (string, bool) {
	var meta struct {
		Metadata struct {
			Namespace string `json:"namespace"`
		} `json:"metadata"`
	}
	_, err := d.Decode(&meta)
	var problems Problems
	errors.As(err, &problems) //nolint:errcheck // Decode returns no other errors
	if problems.At("metadata.namespace") {
		return "", false
	}
	return cmp.Or(meta.Metadata.Namespace, "default"), true
}

// WithNamespace returns the document with the given namespace if it has none.
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
	// Copy the nodes, because aliases may share them.
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
