// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/sluice-net/sluice/kit/nearest"
)

// applyYAML sets the fields that the document names. It walks the YAML tree instead of decoding into a struct, because
// a decoder stops at the first error, expands aliases without limit, and converts values silently.
func applyYAML(path string, data []byte, fields []*field) []error {
	fail := func(line int, key, format string, args ...any) error {
		return &Problem{Key: key, Where: fmt.Sprintf("%s:%d", path, line), Err: fmt.Errorf(format, args...)}
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	if err := dec.Decode(&doc); err != nil {
		if errors.Is(err, io.EOF) {
			return nil // empty, or comments only
		}
		return []error{&Problem{Where: path, Err: err}}
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return []error{&Problem{Where: path, Err: errors.New("more than one YAML document")}}
	}
	if len(doc.Content) != 1 {
		return nil
	}
	root := doc.Content[0]
	if root.Kind == yaml.ScalarNode && root.Tag == "!!null" {
		return nil
	}
	byKey, byOldKey := map[string]*field{}, map[string]*field{}
	groups := map[string]bool{}
	for _, f := range fields {
		byKey[f.key] = f
		if f.was != nil {
			byOldKey[f.was.key] = f
		}
		for i := range f.key {
			if f.key[i] == '.' {
				groups[f.key[:i]] = true
			}
		}
	}
	var errs []error
	var visit func(n *yaml.Node, at string)
	visit = func(n *yaml.Node, at string) {
		if n.Kind != yaml.MappingNode {
			errs = append(errs, fail(n.Line, strings.TrimSuffix(at, "."), "want keys with values, got %s", kindName(n)))
			return
		}
		seen := map[string]int{}
		for i := 0; i+1 < len(n.Content); i += 2 {
			k, v := n.Content[i], n.Content[i+1]
			if k.Kind != yaml.ScalarNode || k.Tag == "!!merge" {
				errs = append(errs, fail(k.Line, strings.TrimSuffix(at, "."), "a key must be a plain name"))
				continue
			}
			key := at + k.Value
			if line, twice := seen[k.Value]; twice {
				errs = append(errs, fail(k.Line, key, "duplicate key; it is in line %d already", line))
				continue
			}
			seen[k.Value] = k.Line
			switch f := byKey[key]; {
			case strings.Contains(k.Value, "."):
				errs = append(errs, fail(k.Line, key, "unknown key; write groups as nested keys"))
			case groups[key]:
				visit(v, key+".")
			case byOldKey[key] != nil:
				errs = append(errs, renamed(fmt.Sprintf("%s:%d", path, k.Line), key, byOldKey[key].key))
			case f == nil:
				errs = append(errs, fail(k.Line, key, "unknown key%s", didYouMean(key, fields)))
			default:
				errs = append(errs, applyNode(f, v, fail, path)...)
			}
		}
	}
	visit(root, "")
	return errs
}

func applyNode(f *field, n *yaml.Node, fail func(int, string, string, ...any) error, path string) []error {
	where := func(line int) string { return fmt.Sprintf("%s:%d", path, line) }
	scalar := func(n *yaml.Node, key string) (string, error) {
		if n.Kind != yaml.ScalarNode {
			return "", fail(n.Line, key, "want one value, got %s", kindName(n))
		}
		if n.Tag == "!!null" {
			return "", fail(n.Line, key, "has no value; leave the key out for its default")
		}
		return n.Value, nil
	}
	switch {
	case f.isList():
		if n.Kind != yaml.SequenceNode {
			return []error{fail(n.Line, f.key, "want a list, got %s", kindName(n))}
		}
		items := make([]string, len(n.Content))
		var errs []error
		for i, c := range n.Content {
			s, err := scalar(c, fmt.Sprintf("%s[%d]", f.key, i))
			if err != nil {
				errs = append(errs, err)
			}
			items[i] = s
		}
		if errs != nil {
			return errs
		}
		return f.setList(items, FromFile, func(i int) string { return where(n.Content[i].Line) })
	case f.isMap():
		if n.Kind != yaml.MappingNode {
			return []error{fail(n.Line, f.key, "want keys with values, got %s", kindName(n))}
		}
		m := map[string]string{}
		var errs []error
		for i := 0; i+1 < len(n.Content); i += 2 {
			k, kerr := scalar(n.Content[i], f.key)
			v, verr := scalar(n.Content[i+1], f.key+"."+k)
			if _, twice := m[k]; twice && kerr == nil {
				kerr = fail(n.Content[i].Line, f.key+"."+k, "duplicate key")
			}
			if err := errors.Join(kerr, verr); err != nil {
				errs = append(errs, All(err)...)
				continue
			}
			m[k] = v
		}
		if errs == nil {
			f.setMap(m, FromFile)
		}
		return errs
	}
	s, err := scalar(n, f.key)
	if err != nil {
		return []error{err}
	}
	return f.set(s, FromFile, where(n.Line))
}

func kindName(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "keys with values"
	case yaml.SequenceNode:
		return "a list"
	case yaml.AliasNode:
		return "an alias, which is not supported"
	case yaml.ScalarNode:
		return fmt.Sprintf("%q", n.Value)
	}
	return "nothing"
}

// didYouMean suggests a key that differs only in case or dashes, or else the nearest key.
func didYouMean(key string, fields []*field) string {
	plain := func(s string) string {
		return strings.ToLower(strings.NewReplacer("-", "", "_", "", ".", "").Replace(s))
	}
	keys := make([]string, 0, len(fields))
	for _, f := range fields {
		if plain(f.key) == plain(key) {
			return fmt.Sprintf("; did you mean %s?", f.key)
		}
		keys = append(keys, f.key)
	}
	return nearest.Hint(key, keys)
}
