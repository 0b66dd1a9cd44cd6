// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"google.golang.org/grpc/codes"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	storev1 "github.com/sluice-net/sluice/proto/gen/sluice/store/v1"
	"github.com/sluice-net/sluice/services/store/internal/enrol"
)

// Reasons maps errors of this service to codes and reasons.
func Reasons() rpcerr.Table {
	t := enrol.Reasons()
	t.Rows = append(t.Rows,
		rpcerr.On(errNoAddress, codes.FailedPrecondition, storev1.ErrorReason_ERROR_REASON_NO_ADDRESS))
	return t
}
