// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package reasontest

import (
	"context"
	"errors"
	"io"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
)

// answering is a connection on which every call ends with the error.
type answering struct{ err error }

func (a answering) Invoke(context.Context, string, any, any, ...grpc.CallOption) error { return a.err }

func (a answering) NewStream(context.Context, *grpc.StreamDesc, string, ...grpc.CallOption) (grpc.ClientStream, error) {
	return ending{err: a.err}, nil
}

type ending struct {
	grpc.ClientStream
	err error
}

func (e ending) RecvMsg(any) error { return e.err }

// TestReasonsAreSeenInCallsAndStreams uses an enumeration of four values, of which the first is
// never sent.
func TestReasonsAreSeenInCallsAndStreams(t *testing.T) {
	answer := func(v grpc_health_v1.HealthCheckResponse_ServingStatus) error {
		return rpcerr.New(codes.NotFound, rpcerr.Of(v), errors.New("x"))
	}
	const of = grpc_health_v1.HealthCheckResponse_UNKNOWN
	call := Record(answering{answer(grpc_health_v1.HealthCheckResponse_SERVING)})
	if err := call.Invoke(t.Context(), "m", nil, nil); err == nil {
		t.Fatal("the error of a call is lost")
	}
	got := problems(of, nil)
	if want := []string{"no test provokes NOT_SERVING", "no test provokes SERVICE_UNKNOWN"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	s, err := Record(answering{answer(grpc_health_v1.HealthCheckResponse_NOT_SERVING)}).NewStream(t.Context(), nil, "m")
	if err != nil || s.RecvMsg(nil) == nil {
		t.Fatalf("the error of a stream is lost: %v", err)
	}
	got = problems(of, map[string]string{"SERVICE_UNKNOWN": "a bug"})
	if len(got) != 0 {
		t.Errorf("%q, want none", got)
	}
	got = problems(of, map[string]string{"SERVICE_UNKNOWN": "a bug", "SERVING": "never sent"})
	if want := []string{"SERVING was answered, but is listed as an exception: never sent"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	// An answer without a reason is not recorded.
	if err := Record(answering{nil}).Invoke(t.Context(), "m", nil, nil); err != nil {
		t.Error(err)
	}
	s, err = Record(answering{io.EOF}).NewStream(t.Context(), nil, "m")
	if err != nil || !errors.Is(s.RecvMsg(nil), io.EOF) {
		t.Errorf("the end of a stream is lost: %v", err)
	}
}

func TestFailedTestsAreNotJudged(t *testing.T) {
	if code := Run(func() int { return 3 }, grpc_health_v1.HealthCheckResponse_UNKNOWN, nil); code != 3 {
		t.Errorf("exit code %d, want the exit code of the tests", code)
	}
}
