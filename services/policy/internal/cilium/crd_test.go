// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cilium

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// crdFields lists the fields below spec in the schemas of Cilium 1.20.2, one line with kind and path for each. The
// fields below specs are the same.
const crdFields = "testdata/crd-fields.txt"

// crds rewrites crdFields for another release of Cilium:
//
//	go mod download -json github.com/cilium/cilium@VERSION # in any directory outside of the workspace
//	go test . -run Schemas -crds DIR/pkg/k8s/apis/cilium.io/client/crds/v2
//
// The module is not a dependency: it is large, and only the names matter.
var crds = flag.String("crds", "", "directory with Cilium's CRDs, to write testdata/crd-fields.txt from")

// TestFieldsAreThoseOfThePublishedSchemas compares the fields of the Go types with the fields of Cilium's schemas. A
// field that the Go type lacks would be rejected as unknown. A field that exists only in the Go type would be accepted,
// although an API server drops it.
func TestFieldsAreThoseOfThePublishedSchemas(t *testing.T) {
	if *crds != "" {
		writeFields(t)
	}
	text, err := os.ReadFile(crdFields)
	if err != nil {
		t.Fatal(err)
	}
	published := map[string][]string{}
	for line := range strings.Lines(string(text)) {
		if kind, path, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			published[kind] = append(published[kind], path)
		}
	}
	for kind, object := range map[string]any{
		"CiliumNetworkPolicy":            NetworkPolicy{},
		"CiliumClusterwideNetworkPolicy": NetworkPolicy{},
		"CiliumCIDRGroup":                CIDRGroup{},
	} {
		var ours, free []string // free: whatever is below
		fieldsOf(reflect.TypeOf(object), "", &ours, &free)
		below := func(path string) bool {
			return slices.ContainsFunc(free, func(f string) bool { return strings.HasPrefix(path, f+".") })
		}
		if len(published[kind]) == 0 {
			t.Errorf("%s has no published field", kind)
		}
		for _, path := range published[kind] {
			if !slices.Contains(ours, path) && !below(path) {
				t.Errorf("%s: %s is published and not known here", kind, path)
			}
		}
		for _, path := range ours {
			if !slices.Contains(published[kind], path) {
				t.Errorf("%s: %s is known here and not published", kind, path)
			}
		}
	}
}

// fieldsOf adds the paths of a type's fields; for objects, the fields of spec.
func fieldsOf(t reflect.Type, path string, out, free *[]string) {
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() == reflect.Interface {
		*free = append(*free, path)
	}
	if t.Kind() != reflect.Struct {
		return
	}
	for f := range t.Fields() {
		name := f.Tag.Get("json")
		switch {
		case f.Anonymous && path != "":
			fieldsOf(f.Type, path, out, free)
		case name == "" || path == "" && name != "spec":
		default:
			at := strings.TrimPrefix(path+"."+name, ".")
			*out = append(*out, at)
			fieldsOf(f.Type, at, out, free)
		}
	}
}

// schema is the part of OpenAPI that is read.
type schema struct {
	Properties map[string]*schema `yaml:"properties"`
	Items      *schema            `yaml:"items"`
}

func writeFields(t *testing.T) {
	t.Helper()
	var lines []string
	for _, file := range []string{"ciliumnetworkpolicies", "ciliumclusterwidenetworkpolicies", "ciliumcidrgroups"} {
		text, err := os.ReadFile(filepath.Join(*crds, file+".yaml"))
		if err != nil {
			t.Fatal(err)
		}
		var crd struct {
			Spec struct {
				Names    struct{ Kind string }
				Versions []struct {
					Name   string
					Schema struct {
						Root schema `yaml:"openAPIV3Schema"`
					}
				}
			}
		}
		if err := yaml.NewDecoder(bytes.NewReader(text)).Decode(&crd); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		for _, v := range crd.Spec.Versions {
			if v.Name != "v2" {
				continue
			}
			lines = appendFields(lines, crd.Spec.Names.Kind+" spec", v.Schema.Root.Properties["spec"])
		}
	}
	slices.Sort(lines)
	if err := os.WriteFile(crdFields, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func appendFields(lines []string, path string, s *schema) []string {
	if s == nil {
		return lines
	}
	lines = append(lines, path)
	for s.Items != nil {
		s = s.Items
	}
	for name, field := range s.Properties {
		lines = appendFields(lines, path+"."+name, field)
	}
	return lines
}
