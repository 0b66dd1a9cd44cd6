// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cluster

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
)

func command(inv *invocation.Invocation) *cobra.Command {
	return invocation.Group("node", "", Commands(inv)...)
}

func TestNodesAreListedWithTheirState(t *testing.T) {
	n := nodetest.New(t, command)
	out, _ := n.Want(t, 0, "node", "list")
	nodetest.WantLines(t, out,
		"node-a (this node) alive 192.0.2.1,2001:db8::1 10.244.0.0/24,fd00:244::/64 2", "node-b silent - - 0")
	out, _ = n.Want(t, 0, "node", "list", "-o", "wide")
	nodetest.WantLines(t, out,
		"node-a (this node) alive 192.0.2.1,2001:db8::1 10.244.0.0/24,fd00:244::/64 2 0 1.0",
		"node-b silent - - 0 1, 1 ranges 1.0")
	n.Identity.StoreError = "etcd has gone"
	out, _ = n.Want(t, 0, "node", "list", "-o", "json")
	var all []struct{ State *string }
	if err := nodetest.UnmarshalItems(out, &all); err != nil {
		t.Fatal(err)
	}
	if len(all) != 2 || all[0].State != nil || all[1].State != nil {
		t.Errorf("without etcd: %s, want two nodes without a state", out)
	}
	out, _ = n.Want(t, 0, "node", "list")
	if strings.Count(out, " unknown ") != 2 {
		t.Errorf("without etcd: %s, want two nodes in state unknown", out)
	}
}

func TestOneNodeIsShownWithWhatIsRefused(t *testing.T) {
	n := nodetest.New(t, command)
	out, _ := n.Want(t, 0, "node", "get", "node-b")
	nodetest.WantLines(t, out, "State silent", "Refused CIDR 10.244.0.0/25: node node-a had addresses of it before",
		"Mappings 0, 1 refused", "Tunnel port -")
	out, _ = n.Want(t, 0, "node", "get", "node-a")
	nodetest.WantLines(t, out, "This node yes", "Routing mode overlay", "Tunnel port 8472", "MTU 1450",
		"Overlay addresses 10.244.0.1")
	_, errOut := n.Want(t, invocation.ExitFailed, "node", "get", "node-c")
	if !strings.Contains(errOut, `no node node-c; see`) {
		t.Errorf("an unknown node: %s", errOut)
	}
}

func TestForgetRefusesANodeThatIsAlive(t *testing.T) {
	n := nodetest.New(t, command)
	_, errOut := n.Want(t, invocation.ExitFailed, "node", "forget", "node-a")
	if !strings.Contains(errOut, "--force") || n.Cluster.Forgotten != nil {
		t.Errorf("a node that is alive: %s, %v; want an error that names --force", errOut, n.Cluster.Forgotten)
	}
	for _, flag := range []string{"--validate-only", "--dry-run"} {
		out, _ := n.Want(t, 0, "node", "forget", "node-a", "--force", flag)
		nodetest.WantLines(t, out, "Nothing was changed: --dry-run. It would forget node node-a with 2 mappings.")
		if !n.Cluster.Forgotten.GetValidateOnly() {
			t.Errorf("%s asked for %v", flag, n.Cluster.Forgotten)
		}
	}
	out, _ := n.Want(t, 0, "node", "forget", "node-a", "--force")
	nodetest.WantLines(t, out, "Forgot node node-a with 2 mappings.",
		"For 15 minutes, only a node of this name can have 10.244.0.0/24 and fd00:244::/64.")
	if r := n.Cluster.Forgotten; r.GetValidateOnly() || !r.GetForce() {
		t.Errorf("the request was %v", r)
	}
	n.Want(t, invocation.ExitFailed, "node", "forget", "node-c")
	n.Want(t, invocation.ExitUsage, "node", "forget")
}
