// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"strconv"

	"go.yaml.in/yaml/v3"

	"github.com/sluice-net/sluice/kit/yamlstream"
)

// nodeError describes a YAML value that cannot be written as JSON.
type nodeError struct{ path, text string }

// toJSON converts a YAML document to JSON, with its aliases expanded.
func toJSON(root *yaml.Node) ([]byte, *nodeError) {
	w := &writer{}
	w.value(root, "", 0)
	if w.err != nil {
		return nil, w.err
	}
	return w.out.Bytes(), nil
}

type writer struct {
	out   bytes.Buffer
	nodes int
	err   *nodeError
}

func (w *writer) fail(path, format string, args ...any) {
	if w.err == nil {
		w.err = &nodeError{path, fmt.Sprintf(format, args...)}
	}
}

func (w *writer) value(n *yaml.Node, path string, depth int) {
	w.nodes++
	switch {
	case w.err != nil:
	case w.nodes > maxNodes:
		w.fail(path, "the document has more than %d values", maxNodes)
	case depth > maxDepth:
		w.fail(path, "is nested more than %d deep", maxDepth)
	case w.out.Len() > maxBytes: // aliases may repeat long texts
		w.fail(path, "the document is larger than %d bytes with its aliases", maxBytes)
	case n.Kind == yaml.AliasNode:
		w.value(n.Alias, path, depth+1)
	case n.Kind == yaml.MappingNode:
		w.mapping(n, path, depth)
	case n.Kind == yaml.SequenceNode:
		w.out.WriteByte('[')
		for i, c := range n.Content {
			if i > 0 {
				w.out.WriteByte(',')
			}
			w.value(c, path+"["+strconv.Itoa(i)+"]", depth+1)
		}
		w.out.WriteByte(']')
	case n.Kind == yaml.ScalarNode:
		w.scalar(n, path)
	default:
		w.fail(path, "is not a value")
	}
}

func (w *writer) mapping(n *yaml.Node, path string, depth int) {
	w.out.WriteByte('{')
	seen := make(map[string]struct{}, len(n.Content)/2)
	for i := 0; i+1 < len(n.Content) && w.err == nil; i += 2 {
		k := n.Content[i]
		if k.Kind == yaml.AliasNode {
			k = k.Alias
		}
		switch {
		case k.Kind != yaml.ScalarNode:
			w.fail(path, "has a key that is not a text")
			return
		case k.ShortTag() == "!!merge":
			w.fail(path, "uses a merge key, which is not supported")
			return
		}
		below := shorten(k.Value)
		if path != "" {
			below = path + "." + below
		}
		if _, ok := seen[k.Value]; ok {
			w.fail(below, "is given twice")
			return
		}
		seen[k.Value] = struct{}{}
		if i > 0 {
			w.out.WriteByte(',')
		}
		w.text(k.Value)
		w.out.WriteByte(':')
		w.value(n.Content[i+1], below, depth+1)
	}
	w.out.WriteByte('}')
}

func (w *writer) text(s string) {
	b, err := json.Marshal(s)
	if err != nil {
		panic("manifest: a string without JSON: " + err.Error())
	}
	w.out.Write(b)
}

func (w *writer) scalar(n *yaml.Node, path string) {
	if is, ok := yamlstream.Word(n); ok { // kubectl also sends such words as booleans
		w.out.WriteString(strconv.FormatBool(is))
		return
	}
	switch tag := n.ShortTag(); tag {
	case "!!str", "!!timestamp":
		w.text(n.Value)
	case "!!null":
		w.out.WriteString("null")
	case "!!bool":
		var b bool
		if n.Decode(&b) != nil {
			w.fail(path, "%q is neither true nor false", shorten(n.Value))
			return
		}
		w.out.WriteString(strconv.FormatBool(b))
	case "!!int":
		var i int64
		if n.Decode(&i) != nil {
			w.fail(path, "%q is not a 64-bit integer", shorten(n.Value))
			return
		}
		w.out.WriteString(strconv.FormatInt(i, 10))
	case "!!float":
		var f float64
		if n.Decode(&f) != nil || math.IsNaN(f) || math.IsInf(f, 0) {
			w.fail(path, "%q is not a number", shorten(n.Value))
			return
		}
		w.out.WriteString(strconv.FormatFloat(f, 'g', -1, 64))
	default:
		w.fail(path, "has the tag %s, which is not supported", shorten(tag))
	}
}
