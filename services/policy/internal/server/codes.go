// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/policy/internal/failure"
	"github.com/sluice-net/sluice/services/policy/internal/reading"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// retryAfter is when a caller may repeat a change that storage did not take.
const retryAfter = time.Second

// statusOf is the one place where errors of the core get code and reason.
func statusOf(err error) error {
	answer := func(code codes.Code, reason policyv1.ErrorReason, details ...protoadapt.MessageV1) error {
		return rpcerr.New(code, rpcerr.Of(reason), err, details...)
	}
	var (
		manifest *reading.Error
		field    *failure.FieldError
	)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &manifest):
		return answer(codes.InvalidArgument, policyv1.ErrorReason_ERROR_REASON_INVALID_MANIFEST, violations(manifest))
	case errors.Is(err, failure.ErrNotFound):
		return answer(codes.NotFound, policyv1.ErrorReason_ERROR_REASON_IDENTITY_NOT_FOUND, rpcerr.Resource("identity", "", err.Error()))
	case errors.Is(err, failure.ErrUnresolved):
		return answer(codes.Unavailable, policyv1.ErrorReason_ERROR_REASON_ADDRESS_NOT_RESOLVED, rpcerr.Retry(retryAfter))
	case errors.Is(err, failure.ErrOwned):
		return answer(codes.AlreadyExists, policyv1.ErrorReason_ERROR_REASON_POLICY_OWNED)
	case errors.Is(err, failure.ErrForeign):
		return answer(codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_POLICY_FOREIGN)
	case errors.Is(err, failure.ErrEmpty):
		return answer(codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_SET_EMPTY)
	case errors.Is(err, failure.ErrNotMissing):
		return answer(codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_FILE_NOT_MISSING)
	case errors.Is(err, failure.ErrRefused):
		return answer(codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_REFUSED_BY_SUBSCRIBER)
	case errors.Is(err, failure.ErrHeld):
		return answer(codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_EARLIER_STATE_ENFORCED)
	case errors.Is(err, failure.ErrLimit):
		return answer(codes.ResourceExhausted, policyv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED, rpcerr.Quota("policy", err.Error()))
	case errors.Is(err, stream.ErrSlow):
		return answer(codes.ResourceExhausted, policyv1.ErrorReason_ERROR_REASON_SUBSCRIBER_TOO_SLOW, rpcerr.Retry(0))
	case errors.Is(err, errFormat):
		return answer(codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_TABLE_FORMAT)
	case errors.Is(err, stream.ErrReplaced):
		return answer(codes.Aborted, policyv1.ErrorReason_ERROR_REASON_SUBSCRIBER_REPLACED)
	case errors.Is(err, failure.ErrChanged):
		return answer(codes.Aborted, policyv1.ErrorReason_ERROR_REASON_STATE_CHANGED)
	case errors.Is(err, stream.ErrAck):
		return answer(codes.InvalidArgument, policyv1.ErrorReason_ERROR_REASON_UNKNOWN_ACK)
	case errors.Is(err, failure.ErrRevision):
		return answer(codes.OutOfRange, policyv1.ErrorReason_ERROR_REASON_UNKNOWN_REVISION)
	case errors.Is(err, failure.ErrStorage):
		return answer(codes.Unavailable, policyv1.ErrorReason_ERROR_REASON_STORAGE_FAILED, rpcerr.Retry(retryAfter))
	case errors.Is(err, failure.ErrStopped):
		return answer(codes.Unavailable, policyv1.ErrorReason_ERROR_REASON_STOPPING)
	case errors.As(err, &field): // after all that say more
		return answer(codes.InvalidArgument, policyv1.ErrorReason_ERROR_REASON_INVALID_REQUEST, rpcerr.Field(field.Field,
			field.Err.Error()))
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(err).Err()
	}
	return answer(codes.Internal, policyv1.ErrorReason_ERROR_REASON_INTERNAL)
}

// violations names document and field of each problem.
func violations(m *reading.Error) *errdetails.BadRequest {
	if m.Whole != nil {
		return rpcerr.Field("manifests", m.Whole.Error())
	}
	out := &errdetails.BadRequest{}
	for _, v := range m.Violations[:min(len(m.Violations), rpcerr.MaxViolations)] {
		field := fmt.Sprintf("manifests[%d]", v.Document)
		if v.Path != "" {
			field += "." + v.Path
		}
		out.FieldViolations = append(out.FieldViolations, &errdetails.BadRequest_FieldViolation{Field: field, Description: v.Text})
	}
	return out
}
