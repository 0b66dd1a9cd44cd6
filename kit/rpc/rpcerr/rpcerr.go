// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rpcerr builds and reads the errors that services answer with.
//
// An error has a code, which says what a caller may do; a reason, which says
// what happened; details, which name the field, the quota or the delay; and a
// text for people. The reason is a google.rpc.ErrorInfo: a name that is unique
// in a domain, the domain being the service that decided on the error, for
// example POOL_EXHAUSTED of ipam.sluice.io. Programs branch on codes and
// reasons and never on texts.
//
// A service lists its reasons as the values of the enum ErrorReason in its
// proto file, so that clients have names for them, and has code and reason of each
// error of its core in one Table. A service that answers because
// another service answered keeps the reason and the details of that service:
// the reader of an error at the end of the way sees where it began.
//
// The package imports neither a server nor metrics, because the command line uses
// it.
package rpcerr

import (
	"errors"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
)

// Bounds of one error. Text and details travel in headers, of which clients
// take little, and are often made of what a hostile caller, or the service
// behind this one, sent.
const (
	MaxText       = 4096 // bytes of the text of an error
	MaxWords      = 512  // bytes of each string in the details
	MaxViolations = 20   // violations of each kind, and keys of the metadata
)

// Reason says what happened: Name is unique in Domain.
type Reason struct {
	Domain string // the service that decided, for example ipam.sluice.io
	Name   string // for example POOL_EXHAUSTED
}

// String is the reason as logs and people write it: domain/NAME.
func (r Reason) String() string { return r.Domain + "/" + r.Name }

// suffix ends the domains of all services.
const suffix = ".sluice.io"

// Of is the reason that a value of a service's enum ErrorReason stands for: of
// sluice.ipam.v1.ErrorReason's ERROR_REASON_POOL_EXHAUSTED it is
// ipam.sluice.io/POOL_EXHAUSTED. The version of the API is not part of the
// domain: a reason keeps its meaning in the next one.
func Of(value protoreflect.Enum) Reason {
	d := value.Descriptor()
	_, service, _ := strings.Cut(string(d.FullName().Parent()), ".")
	service, _, _ = strings.Cut(service, ".")
	r := Reason{Domain: service + suffix, Name: "UNKNOWN"}
	if v := d.Values().ByNumber(value.Number()); v != nil {
		r.Name = strings.TrimPrefix(string(v.Name()), "ERROR_REASON_")
	}
	return r
}

// Reasons that every service gives, because what all of them share decides: the
// packages rpc and watch.
var (
	// InvalidMessage: INVALID_ARGUMENT, the message breaks rules of its proto
	// file; BadRequest names fields and rules.
	InvalidMessage = ofAll("INVALID_MESSAGE")
	// NotPermitted: PERMISSION_DENIED, the method is not for the caller's user.
	NotPermitted = ofAll("NOT_PERMITTED")
	// NoCredentials: UNAUTHENTICATED, the kernel does not tell the caller's user.
	NoCredentials = ofAll("NO_CREDENTIALS")
	// TooManyCalls: RESOURCE_EXHAUSTED, the limit of the method is reached;
	// RetryInfo says when to come back.
	TooManyCalls = ofAll("TOO_MANY_CALLS")
	// Panicked: INTERNAL, a bug; the log of the server has the request id.
	Panicked = ofAll("PANICKED")
	// ShuttingDown: UNAVAILABLE, a stream ends because the server does.
	ShuttingDown = ofAll("SHUTTING_DOWN")
	// TokenExpired: OUT_OF_RANGE, a watch cannot be resumed from the token; it
	// begins anew, without one.
	TokenExpired = ofAll("TOKEN_EXPIRED")
	// ReaderTooSlow: RESOURCE_EXHAUSTED, the reader of a watch was disconnected
	// because it is too far behind; it resumes from its last token.
	ReaderTooSlow = ofAll("READER_TOO_SLOW")
)

func ofAll(name string) Reason { return Reason{Domain: "rpc" + suffix, Name: name} }

