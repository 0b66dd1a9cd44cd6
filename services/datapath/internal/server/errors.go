// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/explain"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/policysync"
)

// retryAfter is when a caller may repeat a call for which something was away or
// in use.
const retryAfter = 100 * time.Millisecond

// existing are the details of an error that another endpoint, or another content of
// it, is in the way: which, and in what.
func existing(err error) []protoadapt.MessageV1 {
	var (
		exists *endpoint.ExistsError
		held   *endpoint.HeldError
	)
	switch {
	case errors.As(err, &exists):
		return []protoadapt.MessageV1{
			rpcerr.Resource("endpoint", exists.Owner.String(), err.Error()),
			rpcerr.Metadata(map[string]string{"fields": strings.Join(exists.Fields, ",")}),
		}
	case errors.As(err, &held):
		return []protoadapt.MessageV1{
			rpcerr.Resource("endpoint", held.Holder.String(), err.Error()),
			rpcerr.Metadata(map[string]string{"address": held.Addr.String(), "holder": held.Holder.String()}),
		}
	}
	return nil
}

// statusOf is the one place where errors of the core get code and reason. What
// ipam, identity or policy answered keeps its own reason and details.
func statusOf(err error) error {
	answer := func(code codes.Code, reason datapathv1.ErrorReason, details ...protoadapt.MessageV1) error {
		return rpcerr.New(code, rpcerr.Of(reason), err, details...)
	}
	again := rpcerr.Retry(retryAfter)
	var field *endpoint.FieldError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, endpoint.ErrDeleted):
		return answer(codes.Aborted, datapathv1.ErrorReason_ERROR_REASON_ENDPOINT_DELETED)
	case errors.Is(err, endpoint.ErrNamespace):
		return answer(codes.InvalidArgument, datapathv1.ErrorReason_ERROR_REASON_NETWORK_NAMESPACE_UNUSABLE, rpcerr.Field("network_namespace", err.Error()))
	case errors.Is(err, endpoint.ErrNamespaceGone):
		return answer(codes.InvalidArgument, datapathv1.ErrorReason_ERROR_REASON_NETWORK_NAMESPACE_REMOVED, rpcerr.Field("network_namespace", err.Error()))
	case errors.Is(err, endpoint.ErrNotFound):
		return answer(codes.NotFound, datapathv1.ErrorReason_ERROR_REASON_ENDPOINT_NOT_FOUND)
	case errors.Is(err, explain.ErrNotLocal):
		return answer(codes.NotFound, datapathv1.ErrorReason_ERROR_REASON_ADDRESSES_NOT_LOCAL)
	case errors.Is(err, pin.ErrNoMap):
		return answer(codes.NotFound, datapathv1.ErrorReason_ERROR_REASON_MAP_NOT_FOUND)
	case errors.Is(err, endpoint.ErrUnreadable):
		return answer(codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_RECORD_UNREADABLE)
	case errors.Is(err, endpoint.ErrForeign):
		return answer(codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_FOREIGN_MANAGER)
	case errors.Is(err, errNoPolicies):
		return answer(codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_POLICY_MODE_NONE)
	case errors.Is(err, endpoint.ErrInUse):
		return answer(codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_ENDPOINT_IN_USE)
	case errors.Is(err, endpoint.ErrHostPort):
		return answer(codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_HOST_PORT_IN_USE)
	case errors.Is(err, endpoint.ErrLoadBalancingOff):
		return answer(codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_LOAD_BALANCING_OFF)
	case errors.Is(err, endpoint.ErrLabelsOfPod):
		return answer(codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_LABELS_FROM_KUBERNETES)
	case errors.Is(err, endpoint.ErrExists):
		return answer(codes.AlreadyExists, datapathv1.ErrorReason_ERROR_REASON_OWNER_HAS_OTHER_ENDPOINT, existing(err)...)
	case errors.Is(err, endpoint.ErrAddressHeld):
		return answer(codes.Aborted, datapathv1.ErrorReason_ERROR_REASON_ADDRESS_IN_USE, append(existing(err), again)...)
	case errors.Is(err, endpoint.ErrLease):
		return answer(codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_LEASE_LOST)
	case errors.Is(err, endpoint.ErrSecond):
		return answer(codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_SECOND_INTERFACE_REFUSED)
	case errors.Is(err, endpoint.ErrNameTaken):
		return answer(codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_INTERFACE_NAME_TAKEN)
	case errors.Is(err, endpoint.ErrStorage):
		return answer(codes.Unavailable, datapathv1.ErrorReason_ERROR_REASON_STORAGE_FAILED, again)
	case errors.Is(err, endpoint.ErrFull):
		return answer(codes.ResourceExhausted, datapathv1.ErrorReason_ERROR_REASON_NO_CAPACITY, again)
	case errors.Is(err, endpoint.ErrExhausted):
		return answer(codes.ResourceExhausted, datapathv1.ErrorReason_ERROR_REASON_SERVICE_EXHAUSTED, again)
	case errors.Is(err, policysync.ErrUnavailable):
		return answer(codes.Unavailable, datapathv1.ErrorReason_ERROR_REASON_POLICY_UNAVAILABLE, again)
	case errors.Is(err, endpoint.ErrUnavailable):
		return answer(codes.Unavailable, datapathv1.ErrorReason_ERROR_REASON_SERVICE_UNAVAILABLE, again)
	case errors.As(err, &field): // after all that say more
		return answer(codes.InvalidArgument, datapathv1.ErrorReason_ERROR_REASON_INVALID_REQUEST, rpcerr.Field(field.Field,
			field.Reason))
	case errors.Is(err, endpoint.ErrInvalid):
		return answer(codes.InvalidArgument, datapathv1.ErrorReason_ERROR_REASON_INVALID_REQUEST)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return status.FromContextError(err).Err()
	}
	return answer(codes.Internal, datapathv1.ErrorReason_ERROR_REASON_INTERNAL)
}
