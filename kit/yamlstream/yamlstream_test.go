// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package yamlstream

import (
	"errors"
	"fmt"
	"slices"
	"testing"
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

func TestUnreadableDocumentIsNamed(t *testing.T) {
	err := Each([]byte("a: 1\n---\nb: [\n"), nil, func(Document) error { return nil })
	bad, ok := errors.AsType[*Error](err)
	if !ok || bad.Document != 1 || bad.Err.Error() != "yaml: line 3: did not find expected node content" {
		t.Errorf("%v, want document 1, line 3", err)
	}
}

func TestErrorOfTheCallerEndsTheStream(t *testing.T) {
	enough, n := errors.New("enough"), 0
	err := Each([]byte("a: 1\n---\nb: 2\n"), nil, func(Document) error { n++; return enough })
	if err != enough || n != 1 { //nolint:errorlint // the error as it was
		t.Errorf("%v after %d documents, want %v after 1", err, n, enough)
	}
}