// New is the answer to a call that ended with err: its code, its reason, the
// text of err and the details. Details of one type are merged into one, as
// google.rpc wants them. If a system call's error is at the bottom of err, the
// metadata of the reason has its name as "errno", for example ENOSPC.
//
// If err wraps the answer of another service that has a reason, that reason and
// those details stay; reason and details are then left out, since they would
// contradict them.
func New(code codes.Code, reason Reason, err error, details ...protoadapt.MessageV1) error {
	info := &errdetails.ErrorInfo{Domain: reason.Domain, Reason: reason.Name}
	if errno := syscall.Errno(0); errors.As(err, &errno) {
		info.Metadata = map[string]string{"errno": unix.ErrnoName(errno)}
	}
	merged := []proto.Message{info}
	if from, ok := status.FromError(err); ok && errorInfo(from) != nil {
		merged = nil
		for _, d := range from.Details() {
			if m, ok := d.(protoadapt.MessageV1); ok {
				merged = merge(merged, m)
			}
		}
	} else {
		for _, d := range details {
			merged = merge(merged, d)
		}
	}
	st := status.New(code, clip(err.Error(), MaxText))
	v1 := make([]protoadapt.MessageV1, 0, len(merged))
	for _, m := range merged {
		if bound(m) {
			v1 = append(v1, protoadapt.MessageV1Of(m))
		}
	}
	if detailed, derr := st.WithDetails(v1...); derr == nil {
		st = detailed
	}
	return st.Err()
}

// merge adds d to the detail of its type.
func merge(all []proto.Message, d protoadapt.MessageV1) []proto.Message {
	m := protoadapt.MessageV2Of(d)
	for _, have := range all {
		if have.ProtoReflect().Descriptor() == m.ProtoReflect().Descriptor() {
			proto.Merge(have, m)
			return all
		}
	}
	return append(all, proto.Clone(m))
}

// bound cuts a detail to what a header takes, and says whether it is one of
// those that services of this house send.
func bound(m proto.Message) bool {
	switch m := m.(type) {
	case *errdetails.ErrorInfo:
		m.Domain, m.Reason = clip(m.GetDomain(), MaxWords), clip(m.GetReason(), MaxWords)
		metadata := map[string]string{}
		for k, v := range m.GetMetadata() {
			if len(metadata) == MaxViolations {
				break
			}
			metadata[clip(k, MaxWords)] = clip(v, MaxWords)
		}
		m.Metadata = metadata
	case *errdetails.BadRequest:
		m.FieldViolations = first(m.GetFieldViolations())
		for _, v := range m.GetFieldViolations() {
			v.Field, v.Description = clip(v.GetField(), MaxWords), clip(v.GetDescription(), MaxWords)
			v.Reason, v.LocalizedMessage = clip(v.GetReason(), MaxWords), nil
		}
	case *errdetails.QuotaFailure:
		violations := make([]*errdetails.QuotaFailure_Violation, 0, len(m.GetViolations()))
		for _, v := range first(m.GetViolations()) {
			violations = append(violations, &errdetails.QuotaFailure_Violation{
				Subject: clip(v.GetSubject(), MaxWords), Description: clip(v.GetDescription(), MaxWords),
			})
		}
		m.Violations = violations
	case *errdetails.ResourceInfo:
		m.ResourceType, m.ResourceName = clip(m.GetResourceType(), MaxWords), clip(m.GetResourceName(), MaxWords)
		m.Owner, m.Description = clip(m.GetOwner(), MaxWords), clip(m.GetDescription(), MaxWords)
	case *errdetails.RetryInfo:
	default:
		return false
	}
	m.ProtoReflect().SetUnknown(nil)
	return true
}

func first[T any](all []T) []T { return all[:min(len(all), MaxViolations)] }

// clip makes s valid UTF-8 of at most limit bytes, as messages must be.
func clip(s string, limit int) string {
	const more = "…"
	s = strings.ToValidUTF8(s[:min(len(s), limit+1)], "\uFFFD")
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit-len(more)], "") + more
}

