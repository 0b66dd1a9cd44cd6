// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// TestEverySentinelHasItsCodeAndReason: statusOf converts every error of the core to the code and reason that the API
// documents, and each reason of the API is used.
func TestEverySentinelHasItsCodeAndReason(t *testing.T) {
	given := map[policyv1.ErrorReason]bool{0: true}
	for _, c := range []struct {
		err    error
		code   codes.Code
		reason policyv1.ErrorReason // unspecified: no reason
	}{
		{&decode.Error{Whole: errors.New("empty")}, codes.InvalidArgument, policyv1.ErrorReason_ERROR_REASON_INVALID_MANIFEST},
		{&failure.FieldError{Field: "name", Err: errors.New("is empty")}, codes.InvalidArgument, policyv1.ErrorReason_ERROR_REASON_INVALID_REQUEST},
		{
			&failure.FieldError{Field: "x", Err: failure.ErrNotFound}, codes.NotFound,
			policyv1.ErrorReason_ERROR_REASON_IDENTITY_NOT_FOUND,
		},
		{failure.ErrNotFound, codes.NotFound, policyv1.ErrorReason_ERROR_REASON_IDENTITY_NOT_FOUND},
		{peer.ErrUnresolved, codes.Unavailable, policyv1.ErrorReason_ERROR_REASON_ADDRESS_NOT_RESOLVED},
		{failure.ErrOwned, codes.AlreadyExists, policyv1.ErrorReason_ERROR_REASON_POLICY_OWNED},
		{failure.ErrForeign, codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_POLICY_FOREIGN},
		{failure.ErrEmpty, codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_SET_EMPTY},
		{owner.ErrNotMissing, codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_FILE_NOT_MISSING},
		{failure.ErrRefused, codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_REFUSED_BY_SUBSCRIBER},
		{stream.ErrHeld, codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_EARLIER_STATE_ENFORCED},
		{failure.ErrLimit, codes.ResourceExhausted, policyv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED},
		{failure.ErrChanged, codes.Aborted, policyv1.ErrorReason_ERROR_REASON_STATE_CHANGED},
		{failure.ErrRevision, codes.OutOfRange, policyv1.ErrorReason_ERROR_REASON_UNKNOWN_REVISION},
		{failure.ErrStorage, codes.Unavailable, policyv1.ErrorReason_ERROR_REASON_STORAGE_FAILED},
		{failure.ErrStopped, codes.Unavailable, policyv1.ErrorReason_ERROR_REASON_STOPPING},
		{stream.ErrSlow, codes.ResourceExhausted, policyv1.ErrorReason_ERROR_REASON_SUBSCRIBER_TOO_SLOW},
		{errFormat, codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_TABLE_FORMAT},
		{failure.ErrReplaced, codes.Aborted, policyv1.ErrorReason_ERROR_REASON_SUBSCRIBER_REPLACED},
		{failure.ErrAck, codes.InvalidArgument, policyv1.ErrorReason_ERROR_REASON_UNKNOWN_ACK},
		{context.Canceled, codes.Canceled, 0},
		{context.DeadlineExceeded, codes.DeadlineExceeded, 0},
		{errors.New("unforeseen"), codes.Internal, policyv1.ErrorReason_ERROR_REASON_INTERNAL},
	} {
		given[c.reason] = true
		got := statusOf(fmt.Errorf("outer: %w", c.err))
		if reason, has := rpcerr.ReasonIn(got); status.Code(got) != c.code || has != (c.reason != 0) || has && reason != rpcerr.Of(c.reason) {
			t.Errorf("%v is answered with %s, %v; want %s, %v", c.err, status.Code(got), reason, c.code, c.reason)
		}
	}
	for number, name := range policyv1.ErrorReason_name {
		if !given[policyv1.ErrorReason(number)] {
			t.Errorf("%s is documented but never used", name)
		}
	}
	if statusOf(nil) != nil {
		t.Error("success has a status")
	}
}

// TestFieldIsNotReadFromTheText: the field of a violation comes from the core, and not from the text of the error.
func TestFieldIsNotReadFromTheText(t *testing.T) {
	err := statusOf(fmt.Errorf("from: outer: %w", &failure.FieldError{Field: "to.labels", Err: errors.New("a: b: c")}))
	if got := rpcerr.Fields(err); len(got) != 1 || got[0].GetField() != "to.labels" || got[0].GetDescription() != "a: b: c" {
		t.Errorf("violations are %v, want to.labels: a: b: c", got)
	}
}
