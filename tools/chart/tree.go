// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
)

// node is a value of a manifest in which components may change scalars, and add or remove entries.
type node struct {
	list    bool
	entries []*entry // of a map or a list; nil for a scalar
	scalar  any
	changed []change // later ones win
	raw     string   // an expression of the template instead of the scalar
}

// entry is a key of a map or an item of a list.
type entry struct {
	key  string
	node *node
	on   []string // the components with which the entry exists; empty: always
	off  []string // the components without which it exists
	// lines are lines of the template at an indentation, instead of a value.
	lines func(indent int) []string
}

// change is the scalar that a component sets.
type change struct {
	component string
	value     any
}

func (n *node) get(key string) *node {
	for _, e := range n.entries {
		if e.key == key && e.lines == nil {
			return e.node
		}
	}
	return nil
}

// at returns the value at a path of keys, or nil.
func (n *node) at(path ...string) *node {
	for _, key := range path {
		if n == nil {
			return nil
		}
		n = n.get(key)
	}
	return n
}

// set replaces or appends the value of a key.
func (n *node) set(key string, v *node) {
	for _, e := range n.entries {
		if e.key == key {
			e.node, e.lines = v, nil
			return
		}
	}
	n.entries = append(n.entries, &entry{key: key, node: v})
}

// replace puts lines of the template where the key is, or at the end.
func (n *node) replace(key string, lines func(indent int) []string) {
	for _, e := range n.entries {
		if e.key == key {
			e.node, e.lines = nil, lines
			return
		}
	}
	n.insert(lines)
}

// insert adds lines of the template at the end.
func (n *node) insert(lines func(indent int) []string) {
	n.entries = append(n.entries, &entry{lines: lines})
}

// text returns the scalar, or "" if it is no text.
func (n *node) text() string {
	if n == nil {
		return ""
	}
	s, _ := n.scalar.(string)
	return s
}

// plain returns the value without components.
func (n *node) plain() any {
	switch {
	case n == nil:
		return nil
	case n.entries == nil:
		return n.scalar
	case n.list:
		list := []any{}
		for _, e := range n.entries {
			if len(e.on) == 0 && e.lines == nil {
				list = append(list, e.node.plain())
			}
		}
		return list
	}
	object := map[string]any{}
	for _, e := range n.entries {
		if len(e.on) == 0 && e.lines == nil {
			object[e.key] = e.node.plain()
		}
	}
	return object
}

// newNode makes a node of a decoded JSON value.
func newNode(v any) *node {
	switch v := v.(type) {
	case map[string]any:
		n := &node{entries: []*entry{}}
		for _, key := range keysOf(v) {
			n.entries = append(n.entries, &entry{key: key, node: newNode(v[key])})
		}
		return n
	case []any:
		n := &node{list: true, entries: []*entry{}}
		for i, item := range v {
			n.entries = append(n.entries, &entry{key: keyOf(v, i), node: newNode(item)})
		}
		return n
	}
	return &node{scalar: v}
}

// keysOf returns the keys of an object in the order in which manifests are usually written.
func keysOf(v map[string]any) []string {
	first := []string{"apiVersion", "kind", "metadata", "name", "namespace"}
	return slices.SortedFunc(maps.Keys(v), func(a, b string) int {
		i, j := slices.Index(first, a), slices.Index(first, b)
		switch {
		case i >= 0 && j >= 0:
			return i - j
		case i >= 0:
			return -1
		case j >= 0:
			return 1
		case a < b:
			return -1
		}
		return 1
	})
}

// keyOf returns what identifies an item of a list: the field by which Kubernetes merges such lists, or the whole item.
func keyOf(list []any, i int) string {
	for _, field := range []string{"name", "mountPath", "containerPort"} {
		if slices.ContainsFunc(list, func(item any) bool {
			object, ok := item.(map[string]any)
			return !ok || object[field] == nil
		}) {
			continue
		}
		return fmt.Sprint(list[i].(map[string]any)[field])
	}
	text, err := json.Marshal(list[i])
	if err != nil {
		panic(err) // a decoded value
	}
	return string(text)
}

