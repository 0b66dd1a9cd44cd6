// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/protoadapt"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/policy/internal/failure"
	"github.com/sluice-net/sluice/services/policy/internal/reading"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// retryAfter is when a caller may repeat a change that storage did not take.
const retryAfter = time.Second

// answers has code and reason of each error of the core.
var answers = rpcerr.Table{
	Rows: []rpcerr.Row{
		rpcerr.OnType(codes.InvalidArgument, policyv1.ErrorReason_ERROR_REASON_INVALID_MANIFEST,
			func(e *reading.Error) []protoadapt.MessageV1 { return rpcerr.Manifests(e.Whole, e.Violations) }),
		rpcerr.On(failure.ErrNotFound, codes.NotFound, policyv1.ErrorReason_ERROR_REASON_IDENTITY_NOT_FOUND,
			rpcerr.OfResource("identity")),
		rpcerr.On(failure.ErrUnresolved, codes.Unavailable, policyv1.ErrorReason_ERROR_REASON_ADDRESS_NOT_RESOLVED,
			rpcerr.Retries(retryAfter)),
		rpcerr.On(failure.ErrOwned, codes.AlreadyExists, policyv1.ErrorReason_ERROR_REASON_POLICY_OWNED),
		rpcerr.On(failure.ErrForeign, codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_POLICY_FOREIGN),
		rpcerr.On(failure.ErrEmpty, codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_SET_EMPTY),
		rpcerr.On(failure.ErrNotMissing, codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_FILE_NOT_MISSING),
		rpcerr.On(failure.ErrRefused, codes.FailedPrecondition,
			policyv1.ErrorReason_ERROR_REASON_REFUSED_BY_SUBSCRIBER),
		rpcerr.On(failure.ErrHeld, codes.FailedPrecondition,
			policyv1.ErrorReason_ERROR_REASON_EARLIER_STATE_ENFORCED),
		rpcerr.On(failure.ErrLimit, codes.ResourceExhausted, policyv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED,
			rpcerr.OfQuota("policy")),
		rpcerr.On(stream.ErrSlow, codes.ResourceExhausted, policyv1.ErrorReason_ERROR_REASON_SUBSCRIBER_TOO_SLOW,
			rpcerr.Retries(0)),
		rpcerr.On(errFormat, codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_TABLE_FORMAT),
		rpcerr.On(stream.ErrReplaced, codes.Aborted, policyv1.ErrorReason_ERROR_REASON_SUBSCRIBER_REPLACED),
		rpcerr.On(failure.ErrChanged, codes.Aborted, policyv1.ErrorReason_ERROR_REASON_STATE_CHANGED),
		rpcerr.On(stream.ErrAck, codes.InvalidArgument, policyv1.ErrorReason_ERROR_REASON_UNKNOWN_ACK),
		rpcerr.On(failure.ErrRevision, codes.OutOfRange, policyv1.ErrorReason_ERROR_REASON_UNKNOWN_REVISION),
		rpcerr.On(failure.ErrStorage, codes.Unavailable, policyv1.ErrorReason_ERROR_REASON_STORAGE_FAILED,
			rpcerr.Retries(retryAfter)),
		rpcerr.On(failure.ErrStopped, codes.Unavailable, policyv1.ErrorReason_ERROR_REASON_STOPPING),
		// A field is the least that is known of a mistake.
		rpcerr.OnType(codes.InvalidArgument, policyv1.ErrorReason_ERROR_REASON_INVALID_REQUEST,
			func(e *failure.FieldError) []protoadapt.MessageV1 {
				return []protoadapt.MessageV1{rpcerr.Field(e.Field, e.Err.Error())}
			}),
	},
	Otherwise: policyv1.ErrorReason_ERROR_REASON_INTERNAL,
}

// statusOf is the answer to a call that ended with err.
func statusOf(err error) error { return answers.Status(err) }
