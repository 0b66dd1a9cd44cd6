// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpcerr

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Table is how a service answers the errors of its core. The first row that matches an
// error decides, so a row for a wrapper follows the rows for what it may wrap.
//
// An error of a context that no row matches keeps the code of the context, and has no
// reason.
type Table struct {
	Rows []Row
	// Otherwise is the reason of INTERNAL, which answers an error that no row matches.
	Otherwise protoreflect.Enum
}

// Row is how one kind of error is answered. On and OnType make one.
type Row struct {
	Code    codes.Code
	Reason  protoreflect.Enum // of the enum ErrorReason of the service
	matches func(error) bool
	details func(error) []protoadapt.MessageV1
}

// Detail makes a detail of the answer from the error.
type Detail func(error) protoadapt.MessageV1

// On is the row for the errors that errors.Is takes for target.
func On(target error, code codes.Code, reason protoreflect.Enum, details ...Detail) Row {
	return Row{
		Code: code, Reason: reason,
		matches: func(err error) bool { return errors.Is(err, target) },
		details: func(err error) []protoadapt.MessageV1 {
			out := make([]protoadapt.MessageV1, len(details))
			for i, d := range details {
				out[i] = d(err)
			}
			return out
		},
	}
}

// OnType is the row for the errors in which errors.As finds a T. Details are made from that
// T; nil: there are none.
func OnType[T error](code codes.Code, reason protoreflect.Enum, details func(T) []protoadapt.MessageV1) Row {
	return Row{
		Code: code, Reason: reason,
		matches: func(err error) bool { _, ok := errors.AsType[T](err); return ok },
		details: func(err error) []protoadapt.MessageV1 {
			if t, ok := errors.AsType[T](err); ok && details != nil {
				return details(t)
			}
			return nil
		},
	}
}

// And narrows a row to errors that errors.Is takes for target as well.
func (r Row) And(target error) Row {
	matches := r.matches
	r.matches = func(err error) bool { return matches(err) && errors.Is(err, target) }
	return r
}

// Status is the answer to a call that ended with err; nil if it did not fail.
func (t *Table) Status(err error) error {
	if err == nil {
		return nil
	}
	for i := range t.Rows {
		if r := &t.Rows[i]; r.matches(err) {
			return New(r.Code, Of(r.Reason), err, r.details(err)...)
		}
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return status.FromContextError(err).Err()
	}
	return New(codes.Internal, Of(t.Otherwise), err)
}

// Retries has the caller repeat the call after a time.
func Retries(after time.Duration) Detail {
	return func(error) protoadapt.MessageV1 { return Retry(after) }
}

// InField names a field of the request; the text of the error says what is wrong with it.
func InField(field string) Detail {
	return func(err error) protoadapt.MessageV1 { return Field(field, err.Error()) }
}

// OfResource names a type of resource; the text of the error says which resource it is.
func OfResource(kind string) Detail {
	return func(err error) protoadapt.MessageV1 { return Resource(kind, "", err.Error()) }
}

// OfQuota names what is used up; the text of the error has the figures.
func OfQuota(subject string) Detail {
	return func(err error) protoadapt.MessageV1 { return Quota(subject, err.Error()) }
}

// Violation is a mistake in a document of a request.
type Violation interface {
	// Where returns the number of the document from 0, the path of the field, which is empty
	// if the mistake is about the document as a whole, and the mistake.
	Where() (document int, path, mistake string)
}

// Manifests are the details of manifests with mistakes. Whole, if it is not nil, is why they
// could not be divided into documents.
func Manifests[V Violation](whole error, violations []V) []protoadapt.MessageV1 {
	if whole != nil {
		return []protoadapt.MessageV1{Field("manifests", whole.Error())}
	}
	out := &errdetails.BadRequest{}
	for _, v := range first(violations) {
		document, path, mistake := v.Where()
		field := fmt.Sprintf("manifests[%d]", document)
		if path != "" {
			field += "." + path
		}
		out.FieldViolations = append(out.FieldViolations, &errdetails.BadRequest_FieldViolation{
			Field: field, Description: mistake,
		})
	}
	return []protoadapt.MessageV1{out}
}
