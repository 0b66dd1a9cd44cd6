// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
)

func TestEndpointsShowTheirPolicy(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "endpoint", "get", "0123")
	nodetest.WantLines(t, out, "Policy revision 6, newer refused", "Egress table 1 (allows everything)",
		"Ingress table 17", "Epoch 9", "Refused no room")
	for _, c := range []struct {
		policy *policy
		want   string
	}{
		{nil, ""},
		{&policy{EgressTable: verdict.TableAllow, IngressTable: verdict.TableAllow}, "none, all is allowed"},
		{&policy{EgressTable: verdict.TableWaiting, IngressTable: verdict.TableWaiting}, "waits for a policy"},
		{&policy{Revision: 4, EgressTable: verdict.TableAllow, IngressTable: 16}, "revision 4"},
		{&policy{Revision: 4, IngressTable: 16, Audit: true}, "revision 4, audit only"},
	} {
		if got := c.policy.text(); got != c.want {
			t.Errorf("%+v reads %q, want %q", c.policy, got, c.want)
		}
	}
}

func TestEndpointListIsATableOrJSON(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "endpoint", "list")
	nodetest.WantLines(t, out,
		"CONTAINER SLOT STATE IDENTITY ADDRESSES DEVICE POLICY LABELS",
		`0123456789abc/eth0 1 ready 300 10.244.0.2,fd00:244::2 sl0 revision 6, newer refused k8s:app=web\x1b]0;x\a`,
	)
	if strings.ContainsAny(out, "\x1b\a") {
		t.Errorf("what a container says reaches the terminal: %q", out)
	}
	out, _ = n.Want(t, 0, "endpoint", "list", "-o", "json")
	var list []endpoint
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if len(list) != 2 || list[0].Owner.ContainerID != nodetest.LongID || list[0].Addresses[0] != "10.244.0.2" ||
		list[0].Container.MAC != "02:00:00:00:00:02" {
		t.Errorf("list %+v", list)
	}
}

func TestEndpointGetTakesTheStartOfAnID(t *testing.T) {
	n := nodetest.New(t, Command)
	for _, name := range []string{nodetest.LongID, "0123", "0123/eth0"} {
		out, _ := n.Want(t, 0, "endpoint", "get", name)
		nodetest.WantLines(t, out, "Container "+nodetest.LongID, "Named ports http=80/tcp", "MTU 1500")
	}
	n.Want(t, invocation.ExitFailed, "endpoint", "get", "9")
	n.Want(t, invocation.ExitFailed, "endpoint", "get", "0123/eth1")
	n.Want(t, invocation.ExitUsage, "endpoint", "get", "/eth0")
	n.Want(t, invocation.ExitUsage, "endpoint", "get")
}
