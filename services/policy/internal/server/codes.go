// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/protoadapt"

	"github.com/sluice-net/sluice/kit/desired/answer"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/policy/internal/decode"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// retryAfter is the delay in RetryInfo after an address could not be resolved.
const retryAfter = time.Second

// answers maps the errors of the core to codes and reasons.
var answers = answer.Reasons{
	NotFound: policyv1.ErrorReason_ERROR_REASON_IDENTITY_NOT_FOUND,
	Owned:    policyv1.ErrorReason_ERROR_REASON_POLICY_OWNED,
	Foreign:  policyv1.ErrorReason_ERROR_REASON_POLICY_FOREIGN,
	Changed:  policyv1.ErrorReason_ERROR_REASON_STATE_CHANGED,
	Limit:    policyv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED,
	Empty:    policyv1.ErrorReason_ERROR_REASON_SET_EMPTY,
	Revision: policyv1.ErrorReason_ERROR_REASON_UNKNOWN_REVISION,
	Refused:  policyv1.ErrorReason_ERROR_REASON_REFUSED_BY_SUBSCRIBER,
	Storage:  policyv1.ErrorReason_ERROR_REASON_STORAGE_FAILED,
	Stopped:  policyv1.ErrorReason_ERROR_REASON_STOPPING,
	Replaced: policyv1.ErrorReason_ERROR_REASON_SUBSCRIBER_REPLACED,
	Ack:      policyv1.ErrorReason_ERROR_REASON_UNKNOWN_ACK,
	Field:    policyv1.ErrorReason_ERROR_REASON_INVALID_REQUEST,
	Internal: policyv1.ErrorReason_ERROR_REASON_INTERNAL,
	Resource: "identity", Quota: "policy",
}.Table(
	rpcerr.OnType(codes.InvalidArgument, policyv1.ErrorReason_ERROR_REASON_INVALID_MANIFEST,
		func(e *decode.Error) []protoadapt.MessageV1 { return rpcerr.Manifests(e.Whole, e.Violations) }),
	rpcerr.On(peer.ErrUnresolved, codes.Unavailable, policyv1.ErrorReason_ERROR_REASON_ADDRESS_NOT_RESOLVED,
		rpcerr.Retries(retryAfter)),
	rpcerr.On(owner.ErrNotMissing, codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_FILE_NOT_MISSING),
	rpcerr.On(stream.ErrHeld, codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_EARLIER_STATE_ENFORCED),
	rpcerr.On(stream.ErrSlow, codes.ResourceExhausted, policyv1.ErrorReason_ERROR_REASON_SUBSCRIBER_TOO_SLOW,
		rpcerr.Retries(0)),
	rpcerr.On(errFormat, codes.FailedPrecondition, policyv1.ErrorReason_ERROR_REASON_TABLE_FORMAT),
)

// statusOf returns the gRPC status for err.
func statusOf(err error) error { return answers.Status(err) }
