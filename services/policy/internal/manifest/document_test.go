// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
)

// split returns all results of Each, and the first error of a document.
func split(data []byte) (docs []Document, texts [][]byte, err error) {
	Each(data, func(d Document) {
		docs, texts = append(docs, d), append(texts, d.Text)
		if d.Err != nil && err == nil {
			err = fmt.Errorf("document %d: %w", d.Number+1, d.Err)
		}
	})
	return docs, texts, err
}

func TestEachDocumentComesWithItsText(t *testing.T) {
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
		docs, texts, err := split([]byte(in))
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

// TestTextsOfDocumentsParseToTheSame: when the stored text of a document is parsed alone, the result equals the
// document.
func TestTextsOfDocumentsParseToTheSame(t *testing.T) {
	t.Parallel()
	var all strings.Builder
	for i := range 50 {
		fmt.Fprintf(&all, "---\n# comment %d\nkind: K%d\nmetadata:\n  name: |-\n    n%d\n", i, i, i)
		if i%3 == 0 {
			all.WriteString("...\n")
		}
	}
	docs, texts, err := split([]byte(all.String()))
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
		"metadata: {name: a, namespace: z}":    "z",
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
		docs[0].WithNamespace("x").Decode(&out) //nolint:errcheck // some have no metadata
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

// TestEachReadsWhatParseReads: Each splits a stream into the same documents as Parse.
func TestEachReadsWhatParseReads(t *testing.T) {
	t.Parallel()
	pieces := []string{
		"kind: A\n", "---\n", "--- \n", "...\n", "... # end\n", "--- # begin\n", "--- {kind: B}\n", "# comment\n", "\n", "   \n", "%YAML 1.2\n", "%TAG ! tag:x,2000:\n",
		"kind: C\nx: |\n  text\n  --- \n", "kind: \"D\n", "\"\n", "- list\n", "text\n", "null\n", "kind: E\n  bad: x\n", "{\"kind\": \"F\"}\n", "---x\n", "....\n", "a: &a {kind: G}\nb: *a\n", "'\n",
	}
	random := rand.New(rand.NewPCG(3, 4)) //nolint:gosec // the same texts in each run
	read, refused := 0, 0
	for range 30_000 {
		var b strings.Builder
		for range 1 + random.IntN(7) {
			b.WriteString(pieces[random.IntN(len(pieces))])
		}
		text := b.String()
		want, werr := Parse([]byte(text))
		got, _, err := split([]byte(text))
		switch {
		case werr != nil && err == nil && strings.Contains(text, "..."):
			continue // an end marker without a document before it is harmless
		case err != nil && werr == nil && strings.Contains(text, "\n%"):
			continue // a directive before the end of a document is not valid YAML
		case (err == nil) != (werr == nil):
			t.Fatalf("%q: %v, want %v", text, err, werr)
		case err != nil:
			refused++
			continue
		}
		kinds := func(docs []Document) (out []string) {
			for _, d := range docs {
				var all any
				if err := d.node.Decode(&all); err != nil {
					all = "a key twice" // the line number differs in a part of the text
				}
				out = append(out, fmt.Sprint(d.Kind, all))
			}
			return out
		}
		if !slices.Equal(kinds(got), kinds(want)) {
			t.Fatalf("%q: %q, want %q", text, kinds(got), kinds(want))
		}
		read += len(got)
	}
	if read < 1000 || refused < 1000 {
		t.Errorf("%d documents, %d texts refused: the test covers nothing", read, refused)
	}
}

func TestBoundsOfEachAreThoseOfADocument(t *testing.T) {
	t.Parallel()
	line := strings.Repeat("x: [a, b, c, d]\n", 1000)
	many := strings.Repeat("---\nkind: K\n# "+strings.Repeat("c", 10_000)+"\n", 400) + strings.Repeat("---\nlist: [a, b, c, d, e]\n", 30_000)
	docs, _, err := split([]byte(many))
	if err != nil || len(docs) != 30_400 {
		t.Errorf("%d documents, %v", len(docs), err)
	}
	for what, text := range map[string]string{
		"document 2: manifest of":   "a: 1\n---\n# " + strings.Repeat("c", MaxBytes) + "\nb: 2\n",
		"document 3: manifest has":  "a: 1\n---\nb: 1\n---\nc: [" + strings.Repeat("[],", maxMarks) + "]\n",
		"line 1004":                 "a: 1\n---\n" + "b: 1\n" + strings.Repeat("# \n", 1001) + "b: [}\n",
		"document 2: is not an obj": "a: 1\n---\n- b\n---\n" + line,
	} {
		if _, _, err := split([]byte(text)); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%.200v, want %s", err, what)
		}
	}
	if err := Check([]byte(many)); err == nil {
		t.Error("all of them together are within the bounds: the test covers nothing")
	}
}

// TestDocumentsHaveNoAnchorsInCommon: an alias cannot refer to an anchor in another document, because each document
// must be parsable alone.
func TestDocumentsHaveNoAnchorsInCommon(t *testing.T) {
	t.Parallel()
	if _, _, err := split([]byte("a: &a {kind: G}\n---\nb: *a\n")); err == nil || !strings.Contains(err.Error(), "document 2: yaml: unknown anchor 'a'") {
		t.Errorf("%v, want a refusal", err)
	}
}
