// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestASocketThatMayNotBeOpenedIsExplained(t *testing.T) {
	c := &Invocation{RunDir: "/run/x"}
	got := c.explain(status.Error(codes.Unavailable, `connection error: desc = "transport: Error while dialing: dial unix /run/x/ipam/ipam.sock: connect: permission denied"`))
	want := "dial unix /run/x/ipam/ipam.sock: connect: permission denied\nBe root, or a member of group 65700."
	if got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Who gets as far as a method is root or in the group already: to tell it to be
// that would send it in a circle.
func TestCallForRootIsExplainedAsOne(t *testing.T) {
	c := &Invocation{RunDir: "/run/x"}
	got := c.explain(status.Error(codes.PermissionDenied, "uid 65534 may not call /sluice.policy.v1.PolicyService/UpsertPolicies"))
	if !strings.Contains(got, "uid 65534 may not call") || !strings.HasSuffix(got, "\n"+rootOnly) || strings.Contains(got, WhoMay) {
		t.Errorf("got %q", got)
	}
}
