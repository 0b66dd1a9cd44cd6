// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"fmt"
	"reflect"
	"strings"
	"testing"
)

type inner struct {
	Name  string `json:"name"`
	Limit *int64 `json:"limit"`
}

type embedded struct {
	Kind string `json:"kind"`
}

type object struct {
	embedded
	Spec struct {
		List   []inner           `json:"list"`
		Labels map[string]string `json:"labels"`
		Flag   *bool             `json:"flag"`
		Port   *Number           `json:"port"`
		Extra  any               `json:"extra"`
	} `json:"spec"`
}

func decode(t *testing.T, text string) (object, []string, error) {
	t.Helper()
	docs, err := Parse([]byte(text))
	if err != nil {
		return object{}, nil, err
	}
	if len(docs) != 1 {
		t.Fatalf("%d documents", len(docs))
	}
	var o object
	unknown, err := docs[0].Decode(&o)
	return o, unknown, err
}

func TestDecodeReadsYAMLAndJSON(t *testing.T) {
	for _, text := range []string{
		"kind: K\nspec:\n  list: [{name: a, limit: 3}]\n  labels: {x: y}\n  flag: true\n  port: http\n  extra: {any: thing}\n",
		`{"kind":"K","spec":{"list":[{"name":"a","limit":3}],"labels":{"x":"y"},"flag":true,"port":"http","extra":{"any":"thing"}}}`,
	} {
		o, unknown, err := decode(t, text)
		if err != nil || len(unknown) > 0 {
			t.Fatalf("%s: %v, unknown %v", text, err, unknown)
		}
		if o.Kind != "K" || len(o.Spec.List) != 1 || o.Spec.List[0].Name != "a" || *o.Spec.List[0].Limit != 3 || o.Spec.Labels["x"] != "y" ||
			!*o.Spec.Flag || !o.Spec.Port.IsString || o.Spec.Port.String != "http" || o.Spec.Extra == nil {
			t.Errorf("%s: %+v", text, o)
		}
	}
}

func TestDecodeTellsAnAbsentListFromAnEmptyOne(t *testing.T) {
	for text, want := range map[string]bool{"spec: {}": false, "spec: {list: null}": false, "spec: {list: []}": true} {
		o, _, err := decode(t, text)
		if err != nil {
			t.Fatal(err)
		}
		if got := o.Spec.List != nil; got != want {
			t.Errorf("%s: list present is %t", text, got)
		}
	}
}

func TestDecodeNamesTheFieldThatIsWrong(t *testing.T) {
	for text, want := range map[string]string{
		"spec: {list: [{name: a}, {name: 5}]}":          `spec.list[1].name: must be a string, is the number 5`,
		"spec: {list: {}}":                              `spec.list: must be a list, is an object`,
		"spec: {list: [{limit: 1.5}]}":                  `spec.list[0].limit: must be a whole number, is the number 1.5`,
		"spec: {list: [{limit: 99999999999999999999}]}": `spec.list[0].limit: must be a whole number`,
		"spec: {labels: {a: true}}":                     `spec.labels.a: must be a string, is the truth value true`,
		"spec: {flag: \"yes\"}":                         `spec.flag: must be true or false, is the string "yes"`,
		"spec: {port: 80.5}":                            `spec.port: must be a whole number or a string`,
		"spec: []":                                      `spec: must be an object, is a list`,
		"spec: {flag: true, flag: false}":               `spec.flag: is given twice`,
		"spec: {labels: {a: b, a: c}}":                  `spec.labels.a: is given twice`,
		"spec: {extra: {x: {y: 1, y: 2}}}":              `spec.extra.x.y: is given twice`,
		"spec: {unknown: [{x: 1, x: 2}]}":               `spec.unknown[0].x: is given twice`,
		"spec: {? [a] : b}":                             `spec: has a key that is a list`,
		"base: &b {flag: true}\nspec:\n  <<: *b":        `spec: uses a merge key`,
		"a: &a [x]\nspec: {list: *a}":                   `spec.list[0]: must be an object, is the string "x"`,
		"spec: {extra: " + strings.Repeat("[", 100) + strings.Repeat("]", 100) + "}": `is nested more than 64 deep`,
	} {
		_, _, err := decode(t, text)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.80s: error %v, want %s", text, err, want)
		}
	}
}

func TestDecodeReportsUnknownFields(t *testing.T) {
	_, unknown, err := decode(t, "spec: {list: [{name: a, nam: b}], foo: 1}\nbar: {}")
	if err != nil {
		t.Fatal(err)
	}
	if want := []string{"spec.list[0].nam", "spec.foo", "bar"}; !reflect.DeepEqual(unknown, want) {
		t.Errorf("unknown %v, want %v", unknown, want)
	}
}

func TestParseSplitsDocuments(t *testing.T) {
	docs, err := Parse([]byte("---\n# nothing\n---\napiVersion: v1\nkind: A\n---\napiVersion: v2\nkind: B\n"))
	if err != nil || len(docs) != 2 || docs[0].Kind != "A" || docs[1].APIVersion != "v2" {
		t.Fatalf("%+v, %v", docs, err)
	}
	for _, text := range []string{"- a\n- b", "just text", "a: [", "\x00"} {
		if _, err := Parse([]byte(text)); err == nil {
			t.Errorf("%q: no error", text)
		}
	}
}

// hostile inputs have to be refused before they cost much: work is bounded by
// the number of values that are visited, not by what aliases would expand to.
func TestHostileInputIsRefused(t *testing.T) {
	var bomb strings.Builder
	bomb.WriteString("a0: &a0 [x]\n")
	for i := 1; i < 30; i++ {
		fmt.Fprintf(&bomb, "a%d: &a%d [*a%d, *a%d, *a%d, *a%d]\n", i, i, i-1, i-1, i-1, i-1)
	}
	bomb.WriteString("spec: {extra: *a29}\n")
	var labels strings.Builder
	labels.WriteString("spec:\n  labels:\n")
	for i := range 100_000 {
		fmt.Fprintf(&labels, "    k%d: v\n", i)
	}
	for name, text := range map[string]string{
		"a stream that is too long":     "spec: {extra: \"" + strings.Repeat("x", 10<<20) + "\"}",
		"aliases that grow":             bomb.String(),
		"an alias to itself":            "spec: &s {extra: *s}",
		"a list in itself":              "spec: {extra: &l [*l, *l]}",
		"100,000 labels":                labels.String(),
		"a long list":                   "spec: {list: [" + strings.Repeat("{},", 200_000) + "]}",
		"deep lists":                    "spec: {extra: " + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + "}",
		"an alias that has no anchor":   "spec: *nowhere",
		"a key that is an alias of map": "k: &k {a: b}\nspec: {*k : c}",
	} {
		_, _, err := decode(t, text)
		if err == nil {
			t.Errorf("%s: accepted", name)
		} else if len(err.Error()) > 2000 {
			t.Errorf("%s: error of %d characters", name, len(err.Error()))
		}
	}
}

func TestSchemaOnly(t *testing.T) {
	var ps Problems
	if ps.SchemaOnly() || ps.Err() != nil {
		t.Error("no problems are not the schema's problems")
	}
	ps.AddSchema("a", "x")
	if !ps.SchemaOnly() {
		t.Error("a problem of the schema")
	}
	ps.Add("b", "y")
	if ps.SchemaOnly() || ps.Err() == nil || ps.Error() != "a: x; b: y" {
		t.Errorf("%v", ps)
	}
}
