// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

import (
	"reflect"

	"github.com/sluice-net/sluice/services/policy/internal/manifest"
	"github.com/sluice-net/sluice/services/policy/internal/networkpolicy"
)

// Typed is an object as the client of an API server has it, which decoded it
// into the struct of its kind. What the struct does not have is not known any
// more: a client of a kind whose objects may have other fields hands on
// documents, of which such a field isolates what the policy selects.
type Typed struct {
	APIVersion, Kind string // of the client's resource: the objects may not repeat them
	// Object is a pointer to networkpolicy.NetworkPolicy, cilium.NetworkPolicy,
	// cilium.CIDRGroup, adminpolicy.Policy or adminpolicy.OldPolicy. It is shared
	// and does not change.
	Object any
}

// Type implements Form.
func (t Typed) Type() (apiVersion, kind string) { return t.APIVersion, t.Kind }

// Decode implements Form.
func (t Typed) Decode(into any) (unknown []string, err error) {
	to, from := reflect.ValueOf(into), reflect.ValueOf(t.Object)
	if from.Kind() != reflect.Pointer || from.IsNil() || from.Type() != to.Type() {
		var problems manifest.Problems
		problems.Add("", "is a %T, which %s %s is not", t.Object, t.APIVersion, t.Kind)
		return nil, problems
	}
	to.Elem().Set(from.Elem())
	return nil, nil
}

// Text is the object as a manifest, from which Decode makes the same.
func (t Typed) Text() ([]byte, error) {
	from := reflect.ValueOf(t.Object)
	if from.Kind() != reflect.Pointer || from.IsNil() || from.Elem().Kind() != reflect.Struct {
		return nil, manifest.Problems{{Text: "is no object"}}
	}
	object := reflect.New(from.Type().Elem())
	object.Elem().Set(from.Elem())
	if f := object.Elem().FieldByName("Meta"); f.IsValid() {
		if meta, ok := f.Addr().Interface().(*networkpolicy.Meta); ok {
			meta.APIVersion, meta.Kind = t.APIVersion, t.Kind
		}
	}
	return manifest.Encode(object.Interface())
}

// Written is an object as a document, with its text and no other.
type Written struct {
	manifest.Document
	Manifest []byte
}

// Text is the manifest.
func (w Written) Text() ([]byte, error) { return w.Manifest, nil }
