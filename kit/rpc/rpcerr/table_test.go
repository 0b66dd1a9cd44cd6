// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rpcerr

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
)

var (
	errFull  = errors.New("the pool is full")
	errField = errors.New("the field is wrong")
)

type fieldError struct {
	field string
	err   error
}

func (e *fieldError) Error() string { return e.field + ": " + e.err.Error() }
func (e *fieldError) Unwrap() error { return e.err }

func table() *Table {
	inField := func(e *fieldError) []protoadapt.MessageV1 {
		return []protoadapt.MessageV1{Field(e.field, e.err.Error())}
	}
	return &Table{
		Rows: []Row{
			OnType(codes.AlreadyExists, reason(1), inField).And(errField),
			On(errFull, codes.ResourceExhausted, reason(1), OfQuota("pool"), Retries(2*time.Second)),
			OnType(codes.InvalidArgument, reason(0), inField),
		},
		Otherwise: reason(0),
	}
}

// TestFirstMatchingRowAnswers checks that the order of rows decides, however an error is wrapped.
func TestFirstMatchingRowAnswers(t *testing.T) {
	for _, c := range []struct {
		err       error
		code      codes.Code
		hasReason bool
		field     string
		delay     time.Duration
		quotas    int
	}{
		{err: errFull, code: codes.ResourceExhausted, hasReason: true, delay: 2 * time.Second, quotas: 1},
		// The row of the wrapped error precedes the row of the wrapper.
		{
			err:  &fieldError{"pool", errFull},
			code: codes.ResourceExhausted, hasReason: true, delay: 2 * time.Second, quotas: 1,
		},
		{err: &fieldError{"pool", errField}, code: codes.AlreadyExists, hasReason: true, field: "pool"},
		{err: &fieldError{"pool", errors.New("x")}, code: codes.InvalidArgument, hasReason: true, field: "pool"},
		{err: errors.New("unforeseen"), code: codes.Internal, hasReason: true},
		{err: context.Canceled, code: codes.Canceled},
		{err: context.DeadlineExceeded, code: codes.DeadlineExceeded},
		// A matching row takes precedence over the error of an ended context.
		{
			err:  fmt.Errorf("%w: %w", errFull, context.Canceled),
			code: codes.ResourceExhausted, hasReason: true, delay: 2 * time.Second, quotas: 1,
		},
	} {
		got := table().Status(fmt.Errorf("outer: %w", c.err))
		_, has := ReasonIn(got)
		delay, _ := RetryDelay(got)
		field := ""
		for _, v := range Fields(got) {
			field = v.GetField()
		}
		if status.Code(got) != c.code || has != c.hasReason || field != c.field || delay != c.delay ||
			len(Quotas(got)) != c.quotas {
			t.Errorf("%v is answered with %v, has a reason %t, field %q, delay %v, %d quotas", c.err, got, has, field, delay,
				len(Quotas(got)))
		}
	}
	if err := table().Status(nil); err != nil {
		t.Errorf("a call that did not fail is answered with %v", err)
	}
}

type mistake struct {
	document   int
	path, text string
}

func (m mistake) Where() (document int, path, text string) { return m.document, m.path, m.text }

func TestManifestsNameDocumentAndField(t *testing.T) {
	all := []mistake{{0, "spec.ports[0]", "is taken"}, {3, "", "has no kind"}}
	for range 2 * MaxViolations {
		all = append(all, mistake{4, "x", "y"})
	}
	got := Fields(New(codes.InvalidArgument, Of(reason(1)), errors.New("x"), Manifests(nil, all)...))
	if len(got) != MaxViolations || got[0].GetField() != "manifests[0].spec.ports[0]" ||
		got[0].GetDescription() != "is taken" || got[1].GetField() != "manifests[3]" {
		t.Errorf("%d violations: %v", len(got), got[:2])
	}
	whole := Manifests[mistake](errors.New("is empty"), nil)
	got = Fields(New(codes.InvalidArgument, Of(reason(1)), errors.New("x"), whole...))
	if len(got) != 1 || got[0].GetField() != "manifests" || got[0].GetDescription() != "is empty" {
		t.Errorf("manifests that cannot be split into documents: %v", got)
	}
}
