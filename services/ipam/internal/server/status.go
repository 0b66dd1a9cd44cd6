// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/services/ipam/internal/ipam"
)

// retryDelay is what a caller is told to wait for.
const retryDelay = 200 * time.Millisecond

// toStatus is where the errors of the core become codes.
func toStatus(err error) error {
	var (
		field     *ipam.FieldError
		exhausted *ipam.ExhaustedError
		code      codes.Code
		details   []protoadapt.MessageV1
	)
	switch {
	case errors.As(err, &field):
		code = codes.InvalidArgument
		details = append(details, &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{
			{Field: field.Field, Description: field.Text},
		}})
	case errors.As(err, &exhausted):
		code = codes.ResourceExhausted
		details = append(details, quota(exhausted))
		if !exhausted.NextFree.IsZero() {
			// When an address comes back by itself; at least the usual delay,
			// because others may wait for it too.
			details = append(details, retry(max(retryDelay, time.Until(exhausted.NextFree))))
		}
	case errors.Is(err, ipam.ErrOtherContent):
		code = codes.AlreadyExists
		details = append(details, resource(err))
	case errors.Is(err, ipam.ErrUnavailable):
		code = codes.FailedPrecondition
		details = append(details, precondition("ADDRESS_UNAVAILABLE", err))
	case errors.Is(err, ipam.ErrMismatch):
		code = codes.FailedPrecondition
		details = append(details, precondition("OTHER_ADDRESSES", err))
	case errors.Is(err, ipam.ErrNotHeld):
		code = codes.NotFound
		details = append(details, resource(err))
	case errors.Is(err, ipam.ErrBusy), errors.Is(err, ipam.ErrStopped), errors.Is(err, ipam.ErrStore), errors.Is(err, ipam.ErrStoreLost):
		code = codes.Unavailable
		details = append(details, retry(retryDelay))
	case errors.Is(err, context.DeadlineExceeded):
		code = codes.DeadlineExceeded
	case errors.Is(err, context.Canceled):
		code = codes.Canceled
	default:
		code = codes.Internal
	}
	st := status.New(code, err.Error())
	if detailed, derr := st.WithDetails(details...); derr == nil {
		st = detailed
	}
	return st.Err()
}

func quota(e *ipam.ExhaustedError) *errdetails.QuotaFailure {
	q := &errdetails.QuotaFailure{}
	for _, f := range e.Pools {
		q.Violations = append(q.Violations, &errdetails.QuotaFailure_Violation{
			Subject: "pool:" + f.Prefix.String(),
			Description: fmt.Sprintf("%d addresses: %d confirmed, %d leased, %d resting, %d reserved, %d free",
				f.Size, f.Confirmed, f.Leased, f.Resting, f.Reserved, f.Free),
		})
	}
	return q
}

func retry(d time.Duration) *errdetails.RetryInfo {
	return &errdetails.RetryInfo{RetryDelay: durationpb.New(d)}
}

func resource(err error) *errdetails.ResourceInfo {
	return &errdetails.ResourceInfo{ResourceType: "sluice.ipam.v1.Allocation", Description: err.Error()}
}

func precondition(kind string, err error) *errdetails.PreconditionFailure {
	return &errdetails.PreconditionFailure{Violations: []*errdetails.PreconditionFailure_Violation{
		{Type: kind, Subject: "sluice.ipam.v1.Allocation", Description: err.Error()},
	}}
}