// merge adds the changes of a component to n: base is the value without components, with the value with this one.
func merge(n *node, base, with any, component, at string) error {
	if reflect.DeepEqual(base, with) {
		return nil
	}
	switch b := base.(type) {
	case map[string]any:
		if w, ok := with.(map[string]any); ok {
			return mergeMap(n, b, w, component, at)
		}
	case []any:
		if w, ok := with.([]any); ok {
			return mergeList(n, b, w, component, at)
		}
	default:
		if n.entries == nil {
			n.changed = append(n.changed, change{component, with})
			return nil
		}
	}
	return fmt.Errorf("%s: the component %s replaces %T by %T, which the chart cannot express", at, component, base, with)
}

func mergeMap(n *node, base, with map[string]any, component, at string) error {
	for _, key := range keysOf(with) {
		b, there := base[key]
		e := n.find(key)
		var err error
		switch {
		case there:
			err = merge(e.node, b, with[key], component, at+"."+key)
		case e != nil:
			err = e.join(with[key], component, at+"."+key)
		default:
			n.entries = append(n.entries, &entry{key: key, node: newNode(with[key]), on: []string{component}})
		}
		if err != nil {
			return err
		}
	}
	for key := range base {
		if _, there := with[key]; !there {
			e := n.find(key)
			e.off = append(e.off, component)
		}
	}
	return nil
}

func mergeList(n *node, base, with []any, component, at string) error {
	before, after := keyed(base), keyed(with)
	if len(before) < len(base) || len(after) < len(with) {
		return fmt.Errorf("%s: the names in the list are not unique", at)
	}
	last := -1 // position in n of the previous item
	for i := range with {
		key := keyOf(with, i)
		e := n.find(key)
		place := slices.Index(n.entries, e)
		var err error
		switch b, there := before[key]; {
		case there:
			if place < last {
				return fmt.Errorf("%s: the component %s moves %s, which the chart cannot express", at, component, key)
			}
			err = merge(e.node, b, with[i], component, at+"["+key+"]")
		case e != nil:
			err = e.join(with[i], component, at+"["+key+"]")
		default:
			place = last + 1
			n.entries = slices.Insert(n.entries, place, &entry{key: key, node: newNode(with[i]), on: []string{component}})
		}
		if err != nil {
			return err
		}
		last = max(last, place)
	}
	for i := range base {
		if key := keyOf(base, i); after[key] == nil {
			e := n.find(key)
			e.off = append(e.off, component)
		}
	}
	return nil
}

func keyed(list []any) map[string]any {
	m := map[string]any{}
	for i, item := range list {
		m[keyOf(list, i)] = item
	}
	return m
}

func (n *node) find(key string) *entry {
	for _, e := range n.entries {
		if e.key == key {
			return e
		}
	}
	return nil
}

// join adds a component to an entry that another one has added.
func (e *entry) join(v any, component, at string) error {
	return e.unite(newNode(v), []string{component}, at)
}

func (e *entry) unite(v *node, components []string, at string) error {
	switch {
	case e.node.entries == nil && v.entries == nil:
		if !reflect.DeepEqual(e.node.scalar, v.scalar) {
			for _, c := range components {
				e.node.changed = append(e.node.changed, change{c, v.scalar})
			}
		}
	case e.node.entries == nil || v.entries == nil || e.node.list != v.list:
		return fmt.Errorf("%s: two components add values of two types", at)
	default:
		for _, inner := range e.node.entries {
			if len(inner.on) == 0 {
				inner.on = slices.Clone(e.on)
			}
		}
		for _, added := range v.entries {
			inner := e.node.find(added.key)
			if inner == nil {
				added.on = components
				e.node.entries = append(e.node.entries, added)
				continue
			}
			if err := inner.unite(added.node, components, at+"."+added.key); err != nil {
				return err
			}
		}
	}
	e.on = append(slices.Clone(e.on), components...)
	return nil
}
