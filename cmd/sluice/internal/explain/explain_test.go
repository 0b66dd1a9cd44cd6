// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
)

func TestExplainShowsEveryStepOfTheKernel(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "explain", "--from", "0123", "--to", "10.244.0.3", "--port", "80/tcp", "--source-port", "4000")
	if r := n.Evaluated; r.GetSourceAddress() != "10.244.0.2" || r.GetProtocol() != 6 ||
		r.GetSourcePort() != 4000 || r.GetDestinationPort() != 80 {
		t.Errorf("asked %v", r)
	}
	nodetest.WantLines(t, out, "10.244.0.2 -> 10.244.0.3, tcp port 80: DROPPED (policy-denied)",
		"END POD IDENTITY IDENTITY CLASS IPCACHE LABELS", `from 0123456789abc/eth0 300 4 10.244.0.2/32 app=web\a`,
		"to none of this node 301 not known 10.244.0.3/32 -",
		"Egress, what the sender's policy says: forwarded because no policy selects it", "table 1 (allows everything)",
		"Ingress, what the receiver's policy says: dropped by NetworkPolicy shop/db", "table 17", "policy revision 6",
		"class by identity 3, by a row of the table", "class by address 1, in 10.244.0.0/24", "rule 2",
		"Connection: 10.244.0.2:4000 -> 10.244.0.3:80 tcp, established", "next packet DROPPED (policy-denied)",
		"verdict outdated: the next packet is evaluated again",
		"rules egress default, ingress 1")

	n.Want(t, 0, "explain", "--from", "fd00:244::2", "--to", "0123", "--icmp", "128/0", "-o", "json", "-6")
	if r := n.Evaluated; r.GetProtocol() != 58 || r.GetDestinationPort() != 128<<8 {
		t.Errorf("asked %v", r)
	}
}

func TestExplainWantsAddresses(t *testing.T) {
	n := nodetest.New(t, Command)
	_, errOut := n.Want(t, invocation.ExitUsage, "explain", "--from", "0123", "--to", "301", "--port", "80")
	if !strings.Contains(errOut, "--to: no pod of this node is 301") {
		t.Errorf("an identity without a pod: %q", errOut)
	}
	_, errOut = n.Want(t, invocation.ExitUsage, "explain", "--from", "300", "--to", "0123", "--port", "80")
	if !strings.Contains(errOut, "300 could be 0123456789abc/eth0 or ") {
		t.Errorf("an identity of two pods: %q", errOut)
	}
	_, errOut = n.Want(t, invocation.ExitFailed, "explain", "--from", "0123", "--to", "192.0.2.1", "--port", "80")
	nodetest.WantLines(t, errOut, "sluice: neither address belongs to an endpoint of this node")
}
