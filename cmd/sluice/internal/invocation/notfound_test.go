// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"errors"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestNotFoundHasOneFormAndKeepsTheCode(t *testing.T) {
	const want = `no node a\x1b[2J; see ` + "`sluice node list`"
	if got := NotFound("node", "a\x1b[2J", "node list").Error(); got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	got := status.Convert(OrNotFound(status.Error(codes.NotFound, "no such node"), "node", "a\x1b[2J", "node list"))
	if got.Code() != codes.NotFound || got.Message() != want {
		t.Errorf("got %v", got)
	}
	for _, err := range []error{nil, errors.New("x"), status.Error(codes.Unavailable, "x")} {
		if got := OrNotFound(err, "node", "a", "node list"); !errors.Is(got, err) {
			t.Errorf("%v became %v", err, got)
		}
	}
}
