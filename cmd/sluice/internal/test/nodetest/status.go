// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetest

import (
	"google.golang.org/protobuf/types/known/timestamppb"

	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
)

// serviceStatus is what a service of this node says of itself.
func serviceStatus(problems ...string) *statusv1.ServiceStatus {
	s := &statusv1.ServiceStatus{Version: "v1", StartTime: timestamppb.Now()}
	for _, text := range problems {
		s.Problems = append(s.Problems, &statusv1.Problem{Reason: statusv1.ProblemReason_PROBLEM_REASON_STORAGE, Text: text})
	}
	return s
}
