// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package identity

import (
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
)

func TestIdentities(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "identity", "list")
	nodetest.WantLines(t, out, "300 cluster 2 k8s:app=web,k8s:tier")
	if strings.Contains(out, "reserved:host") {
		t.Errorf("reserved identities are listed unasked:\n%s", out)
	}
	out, _ = n.Want(t, 0, "identity", "list", "--all")
	nodetest.WantLines(t, out, "1 reserved 0 reserved:host")
	out, _ = n.Want(t, 0, "identity", "get", "300")
	nodetest.WantLines(t, out, "Identity 300", "Held by endpoint:a/eth0", "Held by reference:warm")
	_, errOut := n.Want(t, invocation.ExitFailed, "identity", "get", "301")
	nodetest.WantLines(t, errOut, "sluice: no such identity")
	for _, bad := range []string{"0", "x", "-1", "16777216"} {
		n.Want(t, invocation.ExitUsage, "identity", "get", "--", bad)
	}
}
