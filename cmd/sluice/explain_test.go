// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func (f *fakeObserver) Explain(_ context.Context, r *datapathv1.ExplainRequest) (*datapathv1.ExplainResponse, error) {
	f.node.judged = r
	if addressText(r.GetDestinationAddress()) == "192.0.2.1" {
		return nil, status.Error(codes.NotFound, "neither address belongs to an endpoint of this node")
	}
	return &datapathv1.ExplainResponse{
		Verdict: datapathv1.Verdict_VERDICT_DROPPED, Reason: "policy-denied",
		Source:      &datapathv1.ExplainedPeer{Identity: 300, Known: true, NodeClass: 4, Owner: &workloadv1.Owner{ContainerId: longID, InterfaceName: "eth0"}, Slot: 1, IpcacheEntry: "10.244.0.2/32", Labels: []string{"k8s:app=web\a"}},
		Destination: &datapathv1.ExplainedPeer{Identity: 301, IpcacheEntry: "10.244.0.3/32"},
		Egress:      &datapathv1.ExplainedSide{Verdict: &datapathv1.SideVerdict{Verdict: datapathv1.Verdict_VERDICT_FORWARDED, Table: tableAllow, DecidedBy: "no-table"}},
		Ingress: &datapathv1.ExplainedSide{
			Verdict:       &datapathv1.SideVerdict{Verdict: datapathv1.Verdict_VERDICT_DROPPED, Table: 17, Rule: 2, Generation: 9, Revision: 6, DecidedBy: "rule", RuleSources: []string{"NetworkPolicy shop/db"}},
			IdentityClass: 3, IdentityRow: true, AddressClass: 1, AddressBlock: "10.244.0.0/24",
		},
		Connection: &datapathv1.Connection{Initiator: "10.244.0.2:4000", Responder: "10.244.0.3:80", Protocol: 6, State: []string{"established"}, LastSeen: timestamppb.New(time.Now().Add(-3 * time.Second)), IngressRule: 1},
	}, nil
}

func (f *fakeDatapath) DumpMap(r *datapathv1.DumpMapRequest, s grpc.ServerStreamingServer[datapathv1.DumpMapResponse]) error {
	if r.GetName() != "sl_peer" {
		return status.Error(codes.NotFound, fmt.Sprintf("no map %q; there are sl_ct, sl_peer", r.GetName()))
	}
	for i := range 3 {
		if r.GetLimit() != 0 && uint32(i) >= r.GetLimit() {
			break
		}
		if err := s.Send(&datapathv1.DumpMapResponse{Key: fmt.Sprintf("set 16 class %d", i), Value: "class 2"}); err != nil {
			return err
		}
	}
	return nil
}

func (f *fakeDatapath) AuditMaps(r *datapathv1.AuditMapsRequest, s grpc.ServerStreamingServer[datapathv1.AuditMapsResponse]) error {
	for _, d := range f.node.differences {
		if err := s.Send(&datapathv1.AuditMapsResponse{Difference: d, Repaired: r.GetRepair() && d.GetSubject() != "pin"}); err != nil {
			return err
		}
	}
	if r.GetRepair() {
		f.node.differences = slices.DeleteFunc(f.node.differences, func(d *datapathv1.Difference) bool { return d.GetSubject() != "pin" })
	}
	return nil
}

