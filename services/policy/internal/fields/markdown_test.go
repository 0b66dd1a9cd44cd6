// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package fields

import (
	"flag"
	"os"
	"testing"
)

var update = flag.Bool("update", false, "write docs/reference/policy-fields.md")

// TestThePageOfFieldsIsThatOfTheDecoder compares docs/reference/policy-fields.md with the rows of the decoder. -update
// rewrites the page.
func TestThePageOfFieldsIsThatOfTheDecoder(t *testing.T) {
	const page = "../../../../docs/reference/policy-fields.md"
	want := Markdown()
	if *update {
		if err := os.WriteFile(page, []byte(want), 0o644); err != nil { //nolint:gosec // a page of the documentation
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Error("docs/reference/policy-fields.md is out of date; " +
			"`go test ./internal/fields -update` in services/policy rewrites it")
	}
}
