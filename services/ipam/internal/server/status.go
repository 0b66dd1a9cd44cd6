// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	"github.com/sluice-net/sluice/services/ipam/internal/cluster"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
)

// retryDelay is when a caller may repeat a call that found the service busy.
const retryDelay = 200 * time.Millisecond

// growDelay is when another block may have come.
const growDelay = time.Second

// allocation is the type of what the answers about a missing or another
// allocation name.
const allocation = "sluice.ipam.v1.Allocation"

// statusOf is the one place where errors of the core get code and reason.
func statusOf(err error) error {
	answer := func(code codes.Code, reason ipamv1.ErrorReason, details ...protoadapt.MessageV1) error {
		return rpcerr.New(code, rpcerr.Of(reason), err, details...)
	}
	var (
		field     *ipam.FieldError
		exhausted *ipam.ExhaustedError
	)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &field) && errors.Is(err, ipam.ErrNoPool):
		return answer(codes.InvalidArgument, ipamv1.ErrorReason_ERROR_REASON_NO_POOL, rpcerr.Field(field.Field, field.Text))
	case errors.As(err, &field):
		return answer(codes.InvalidArgument, ipamv1.ErrorReason_ERROR_REASON_INVALID_REQUEST, rpcerr.Field(field.Field, field.Text))
	case errors.Is(err, cluster.ErrPoolFull):
		return answer(codes.ResourceExhausted, ipamv1.ErrorReason_ERROR_REASON_CLUSTER_POOL_EXHAUSTED,
			rpcerr.Retry(growDelay))
	case errors.Is(err, cluster.ErrAway):
		return answer(codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_CLUSTER_UNAVAILABLE, rpcerr.Retry(growDelay))
	case errors.Is(err, ipam.ErrNoRange):
		return answer(codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_NO_RANGE, rpcerr.Retry(retryDelay))
	case errors.As(err, &exhausted):
		return answer(codes.ResourceExhausted, ipamv1.ErrorReason_ERROR_REASON_POOL_EXHAUSTED, usage(exhausted)...)
	case errors.Is(err, ipam.ErrOtherContent):
		return answer(codes.AlreadyExists, ipamv1.ErrorReason_ERROR_REASON_OWNER_HAS_OTHER_ADDRESSES, rpcerr.Resource(allocation, "", err.Error()))
	case errors.Is(err, ipam.ErrUnavailable):
		return answer(codes.FailedPrecondition, ipamv1.ErrorReason_ERROR_REASON_ADDRESS_UNAVAILABLE)
	case errors.Is(err, ipam.ErrMismatch):
		return answer(codes.FailedPrecondition, ipamv1.ErrorReason_ERROR_REASON_ADDRESSES_DIFFER)
	case errors.Is(err, ipam.ErrNotHeld):
		return answer(codes.NotFound, ipamv1.ErrorReason_ERROR_REASON_ALLOCATION_NOT_FOUND, rpcerr.Resource(allocation, "", err.Error()))
	case errors.Is(err, ipam.ErrBusy):
		return answer(codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_BUSY, rpcerr.Retry(retryDelay))
	case errors.Is(err, ipam.ErrStopped):
		return answer(codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_STOPPING, rpcerr.Retry(retryDelay))
	case errors.Is(err, ipam.ErrStoreLost):
		return answer(codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_STORAGE_UNCERTAIN, rpcerr.Retry(retryDelay))
	case errors.Is(err, ipam.ErrStore):
		return answer(codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_STORAGE_FAILED, rpcerr.Retry(retryDelay))
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return status.FromContextError(err).Err()
	}
	return answer(codes.Internal, ipamv1.ErrorReason_ERROR_REASON_INTERNAL)
}

// usage has the figures of the pools, and when an address comes back by itself.
// That is at least the usual delay, because other callers may wait for it too.
func usage(e *ipam.ExhaustedError) []protoadapt.MessageV1 {
	var details []protoadapt.MessageV1
	for _, f := range e.Pools {
		details = append(details, rpcerr.Quota("pool:"+f.Prefix.String(),
			fmt.Sprintf("%d addresses: %d confirmed, %d leased, %d quarantined, %d reserved, %d free",
				f.Size, f.Confirmed, f.Leased, f.Quarantined, f.Reserved, f.Free)))
	}
	if !e.NextFree.IsZero() {
		details = append(details, rpcerr.Retry(max(retryDelay, time.Until(e.NextFree))))
	}
	return details
}
