// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package answer is the gRPC side of a desired-state service: it maps errors to codes and serves
// the stream of a subscriber.
package answer

import (
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/sluice-net/sluice/kit/desired/failure"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
)

// retryAfter is the RetryInfo delay after a change that could not be stored.
const retryAfter = time.Second

// Reasons maps the errors of package failure to values of the service's enum ErrorReason. Every
// field must be set.
type Reasons struct {
	NotFound, Owned, Foreign, Changed, Limit, Empty, Revision, Refused, Storage, Stopped, Replaced, Ack protoreflect.Enum
	// Field is the reason for a FieldError; Internal is the reason for an error that no row
	// matches.
	Field, Internal protoreflect.Enum
	// Resource is the resource type in NOT_FOUND answers; Quota is the subject in quota violations.
	Resource, Quota string
}

// Table returns the error table of a service: its own rows, which are matched first, then the rows
// for package failure.
func (r Reasons) Table(own ...rpcerr.Row) rpcerr.Table {
	return rpcerr.Table{
		Rows: append(own,
			rpcerr.On(failure.ErrNotFound, codes.NotFound, r.NotFound, rpcerr.OfResource(r.Resource)),
			rpcerr.On(failure.ErrOwned, codes.AlreadyExists, r.Owned),
			rpcerr.On(failure.ErrForeign, codes.FailedPrecondition, r.Foreign),
			rpcerr.On(failure.ErrEmpty, codes.FailedPrecondition, r.Empty),
			rpcerr.On(failure.ErrRefused, codes.FailedPrecondition, r.Refused),
			rpcerr.On(failure.ErrLimit, codes.ResourceExhausted, r.Limit, rpcerr.OfQuota(r.Quota)),
			rpcerr.On(failure.ErrReplaced, codes.Aborted, r.Replaced),
			rpcerr.On(failure.ErrChanged, codes.Aborted, r.Changed),
			rpcerr.On(failure.ErrAck, codes.InvalidArgument, r.Ack),
			rpcerr.On(failure.ErrRevision, codes.OutOfRange, r.Revision),
			rpcerr.On(failure.ErrStorage, codes.Unavailable, r.Storage, rpcerr.Retries(retryAfter)),
			rpcerr.On(failure.ErrStopped, codes.Unavailable, r.Stopped),
			// FieldError is matched last: if an error also wraps another error of this table, that row has
			// the more specific reason.
			rpcerr.OnType(codes.InvalidArgument, r.Field, func(e *failure.FieldError) []protoadapt.MessageV1 {
				return []protoadapt.MessageV1{rpcerr.Field(e.Field, e.Err.Error())}
			}),
		),
		Otherwise: r.Internal,
	}
}
