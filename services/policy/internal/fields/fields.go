// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package fields says of every field of every kind of policy what Sluice does with
// it. The fields are those that the decoder knows; what is said of each stands in
// rows, by the struct that the decoder reads it into. A test decodes a manifest
// for every field and compares what becomes of it with what is said here.
package fields

import (
	"reflect"
	"strings"

	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// Support is what Sluice does with a field.
type Support string

// What Sluice does with fields.
const (
	// Enforced: the field decides which packets pass, as its kind defines.
	Enforced Support = "enforced"
	// Converted: the field is not supported. The policy is accepted, with a note, and
	// its rule allows less than it says, or denies more.
	Converted Support = "converted"
	// Refused: a policy with the field is refused.
	Refused Support = "refused"
	// NoEffect: the field is accepted, and no verdict depends on it.
	NoEffect Support = "no effect"
)

// Field is a field of a kind.
type Field struct {
	Kind string `json:"kind"`
	// Versions are the API versions of the kind that are read, the best first.
	Versions []string `json:"versions"`
	// Path has a name for each level: spec.ingress.toPorts.ports.port. Lists are not
	// marked in it, as in `kubectl explain`.
	Path string `json:"path"`
	// Type is that of manifest.Field.
	Type     string  `json:"type"`
	Required bool    `json:"required"`
	Support  Support `json:"support"`
	// Becomes says what becomes of a policy with the field, if it is converted or
	// refused; what limits it, if it is enforced.
	Becomes string `json:"becomes,omitempty"`
	// Setting of sluice-policy without which a policy with the field is refused.
	Setting string `json:"setting,omitempty"`
	// Values are all that the field takes, if they can be listed.
	Values []string `json:"values,omitempty"`
	// About says what the field is for.
	About string `json:"about"`

	row row
	// of is the field that converts or refuses this one as a part of it.
	of *Field
	// selector says that the field is a part of a label selector.
	selector bool
	// field is what the decoder knows of it.
	field manifest.Field
	// around is the field whose object has this one; nil at the top.
	around *Field
}

// row is what is said of a field of a struct.
type row struct {
	support  Support // as Enforced if empty
	required bool
	becomes  string
	setting  string
	values   []string
	about    string

	// example is a value of the field, in YAML. An enforced field makes another
	// policy of it than other, which is a value too; absent if empty.
	example, other string
	// beside are fields that an object with this one needs; instead those that it may
	// have in place of a refused one.
	beside, instead string
}

// Of are the fields of a kind, parents before their children. They are none of a
// kind that is not known. A field without a row has an empty About.
func Of(kind string) []Field {
	t := policy.Struct(kind)
	if t == nil {
		return nil
	}
	var out []Field
	below(kind, "", t, nil, &out)
	return out
}

// All are the fields of all kinds.
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

// inherit has the field do what the one around it does, unless it is enforced.
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

// find is the row of a field: that for the struct around it or for the one that
// declares it; of each, that for a field further out, for the kind, or for all.
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

// keyOf is the name of a row.
func keyOf(owner reflect.Type, name, context string) string {
	key := owner.String() + "." + name
	if context != "" {
		key += "@" + context
	}
	return key
}