func TestExplainShowsEveryStepOfTheKernel(t *testing.T) {
	n := newFakeNode(t)
	out, _ := n.want(t, 0, "explain", "--from", "0123", "--to", "10.244.0.3", "--port", "80/tcp", "--source-port", "4000")
	if r := n.judged; addressText(r.GetSourceAddress()) != "10.244.0.2" || r.GetProtocol() != 6 || r.GetSourcePort() != 4000 || r.GetDestinationPort() != 80 {
		t.Errorf("asked %v", r)
	}
	wantLines(t, out, "10.244.0.2 -> 10.244.0.3, tcp port 80: DROPPED (policy-denied)",
		"END POD IDENTITY NODE CLASS IPCACHE LABELS", `from 0123456789abc/eth0 300 4 10.244.0.2/32 app=web\a`, "to none of this node 301 not known 10.244.0.3/32 -",
		"Egress, what the sender's policy says: forwarded because no policy selects it", "table 1 (allows everything)",
		"Ingress, what the receiver's policy says: dropped by NetworkPolicy shop/db", "table 17", "policy revision 6",
		"class by identity 3, by a row of the table", "class by address 1, in 10.244.0.0/24", "rule 2",
		"Connection: 10.244.0.2:4000 -> 10.244.0.3:80 tcp, established", "verdict outdated: the next packet is judged anew", "rules egress default, ingress 1")

	n.want(t, 0, "explain", "--from", "fd00:244::2", "--to", "0123", "--icmp", "128/0", "-o", "json", "-6")
	if r := n.judged; r.GetProtocol() != 58 || r.GetDestinationPort() != 128<<8 {
		t.Errorf("asked %v", r)
	}
}

func TestExplainWantsAddresses(t *testing.T) {
	n := newFakeNode(t)
	_, errOut := n.want(t, exitUsage, "explain", "--from", "0123", "--to", "301", "--port", "80")
	if !strings.Contains(errOut, "--to: no pod of this node is 301") {
		t.Errorf("an identity without a pod: %q", errOut)
	}
	_, errOut = n.want(t, exitUsage, "explain", "--from", "300", "--to", "0123", "--port", "80")
	if !strings.Contains(errOut, "300 could be 0123456789abc/eth0 or ") {
		t.Errorf("an identity of two pods: %q", errOut)
	}
	_, errOut = n.want(t, exitFailed, "explain", "--from", "0123", "--to", "192.0.2.1", "--port", "80")
	wantLines(t, errOut, "sluice: neither address belongs to an endpoint of this node")
}

func TestMaps(t *testing.T) {
	n := newFakeNode(t)
	out, _ := n.want(t, 0, "map", "list")
	wantLines(t, out, "MAP ENTRIES OF MEMORY", "sl_ct ? 65536 1.0 KiB", "sl_peer 3 16 512 B", "2 maps - - 1.5 KiB")
	out, _ = n.want(t, 0, "map", "dump", "sl_peer")
	wantLines(t, out, "set 16 class 2 => class 2")
	out, _ = n.want(t, 0, "map", "dump", "sl_peer", "--limit", "1", "-o", "json")
	var entry map[string]string
	if err := json.Unmarshal([]byte(out), &entry); err != nil || entry["key"] != "set 16 class 0" {
		t.Errorf("JSON %v %s", err, out)
	}
	_, errOut := n.want(t, exitFailed, "map", "dump", "sl_x")
	wantLines(t, errOut, `sluice: no map "sl_x"; there are sl_ct, sl_peer`)
	n.want(t, exitUsage, "map", "dump")
}

func TestAuditSaysWhetherAllIsWell(t *testing.T) {
	n := newFakeNode(t)
	out, _ := n.want(t, 0, "audit")
	wantLines(t, out, "The kernel is as it should be.")
	n.differences = []*datapathv1.Difference{{Subject: "sl_ip4", Key: "10.244.0.2", Want: "identity 300"}, {Subject: "pin", Key: "sl_x", Have: "map 7"}}
	out, _ = n.want(t, exitFailed, "audit")
	wantLines(t, out, "WHAT WHICH WANT HAVE REPAIRED", "sl_ip4 10.244.0.2 identity 300 - no")
	out, _ = n.want(t, exitFailed, "audit", "--repair")
	wantLines(t, out, "sl_ip4 10.244.0.2 identity 300 - yes", "pin sl_x - map 7 no")
	n.differences = nil
	n.want(t, 0, "audit", "-o", "json")
}

