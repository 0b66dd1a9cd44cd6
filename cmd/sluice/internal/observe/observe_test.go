// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	"github.com/sluice-net/sluice/cmd/sluice/internal/verdict"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

func TestObserveShowsVerdictsWithTheirRules(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Flows = []*datapathv1.Flow{{
		Type: datapathv1.FlowType_FLOW_TYPE_DROP, Time: timestamppb.New(time.Unix(1e9, 0)),
		Verdict: datapathv1.Verdict_VERDICT_DROPPED, Reason: datapathv1.Reason_REASON_POLICY_DENIED,
		Direction: netv1.Direction_DIRECTION_INGRESS, Protocol: 6, TcpFlags: 2, Length: 74,
		Source: &datapathv1.FlowEnd{
			Address: "10.244.0.2", Port: 4000, Identity: 300, Labels: []*workloadv1.Label{nodetest.Label("app", "client")},
		},
		Destination: &datapathv1.FlowEnd{Address: "10.244.0.3", Port: 80, Identity: 301},
		Egress: &datapathv1.SideVerdict{
			Verdict: datapathv1.Verdict_VERDICT_FORWARDED, Table: verdict.TableAllow,
			DecidedBy: netv1.DecidedBy_DECIDED_BY_NO_POLICY,
		},
		Ingress: &datapathv1.SideVerdict{
			Verdict: datapathv1.Verdict_VERDICT_DROPPED, Table: 17, Rule: 2, Revision: 6,
			DecidedBy: netv1.DecidedBy_DECIDED_BY_RULE, RuleSources: []string{"NetworkPolicy shop/db spec"},
		},
	}}
	out, _ := n.Want(t, 0, "observe", "--label", "app=web,tier in (a,b)", "--label", "!x", "--verdict", "dropped,audited",
		"--type", "policy-verdict")
	r := <-n.Observed
	if len(r.GetSelectors()) != 2 || len(r.GetSelectors()[0].GetRequirements()) != 2 ||
		r.GetSelectors()[1].GetRequirements()[0].GetOperator() != datapathv1.LabelOperator_LABEL_OPERATOR_NOT_EXISTS ||
		len(r.GetVerdicts()) != 2 || r.GetVerdicts()[1] != datapathv1.Verdict_VERDICT_AUDITED ||
		r.GetTypes()[0] != datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT {
		t.Errorf("request %v", r)
	}
	for _, want := range []string{
		"10.244.0.2:4000 (app=client) -> 10.244.0.3:80 (identity 301)  tcp SYN, 74 bytes; ingress dropped by " +
			"NetworkPolicy shop/db spec",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	out, _ = n.Want(t, 0, "observe", "-o", "json")
	<-n.Observed
	var f flow
	if err := json.NewDecoder(strings.NewReader(out)).Decode(&f); err != nil || f.Type != "drop" ||
		f.Ingress.Sources[0] != "NetworkPolicy shop/db spec" || f.TCPFlags != "SYN" {
		t.Errorf("JSON %v %s", err, out)
	}
	_, errOut := n.Want(t, invocation.ExitUsage, "observe", "--label", "app in (")
	nodetest.WantLines(t, errOut, "sluice: --label: at its end: want a comma or )")
	if len(n.Observed) > 0 {
		t.Error("a selector with a mistake was sent")
	}
	// The service names the field, and the answer of the command the flag.
	_, errOut = n.Want(t, invocation.ExitUsage, "observe", "--port", "1", "--label", "app")
	<-n.Observed
	nodetest.WantLines(t, errOut, "sluice: --port: is none that this node has",
		"--label: must be shorter")
	for _, bad := range [][]string{
		{"--label", " "}, {"--verdict", "lost"}, {"--type", "unspecified"}, {"--reason", "nonsense"},
	} {
		_, errOut := n.Want(t, invocation.ExitUsage, append([]string{"observe"}, bad...)...)
		if bad[0] != "--label" && !strings.Contains(errOut, "is not one of ") {
			t.Errorf("%q: %s", bad, errOut)
		}
	}
}

func TestObserveSendsItsCriteria(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, 0, "observe", "--since", "1m", "--reason", "spoofed-ip", "--container", "c1", "--container",
		"c2/net1", "--identity", "300",
		"--address", "10.0.0.7/8", "--address", "fd00::1", "--direction", "egress", "--protocol", "udp,47", "--port", "53")
	r := <-n.Observed
	if r.GetFollow() || r.GetSince() == nil || len(r.GetOwners()) != 2 || r.GetOwners()[0].GetInterfaceName() != "eth0" ||
		r.GetOwners()[1].GetInterfaceName() != "net1" ||
		r.GetPrefixes()[0] != "10.0.0.0/8" || r.GetPrefixes()[1] != "fd00::1/128" ||
		r.GetDirection() != netv1.Direction_DIRECTION_EGRESS ||
		r.GetProtocols()[0] != 17 || r.GetProtocols()[1] != 47 || r.GetPorts()[0] != 53 || r.GetIdentities()[0] != 300 ||
		r.GetReasons()[0] != datapathv1.Reason_REASON_SPOOFED_IP {
		t.Errorf("request %v", r)
	}
	n.Want(t, 0, "observe", "--container", "0123")
	if r := <-n.Observed; r.GetOwners()[0].GetContainerId() != nodetest.LongID {
		t.Errorf("the start of an id is asked for as %v", r.GetOwners())
	}
	for _, want := range []string{
		"spoofed-ip", "198.51.100.7:1234 (identity 300) -> 10.244.0.2:53",
		"12 events were lost by the kernel",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	out, _ = n.Want(t, 0, "observe", "-o", "json")
	<-n.Observed
	d := json.NewDecoder(strings.NewReader(out))
	var f, lost flow
	if err := d.Decode(&f); err != nil {
		t.Fatal(err)
	}
	if err := d.Decode(&lost); err != nil {
		t.Fatal(err)
	}
	if f.Protocol != "udp" || f.DestinationPort != 53 || f.SourcePod != "shop/web-0" || f.Node != "node-1" ||
		f.UUID == "" ||
		f.Owner == nil || *f.Owner != *f.SourceOwner || f.DestinationOwner != nil || lost.Lost != 12 {
		t.Errorf("flows %+v, %+v", f, lost)
	}
	for _, bad := range [][]string{
		{"--direction", "up"},
		{"--address", "x"},
		{"--protocol", "300"},
		{"--port", "70000"},
		{"--identity", "0"},
		{"--since", "-1s"},
	} {
		n.Want(t, invocation.ExitUsage, append([]string{"observe"}, bad...)...)
	}
}
