// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetest

import (
	"context"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	controllerv1 "github.com/sluice-net/sluice/proto/gen/sluice/controller/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
)

// controller is a fake of an elected sluice-controller that cannot write the status of one object.
type controller struct {
	controllerv1.UnimplementedControllerServiceServer
}

func (*controller) GetStatus(
	context.Context, *controllerv1.GetStatusRequest,
) (*controllerv1.GetStatusResponse, error) {
	began := timestamppb.New(time.Now().Add(-time.Hour))
	const refused = "the API server refuses it"
	return &controllerv1.GetStatusResponse{
		Service: &statusv1.ServiceStatus{Version: "v1", StartTime: began, Problems: []*statusv1.Problem{
			{Reason: statusv1.ProblemReason_PROBLEM_REASON_SERVICE, Text: "policy status: " + refused},
		}},
		Election: &controllerv1.Election{
			Namespace: "sluice-system", Lease: "sluice-status", Identity: "node-a_1", Leading: true, Holder: "node-a_1",
			ElectedTime: began,
		},
		Subjects: []*controllerv1.Subject{
			{Name: "node garbage collection", Requests: 2},
			{Name: "policy status", Pending: 1, Requests: 30, FailedRequests: 1, Error: refused},
		},
	}, nil
}
