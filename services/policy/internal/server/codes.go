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

	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/stream"
)

// retryAfter is what callers are told when storage does not take a change.
const retryAfter = time.Second

// maxViolations is how many problems of a manifest are named: details travel
// in a header, of which clients take little.
const maxViolations = 20

// maxText is how long one text about a manifest may be, in bytes.
const maxText = 256

// statusOf is the one place where errors of the core get their codes.
func statusOf(err error) error {
	var manifest *owner.ManifestError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &manifest):
		return with(codes.InvalidArgument, err, violations(manifest))
	case errors.Is(err, owner.ErrInvalid):
		field, text, _ := strings.Cut(strings.TrimPrefix(err.Error(), owner.ErrInvalid.Error()+": "), ": ")
		return with(codes.InvalidArgument, err, &errdetails.BadRequest{
			FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: field, Description: text}},
		})
	case errors.Is(err, owner.ErrNotFound):
		return with(codes.NotFound, err, &errdetails.ResourceInfo{ResourceType: "identity", Description: err.Error()})
	case errors.Is(err, owner.ErrOwned):
		return with(codes.AlreadyExists, err)
	case errors.Is(err, owner.ErrForeign), errors.Is(err, owner.ErrRefused), errors.Is(err, owner.ErrHeld):
		return with(codes.FailedPrecondition, err)
	case errors.Is(err, owner.ErrLimit):
		return with(codes.ResourceExhausted, err, &errdetails.QuotaFailure{
			Violations: []*errdetails.QuotaFailure_Violation{{Subject: "policy", Description: clip(err.Error())}},
		})
	case errors.Is(err, stream.ErrSlow):
		return with(codes.ResourceExhausted, err, &errdetails.RetryInfo{RetryDelay: durationpb.New(0)})
	case errors.Is(err, stream.ErrReplaced), errors.Is(err, owner.ErrChanged):
		return with(codes.Aborted, err)
	case errors.Is(err, stream.ErrAck):
		return with(codes.InvalidArgument, err)
	case errors.Is(err, owner.ErrRevision):
		return with(codes.OutOfRange, err)
	case errors.Is(err, owner.ErrStorage):
		return with(codes.Unavailable, err, &errdetails.RetryInfo{RetryDelay: durationpb.New(retryAfter)})
	case errors.Is(err, owner.ErrStopped):
		return with(codes.Unavailable, err)
	case errors.Is(err, context.Canceled):
		return with(codes.Canceled, err)
	case errors.Is(err, context.DeadlineExceeded):
		return with(codes.DeadlineExceeded, err)
	}
	return with(codes.Internal, err)
}

// violations names document and field of each problem.
func violations(m *owner.ManifestError) *errdetails.BadRequest {
	if m.Whole != nil {
		return &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{
			Field: "manifests", Description: clip(m.Whole.Error()),
		}}}
	}
	out := &errdetails.BadRequest{}
	for i, v := range m.Violations {
		if i == maxViolations {
			break
		}
		field := fmt.Sprintf("manifests[%d]", v.Document)
		if v.Path != "" {
			field += "." + v.Path
		}
		out.FieldViolations = append(out.FieldViolations, &errdetails.BadRequest_FieldViolation{Field: clip(field), Description: clip(v.Text)})
	}
	return out
}

func clip(s string) string {
	if len(s) <= maxText {
		return s
	}
	return strings.ToValidUTF8(s[:maxText], "") + "…"
}

func with(code codes.Code, err error, details ...protoadapt.MessageV1) error {
	text := strings.ToValidUTF8(err.Error(), "\uFFFD")
	if len(text) > 16*maxText {
		text = strings.ToValidUTF8(text[:16*maxText], "") + "…"
	}
	s := status.New(code, text)
	if d, derr := s.WithDetails(details...); derr == nil {
		s = d
	}
	return s.Err()
}
