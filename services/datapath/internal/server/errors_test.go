// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func TestEverySentinelHasItsCode(t *testing.T) {
	for _, c := range []struct {
		err  error
		code codes.Code
		// what the details must have
		retry bool
		field string
	}{
		{&endpoint.FieldError{Field: "mtu", Reason: "x"}, codes.InvalidArgument, false, "mtu"},
		{endpoint.ErrInvalid, codes.InvalidArgument, false, ""},
		{endpoint.ErrNamespace, codes.InvalidArgument, false, "network_namespace"},
		{endpoint.ErrNamespaceGone, codes.InvalidArgument, false, "network_namespace"},
		{endpoint.ErrExists, codes.AlreadyExists, false, ""},
		{endpoint.ErrNotFound, codes.NotFound, false, ""},
		{kernel.ErrNotLocal, codes.NotFound, false, ""},
		{pin.ErrNoMap, codes.NotFound, false, ""},
		{endpoint.ErrLease, codes.FailedPrecondition, false, ""},
		{endpoint.ErrNameTaken, codes.FailedPrecondition, false, ""},
		{endpoint.ErrSecond, codes.FailedPrecondition, false, ""},
		{endpoint.ErrUnreadable, codes.FailedPrecondition, false, ""},
		{endpoint.ErrAddressHeld, codes.Aborted, true, ""},
		{endpoint.ErrDeleted, codes.Aborted, false, ""},
		{endpoint.ErrFull, codes.ResourceExhausted, true, ""},
		{endpoint.ErrExhausted, codes.ResourceExhausted, true, ""},
		{endpoint.ErrUnavailable, codes.Unavailable, true, ""},
		{context.DeadlineExceeded, codes.DeadlineExceeded, false, ""},
		{context.Canceled, codes.Canceled, false, ""},
		{errors.New("anything else"), codes.Internal, false, ""},
	} {
		st := status.Convert(statusOf(fmt.Errorf("some step: %w", c.err)))
		if st.Code() != c.code {
			t.Errorf("%v: %v, want %v", c.err, st.Code(), c.code)
		}
		var retry bool
		var field string
		for _, d := range st.Details() {
			switch d := d.(type) {
			case *errdetails.RetryInfo:
				retry = d.GetRetryDelay().AsDuration() > 0
			case *errdetails.BadRequest:
				field = d.GetFieldViolations()[0].GetField()
			}
		}
		if retry != c.retry || field != c.field {
			t.Errorf("%v: retry %v, field %q; want %v, %q", c.err, retry, field, c.retry, c.field)
		}
	}
	if statusOf(nil) != nil {
		t.Error("no error has a status")
	}
}
