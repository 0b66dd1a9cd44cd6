// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"io"
	"testing"
)

func TestCommandEndsWithItsInput(t *testing.T) {
	input, caller := io.Pipe()
	ctx, stop := EndWith(t.Context(), input)
	defer stop()
	// The content of the input is ignored.
	if _, err := caller.Write([]byte("x\n")); err != nil || ctx.Err() != nil {
		t.Fatalf("%v; with an input that goes on: %v", err, ctx.Err())
	}
	if err := caller.Close(); err != nil {
		t.Fatal(err)
	}
	<-ctx.Done()
}
