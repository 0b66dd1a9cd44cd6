// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"fmt"
	"strings"
	"testing"
)

func TestSplitGivesEachDocumentItsText(t *testing.T) {
	t.Parallel()
	for in, want := range map[string][]string{
		"":                                       nil,
		"# nothing\n---\n---\n":                  nil,
		"a: 1":                                   {"a: 1"},
		"a: 1\n---\nb: 2\n":                      {"a: 1\n", "---\nb: 2\n"},
		"---\na: 1\n---\n# c\n---\nb: 2":         {"---\na: 1\n", "---\nb: 2"},
		"--- {a: 1}\n--- {b: 2}\n":               {"--- {a: 1}\n", "--- {b: 2}\n"},
		"a: 1\n...\n---\nb: 2\n":                 {"a: 1\n", "---\nb: 2\n"},
		"# c\na: |\n  ---\n  x\n---\r\nb: 2\r\n": {"# c\na: |\n  ---\n  x\n", "---\r\nb: 2\r\n"},
		`{"a": 1}` + "\n---\n" + `{"b": 2}`:      {`{"a": 1}` + "\n", "---\n" + `{"b": 2}`},
		"a: ---x\nb: 1\n":                        {"a: ---x\nb: 1\n"},
	} {
		docs, texts, err := Split([]byte(in))
		if err != nil || len(docs) != len(want) || len(texts) != len(want) {
			t.Errorf("%q: %d documents, %q, %v; want %q", in, len(docs), texts, err, want)
			continue
		}
		for i := range texts {
			if string(texts[i]) != want[i] {
				t.Errorf("%q: document %d is %q, want %q", in, i, texts[i], want[i])
			}
		}
	}
}

// What is kept of a document has to say what the document said.
func TestTextsOfASplitParseToTheSame(t *testing.T) {
	t.Parallel()
	var all strings.Builder
	for i := range 50 {
		fmt.Fprintf(&all, "---\n# comment %d\nkind: K%d\nmetadata:\n  name: |-\n    n%d\n", i, i, i)
		if i%3 == 0 {
			all.WriteString("...\n")
		}
	}
	docs, texts, err := Split([]byte(all.String()))
	if err != nil || len(docs) != 50 {
		t.Fatalf("%d documents, %v", len(docs), err)
	}
	for i := range docs {
		again, err := Parse(texts[i])
		if err != nil || len(again) != 1 || again[0].Kind != docs[i].Kind || docs[i].Kind != fmt.Sprint("K", i) {
			t.Errorf("document %d: %q, %v", i, texts[i], err)
		}
	}
}

func TestNamespaceIsAddedWhereNoneIs(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"metadata: {name: a}":                  "x",
		"metadata: {name: a, namespace: y}":    "y",
		"metadata: {name: a, namespace: null}": "x",
		"metadata: {name: a, namespace: ''}":   "",
		"kind: K":                              "",
		"metadata: [a]":                        "",
		"m: &m {name: a}\nmetadata: *m":        "x",
		"metadata: &m {name: a}\nother: *m\n":  "x",
	} {
		docs, err := Parse([]byte(in))
		if err != nil {
			t.Fatalf("%q: %v", in, err)
		}
		var out struct {
			Metadata struct {
				Name      string `json:"name"`
				Namespace string `json:"namespace"`
			} `json:"metadata"`
		}
		before := docs[0]
		docs[0].WithNamespace("x").Decode(&out) //nolint:errcheck // of some, metadata is nothing
		if out.Metadata.Namespace != want {
			t.Errorf("%q: namespace %q, want %q", in, out.Metadata.Namespace, want)
		}
		out.Metadata.Namespace = ""
		before.Decode(&out) //nolint:errcheck // the same
		if want == "x" && out.Metadata.Namespace == "x" {
			t.Errorf("%q: the document itself was changed", in)
		}
	}
}
