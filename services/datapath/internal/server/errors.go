// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/protoadapt"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/explain"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policysync"
)

// retryAfter is the suggested delay before a call is repeated after a temporary failure.
const retryAfter = 100 * time.Millisecond

// again suggests that the caller repeats the call.
var again = rpcerr.Retries(retryAfter)

// answers maps errors of the core to codes and reasons. Errors of ipam, identity or policy keep their own reason and
// details.
var answers = rpcerr.Table{
	Rows: []rpcerr.Row{
		rpcerr.On(endpoint.ErrDeleted, codes.Aborted, datapathv1.ErrorReason_ERROR_REASON_ENDPOINT_DELETED),
		rpcerr.On(endpoint.ErrNamespace, codes.InvalidArgument,
			datapathv1.ErrorReason_ERROR_REASON_NETWORK_NAMESPACE_UNUSABLE, rpcerr.InField("network_namespace")),
		rpcerr.On(endpoint.ErrNamespaceGone, codes.InvalidArgument,
			datapathv1.ErrorReason_ERROR_REASON_NETWORK_NAMESPACE_REMOVED, rpcerr.InField("network_namespace")),
		rpcerr.On(endpoint.ErrNotFound, codes.NotFound, datapathv1.ErrorReason_ERROR_REASON_ENDPOINT_NOT_FOUND),
		rpcerr.On(explain.ErrNotLocal, codes.NotFound, datapathv1.ErrorReason_ERROR_REASON_ADDRESSES_NOT_LOCAL),
		rpcerr.On(pin.ErrNoMap, codes.NotFound, datapathv1.ErrorReason_ERROR_REASON_MAP_NOT_FOUND),
		rpcerr.On(endpoint.ErrUnreadable, codes.FailedPrecondition,
			datapathv1.ErrorReason_ERROR_REASON_RECORD_UNREADABLE),
		rpcerr.On(endpoint.ErrForeign, codes.FailedPrecondition,
			datapathv1.ErrorReason_ERROR_REASON_FOREIGN_MANAGER),
		rpcerr.On(errNoPolicies, codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_POLICY_MODE_NONE),
		rpcerr.On(endpoint.ErrInUse, codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_ENDPOINT_IN_USE),
		rpcerr.On(endpoint.ErrHostPort, codes.FailedPrecondition,
			datapathv1.ErrorReason_ERROR_REASON_HOST_PORT_IN_USE),
		rpcerr.On(endpoint.ErrLoadBalancingOff, codes.FailedPrecondition,
			datapathv1.ErrorReason_ERROR_REASON_LOAD_BALANCING_OFF),
		rpcerr.On(endpoint.ErrLabelsOfPod, codes.FailedPrecondition,
			datapathv1.ErrorReason_ERROR_REASON_LABELS_FROM_KUBERNETES),
		rpcerr.OnType(codes.AlreadyExists, datapathv1.ErrorReason_ERROR_REASON_OWNER_HAS_OTHER_ENDPOINT,
			func(e *endpoint.ExistsError) []protoadapt.MessageV1 {
				return []protoadapt.MessageV1{
					rpcerr.Resource("endpoint", e.Owner.String(), e.Error()),
					rpcerr.Metadata(map[string]string{"fields": strings.Join(e.Fields, ",")}),
				}
			}),
		rpcerr.On(endpoint.ErrExists, codes.AlreadyExists,
			datapathv1.ErrorReason_ERROR_REASON_OWNER_HAS_OTHER_ENDPOINT),
		rpcerr.OnType(codes.Aborted, datapathv1.ErrorReason_ERROR_REASON_ADDRESS_IN_USE,
			func(e *endpoint.HeldError) []protoadapt.MessageV1 {
				return []protoadapt.MessageV1{
					rpcerr.Resource("endpoint", e.Holder.String(), e.Error()),
					rpcerr.Metadata(map[string]string{"address": e.Addr.String(), "holder": e.Holder.String()}),
					rpcerr.Retry(retryAfter),
				}
			}),
		rpcerr.On(endpoint.ErrAddressHeld, codes.Aborted,
			datapathv1.ErrorReason_ERROR_REASON_ADDRESS_IN_USE, again),
		rpcerr.On(endpoint.ErrLease, codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_LEASE_LOST),
		rpcerr.On(endpoint.ErrSecond, codes.FailedPrecondition,
			datapathv1.ErrorReason_ERROR_REASON_SECOND_INTERFACE_REFUSED),
		rpcerr.On(endpoint.ErrNameTaken, codes.FailedPrecondition,
			datapathv1.ErrorReason_ERROR_REASON_INTERFACE_NAME_TAKEN),
		rpcerr.On(endpoint.ErrStorage, codes.Unavailable,
			datapathv1.ErrorReason_ERROR_REASON_STORAGE_FAILED, again),
		rpcerr.On(endpoint.ErrFull, codes.ResourceExhausted,
			datapathv1.ErrorReason_ERROR_REASON_NO_CAPACITY, again),
		rpcerr.On(endpoint.ErrExhausted, codes.ResourceExhausted,
			datapathv1.ErrorReason_ERROR_REASON_SERVICE_EXHAUSTED, again),
		rpcerr.On(policysync.ErrUnavailable, codes.Unavailable,
			datapathv1.ErrorReason_ERROR_REASON_POLICY_UNAVAILABLE, again),
		rpcerr.On(endpoint.ErrUnavailable, codes.Unavailable,
			datapathv1.ErrorReason_ERROR_REASON_SERVICE_UNAVAILABLE, again),
		// Used if only the field is known.
		rpcerr.OnType(codes.InvalidArgument, datapathv1.ErrorReason_ERROR_REASON_INVALID_REQUEST,
			func(e *endpoint.FieldError) []protoadapt.MessageV1 {
				return []protoadapt.MessageV1{rpcerr.Field(e.Field, e.Reason)}
			}),
		rpcerr.On(endpoint.ErrInvalid, codes.InvalidArgument, datapathv1.ErrorReason_ERROR_REASON_INVALID_REQUEST),
	},
	Otherwise: datapathv1.ErrorReason_ERROR_REASON_INTERNAL,
}

// statusOf converts err to the status of a call.
func statusOf(err error) error { return answers.Status(err) }