// Field is a detail that names a field of the request and its mistake.
func Field(field, text string) *errdetails.BadRequest {
	return &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: field, Description: text}}}
}

// Quota is a detail that names what is used up.
func Quota(subject, text string) *errdetails.QuotaFailure {
	return &errdetails.QuotaFailure{Violations: []*errdetails.QuotaFailure_Violation{{Subject: subject, Description: text}}}
}

// Resource is a detail that names what does not exist, or exists already.
func Resource(kind, name, text string) *errdetails.ResourceInfo {
	return &errdetails.ResourceInfo{ResourceType: kind, ResourceName: name, Description: text}
}

// Retry is a detail that tells the caller to repeat the call, and after what
// time. An error without it is not cured by repeating the call alone.
func Retry(after time.Duration) *errdetails.RetryInfo {
	return &errdetails.RetryInfo{RetryDelay: durationpb.New(after)}
}

// Metadata is a detail that adds facts to the reason; keys are lowerCamelCase.
func Metadata(facts map[string]string) *errdetails.ErrorInfo {
	return &errdetails.ErrorInfo{Metadata: facts}
}

// ReasonIn returns the reason of an answer that err is or wraps. It is false
// for errors that no service decided on: the connection's, and a context's.
func ReasonIn(err error) (Reason, bool) {
	if err == nil {
		return Reason{}, false
	}
	st, ok := status.FromError(err)
	if !ok {
		return Reason{}, false
	}
	info := errorInfo(st)
	if info == nil {
		return Reason{}, false
	}
	return Reason{Domain: info.GetDomain(), Name: info.GetReason()}, true
}

func errorInfo(st *status.Status) *errdetails.ErrorInfo {
	for _, d := range st.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info
		}
	}
	return nil
}

// Facts are the metadata of the reason: "errno", and what Metadata added.
func Facts(err error) map[string]string {
	return detail[*errdetails.ErrorInfo](err).GetMetadata()
}

// Is says whether an answer that err is or wraps has one of these reasons.
func Is(err error, values ...protoreflect.Enum) bool {
	r, ok := ReasonIn(err)
	return ok && slices.ContainsFunc(values, func(v protoreflect.Enum) bool { return r == Of(v) })
}

// Has says whether an answer that err is or wraps has one of these reasons.
func Has(err error, reasons ...Reason) bool {
	r, ok := ReasonIn(err)
	return ok && slices.Contains(reasons, r)
}

// RetryDelay is when the server wants the call again. It is false if the server
// does not ask for that.
func RetryDelay(err error) (time.Duration, bool) {
	if d := detail[*errdetails.RetryInfo](err); d != nil {
		return max(0, d.GetRetryDelay().AsDuration()), true
	}
	return 0, false
}

// Fields are the fields of the request that an answer names, with their
// mistakes.
func Fields(err error) []*errdetails.BadRequest_FieldViolation {
	return detail[*errdetails.BadRequest](err).GetFieldViolations()
}

// Quotas are what an answer names of what is used up.
func Quotas(err error) []*errdetails.QuotaFailure_Violation {
	return detail[*errdetails.QuotaFailure](err).GetViolations()
}

// detail is the first detail of its type, or nil.
func detail[T any](err error) (none T) {
	if err == nil {
		return none
	}
	st, ok := status.FromError(err)
	if !ok {
		return none
	}
	for _, d := range st.Details() {
		if d, ok := d.(T); ok {
			return d
		}
	}
	return none
}

// Answer is err as the answer of a service, which a core may wrap beside its own
// error: the text is the service's, without gRPC's words around it, and code,
// reason and details can be read from whatever wraps it.
func Answer(err error) error {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		return err
	}
	return &answer{st}
}

type answer struct{ st *status.Status }

func (a *answer) Error() string { return a.st.Message() }

// GRPCStatus lets package status find the answer in errors that wrap it.
func (a *answer) GRPCStatus() *status.Status { return a.st }
