// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package unary

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/sluice-net/sluice/services/cni-shim/internal/message"
)

// Code is a status code of gRPC.
type Code int32

// The codes, by their numbers.
const (
	OK Code = iota
	Canceled
	Unknown
	InvalidArgument
	DeadlineExceeded
	NotFound
	AlreadyExists
	PermissionDenied
	ResourceExhausted
	FailedPrecondition
	Aborted
	OutOfRange
	Unimplemented
	Internal
	Unavailable
	DataLoss
	Unauthenticated
)

var codeNames = [...]string{
	"OK", "Canceled", "Unknown", "InvalidArgument", "DeadlineExceeded", "NotFound", "AlreadyExists", "PermissionDenied",
	"ResourceExhausted", "FailedPrecondition", "Aborted", "OutOfRange", "Unimplemented", "Internal", "Unavailable",
	"DataLoss", "Unauthenticated",
}

// String returns the name that grpc-go uses.
func (c Code) String() string {
	if c < 0 || int(c) >= len(codeNames) {
		return fmt.Sprintf("Code(%d)", int32(c))
	}
	return codeNames[c]
}

// Error is the error of a call: an error that the server has returned, or an error of the connection.
type Error struct {
	Code    Code
	Message string
	// Details are the server's error details, not decoded.
	Details []*message.Any
	// Unsent means that the server has certainly not begun to execute the call.
	Unsent bool
	// Cause is the kernel's error, if it was the cause; else nil.
	Cause error
}

// Error returns the text for logs; Message is for users.
func (e *Error) Error() string {
	return fmt.Sprintf("rpc error: code = %s desc = %s", e.Code, e.Message)
}

// Unwrap returns the kernel's error.
func (e *Error) Unwrap() error { return e.Cause }

// CodeOf returns the code of the *Error that err is or wraps. It returns OK for nil, and Unknown for any other error.
func CodeOf(err error) Code {
	if err == nil {
		return OK
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return Unknown
}

// detail decodes the first detail of a type into m, and reports whether there is one.
func detail(err error, typ string, m message.Message) bool {
	e, ok := errors.AsType[*Error](err)
	if !ok {
		return false
	}
	for _, d := range e.Details {
		if d.TypeURL[strings.LastIndexByte(d.TypeURL, '/')+1:] == typ && message.Unmarshal(d.Value, m) == nil {
			return true
		}
	}
	return false
}

// Reason returns the reason of a service's error, DOMAIN/NAME, and the facts in it. ok is false for errors of the
// connection and of a context.
func Reason(err error) (reason string, facts map[string]string, ok bool) {
	var info message.ErrorInfo
	ok = detail(err, "google.rpc.ErrorInfo", &info)
	return info.Domain + "/" + info.Reason, info.Metadata, ok
}

// RetryDelay returns the server's retry delay; false if the answer has none.
func RetryDelay(err error) (time.Duration, bool) {
	var retry message.RetryInfo
	ok := detail(err, "google.rpc.RetryInfo", &retry)
	return max(0, retry.RetryDelay.Duration()), ok
}

// Fields returns the fields of the request that an answer names, with their mistakes.
func Fields(err error) []*message.BadRequestFieldViolation {
	var v message.BadRequest
	detail(err, "google.rpc.BadRequest", &v)
	return v.FieldViolations
}

// Quotas returns the exhausted quotas in an error.
func Quotas(err error) []*message.QuotaFailureViolation {
	var v message.QuotaFailure
	detail(err, "google.rpc.QuotaFailure", &v)
	return v.Violations
}

// trailers contains the trailers of an answer that the client uses.
type trailers struct {
	code    Code
	hasCode bool
	text    string // percent-encoded
	details string // base64
}

// err returns the error of the trailers; nil for the code OK.
func (t *trailers) err() error {
	if t.code == OK {
		return nil
	}
	e := &Error{Code: t.code, Message: unescape(t.text)}
	// Accept the details with and without padding: servers differ.
	b, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(t.details, "="))
	if err != nil {
		return odd("the server's details: %v", err)
	}
	var st message.Status
	if len(b) == 0 || message.Unmarshal(b, &st) != nil {
		return e
	}
	if Code(st.Code) != t.code {
		return fail(Internal, "the server sent two different codes, %s and %s", t.code, Code(st.Code))
	}
	e.Message, e.Details = st.Message, st.Details
	return e
}

// unescape decodes grpc-message: %XX is a byte. Invalid sequences are kept literally, and bytes that are not UTF-8 are
// replaced.
func unescape(s string) string {
	if strings.IndexByte(s, '%') < 0 {
		return strings.ToValidUTF8(s, "\uFFFD")
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			high, low := unhex(s[i+1]), unhex(s[i+2])
			if high >= 0 && low >= 0 {
				b.WriteByte(byte(high<<4 | low))
				i += 2
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return strings.ToValidUTF8(b.String(), "\uFFFD")
}

func unhex(c byte) int { return strings.IndexByte("0123456789abcdef", c|0x20) }

// fail returns an error that the client has detected.
func fail(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// broken returns the error for a server that violates HTTP/2: the call fails as if the server had closed the
// connection.
func broken(format string, args ...any) *Error { return fail(Unavailable, format, args...) }

// odd returns the error for a server that violates gRPC.
func odd(format string, args ...any) *Error { return fail(Internal, format, args...) }

// ended returns the error for a context that has ended.
func ended(err error) *Error {
	if errors.Is(err, context.Canceled) {
		return fail(Canceled, "%v", err)
	}
	return fail(DeadlineExceeded, "%v", context.DeadlineExceeded)
}

// ofHTTP returns gRPC's code for an answer that has an HTTP status but no gRPC status.
func ofHTTP(status string) Code {
	switch status {
	case "400":
		return Internal
	case "401":
		return Unauthenticated
	case "403":
		return PermissionDenied
	case "404":
		return Unimplemented
	case "429", "502", "503", "504":
		return Unavailable
	}
	return Unknown
}

// ofReset returns the code for a stream that the server has reset.
func ofReset(code uint32) Code {
	switch code {
	case 3, 11: // FLOW_CONTROL_ERROR, ENHANCE_YOUR_CALM
		return ResourceExhausted
	case refusedStream:
		return Unavailable
	case cancel:
		return Canceled
	case 12: // INADEQUATE_SECURITY
		return PermissionDenied
	}
	if code > 13 {
		return Unknown
	}
	return Internal
}
