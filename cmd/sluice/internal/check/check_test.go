// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package check

import (
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

func TestAuditSaysWhetherAllIsWell(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "check")
	nodetest.WantLines(t, out, "No differences found.")
	n.Differences = []*datapathv1.Difference{
		{Subject: "sl_ip4", Key: "10.244.0.2", Want: "identity 300"},
		{Subject: "pin", Key: "sl_x", Have: "map 7"},
	}
	out, _ = n.Want(t, invocation.ExitFailed, "check")
	nodetest.WantLines(t, out, "WHAT WHICH WANT HAVE REPAIRED", "sl_ip4 10.244.0.2 identity 300 - no")
	out, _ = n.Want(t, invocation.ExitFailed, "check", "--repair")
	nodetest.WantLines(t, out, "sl_ip4 10.244.0.2 identity 300 - yes", "pin sl_x - map 7 no")
	n.Differences = nil
	n.Want(t, 0, "check", "-o", "json")
}
