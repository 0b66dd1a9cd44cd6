// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpcid

import (
	"testing"

	"google.golang.org/grpc/metadata"

	"github.com/sluice-net/sluice/kit/requestid"
)

func TestIdentifierTravelsOnceAndIsCheckedOnArrival(t *testing.T) {
	ctx := outgoing(outgoing(requestid.Into(t.Context(), "r1")))
	md, _ := metadata.FromOutgoingContext(ctx)
	if got := md.Get(requestid.Key); len(got) != 1 || got[0] != "r1" {
		t.Fatalf("outgoing metadata is %q", got)
	}
	if got := requestid.From(incoming(metadata.NewIncomingContext(t.Context(), md))); got != "r1" {
		t.Errorf("arrived as %q", got)
	}
	for _, bad := range [][]string{nil, {"a", "b"}, {"a b"}} {
		ctx := metadata.NewIncomingContext(t.Context(), metadata.MD{requestid.Key: bad})
		if got := requestid.From(incoming(ctx)); len(got) != 16 {
			t.Errorf("metadata %q became %q, want a new identifier", bad, got)
		}
	}
}
