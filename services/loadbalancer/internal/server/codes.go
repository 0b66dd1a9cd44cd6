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
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/failure"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/stream"
)

// retryAfter is when a caller may repeat a change that storage did not take.
const retryAfter = time.Second

// statusOf is the one place where errors of the core get code and reason.
func statusOf(err error) error {
	answer := func(code codes.Code, reason lbv1.ErrorReason, details ...protoadapt.MessageV1) error {
		return rpcerr.New(code, rpcerr.Of(reason), err, details...)
	}
	var (
		bad   *manifest.Error
		field *failure.FieldError
	)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &bad):
		return answer(codes.InvalidArgument, lbv1.ErrorReason_ERROR_REASON_INVALID_MANIFEST, violations(bad))
	case errors.Is(err, failure.ErrNotFound):
		return answer(codes.NotFound, lbv1.ErrorReason_ERROR_REASON_SERVICE_NOT_FOUND,
			rpcerr.Resource("service", "", err.Error()))
	case errors.Is(err, failure.ErrOwned):
		return answer(codes.AlreadyExists, lbv1.ErrorReason_ERROR_REASON_OBJECT_OWNED)
	case errors.Is(err, failure.ErrForeign):
		return answer(codes.FailedPrecondition, lbv1.ErrorReason_ERROR_REASON_OBJECT_FOREIGN)
	case errors.Is(err, failure.ErrEmpty):
		return answer(codes.FailedPrecondition, lbv1.ErrorReason_ERROR_REASON_SET_EMPTY)
	case errors.Is(err, failure.ErrRefused):
		return answer(codes.FailedPrecondition, lbv1.ErrorReason_ERROR_REASON_REFUSED_BY_SUBSCRIBER)
	case errors.Is(err, failure.ErrLimit):
		return answer(codes.ResourceExhausted, lbv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED,
			rpcerr.Quota("services", err.Error()))
	case errors.Is(err, stream.ErrOverflow):
		return answer(codes.ResourceExhausted, lbv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED,
			rpcerr.Quota("frontends", err.Error()), rpcerr.Retry(0))
	case errors.Is(err, stream.ErrReplaced):
		return answer(codes.Aborted, lbv1.ErrorReason_ERROR_REASON_SUBSCRIBER_REPLACED)
	case errors.Is(err, failure.ErrChanged):
		return answer(codes.Aborted, lbv1.ErrorReason_ERROR_REASON_STATE_CHANGED)
	case errors.Is(err, stream.ErrAck):
		return answer(codes.InvalidArgument, lbv1.ErrorReason_ERROR_REASON_UNKNOWN_ACK)
	case errors.Is(err, failure.ErrRevision):
		return answer(codes.OutOfRange, lbv1.ErrorReason_ERROR_REASON_UNKNOWN_REVISION)
	case errors.Is(err, failure.ErrStorage):
		return answer(codes.Unavailable, lbv1.ErrorReason_ERROR_REASON_STORAGE_FAILED, rpcerr.Retry(retryAfter))
	case errors.Is(err, failure.ErrStopped):
		return answer(codes.Unavailable, lbv1.ErrorReason_ERROR_REASON_STOPPING)
	case errors.As(err, &field): // after all that say more
		return answer(codes.InvalidArgument, lbv1.ErrorReason_ERROR_REASON_INVALID_REQUEST,
			rpcerr.Field(field.Field, field.Err.Error()))
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(err).Err()
	}
	return answer(codes.Internal, lbv1.ErrorReason_ERROR_REASON_INTERNAL)
}

// violations names document and field of each problem.
func violations(m *manifest.Error) *errdetails.BadRequest {
	if m.Whole != nil {
		return rpcerr.Field("manifests", m.Whole.Error())
	}
	out := &errdetails.BadRequest{}
	for _, v := range m.Violations[:min(len(m.Violations), rpcerr.MaxViolations)] {
		field := fmt.Sprintf("manifests[%d]", v.Document)
		if v.Path != "" {
			field += "." + v.Path
		}
		out.FieldViolations = append(out.FieldViolations, &errdetails.BadRequest_FieldViolation{
			Field:       field,
			Description: v.Text,
		})
	}
	return out
}
