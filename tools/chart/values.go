// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// value is a value of the chart, or a group of values.
type value struct {
	name        string
	description string
	schema      map[string]any // nil for a group
	def         any
	// only in the schema: the default is a program's
	hidden   bool
	children []*value
}

// add appends a value to a group.
func (v *value) add(children ...*value) *value {
	v.children = append(v.children, children...)
	return v
}

// group returns the child with the name, which it makes if necessary.
func (v *value) group(name string) *value {
	for _, c := range v.children {
		if c.name == name {
			return c
		}
	}
	c := &value{name: name}
	v.children = append(v.children, c)
	return c
}

// visible reports whether values.yaml has the value or one of its children.
func (v *value) visible() bool {
	if v.schema != nil {
		return !v.hidden
	}
	return slices.ContainsFunc(v.children, (*value).visible)
}

// jsonSchema returns the schema of a value. Unknown values are refused.
func (v *value) jsonSchema() map[string]any {
	s := map[string]any{}
	if v.description != "" {
		s["description"] = v.description
	}
	if v.schema != nil {
		for key, of := range v.schema {
			s[key] = of
		}
		if !v.hidden {
			s["default"] = v.def
		}
		return s
	}
	properties := map[string]any{}
	for _, c := range v.children {
		properties[c.name] = c.jsonSchema()
	}
	s["type"], s["additionalProperties"], s["properties"] = "object", false, properties
	return s
}

// yaml returns the lines of values.yaml.
func (v *value) yaml(indent int) (lines []string) {
	pad := strings.Repeat(" ", indent)
	for i, c := range v.children {
		if indent == 0 && i > 0 {
			lines = append(lines, "")
		}
		for _, line := range wrap(c.description, 98-indent) {
			lines = append(lines, pad+"# "+line)
		}
		switch {
		case c.schema == nil && c.visible():
			lines = append(lines, pad+c.name+":")
			lines = append(lines, c.yaml(indent+2)...)
		case c.schema == nil:
			lines = append(lines, pad+c.name+": {}")
		case !c.hidden:
			lines = append(lines, emit(&node{entries: []*entry{{key: c.name, node: newNode(c.def)}}}, indent)...)
		}
	}
	return lines
}

// rows returns the rows of the table of values.
func (v *value) rows(at string) (rows []string) {
	for _, c := range v.children {
		path := at + c.name
		switch {
		case c.schema == nil && c.visible():
			rows = append(rows, c.rows(path+".")...)
		case c.schema == nil:
			rows = append(rows, fmt.Sprintf("| `%s` | `{}` | %s |", path, cell(c.description)))
		case !c.hidden:
			def, err := json.Marshal(c.def)
			if err != nil {
				panic(err) // of this package
			}
			text := "`" + string(def) + "`"
			switch {
			case c.def == nil:
				text = ""
			case len(text) > 60:
				text = "see values.yaml"
			}
			rows = append(rows, fmt.Sprintf("| `%s` | %s | %s |", path, text, cell(c.description)))
		}
	}
	return rows
}

func cell(s string) string { return strings.ReplaceAll(s, "|", `\|`) }

// wrap divides a text into lines.
func wrap(text string, width int) (lines []string) {
	line := ""
	for _, word := range strings.Fields(text) {
		if line != "" && len([]rune(line))+1+len([]rune(word)) > width {
			lines = append(lines, line)
			line = ""
		}
		line = strings.TrimPrefix(line+" "+word, " ")
	}
	if line != "" {
		lines = append(lines, line)
	}
	return lines
}

// Schemas of values that are no settings.
var (
	text    = map[string]any{"type": "string"}
	boolean = map[string]any{"type": "boolean"}
	texts   = map[string]any{"type": "object", "additionalProperties": map[string]any{"type": "string"}}
	amounts = map[string]any{
		"type":                 "object",
		"additionalProperties": map[string]any{"type": []string{"string", "number"}},
	}
	resources = map[string]any{
		"type": "object", "additionalProperties": false,
		"properties": map[string]any{"limits": amounts, "requests": amounts},
	}
	tolerations = map[string]any{
		"type": "array",
		"items": map[string]any{
			"type": "object", "additionalProperties": false,
			"properties": map[string]any{
				"key": text, "value": text,
				"operator":          map[string]any{"enum": []string{"Exists", "Equal", "Lt", "Gt"}},
				"effect":            map[string]any{"enum": []string{"NoSchedule", "PreferNoSchedule", "NoExecute"}},
				"tolerationSeconds": map[string]any{"type": "integer"},
			},
		},
	}
)

// schemaOf returns the schema of a setting.
func (s setting) schemaOf() map[string]any {
	integer := func(kind string) bool { return strings.HasPrefix(kind, "int") || strings.HasPrefix(kind, "uint") }
	switch {
	case s.enum != nil:
		return map[string]any{"type": "string", "enum": s.enum}
	case s.kind == "bool":
		return map[string]any{"type": "boolean"}
	case integer(s.kind):
		return map[string]any{"type": "integer"}
	case strings.HasPrefix(s.kind, "float"):
		return map[string]any{"type": "number"}
	case s.kind == "time.Duration":
		return map[string]any{"type": "string", "pattern": `^([0-9]+(\.[0-9]+)?(ns|us|ms|s|m|h))+$|^0$`}
	case s.kind == "map":
		return map[string]any{"type": "object", "additionalProperties": map[string]any{"type": []string{"string", "number"}}}
	case strings.HasPrefix(s.kind, "[]"):
		items := map[string]any{"type": "string"}
		if integer(s.kind[2:]) {
			items = map[string]any{"type": "integer"}
		}
		return map[string]any{"type": []string{"array", "string"}, "items": items}
	}
	return map[string]any{"type": "string"}
}

// value converts the text of a setting in a manifest to a value of its schema.
func (s setting) value(text string) any {
	switch {
	case s.kind == "bool":
		return text == "true"
	case strings.HasPrefix(s.kind, "[]") && text == "":
		return []any{}
	case strings.HasPrefix(s.kind, "[]"):
		list := []any{}
		for _, item := range strings.Split(text, ",") {
			list = append(list, item)
		}
		return list
	}
	return text
}

// meaning is the description of a setting in the schema.
func (s setting) meaning() string {
	if s.def == "" {
		return s.help
	}
	return s.help + " [" + s.def + "]"
}
