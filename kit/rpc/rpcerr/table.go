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

// Table maps the errors of a service's core to the status of a call. The first row that matches an
// error is used, so the row of a wrapper must follow the rows of the errors that it may wrap.
//
// A context error that no row matches keeps the code of the context, without a reason.
type Table struct {
	Rows []Row
	// Otherwise is the reason of the answer INTERNAL for errors that no row matches.
	Otherwise protoreflect.Enum
}

// Row maps one kind of error to a code, a reason and details. On, OnType and OnTypeOfAll create rows.
type Row struct {
	Code    codes.Code
	Reason  Reason
	matches func(error) bool
	details func(error) []protoadapt.MessageV1
}

// Detail creates a detail of the answer from the error.
type Detail func(error) protoadapt.MessageV1

// On returns the row for errors that match target by errors.Is. The reason is a value of the
// service's enum ErrorReason.
func On(target error, code codes.Code, reason protoreflect.Enum, details ...Detail) Row {
	return Row{
		Code: code, Reason: Of(reason),
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

// OnType returns the row for errors in which errors.As finds a T. The reason is a value of the
// service's enum ErrorReason. details creates the details from that T; it may be nil.
func OnType[T error](code codes.Code, reason protoreflect.Enum, details func(T) []protoadapt.MessageV1) Row {
	return OnTypeOfAll(code, Of(reason), details)
}

// OnTypeOfAll is OnType with a reason that is common to all services, such as NotPermitted.
func OnTypeOfAll[T error](code codes.Code, reason Reason, details func(T) []protoadapt.MessageV1) Row {
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

// And restricts a row to errors that also match target by errors.Is.
func (r Row) And(target error) Row {
	matches := r.matches
	r.matches = func(err error) bool { return matches(err) && errors.Is(err, target) }
	return r
}

// Status returns the answer to a call that ended with err; nil if err is nil.
func (t *Table) Status(err error) error {
	if err == nil {
		return nil
	}
	for i := range t.Rows {
		if r := &t.Rows[i]; r.matches(err) {
			return New(r.Code, r.Reason, err, r.details(err)...)
		}
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return status.FromContextError(err).Err()
	}
	return New(codes.Internal, Of(t.Otherwise), err)
}

// Retries asks the caller to retry after the delay.
func Retries(after time.Duration) Detail {
	return func(error) protoadapt.MessageV1 { return Retry(after) }
}

// InField names a field of the request; the text of the error describes the mistake.
func InField(field string) Detail {
	return func(err error) protoadapt.MessageV1 { return Field(field, err.Error()) }
}

// OfResource names a type of resource; the text of the error identifies the resource.
func OfResource(kind string) Detail {
	return func(err error) protoadapt.MessageV1 { return Resource(kind, "", err.Error()) }
}

// OfQuota names an exhausted resource; the text of the error contains the numbers.
func OfQuota(subject string) Detail {
	return func(err error) protoadapt.MessageV1 { return Quota(subject, err.Error()) }
}

// Violation is a mistake in one document of a request.
type Violation interface {
	// Where returns the index of the document, from 0; the path of the field, which is empty if the
	// mistake concerns the whole document; and the mistake.
	Where() (document int, path, mistake string)
}

// Manifests returns the details for invalid manifests. whole, if not nil, is the reason why the
// input could not be split into documents.
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
