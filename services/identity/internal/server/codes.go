// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/pods"
	"github.com/sluice-net/sluice/services/identity/internal/registry"
)

// retryAfter is when a caller may repeat a call that needs the store while it is
// away: about as long as the allocator itself waits between two attempts.
const retryAfter = time.Second

// statusOf is the one place where errors of the core get code and reason.
func statusOf(err error) error {
	answer := func(code codes.Code, reason identityv1.ErrorReason, details ...protoadapt.MessageV1) error {
		return rpcerr.New(code, rpcerr.Of(reason), err, details...)
	}
	unavailable := func(reason identityv1.ErrorReason) error {
		return answer(codes.Unavailable, reason, rpcerr.Retry(retryAfter))
	}
	var (
		invalid *label.Error
		quota   *allocator.QuotaError
		full    *registry.FullError
	)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &invalid):
		return answer(codes.InvalidArgument, identityv1.ErrorReason_ERROR_REASON_INVALID_LABEL,
			rpcerr.Field(invalid.Field(), err.Error()))
	case errors.Is(err, label.ErrInvalid):
		return answer(codes.InvalidArgument, identityv1.ErrorReason_ERROR_REASON_INVALID_LABEL,
			rpcerr.Field("labels", err.Error()))
	case errors.Is(err, workload.ErrNamedPort):
		return answer(codes.InvalidArgument, identityv1.ErrorReason_ERROR_REASON_INVALID_NAMED_PORT,
			rpcerr.Field("named_ports", err.Error()))
	case errors.Is(err, allocator.ErrHolder):
		return answer(codes.InvalidArgument, identityv1.ErrorReason_ERROR_REASON_INVALID_REFERENCE,
			rpcerr.Field("reference", err.Error()))
	case errors.As(err, &quota) && errors.Is(err, allocator.ErrQuota):
		return answer(codes.ResourceExhausted, identityv1.ErrorReason_ERROR_REASON_QUOTA_EXHAUSTED,
			rpcerr.Quota("identities", describe(quota)))
	case errors.As(err, &quota):
		return answer(codes.ResourceExhausted, identityv1.ErrorReason_ERROR_REASON_NUMBERS_EXHAUSTED,
			rpcerr.Quota("identities", describe(quota)))
	case errors.Is(err, allocator.ErrHeldOther):
		return answer(codes.AlreadyExists, identityv1.ErrorReason_ERROR_REASON_REFERENCE_HAS_OTHER_LABELS)
	case errors.Is(err, allocator.ErrNotFound):
		return answer(codes.NotFound, identityv1.ErrorReason_ERROR_REASON_IDENTITY_NOT_FOUND,
			rpcerr.Resource("identity", "", err.Error()))
	case errors.Is(err, registry.ErrNoNode):
		return answer(codes.NotFound, identityv1.ErrorReason_ERROR_REASON_NODE_NOT_FOUND,
			rpcerr.Resource("node", "", err.Error()))
	case errors.Is(err, registry.ErrAlive):
		return answer(codes.FailedPrecondition, identityv1.ErrorReason_ERROR_REASON_NODE_ALIVE)
	case errors.Is(err, registry.ErrNoMapping):
		return answer(codes.NotFound, identityv1.ErrorReason_ERROR_REASON_ADDRESS_UNKNOWN,
			rpcerr.Resource("address", "", err.Error()))
	case errors.Is(err, registry.ErrIPAMDiffers):
		return answer(codes.FailedPrecondition, identityv1.ErrorReason_ERROR_REASON_IPAM_SETTINGS_DIFFER)
	case errors.As(err, &full):
		return answer(codes.ResourceExhausted, identityv1.ErrorReason_ERROR_REASON_NO_FREE_RANGE,
			rpcerr.Quota("ranges", full.Figures()))
	case errors.Is(err, registry.ErrResting):
		return unavailable(identityv1.ErrorReason_ERROR_REASON_ADDRESS_RESTING)
	case errors.Is(err, registry.ErrMaxRanges):
		return answer(codes.ResourceExhausted, identityv1.ErrorReason_ERROR_REASON_NO_FREE_RANGE)
	case errors.Is(err, registry.ErrLastRange):
		return answer(codes.FailedPrecondition, identityv1.ErrorReason_ERROR_REASON_LAST_RANGE)
	case errors.Is(err, allocator.ErrContended):
		return answer(codes.Aborted, identityv1.ErrorReason_ERROR_REASON_CONTENDED, rpcerr.Retry(retryAfter))
	case errors.Is(err, allocator.ErrNameTaken):
		return unavailable(identityv1.ErrorReason_ERROR_REASON_NODE_NAME_TAKEN)
	case errors.Is(err, allocator.ErrNoSpace):
		return unavailable(identityv1.ErrorReason_ERROR_REASON_STORE_FULL)
	case errors.Is(err, allocator.ErrSessionLost):
		return unavailable(identityv1.ErrorReason_ERROR_REASON_SESSION_LOST)
	case errors.Is(err, allocator.ErrRecords), errors.Is(err, registry.ErrRecords):
		return unavailable(identityv1.ErrorReason_ERROR_REASON_STORAGE_FAILED)
	case errors.Is(err, allocator.ErrUnavailable), errors.Is(err, registry.ErrUnlisted):
		return unavailable(identityv1.ErrorReason_ERROR_REASON_STORE_UNAVAILABLE)
	case errors.Is(err, pods.ErrNotFound):
		return unavailable(identityv1.ErrorReason_ERROR_REASON_POD_NOT_FOUND)
	case errors.Is(err, pods.ErrUnavailable):
		return unavailable(identityv1.ErrorReason_ERROR_REASON_KUBERNETES_UNAVAILABLE)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return status.FromContextError(err).Err()
	case errors.Is(err, allocator.ErrCorrupt):
		return answer(codes.Internal, identityv1.ErrorReason_ERROR_REASON_STORE_CORRUPT)
	}
	return answer(codes.Internal, identityv1.ErrorReason_ERROR_REASON_INTERNAL)
}

func describe(q *allocator.QuotaError) string {
	keys := make([]string, len(q.Keys))
	for i, k := range q.Keys {
		keys[i] = fmt.Sprintf("%s=%d", k.Key, k.Values)
	}
	return fmt.Sprintf("%d of %d; label keys by number of values: %s", q.Used, q.Limit, strings.Join(keys, " "))
}
