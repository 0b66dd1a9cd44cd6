// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import "reflect"

// Field is a field that Decode sets in a struct.
type Field struct {
	Name string
	// Owners are the structs that contain the field: the struct that was passed to Fields and, if it embeds the
	// struct that declares the field, the embedded struct too.
	Owners []reflect.Type
	// Type is the type of its value in a manifest: string, boolean, integer, "string or integer", object, "map of
	// strings", any, or "list of" one of these.
	Type string
	// Of is the Go struct for the field's value, or for each entry of the field's list; nil if that is not a struct.
	Of reflect.Type
}

// Fields returns the fields of a struct that Decode knows, in the order of their declaration.
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

// typeOf returns the type of values that are decoded into a Go type.
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
