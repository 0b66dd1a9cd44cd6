// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"fmt"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/protoadapt"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	"github.com/sluice-net/sluice/services/ipam/internal/cluster"
	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
)

// retryDelay is the delay after which a caller may repeat a call if the service was busy.
const retryDelay = 200 * time.Millisecond

// growDelay is the delay after which another block may have been claimed.
const growDelay = time.Second

// allocation is the resource type in errors about a missing or a different allocation.
const allocation = "sluice.ipam.v1.Allocation"

// answers maps each error of the core to its code and reason.
var answers = rpcerr.Table{
	Rows: []rpcerr.Row{
		rpcerr.OnType(codes.InvalidArgument, ipamv1.ErrorReason_ERROR_REASON_NO_POOL, inField).And(ipam.ErrNoPool),
		rpcerr.OnType(codes.InvalidArgument, ipamv1.ErrorReason_ERROR_REASON_INVALID_REQUEST, inField),
		rpcerr.On(cluster.ErrPoolFull, codes.ResourceExhausted,
			ipamv1.ErrorReason_ERROR_REASON_CLUSTER_POOL_EXHAUSTED, rpcerr.Retries(growDelay)),
		rpcerr.On(cluster.ErrAway, codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_CLUSTER_UNAVAILABLE,
			rpcerr.Retries(growDelay)),
		rpcerr.On(ipam.ErrNoRange, codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_NO_RANGE,
			rpcerr.Retries(retryDelay)),
		rpcerr.OnType(codes.ResourceExhausted, ipamv1.ErrorReason_ERROR_REASON_POOL_EXHAUSTED, usage),
		rpcerr.On(ipam.ErrOtherContent, codes.AlreadyExists,
			ipamv1.ErrorReason_ERROR_REASON_OWNER_HAS_OTHER_ADDRESSES, rpcerr.OfResource(allocation)),
		rpcerr.On(ipam.ErrUnavailable, codes.FailedPrecondition, ipamv1.ErrorReason_ERROR_REASON_ADDRESS_UNAVAILABLE),
		rpcerr.On(ipam.ErrMismatch, codes.FailedPrecondition, ipamv1.ErrorReason_ERROR_REASON_ADDRESSES_DIFFER),
		rpcerr.On(ipam.ErrNotHeld, codes.NotFound, ipamv1.ErrorReason_ERROR_REASON_ALLOCATION_NOT_FOUND,
			rpcerr.OfResource(allocation)),
		rpcerr.On(ipam.ErrBusy, codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_BUSY, rpcerr.Retries(retryDelay)),
		rpcerr.On(ipam.ErrStopped, codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_STOPPING,
			rpcerr.Retries(retryDelay)),
		rpcerr.On(ipam.ErrStoreLost, codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_STORAGE_UNCERTAIN,
			rpcerr.Retries(retryDelay)),
		rpcerr.On(ipam.ErrStore, codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_STORAGE_FAILED,
			rpcerr.Retries(retryDelay)),
	},
	Otherwise: ipamv1.ErrorReason_ERROR_REASON_INTERNAL,
}

// statusOf returns the status of a call that ended with err.
func statusOf(err error) error { return answers.Status(err) }

func inField(e *ipam.FieldError) []protoadapt.MessageV1 {
	return []protoadapt.MessageV1{rpcerr.Field(e.Field, e.Text)}
}

// usage returns the usage of the pools, and when the next quarantined address becomes free. The delay is at least the
// usual one, because other callers may also wait for that address.
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
