// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"testing"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/leaktest"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/model/workload"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/explain"
	"github.com/sluice-net/sluice/services/datapath/internal/policy/policysync"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// TestEverySentinelHasItsCodeAndReason tests that statusOf maps every error of the core to the code and reason in the
// API, and that each reason of the API is used.
func TestEverySentinelHasItsCodeAndReason(t *testing.T) {
	given := map[datapathv1.ErrorReason]bool{0: true}
	for _, c := range []struct {
		err    error
		code   codes.Code
		reason datapathv1.ErrorReason // unspecified: the answer has none
		// what the details must have
		retry bool
		field string
	}{
		{&endpoint.FieldError{Field: "mtu", Reason: "x"}, codes.InvalidArgument, datapathv1.ErrorReason_ERROR_REASON_INVALID_REQUEST, false, "mtu"},
		{endpoint.ErrInvalid, codes.InvalidArgument, datapathv1.ErrorReason_ERROR_REASON_INVALID_REQUEST, false, ""},
		{endpoint.ErrNamespace, codes.InvalidArgument, datapathv1.ErrorReason_ERROR_REASON_NETWORK_NAMESPACE_UNUSABLE, false, "network_namespace"},
		{endpoint.ErrNamespaceGone, codes.InvalidArgument, datapathv1.ErrorReason_ERROR_REASON_NETWORK_NAMESPACE_REMOVED, false, "network_namespace"},
		{
			fmt.Errorf("%w: %w", &endpoint.FieldError{Field: "network_namespace", Reason: "x"}, endpoint.ErrNamespaceGone),
			codes.InvalidArgument, datapathv1.ErrorReason_ERROR_REASON_NETWORK_NAMESPACE_REMOVED, false, "network_namespace",
		},
		{endpoint.ErrExists, codes.AlreadyExists, datapathv1.ErrorReason_ERROR_REASON_OWNER_HAS_OTHER_ENDPOINT, false, ""},
		{endpoint.ErrNotFound, codes.NotFound, datapathv1.ErrorReason_ERROR_REASON_ENDPOINT_NOT_FOUND, false, ""},
		{explain.ErrNotLocal, codes.NotFound, datapathv1.ErrorReason_ERROR_REASON_ADDRESSES_NOT_LOCAL, false, ""},
		{pin.ErrNoMap, codes.NotFound, datapathv1.ErrorReason_ERROR_REASON_MAP_NOT_FOUND, false, ""},
		{endpoint.ErrLease, codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_LEASE_LOST, false, ""},
		{endpoint.ErrNameTaken, codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_INTERFACE_NAME_TAKEN, false, ""},
		{endpoint.ErrSecond, codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_SECOND_INTERFACE_REFUSED, false, ""},
		{errNoPolicies, codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_POLICY_MODE_NONE, false, ""},
		{endpoint.ErrInUse, codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_ENDPOINT_IN_USE, false, ""},
		{endpoint.ErrForeign, codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_FOREIGN_MANAGER, false, ""},
		{
			endpoint.ErrLabelsOfPod, codes.FailedPrecondition,
			datapathv1.ErrorReason_ERROR_REASON_LABELS_FROM_KUBERNETES, false, "",
		},
		{
			fmt.Errorf("%w by service shop/web", endpoint.ErrHostPort), codes.FailedPrecondition,
			datapathv1.ErrorReason_ERROR_REASON_HOST_PORT_IN_USE, false, "",
		},
		{
			endpoint.ErrLoadBalancingOff, codes.FailedPrecondition,
			datapathv1.ErrorReason_ERROR_REASON_LOAD_BALANCING_OFF, false, "",
		},
		{endpoint.ErrUnreadable, codes.FailedPrecondition, datapathv1.ErrorReason_ERROR_REASON_RECORD_UNREADABLE, false, ""},
		{endpoint.ErrAddressHeld, codes.Aborted, datapathv1.ErrorReason_ERROR_REASON_ADDRESS_IN_USE, true, ""},
		{endpoint.ErrDeleted, codes.Aborted, datapathv1.ErrorReason_ERROR_REASON_ENDPOINT_DELETED, false, ""},
		{endpoint.ErrFull, codes.ResourceExhausted, datapathv1.ErrorReason_ERROR_REASON_NO_CAPACITY, true, ""},
		{endpoint.ErrExhausted, codes.ResourceExhausted, datapathv1.ErrorReason_ERROR_REASON_SERVICE_EXHAUSTED, true, ""},
		{endpoint.ErrUnavailable, codes.Unavailable, datapathv1.ErrorReason_ERROR_REASON_SERVICE_UNAVAILABLE, true, ""},
		{fmt.Errorf("%w: %w", endpoint.ErrUnavailable, policysync.ErrUnavailable), codes.Unavailable, datapathv1.ErrorReason_ERROR_REASON_POLICY_UNAVAILABLE, true, ""},
		{endpoint.ErrStorage, codes.Unavailable, datapathv1.ErrorReason_ERROR_REASON_STORAGE_FAILED, true, ""},
		{context.DeadlineExceeded, codes.DeadlineExceeded, 0, false, ""},
		{context.Canceled, codes.Canceled, 0, false, ""},
		{errors.New("anything else"), codes.Internal, datapathv1.ErrorReason_ERROR_REASON_INTERNAL, false, ""},
	} {
		given[c.reason] = true
		got := statusOf(fmt.Errorf("some step: %w", c.err))
		if reason, has := rpcerr.ReasonIn(got); status.Code(got) != c.code || has != (c.reason != 0) || has && reason != rpcerr.Of(c.reason) {
			t.Errorf("%v is answered with %s, %v; want %s, %v", c.err, status.Code(got), reason, c.code, c.reason)
		}
		field := ""
		for _, v := range rpcerr.Fields(got) {
			field = v.GetField()
		}
		if delay, _ := rpcerr.RetryDelay(got); delay > 0 != c.retry || field != c.field {
			t.Errorf("%v: retry after %v, field %q; want %v, %q", c.err, delay, field, c.retry, c.field)
		}
	}
	for number, name := range datapathv1.ErrorReason_name {
		if !given[datapathv1.ErrorReason(number)] {
			t.Errorf("%s is promised and never given", name)
		}
	}
	if statusOf(nil) != nil {
		t.Error("no error has a status")
	}
}

func TestErrorsNameTheEndpointThatIsInTheWay(t *testing.T) {
	o := workload.Owner{ContainerID: "a", Interface: "eth0"}
	for _, c := range []struct {
		err  error
		want map[string]string
	}{
		{
			&endpoint.ExistsError{Owner: o, Fields: []string{"mtu", "labels"}}, map[string]string{"fields": "mtu,labels"},
		},
		{
			&endpoint.HeldError{Addr: netip.MustParseAddr("10.244.0.2"), Holder: o},
			map[string]string{"address": "10.244.0.2", "holder": "a/eth0"},
		},
	} {
		got := statusOf(fmt.Errorf("some step: %w", c.err))
		if facts := rpcerr.Facts(got); !maps.Equal(facts, c.want) {
			t.Errorf("%v has the facts %v, want %v", c.err, facts, c.want)
		}
		named := ""
		for _, d := range status.Convert(got).Details() {
			if r, ok := d.(*errdetails.ResourceInfo); ok {
				named = r.GetResourceType() + " " + r.GetResourceName()
			}
		}
		if named != "endpoint a/eth0" {
			t.Errorf("%v names %q", c.err, named)
		}
	}
}
