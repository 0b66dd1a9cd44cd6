// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/protoadapt"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/confirmed"
	"github.com/sluice-net/sluice/services/identity/internal/pods"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// retryAfter is the time after which a caller may retry a call that needs the store while it is unavailable: about the
// pause of the allocator between two attempts.
const retryAfter = time.Second

// answers contains code and reason of each error of the core.
var answers = rpcerr.Table{
	Rows: []rpcerr.Row{
		rpcerr.OnTypeOfAll(codes.InvalidArgument, rpcerr.InvalidMessage, func(e *fieldError) []protoadapt.MessageV1 {
			return []protoadapt.MessageV1{rpcerr.Field(e.field, e.Error())}
		}),
		rpcerr.OnTypeOfAll[*forbiddenError](codes.PermissionDenied, rpcerr.NotPermitted, nil),
		rpcerr.OnType(codes.InvalidArgument, identityv1.ErrorReason_ERROR_REASON_INVALID_LABEL,
			func(e *label.Error) []protoadapt.MessageV1 {
				return []protoadapt.MessageV1{rpcerr.Field(e.Field(), e.Error())}
			}),
		rpcerr.On(label.ErrInvalid, codes.InvalidArgument, identityv1.ErrorReason_ERROR_REASON_INVALID_LABEL,
			rpcerr.InField("labels")),
		rpcerr.On(workload.ErrNamedPort, codes.InvalidArgument,
			identityv1.ErrorReason_ERROR_REASON_INVALID_NAMED_PORT, rpcerr.InField("named_ports")),
		rpcerr.On(allocator.ErrHolder, codes.InvalidArgument, identityv1.ErrorReason_ERROR_REASON_INVALID_REFERENCE,
			rpcerr.InField("reference")),
		rpcerr.OnType(codes.ResourceExhausted, identityv1.ErrorReason_ERROR_REASON_QUOTA_EXHAUSTED, numbers).
			And(allocator.ErrQuota),
		rpcerr.OnType(codes.ResourceExhausted, identityv1.ErrorReason_ERROR_REASON_NUMBERS_EXHAUSTED, numbers),
		rpcerr.On(allocator.ErrHeldOther, codes.AlreadyExists,
			identityv1.ErrorReason_ERROR_REASON_REFERENCE_HAS_OTHER_LABELS),
		rpcerr.On(allocator.ErrNotFound, codes.NotFound, identityv1.ErrorReason_ERROR_REASON_IDENTITY_NOT_FOUND,
			rpcerr.OfResource("identity")),
		rpcerr.On(registry.ErrNoNode, codes.NotFound, identityv1.ErrorReason_ERROR_REASON_NODE_NOT_FOUND,
			rpcerr.OfResource("node")),
		rpcerr.On(registry.ErrAlive, codes.FailedPrecondition, identityv1.ErrorReason_ERROR_REASON_NODE_ALIVE),
		rpcerr.On(registry.ErrNoMapping, codes.NotFound, identityv1.ErrorReason_ERROR_REASON_ADDRESS_UNKNOWN,
			rpcerr.OfResource("address")),
		rpcerr.On(registry.ErrIPAMDiffers, codes.FailedPrecondition,
			identityv1.ErrorReason_ERROR_REASON_IPAM_SETTINGS_DIFFER),
		rpcerr.OnType(codes.ResourceExhausted, identityv1.ErrorReason_ERROR_REASON_NO_FREE_RANGE,
			func(e *registry.FullError) []protoadapt.MessageV1 {
				return []protoadapt.MessageV1{rpcerr.Quota("ranges", e.Figures())}
			}),
		rpcerr.On(registry.ErrResting, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_ADDRESS_RESTING, again),
		rpcerr.On(registry.ErrMaxRanges, codes.ResourceExhausted,
			identityv1.ErrorReason_ERROR_REASON_NO_FREE_RANGE),
		rpcerr.On(registry.ErrLastRange, codes.FailedPrecondition, identityv1.ErrorReason_ERROR_REASON_LAST_RANGE),
		rpcerr.On(allocator.ErrContended, codes.Aborted, identityv1.ErrorReason_ERROR_REASON_CONTENDED, again),
		rpcerr.On(allocator.ErrNameTaken, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_NODE_NAME_TAKEN,
			again),
		rpcerr.On(allocator.ErrNoSpace, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_STORE_FULL, again),
		rpcerr.On(allocator.ErrSessionLost, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_SESSION_LOST,
			again),
		rpcerr.On(allocator.ErrRecords, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_STORAGE_FAILED, again),
		rpcerr.On(registry.ErrRecords, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_STORAGE_FAILED, again),
		rpcerr.On(allocator.ErrUnavailable, codes.Unavailable,
			identityv1.ErrorReason_ERROR_REASON_STORE_UNAVAILABLE, again),
		rpcerr.On(confirmed.ErrDenied, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_STORE_UNAVAILABLE,
			again),
		rpcerr.On(registry.ErrUnlisted, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_STORE_UNAVAILABLE,
			again),
		rpcerr.On(pods.ErrNotFound, codes.Unavailable, identityv1.ErrorReason_ERROR_REASON_POD_NOT_FOUND, again),
		rpcerr.On(pods.ErrUnavailable, codes.Unavailable,
			identityv1.ErrorReason_ERROR_REASON_KUBERNETES_UNAVAILABLE, again),
		rpcerr.On(allocator.ErrCorrupt, codes.Internal, identityv1.ErrorReason_ERROR_REASON_STORE_CORRUPT),
	},
	Otherwise: identityv1.ErrorReason_ERROR_REASON_INTERNAL,
}

// again adds the delay before a retry.
var again = rpcerr.Retries(retryAfter)

// statusOf returns the gRPC status for an error of a call.
func statusOf(err error) error { return answers.Status(err) }

func numbers(q *allocator.QuotaError) []protoadapt.MessageV1 {
	return []protoadapt.MessageV1{rpcerr.Quota("identities", describe(q))}
}

func describe(q *allocator.QuotaError) string {
	keys := make([]string, len(q.Keys))
	for i, k := range q.Keys {
		keys[i] = fmt.Sprintf("%s=%d", k.Key, k.Values)
	}
	return fmt.Sprintf("%d of %d; label keys by number of values: %s", q.Used, q.Limit, strings.Join(keys, " "))
}

// fieldError reports a field with an invalid value that the rules of the proto file accept.
type fieldError struct {
	field string
	err   error
}

func (e *fieldError) Error() string { return e.err.Error() }

// forbiddenError reports a call with a field that its caller may not set.
type forbiddenError struct {
	uid  uint32
	what string
}

func (e *forbiddenError) Error() string { return fmt.Sprintf("uid %d may not %s", e.uid, e.what) }

// invalid returns the status for a call with an invalid field.
func invalid(field string, err error) error { return statusOf(&fieldError{field, err}) }

// forbidden returns the status for a caller without the permission for what.
func forbidden(uid uint32, what string) error { return statusOf(&forbiddenError{uid, what}) }
