// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package wire

import (
	"reflect"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// fields returns the fields of a struct by their JSON names, including fields of embedded structs.
func fields(t reflect.Type) map[string]reflect.Type {
	out := make(map[string]reflect.Type)
	for f := range t.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous && name == "" {
			for k, v := range fields(f.Type) {
				out[k] = v
			}
			continue
		}
		out[name] = f.Type
	}
	return out
}

// below returns the struct type of a field, or of its elements; nil if that is not a struct.
func below(t reflect.Type) reflect.Type {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return nil
	}
	return t
}

// TestTypesHaveTheFieldsOfKubernetes: the types have exactly the fields of Kubernetes' own types.
func TestTypesHaveTheFieldsOfKubernetes(t *testing.T) {
	compared := 0
	var compare func(path string, ours, theirs reflect.Type)
	compare = func(path string, ours, theirs reflect.Type) {
		compared++
		a, b := fields(ours), fields(theirs)
		for name := range b {
			if _, ok := a[name]; !ok {
				t.Errorf("%s%s is missing", path, name)
			}
		}
		for name, field := range a {
			other, ok := b[name]
			if !ok {
				t.Errorf("%s%s does not exist", path, name)
				continue
			}
			if x := below(field); x != nil && x != reflect.TypeFor[Opaque]() {
				compare(path+name+".", x, below(other))
			}
		}
	}
	compare("Service.", reflect.TypeFor[Service](), reflect.TypeFor[corev1.Service]())
	compare("EndpointSlice.", reflect.TypeFor[Slice](), reflect.TypeFor[discoveryv1.EndpointSlice]())
	if compared != 17 {
		t.Errorf("%d structs were compared, want 17", compared)
	}
}