func TestEndpointsShowTheirPolicy(t *testing.T) {
	n := newFakeNode(t)
	out, _ := n.want(t, 0, "endpoint", "get", "0123")
	wantLines(t, out, "Policy revision 6, newer refused", "Egress table 1 (allows everything)", "Ingress table 17", "Generation 9", "Refused no room")
	for _, c := range []struct {
		policy *endpointPolicy
		want   string
	}{
		{nil, ""},
		{&endpointPolicy{EgressTable: tableAllow, IngressTable: tableAllow}, "none, all is allowed"},
		{&endpointPolicy{EgressTable: tableWaiting, IngressTable: tableWaiting}, "waits for a policy"},
		{&endpointPolicy{Revision: 4, EgressTable: tableAllow, IngressTable: 16}, "revision 4"},
		{&endpointPolicy{Revision: 4, IngressTable: 16, Audit: true}, "revision 4, audit only"},
	} {
		if got := c.policy.text(); got != c.want {
			t.Errorf("%+v reads %q, want %q", c.policy, got, c.want)
		}
	}
}

func TestObserveShowsVerdictsWithTheirRules(t *testing.T) {
	n := newFakeNode(t)
	n.flows = []*datapathv1.Flow{{
		Type: datapathv1.FlowType_FLOW_TYPE_DROP, Time: timestamppb.New(time.Unix(1e9, 0)), Verdict: datapathv1.Verdict_VERDICT_DROPPED, Reason: "policy-denied",
		Direction: datapathv1.Direction_DIRECTION_INGRESS, SourceAddress: []byte{10, 244, 0, 2}, DestinationAddress: []byte{10, 244, 0, 3}, Protocol: 6, SourcePort: 4000, DestinationPort: 80,
		SourceIdentity: 300, DestinationIdentity: 301, SourceLabels: []string{"k8s:app=client"}, TcpFlags: 2, Length: 74,
		Egress:  &datapathv1.SideVerdict{Verdict: datapathv1.Verdict_VERDICT_FORWARDED, Table: tableAllow, DecidedBy: "no-table"},
		Ingress: &datapathv1.SideVerdict{Verdict: datapathv1.Verdict_VERDICT_DROPPED, Table: 17, Rule: 2, Revision: 6, DecidedBy: "rule", RuleSources: []string{"NetworkPolicy shop/db spec"}},
	}}
	out, _ := n.want(t, 0, "observe", "--label", "app=web,tier in (a,b)", "--label", "!x", "--verdict", "dropped,audited", "--type", "policy-verdict")
	r := <-n.observed
	if !slices.Equal(r.GetLabelSelectors(), []string{"app=web,tier in (a,b)", "!x"}) || len(r.GetVerdicts()) != 2 || r.GetVerdicts()[1] != datapathv1.Verdict_VERDICT_AUDITED ||
		r.GetTypes()[0] != datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT {
		t.Errorf("request %v", r)
	}
	for _, want := range []string{
		"10.244.0.2:4000 (app=client) -> 10.244.0.3:80 (identity 301)  tcp SYN, 74 bytes; ingress dropped by NetworkPolicy shop/db spec",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	out, _ = n.want(t, 0, "observe", "-o", "json")
	<-n.observed
	var f flow
	if err := json.NewDecoder(strings.NewReader(out)).Decode(&f); err != nil || f.Type != "drop" || f.Ingress.Sources[0] != "NetworkPolicy shop/db spec" || f.TCPFlags != "SYN" {
		t.Errorf("JSON %v %s", err, out)
	}
	_, errOut := n.want(t, exitUsage, "observe", "--label", "app in (")
	<-n.observed
	wantLines(t, errOut, "sluice: --label: at its end: want a comma or )")
	for _, bad := range [][]string{{"--label", " "}, {"--verdict", "lost"}, {"--type", "unspecified"}} {
		_, errOut := n.want(t, exitUsage, append([]string{"observe"}, bad...)...)
		if bad[0] != "--label" && !strings.Contains(errOut, "is not one of ") {
			t.Errorf("%q: %s", bad, errOut)
		}
	}
}
