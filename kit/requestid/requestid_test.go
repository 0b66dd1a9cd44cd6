// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package requestid

import (
	"strings"
	"testing"
)

func TestOnlyValidIdentifiersAreCarried(t *testing.T) {
	for id, want := range map[string]bool{
		"a": true, "A-1_b.c:d": true, strings.Repeat("x", MaxLen): true, New(): true,
		"": false, "a b": false, "a\nb": false, "é": false, strings.Repeat("x", MaxLen+1): false,
	} {
		if got := From(Into(t.Context(), id)); (got == id && id != "") != want {
			t.Errorf("Into(%q) carries %q, want it carried: %v", id, got, want)
		}
	}
}

func TestNewIdentifiersDiffer(t *testing.T) {
	seen := map[string]bool{}
	for range 1000 {
		id := New()
		if !Valid(id) || seen[id] {
			t.Fatalf("identifier %q is invalid or a duplicate", id)
		}
		seen[id] = true
	}
}
