// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package conntrack

import (
	"encoding/json"
	"maps"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func TestConnectionsAreListedWithWhatTheyAskedFor(t *testing.T) {
	n := nodetest.New(t, Command)
	out, errOut := n.Want(t, 0, "conntrack", "list", "-o", "wide")
	nodetest.WantLines(t, out,
		"PROTOCOL INITIATOR RESPONDER STATE LAST SEEN ASKED",
		"tcp 10.244.0.2:4000 (shop/web-0) 10.244.0.3:8080 (301) established 3s 10.96.0.1:80 (shop/db:sql)",
		`icmpv6 [fd00:244::2]:0 (evil\x1b[2J/eth0) [fd00:244::1]:0 (local node) opening,to-be-evaluated 3s -`,
		"tcp 198.51.100.7:5000 (9) 10.244.1.3:8080 (301) established,in-transit,earlier-layout 3s "+
			"192.0.2.1:30080 (shop/web:http) as 10.244.0.1:20000",
	)
	if strings.Contains(out, "\x1b") || errOut != "" {
		t.Errorf("what a container says reaches the terminal: %q, %q", out, errOut)
	}
	out, errOut = n.Want(t, 0, "conntrack", "list", "--limit", "1", "-o", "json")
	c := &datapathv1.TrackedConnection{}
	if err := message.Unmarshal([]byte(out), c); err != nil || c.GetInitiator().GetPod().GetName() != "web-0" ||
		c.GetAskedAddress() != "10.96.0.1" || !strings.Contains(out, `"omittedConnectionCount":2`) ||
		errOut != "note: 2 more connections are not shown because of --limit\n" {
		t.Errorf("%v: %s%s", err, out, errOut)
	}
}

func TestCriteriaOfConnectionsAreThoseOfTheFlags(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Want(t, 0, "conntrack", "list", "--container", "0123", "--address", "10.0.0.1/8,::1", "--port", "53",
		"--protocol", "UDP,47", "--state", "half-closed", "-4")
	want := &datapathv1.ListConnectionsRequest{Limit: listedAtOnce, Filter: &datapathv1.ConnectionFilter{
		Owners:   []*workloadv1.Owner{{ContainerId: nodetest.LongID, InterfaceName: "eth0"}},
		Prefixes: []string{"10.0.0.0/8", "::1/128"}, Ports: []uint32{53},
		Family: datapathv1.AddressFamily_ADDRESS_FAMILY_IPV4,
		States: []datapathv1.ConnectionState{datapathv1.ConnectionState_CONNECTION_STATE_HALF_CLOSED},
	}}
	want.Filter.Protocols = append(want.Filter.Protocols, 17, 47)
	if !proto.Equal(n.Listed, want) {
		t.Errorf("asked %v, want %v", n.Listed, want)
	}
	for _, wrong := range [][]string{
		{"--address", "x"},
		{"--address", "fe80::1%eth0"},
		{"--port", "65536"},
		{"--protocol", "256"},
		{"--state", "unspecified"},
		{"-4", "-6"},
		{"--container", "/eth0"},
	} {
		n.Want(t, invocation.ExitUsage, append([]string{"conntrack", "list"}, wrong...)...)
	}
	// An unknown container must not become an empty filter, which would match all connections.
	n.Want(t, invocation.ExitFailed, "conntrack", "flush", "--container", "9")
	if n.Flushed != nil {
		t.Errorf("flushed %v", n.Flushed)
	}
}

func TestFlushSaysWhatStays(t *testing.T) {
	n := nodetest.New(t, Command)
	_, errOut := n.Want(t, invocation.ExitUsage, "conntrack", "flush")
	if !strings.Contains(errOut, "no filter: give one, or --all to flush every connection") {
		t.Errorf("without criteria: %q", errOut)
	}
	out, _ := n.Want(t, 0, "conntrack", "flush", "--port", "53", "--dry-run")
	if out != "Nothing was flushed: --dry-run. 1 connection would be flushed.\nThe change applies only to this node "+
		"(node-a), not 1 other node of the cluster.\n" || !n.Flushed.GetValidateOnly() {
		t.Errorf("%q after %v", out, n.Flushed)
	}
	out, _ = n.Want(t, invocation.ExitFailed, "conntrack", "flush", "--all")
	nodetest.WantLines(t, out, "9 connections flushed.",
		"Not flushed: 1 connection, because a policy has terminated them.",
		"Not flushed: 2 connections, because the datapath cannot remember the direction of more TCP "+
			"connections of the family; flush again later.",
		"Not flushed: 3 connections, because packets changed them during the flush; flush again.")
	out, _ = n.Want(t, invocation.ExitFailed, "conntrack", "flush", "--all", "-o", "json")
	want := map[string]any{
		"flushedCount": 9.0, "terminatedCount": 1.0, "unrememberedCount": 2.0, "busyCount": 3.0, "validateOnly": false,
	}
	var done map[string]any
	if err := json.Unmarshal([]byte(out), &done); err != nil || !maps.Equal(done, want) {
		t.Errorf("%v: %s", err, out)
	}
}
