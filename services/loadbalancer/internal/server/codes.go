// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/protoadapt"

	"github.com/sluice-net/sluice/kit/desired/answer"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/stream"
)

// answers maps errors of the core to codes and reasons.
var answers = answer.Reasons{
	NotFound: lbv1.ErrorReason_ERROR_REASON_SERVICE_NOT_FOUND,
	Owned:    lbv1.ErrorReason_ERROR_REASON_OBJECT_OWNED,
	Foreign:  lbv1.ErrorReason_ERROR_REASON_OBJECT_FOREIGN,
	Changed:  lbv1.ErrorReason_ERROR_REASON_STATE_CHANGED,
	Limit:    lbv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED,
	Empty:    lbv1.ErrorReason_ERROR_REASON_SET_EMPTY,
	Revision: lbv1.ErrorReason_ERROR_REASON_UNKNOWN_REVISION,
	Refused:  lbv1.ErrorReason_ERROR_REASON_REFUSED_BY_SUBSCRIBER,
	Storage:  lbv1.ErrorReason_ERROR_REASON_STORAGE_FAILED,
	Stopped:  lbv1.ErrorReason_ERROR_REASON_STOPPING,
	Replaced: lbv1.ErrorReason_ERROR_REASON_SUBSCRIBER_REPLACED,
	Ack:      lbv1.ErrorReason_ERROR_REASON_UNKNOWN_ACK,
	Field:    lbv1.ErrorReason_ERROR_REASON_INVALID_REQUEST,
	Internal: lbv1.ErrorReason_ERROR_REASON_INTERNAL,
	Resource: "service", Quota: "services",
}.Table(
	rpcerr.OnType(codes.InvalidArgument, lbv1.ErrorReason_ERROR_REASON_INVALID_MANIFEST,
		func(e *manifest.Error) []protoadapt.MessageV1 { return rpcerr.Manifests(e.Whole, e.Violations) }),
	rpcerr.On(stream.ErrOverflow, codes.ResourceExhausted, lbv1.ErrorReason_ERROR_REASON_LIMIT_EXCEEDED,
		rpcerr.OfQuota("frontends"), rpcerr.Retries(0)),
)

// statusOf returns the status of a call that ended with err.
func statusOf(err error) error { return answers.Status(err) }
