// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package requestid

import (
	"strings"
	"testing"

	"google.golang.org/grpc/metadata"
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
			t.Fatalf("identifier %q is invalid or was there before", id)
		}
		seen[id] = true
	}
}

func TestIdentifierTravelsOnceAndIsCheckedOnArrival(t *testing.T) {
	ctx := outgoing(outgoing(Into(t.Context(), "r1")))
	md, _ := metadata.FromOutgoingContext(ctx)
	if got := md.Get(Key); len(got) != 1 || got[0] != "r1" {
		t.Fatalf("outgoing metadata is %q", got)
	}
	if got := From(incoming(metadata.NewIncomingContext(t.Context(), md))); got != "r1" {
		t.Errorf("arrived as %q", got)
	}
	for _, bad := range [][]string{nil, {"a", "b"}, {"a b"}} {
		ctx := metadata.NewIncomingContext(t.Context(), metadata.MD{Key: bad})
		if got := From(incoming(ctx)); len(got) != 16 {
			t.Errorf("metadata %q became %q, want a new identifier", bad, got)
		}
	}
}
