// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/protoadapt"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/failure"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/stream"
)

// retryAfter is when a caller may repeat a change that storage did not take.
const retryAfter = time.Second

// answers has code and reason of each error of the core.
var answers = rpcerr.Table{
	Rows: []rpcerr.Row{
		rpcerr.OnType(codes.InvalidArgument, lbv1.ErrorReason_ERROR_REASON_INVALID_MANIFEST,
			func(e *manifest.Error) []protoadapt.MessageV1 { return rpcerr.Manifests(e.Whole, e.Violations) }),
		rpcerr.On(failure.ErrNotFound, codes.NotFound, lbv1.ErrorReason_ERROR_REASON_SERVICE_NOT_FOUND,
			rpcerr.OfResource("service")),
		rpcerr.On(failure.ErrOwned, codes.AlreadyExists, lbv1.ErrorReason_ERROR_REASON_OBJECT_OWNED),
		rpcerr.On(failure.ErrForeign, codes.FailedPrecondition, lbv1.ErrorReason_ERROR_REASON_OBJECT_FOREIGN),
		rpcerr.On(failure.ErrEmpty, codes.FailedPrecondition, lbv1.ErrorReason_ERROR_REASON_SET_EMPTY),
		rpcerr.On(failure.ErrRefused, codes.FailedPrecondition, lbv1.ErrorReason_ERROR_REASON_REFUSED_BY_SUBSCRIBER),
		rpcerr.On(failure.ErrLimit, codes.ResourceExhausted, lbv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED,
			rpcerr.OfQuota("services")),
		rpcerr.On(stream.ErrOverflow, codes.ResourceExhausted, lbv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED,
			rpcerr.OfQuota("frontends"), rpcerr.Retries(0)),
		rpcerr.On(stream.ErrReplaced, codes.Aborted, lbv1.ErrorReason_ERROR_REASON_SUBSCRIBER_REPLACED),
		rpcerr.On(failure.ErrChanged, codes.Aborted, lbv1.ErrorReason_ERROR_REASON_STATE_CHANGED),
		rpcerr.On(stream.ErrAck, codes.InvalidArgument, lbv1.ErrorReason_ERROR_REASON_UNKNOWN_ACK),
		rpcerr.On(failure.ErrRevision, codes.OutOfRange, lbv1.ErrorReason_ERROR_REASON_UNKNOWN_REVISION),
		rpcerr.On(failure.ErrStorage, codes.Unavailable, lbv1.ErrorReason_ERROR_REASON_STORAGE_FAILED,
			rpcerr.Retries(retryAfter)),
		rpcerr.On(failure.ErrStopped, codes.Unavailable, lbv1.ErrorReason_ERROR_REASON_STOPPING),
		// A field is the least that is known of a mistake.
		rpcerr.OnType(codes.InvalidArgument, lbv1.ErrorReason_ERROR_REASON_INVALID_REQUEST,
			func(e *failure.FieldError) []protoadapt.MessageV1 {
				return []protoadapt.MessageV1{rpcerr.Field(e.Field, e.Err.Error())}
			}),
	},
	Otherwise: lbv1.ErrorReason_ERROR_REASON_INTERNAL,
}

// statusOf is the answer to a call that ended with err.
func statusOf(err error) error { return answers.Status(err) }
