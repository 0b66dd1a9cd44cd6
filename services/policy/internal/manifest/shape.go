// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import "reflect"

// Field is a field that Decode fills in a struct.
type Field struct {
	Name string
	// Owners are the structs that have it: the one that was asked for and, if it is a
	// part of another that is embedded there, that one.
	Owners []reflect.Type
	// Type is that of its value as a manifest has it: string, boolean, integer,
	// "string or integer", object, "map of strings", any, and "list of" one of them.
	Type string
	// Of is the struct that its value, or each entry of a list, is read into; nil if
	// it is none.
	Of reflect.Type
}

// Fields are those that Decode knows of a struct, in the order in which they are
// declared.
func Fields(t reflect.Type) []Field {
	var out []Field
	for i := range t.NumField() {
		f := t.Field(i)
		if f.Anonymous {
			for _, inner := range Fields(f.Type) {
				inner.Owners = append([]reflect.Type{t}, inner.Owners...)
				out = append(out, inner)
			}
			continue
		}
		one := Field{Name: f.Tag.Get("json"), Owners: []reflect.Type{t}}
		one.Type, one.Of = typeOf(f.Type)
		out = append(out, one)
	}
	return out
}

// typeOf is what value takes for a Go type.
func typeOf(t reflect.Type) (name string, of reflect.Type) {
	if t == numberType {
		return "string or integer", nil
	}
	switch t.Kind() {
	case reflect.Pointer:
		return typeOf(t.Elem())
	case reflect.Slice:
		name, of = typeOf(t.Elem())
		return "list of " + name, of
	case reflect.Struct:
		return "object", t
	case reflect.Map:
		return "map of strings", nil
	case reflect.String:
		return "string", nil
	case reflect.Bool:
		return "boolean", nil
	case reflect.Int64:
		return "integer", nil
	case reflect.Interface:
		return "any", nil
	default:
		panic("manifest: no decoding for " + t.String())
	}
}
