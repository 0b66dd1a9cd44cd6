// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// statusOf is the one place where errors of the core get a code.
func statusOf(err error) error {
	if err == nil {
		return nil
	}
	retry := &errdetails.RetryInfo{RetryDelay: durationpb.New(100 * time.Millisecond)}
	var field *endpoint.FieldError
	switch {
	case errors.As(err, &field):
		return detailed(codes.InvalidArgument, err, &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{
			{Field: field.Field, Description: err.Error()},
		}})
	case errors.Is(err, endpoint.ErrDeleted):
		return detailed(codes.Aborted, err)
	case errors.Is(err, endpoint.ErrNamespace), errors.Is(err, endpoint.ErrNamespaceGone):
		return detailed(codes.InvalidArgument, err, &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{
			{Field: "network_namespace", Description: err.Error()},
		}})
	case errors.Is(err, endpoint.ErrInvalid):
		return detailed(codes.InvalidArgument, err)
	case errors.Is(err, endpoint.ErrNotFound), errors.Is(err, kernel.ErrNotLocal), errors.Is(err, pin.ErrNoMap):
		return detailed(codes.NotFound, err)
	case errors.Is(err, endpoint.ErrUnreadable):
		return detailed(codes.FailedPrecondition, err, &errdetails.PreconditionFailure{Violations: []*errdetails.PreconditionFailure_Violation{
			{Type: "UNREADABLE", Subject: "record", Description: err.Error()},
		}})
	case errors.Is(err, endpoint.ErrExists):
		return detailed(codes.AlreadyExists, err)
	case errors.Is(err, endpoint.ErrAddressHeld):
		return detailed(codes.Aborted, err, retry)
	case errors.Is(err, endpoint.ErrLease):
		return detailed(codes.FailedPrecondition, err)
	case errors.Is(err, endpoint.ErrSecond):
		return detailed(codes.FailedPrecondition, err, &errdetails.PreconditionFailure{Violations: []*errdetails.PreconditionFailure_Violation{
			{Type: "TAKEN", Subject: "network_namespace", Description: err.Error()},
		}})
	case errors.Is(err, endpoint.ErrNameTaken):
		// The subject tells this from a lost lease: trying again does not help.
		return detailed(codes.FailedPrecondition, err, &errdetails.PreconditionFailure{Violations: []*errdetails.PreconditionFailure_Violation{
			{Type: "TAKEN", Subject: "owner.interface_name", Description: err.Error()},
		}})
	case errors.Is(err, endpoint.ErrFull), errors.Is(err, endpoint.ErrExhausted):
		return detailed(codes.ResourceExhausted, err, retry)
	case errors.Is(err, endpoint.ErrUnavailable):
		return detailed(codes.Unavailable, err, retry)
	case errors.Is(err, context.DeadlineExceeded):
		return detailed(codes.DeadlineExceeded, err)
	case errors.Is(err, context.Canceled):
		return detailed(codes.Canceled, err)
	}
	return detailed(codes.Internal, err)
}

func detailed(code codes.Code, err error, details ...protoadapt.MessageV1) error {
	st := status.New(code, err.Error())
	if len(details) > 0 {
		if with, derr := st.WithDetails(details...); derr == nil {
			st = with
		}
	}
	return st.Err()
}
