// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"math"
	"time"
)

// Status is google.rpc.Status.
type Status struct {
	Code    int32
	Message string
	Details []*Any
}

func (m *Status) fields(f *Fields) {
	varint(f, 1, &m.Code)
	text(f, 2, &m.Message)
	many(f, 3, &m.Details)
}

// Any is google.protobuf.Any.
type Any struct {
	TypeURL string
	Value   []byte
}

func (m *Any) fields(f *Fields) {
	text(f, 1, &m.TypeURL)
	raw(f, 2, &m.Value)
}

// ErrorInfo is google.rpc.ErrorInfo.
type ErrorInfo struct {
	Reason   string
	Domain   string
	Metadata map[string]string
}

func (m *ErrorInfo) fields(f *Fields) {
	text(f, 1, &m.Reason)
	text(f, 2, &m.Domain)
	textMap(f, 3, &m.Metadata)
}

// Duration is google.protobuf.Duration.
type Duration struct {
	Seconds int64
	Nanos   int32
}

func (m *Duration) fields(f *Fields) {
	varint(f, 1, &m.Seconds)
	varint(f, 2, &m.Nanos)
}

// Duration is what m says, or the nearest that can be said; 0 for nil.
func (m *Duration) Duration() time.Duration {
	const most = math.MaxInt64 / int64(time.Second)
	switch {
	case m == nil:
		return 0
	case m.Seconds >= most:
		return math.MaxInt64
	case m.Seconds <= -most:
		return math.MinInt64
	}
	return time.Duration(m.Seconds)*time.Second + time.Duration(m.Nanos)
}

// RetryInfo is google.rpc.RetryInfo.
type RetryInfo struct{ RetryDelay *Duration }

func (m *RetryInfo) fields(f *Fields) { one(f, 1, &m.RetryDelay) }

// Violation is google.rpc.BadRequest.FieldViolation, and
// google.rpc.QuotaFailure.Violation: both have a name and a text.
type Violation struct{ Name, Description string }

func (m *Violation) fields(f *Fields) {
	text(f, 1, &m.Name)
	text(f, 2, &m.Description)
}

// Violations is google.rpc.BadRequest, and google.rpc.QuotaFailure.
type Violations struct{ Violations []*Violation }

func (m *Violations) fields(f *Fields) { many(f, 1, &m.Violations) }
