// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package fields describes how Sluice treats every field of every kind of policy. The list of fields comes from the
// structs that the decoder fills; rows describe each field of these structs. A test decodes a manifest for every
// field and compares the result with the description.
package fields

import (
	"reflect"
	"strings"

	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// Support is the way in which Sluice treats a field.
type Support string

// The values of Support.
const (
	// Enforced: the field determines which packets pass, as its kind defines.
	Enforced Support = "enforced"
	// Converted: the field is not supported. The policy is accepted with a note, and its rule allows less than
	// written, or denies more.
	Converted Support = "converted"
	// Refused: a policy with the field is rejected.
	Refused Support = "refused"
	// NoEffect: the field is accepted, but no verdict depends on it.
	NoEffect Support = "no effect"
)

// Field is a field of a kind.
type Field struct {
	Kind string `json:"kind"`
	// Versions are the supported API versions of the kind, preferred version first.
	Versions []string `json:"versions"`
	// Path contains the name of each level: spec.ingress.toPorts.ports.port. As in `kubectl explain`, lists are not
	// marked.
	Path string `json:"path"`
	// Type is the type in manifest.Field.
	Type     string  `json:"type"`
	Required bool    `json:"required"`
	Support  Support `json:"support"`
	// Becomes describes how a policy with the field is converted, or why it is refused. For an enforced field, it
	// describes restrictions.
	Becomes string `json:"becomes,omitempty"`
	// Setting is the setting of sluice-policy that allows the field. Without it, a policy with the field is
	// refused.
	Setting string `json:"setting,omitempty"`
	// Values lists all valid values, if they can be listed.
	Values []string `json:"values,omitempty"`
	// About describes the purpose of the field.
	About string `json:"about"`

	row row
	// of is the enclosing field because of which this field is converted or refused, too.
	of *Field
	// selector reports whether the field is part of a label selector.
	selector bool
	// field is the decoder's description of the field.
	field manifest.Field
	// around is the enclosing field; nil at the top level.
	around *Field
}

// row describes a field of a struct.
type row struct {
	support  Support // empty: Enforced
	required bool
	becomes  string
	setting  string
	values   []string
	about    string

	// example is a value of the field, in YAML. other is another value; if it is empty, the field is left out
	// instead. For an enforced field, a policy with example must differ from a policy with other.
	example, other string
	// More fields of the object, in YAML: an object with this field must also have the fields of the first text. A
	// valid object has the fields of the second text in place of a refused field.
	beside, instead string
	// outer replaces the first text for the enclosing field.
	outer string
}

// Of returns the fields of a kind, parents before their children; nil for an unknown kind. If a field has no row, its
// About is empty.
func Of(kind string) []Field {
	t := policy.Struct(kind)
	if t == nil {
		return nil
	}
	var out []Field
	below(kind, "", t, nil, &out)
	return out
}

// All returns the fields of all kinds.
func All() []Field {
	var out []Field
	for _, kind := range policy.Kinds() {
		out = append(out, Of(kind)...)
	}
	return out
}

func below(kind, path string, t reflect.Type, parent *Field, out *[]Field) {
	for _, f := range manifest.Fields(t) {
		at := strings.TrimPrefix(path+"."+f.Name, ".")
		r := find(kind, at, f)
		one := Field{
			Kind: kind, Versions: policy.Versions(kind), Path: at, Type: f.Type, Required: r.required,
			Support: r.support, Becomes: r.becomes,
			Setting: r.setting, Values: r.values, About: r.about, row: r, field: f, around: parent,
			selector: parent != nil && (parent.selector || strings.HasSuffix(t.String(), ".LabelSelector")),
		}
		if one.Support == "" {
			one.Support = Enforced
		}
		if parent != nil {
			one.inherit(parent)
		}
		*out = append(*out, one)
		if f.Of != nil {
			below(kind, at, f.Of, &one, out)
		}
	}
}

// inherit applies the treatment of the enclosing field, unless that field is enforced.
func (f *Field) inherit(parent *Field) {
	if f.row.support == Refused {
		return
	}
	f.of = parent.of
	if f.of == nil && parent.Support != Enforced {
		f.of = parent
	}
	if f.Setting == "" {
		f.Setting = parent.Setting
	}
	if f.of == nil {
		return
	}
	f.Support, f.Setting = f.of.Support, f.of.Setting
	f.Becomes = "as a part of " + f.of.Path
	if f.of.Becomes != "" {
		f.Becomes += ": " + f.of.Becomes
	}
}

// find returns the row of a field. A row for the enclosing struct takes precedence over a row for the declaring
// struct. For each struct, the order of precedence is: a row for an outer field, a row for the kind, a row for all
// kinds.
func find(kind, path string, f manifest.Field) row {
	for _, owner := range f.Owners {
		for _, context := range append(strings.Split(path, "."), kind, "") {
			if r, ok := rows[keyOf(owner, f.Name, context)]; ok {
				return r
			}
		}
	}
	return row{}
}

// keyOf returns the key of a row.
func keyOf(owner reflect.Type, name, context string) string {
	key := owner.String() + "." + name
	if context != "" {
		key += "@" + context
	}
	return key
}
