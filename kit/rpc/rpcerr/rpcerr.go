// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rpcerr builds and reads the errors that services answer with.
//
// An error has a code, which determines how the caller may react; a reason, which identifies the cause; details, which
// name the field, the quota or the delay; and a text for people. The reason is a google.rpc.ErrorInfo: a name that is
// unique in a domain. The domain is the service that decided on the error, for example POOL_EXHAUSTED of
// ipam.sluice.io. Programs branch on codes and reasons, never on texts.
//
// A service lists its reasons as values of the enum ErrorReason in its proto file, so that clients
// have names for them. One Table maps the errors of its core to codes and reasons. If a service
// fails because another service failed, it passes on the reason and the details of that service, so
// that the caller sees where the error originated.
//
// The package imports neither a server nor metrics, because the command line uses it.
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

// Limits of one error. Text and details are sent in headers, whose size clients limit, and often
// contain input from an untrusted caller or from another service.
const (
	MaxText       = 4096 // bytes of the text of an error
	MaxWords      = 512  // bytes of each string in the details
	MaxViolations = 20   // violations of each kind, and metadata keys
)

// Reason identifies what happened. Name is unique within Domain.
type Reason struct {
	Domain string // the service that decided on the error, for example ipam.sluice.io
	Name   string // for example POOL_EXHAUSTED
}

// String returns domain/NAME, the form in logs and messages.
func (r Reason) String() string { return r.Domain + "/" + r.Name }

// suffix is the end of all service domains.
const suffix = ".sluice.io"

// Of returns the reason for a value of a service's enum ErrorReason. For example,
// ERROR_REASON_POOL_EXHAUSTED of sluice.ipam.v1.ErrorReason is ipam.sluice.io/POOL_EXHAUSTED. The
// API version is not part of the domain, because a reason keeps its meaning in later versions.
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

// Reasons of packages rpc and watch, which all services share.
var (
	// InvalidMessage: INVALID_ARGUMENT, the message violates rules of its proto file; BadRequest
	// names the fields and the rules.
	InvalidMessage = ofAll("INVALID_MESSAGE")
	// NotPermitted: PERMISSION_DENIED, the caller's user may not call the method.
	NotPermitted = ofAll("NOT_PERMITTED")
	// NoCredentials: UNAUTHENTICATED, the connection has no peer credentials.
	NoCredentials = ofAll("NO_CREDENTIALS")
	// TooManyCalls: RESOURCE_EXHAUSTED, the limit of the method is reached; RetryInfo has the delay
	// before a retry.
	TooManyCalls = ofAll("TOO_MANY_CALLS")
	// Panicked: INTERNAL, a bug; the server logs it with the request ID.
	Panicked = ofAll("PANICKED")
	// ShuttingDown: UNAVAILABLE, the stream ended because the server shuts down.
	ShuttingDown = ofAll("SHUTTING_DOWN")
	// TokenExpired: OUT_OF_RANGE, the watch cannot be resumed from the token; watch again without a
	// token.
	TokenExpired = ofAll("TOKEN_EXPIRED")
	// ReaderTooSlow: RESOURCE_EXHAUSTED, the reader of a watch fell too far behind and was
	// disconnected; watch again from its last token.
	ReaderTooSlow = ofAll("READER_TOO_SLOW")
)

func ofAll(name string) Reason { return Reason{Domain: "rpc" + suffix, Name: name} }

// New returns the answer to a call that failed with err: with the code, the reason, the text of err
// and the details. Details of the same type are merged into one, as google.rpc requires. If err
// wraps the error of a system call, the metadata of the reason contains the error's symbol as "errno", for
// example ENOSPC.
//
// If err wraps an answer of another service that has a reason, that reason and its details are
// passed on, and the arguments reason and details are ignored, since they would contradict them.
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

// merge adds d to the existing detail of the same type, if any.
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

// bound truncates a detail to the limits, and reports whether its type is one that Sluice services
// send.
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

// clip returns s as valid UTF-8 of at most limit bytes, as protobuf requires.
func clip(s string, limit int) string {
	const more = "…"
	s = strings.ToValidUTF8(s[:min(len(s), limit+1)], "\uFFFD")
	if len(s) <= limit {
		return s
	}
	return strings.ToValidUTF8(s[:limit-len(more)], "") + more
}

// Field returns a detail that names a field of the request and its mistake.
func Field(field, text string) *errdetails.BadRequest {
	return &errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: field, Description: text}}}
}

// Quota returns a detail that names an exhausted resource.
func Quota(subject, text string) *errdetails.QuotaFailure {
	return &errdetails.QuotaFailure{Violations: []*errdetails.QuotaFailure_Violation{{Subject: subject, Description: text}}}
}

// Resource returns a detail that names a resource that does not exist or already exists.
func Resource(kind, name, text string) *errdetails.ResourceInfo {
	return &errdetails.ResourceInfo{ResourceType: kind, ResourceName: name, Description: text}
}

// Retry returns a detail that asks the caller to retry after the delay. Without this detail, a
// retry of the same call will not succeed.
func Retry(after time.Duration) *errdetails.RetryInfo {
	return &errdetails.RetryInfo{RetryDelay: durationpb.New(after)}
}

// Metadata returns a detail that adds facts to the reason; keys are in lowerCamelCase.
func Metadata(facts map[string]string) *errdetails.ErrorInfo {
	return &errdetails.ErrorInfo{Metadata: facts}
}

// ReasonIn returns the reason in err or in an answer that err wraps. It returns false for errors that did not come from
// a service: failed connections and ended contexts.
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

// Facts returns the metadata of the reason: "errno", and the facts from Metadata.
func Facts(err error) map[string]string {
	return detail[*errdetails.ErrorInfo](err).GetMetadata()
}

// Is reports whether err is or wraps an answer with one of these reasons.
func Is(err error, values ...protoreflect.Enum) bool {
	r, ok := ReasonIn(err)
	return ok && slices.ContainsFunc(values, func(v protoreflect.Enum) bool { return r == Of(v) })
}

// Has reports whether err is or wraps an answer with one of these reasons.
func Has(err error, reasons ...Reason) bool {
	r, ok := ReasonIn(err)
	return ok && slices.Contains(reasons, r)
}

// RetryDelay returns the delay after which the server asks for a retry. It returns false if the
// server does not ask for one.
func RetryDelay(err error) (time.Duration, bool) {
	if d := detail[*errdetails.RetryInfo](err); d != nil {
		return max(0, d.GetRetryDelay().AsDuration()), true
	}
	return 0, false
}

// Fields returns the fields of the request that the answer names, with their mistakes.
func Fields(err error) []*errdetails.BadRequest_FieldViolation {
	return detail[*errdetails.BadRequest](err).GetFieldViolations()
}

// Quotas returns the exhausted resources that the answer names.
func Quotas(err error) []*errdetails.QuotaFailure_Violation {
	return detail[*errdetails.QuotaFailure](err).GetViolations()
}

// detail returns the first detail of its type, or nil.
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

// Answer converts a gRPC error into an error that a core may wrap together with its own: the text
// is the service's, without gRPC's prefix, and code, reason and details can be read from every
// error that wraps it.
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

// GRPCStatus makes package status find the answer in errors that wrap it.
func (a *answer) GRPCStatus() *status.Status { return a.st }
