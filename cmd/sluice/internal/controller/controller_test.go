// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package controller

import (
	"testing"

	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
)

// TestReadyIsOfTheProcess: a probe with --ready fails until the process serves. Without --ready it succeeds, so a
// process that waits for the API server is not restarted.
func TestReadyIsOfTheProcess(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Health["controller"].SetServingStatus("", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	_, errOut := n.Want(t, invocation.ExitFailed, "controller", "status", "--ready")
	nodetest.WantLines(t, errOut, "sluice: sluice-controller is not ready: it has not listed every kind of policy; "+
		"its log has the reason")
	n.Want(t, 0, "controller", "status")
	n.Health["controller"].SetServingStatus("", grpc_health_v1.HealthCheckResponse_SERVING)
	n.Want(t, 0, "controller", "status", "--ready")
}
