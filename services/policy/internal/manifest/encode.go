// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"encoding/json"
	"reflect"
)

// Encode writes a struct that Decode fills, or a pointer to one, as JSON. Zero
// values are left out: Decode of the text makes an equal struct. Of a part whose
// content is not looked at it says only that there is one.
func Encode(v any) ([]byte, error) {
	text, err := json.Marshal(plain(reflect.ValueOf(v)))
	return append(text, '\n'), err
}

// plain is a value in terms of json.Marshal, which sorts the keys of maps.
func plain(v reflect.Value) any {
	switch v.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Map, reflect.Interface:
		if v.IsNil() {
			return nil
		}
	}
	switch v.Kind() {
	case reflect.Pointer:
		return plain(v.Elem())
	case reflect.Struct:
		if n, ok := v.Interface().(Number); ok {
			if n.IsString {
				return n.String
			}
			return n.Int
		}
		out := make(map[string]any)
		structure(v, out)
		return out
	case reflect.Slice:
		out := make([]any, v.Len())
		for i := range out {
			out[i] = plain(v.Index(i))
		}
		return out
	case reflect.Map:
		out := make(map[string]any, v.Len())
		for k, e := range v.Seq2() {
			out[k.String()] = plain(e)
		}
		return out
	case reflect.Interface:
		return true
	}
	return v.Interface()
}

func structure(v reflect.Value, out map[string]any) {
	for i := range v.NumField() {
		switch f, t := v.Field(i), v.Type().Field(i); {
		case t.Anonymous:
			structure(f, out)
		case !f.IsZero():
			out[t.Tag.Get("json")] = plain(f)
		}
	}
}
