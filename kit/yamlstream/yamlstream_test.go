// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package yamlstream

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"unicode/utf16"
)

func TestDocumentsKnowTheirLines(t *testing.T) {
	text := "# nothing\n---\n---\na: 1\n...\n%YAML 1.1\n---\nb: 2\n--- {c: 3}\n"
	var got []string
	err := Each([]byte(text), nil, func(d Document) error {
		got = append(got, fmt.Sprintf("%d: %s in line %d", d.Number, d.Root.Content[0].Value, d.Before+d.Root.Line))
		return nil
	})
	if want := []string{"0: a in line 4", "1: b in line 8", "2: c in line 9"}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
}

func TestUnreadableDocumentHidesNoOther(t *testing.T) {
	var got []string
	err := Each([]byte("a: 1\n---\nb: [\n---\n{c: 1} {d: 1}\n---\n# e\ne: 1\n"), nil, func(d Document) error {
		got = append(got, fmt.Sprintf("%d line %d: %v", d.Number, d.Line, d.Err))
		return nil
	})
	want := []string{
		"0 line 1: <nil>", "1 line 3: yaml: line 3: did not find expected node content",
		"2 line 5: yaml: line 4: did not find expected <document start>", "3 line 8: <nil>",
	}
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
}

// TestByteOrderMarksAreNoText: Windows editors write byte order marks, and the Windows shell writes UTF-16.
// Concatenated files contain marks in the middle.
func TestByteOrderMarksAreNoText(t *testing.T) {
	sixteen := func(big bool, text string) string {
		var b []byte
		for _, u := range utf16.Encode([]rune("\ufeff" + text)) {
			if big {
				b = append(b, byte(u>>8), byte(u))
			} else {
				b = append(b, byte(u), byte(u>>8))
			}
		}
		return string(b)
	}
	const text = "a: é\n---\nb: x\ufeffy\n"
	for what, data := range map[string]string{
		"first": "\ufeff" + text, "in front of a marker": "a: é\n\ufeff---\nb: x\ufeffy\n",
		"behind a marker":       "---\n\ufeffa: é\n---\n\ufeffb: x\ufeffy\n",
		"UTF-16, little endian": sixteen(false, text), "UTF-16, big endian": sixteen(true, text),
	} {
		var got []string
		err := Each([]byte(data), nil, func(d Document) error {
			if d.Err == nil {
				got = append(got, d.Root.Content[0].Value+"="+d.Root.Content[1].Value)
			}
			return d.Err
		})
		if want := []string{"a=é", "b=x\ufeffy"}; err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %q, %v, want %q", what, got, err, want)
		}
	}
}

func TestErrorOfTheCallerEndsTheStream(t *testing.T) {
	enough, n := errors.New("enough"), 0
	err := Each([]byte("a: 1\n---\nb: 2\n"), nil, func(Document) error { n++; return enough })
	if err != enough || n != 1 { //nolint:errorlint // the identical error
		t.Errorf("%v after %d documents, want %v after 1", err, n, enough)
	}
}
