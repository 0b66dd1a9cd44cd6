// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package ip

import (
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
)

func TestAnAddressIsShownWithItsIdentityAndWhatIsRefused(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "ip", "get", "10.244.0.2")
	nodetest.WantLines(t, out, "Identity app=web (300)", "Node node-a", "Range 10.244.0.0/24 of node node-a",
		"node-b identity 301 the address lies in a range of node node-a")
	out, _ = n.Want(t, 0, "ip", "get", "::ffff:10.244.0.9")
	nodetest.WantLines(t, out, "Address 10.244.0.9", "Identity none: packets have 255, unknown-in-cluster")
	if strings.Contains(out, "REFUSED") {
		t.Errorf("nothing is refused:\n%s", out)
	}
	out, _ = n.Want(t, 0, "ip", "get", "192.0.2.7", "-o", "json")
	if !strings.Contains(out, `"identity": 7`) || !strings.Contains(out, `"range": ""`) {
		t.Errorf("an address outside of all ranges:\n%s", out)
	}
	out, _ = n.Want(t, 0, "ip", "get", "10.9.0.1")
	nodetest.WantLines(t, out, "Identity none: packets have the identity of the world", "Range none of a node",
		"node-b identity 301 the address lies in no range of the node")
	_, errOut := n.Want(t, invocation.ExitFailed, "ip", "get", "203.0.113.1")
	nodetest.WantLines(t, errOut, "sluice: the address is unknown: 203.0.113.1")
	for _, bad := range []string{"x", "10.244.0.0/24", "fe80::1%eth0"} {
		n.Want(t, invocation.ExitUsage, "ip", "get", bad)
	}
}
