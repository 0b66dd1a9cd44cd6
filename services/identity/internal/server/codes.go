// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/sluice-net/sluice/services/identity/internal/allocator"
	"github.com/sluice-net/sluice/services/identity/internal/identity"
)

// retryAfter is what callers are told when the store is away: about as long
// as the allocator itself waits between two attempts.
const retryAfter = time.Second

// statusOf is the one place where errors of the core get their codes.
func statusOf(err error) error {
	var (
		label *identity.LabelError
		quota *allocator.QuotaError
	)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, identity.ErrLabels), errors.Is(err, identity.ErrNamedPort):
		field := "named_ports"
		if errors.As(err, &label) {
			field = label.Field()
		}
		return with(codes.InvalidArgument, err, &errdetails.BadRequest{
			FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: field, Description: err.Error()}},
		})
	case errors.Is(err, allocator.ErrHolder):
		return with(codes.InvalidArgument, err, &errdetails.BadRequest{
			FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: "reference", Description: err.Error()}},
		})
	case errors.As(err, &quota):
		return with(codes.ResourceExhausted, err, &errdetails.QuotaFailure{
			Violations: []*errdetails.QuotaFailure_Violation{{Subject: "identities", Description: describe(quota)}},
		})
	case errors.Is(err, allocator.ErrHeldOther):
		return with(codes.AlreadyExists, err)
	case errors.Is(err, allocator.ErrNotFound):
		return with(codes.NotFound, err, &errdetails.ResourceInfo{ResourceType: "identity", Description: err.Error()})
	case errors.Is(err, allocator.ErrContended):
		return with(codes.Aborted, err, &errdetails.RetryInfo{RetryDelay: durationpb.New(retryAfter)})
	case errors.Is(err, allocator.ErrUnavailable), errors.Is(err, allocator.ErrNoSpace), errors.Is(err, allocator.ErrSessionLost), errors.Is(err, allocator.ErrRecords):
		return with(codes.Unavailable, err, &errdetails.RetryInfo{RetryDelay: durationpb.New(retryAfter)})
	case errors.Is(err, context.Canceled):
		return with(codes.Canceled, err)
	case errors.Is(err, context.DeadlineExceeded):
		return with(codes.DeadlineExceeded, err)
	}
	// ErrCorrupt, and what nobody foresaw.
	return with(codes.Internal, err)
}

func describe(q *allocator.QuotaError) string {
	keys := make([]string, len(q.Keys))
	for i, k := range q.Keys {
		keys[i] = fmt.Sprintf("%s=%d", k.Key, k.Values)
	}
	return fmt.Sprintf("%d of %d; label keys by number of values: %s", q.Used, q.Limit, strings.Join(keys, " "))
}

func with(code codes.Code, err error, details ...protoadapt.MessageV1) error {
	s := status.New(code, err.Error())
	if d, derr := s.WithDetails(details...); derr == nil {
		s = d
	}
	return s.Err()
}
