// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package explain

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	"github.com/sluice-net/sluice/model/identity"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
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
		"Egress, the sender's policy: forwarded because no policy selects it", "table 1 (allows everything)",
		"Ingress, the receiver's policy: dropped by NetworkPolicy shop/db", "table 17", "policy revision 6",
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

// TestExplainNamesTheNodeThatItDidNotAsk: the first line mentions this node only if the other end of the connection is
// on another node.
func TestExplainNamesTheNodeThatItDidNotAsk(t *testing.T) {
	n := nodetest.New(t, Command)
	pod := &datapathv1.ExplainedPeer{Identity: 300, Owner: &workloadv1.Owner{ContainerId: "a", InterfaceName: "eth0"}}
	there := &datapathv1.ExplainedPeer{Identity: 301, NodeName: "node-b"}
	answer := func(from, to *datapathv1.ExplainedPeer, v datapathv1.Verdict,
		r datapathv1.Reason,
	) *datapathv1.ExplainResponse {
		return &datapathv1.ExplainResponse{Verdict: v, Reason: r, Source: from, Destination: to}
	}
	forwarded, dropped := datapathv1.Verdict_VERDICT_FORWARDED, datapathv1.Verdict_VERDICT_DROPPED
	n.Explained = map[string]*datapathv1.ExplainResponse{
		"10.244.1.2": answer(pod, there, forwarded, datapathv1.Reason_REASON_FORWARDED_OVERLAY),
		"10.244.0.2": answer(there, pod, datapathv1.Verdict_VERDICT_AUDITED, datapathv1.Reason_REASON_FORWARDED_FROM_STACK),
		"10.244.1.3": answer(pod, there, dropped, datapathv1.Reason_REASON_POLICY_DENIED),
		"192.0.2.2": answer(pod, &datapathv1.ExplainedPeer{Identity: uint32(identity.RemoteNode), NodeName: "node-b"},
			forwarded, datapathv1.Reason_REASON_FORWARDED_OVERLAY),
		"10.96.0.10": {
			Verdict: forwarded, Reason: datapathv1.Reason_REASON_FORWARDED_OVERLAY, Source: pod,
			Service: &datapathv1.ExplainedService{
				Service: "shop/web", Outcome: datapathv1.ServiceOutcome_SERVICE_OUTCOME_TRANSLATED, BackendCount: 1,
				Backends: []*datapathv1.ExplainedBackend{{
					Address: "10.244.1.2", Port: 8080, Path: datapathv1.BackendPath_BACKEND_PATH_EVALUATED, Peer: there,
					Verdict: forwarded, Reason: datapathv1.Reason_REASON_FORWARDED_OVERLAY,
				}},
			},
		},
	}
	for to, want := range map[string]string{
		"10.244.1.2": "FORWARDED by this node (forwarded-overlay); node-b, which has the receiver, was not asked",
		"10.244.0.2": "AUDITED by this node (forwarded-from-stack); node-b, which has the sender, was not asked",
		"10.244.1.3": "DROPPED (policy-denied)",
		"192.0.2.2":  "FORWARDED (forwarded-overlay)", // no policies are enforced for a node itself
		"10.96.0.10": "FORWARDED (forwarded-overlay)",
	} {
		out, _ := n.Want(t, 0, "explain", "--from", "10.244.0.9", "--to", to, "--port", "80")
		nodetest.WantLines(t, out, "10.244.0.9 -> "+to+", tcp port 80: "+want)
		if to == "10.96.0.10" {
			nodetest.WantLines(t, out,
				"10.244.1.2:8080: FORWARDED by this node (forwarded-overlay); node-b, which has the backend, was not asked")
		}
	}
	n.Stop("identity") // the kernel maps addresses to identities
	n.Want(t, 0, "explain", "--from", "10.244.0.9", "--to", "10.244.1.2", "--port", "80")
}

// TestExplainAtATimeShowsTheStoredVerdict: with the rule and the revision that decided. Without a verdict, the message
// says which part of the history is missing.
func TestExplainAtATimeShowsTheStoredVerdict(t *testing.T) {
	n := nodetest.New(t, Command)
	decided := time.Date(2026, 11, 30, 10, 0, 0, 0, time.Local)
	n.Stored = []*datapathv1.ObserveResponse{{Event: &datapathv1.ObserveResponse_Flow{Flow: &datapathv1.Flow{
		Time: timestamppb.New(decided), NodeName: "node-1", Type: datapathv1.FlowType_FLOW_TYPE_DROP,
		Verdict: datapathv1.Verdict_VERDICT_DROPPED, Reason: datapathv1.Reason_REASON_POLICY_DENIED, Protocol: 6,
		OriginalDestinationAddress: "10.96.0.10", OriginalDestinationPort: 80, Service: "shop/web:http",
		Source: &datapathv1.FlowEnd{
			Address: "10.244.0.2", Port: 4000, Identity: 300,
			Pod:    &workloadv1.PodReference{Namespace: "shop", Name: "client"},
			Labels: []*workloadv1.Label{nodetest.Label("app", "client")},
		},
		Destination: &datapathv1.FlowEnd{Address: "10.244.0.3", Port: 8080, Identity: 301, NodeName: "node-2"},
		Ingress: &datapathv1.SideVerdict{
			Verdict: datapathv1.Verdict_VERDICT_DROPPED, DecidedBy: netv1.DecidedBy_DECIDED_BY_RULE, Rule: 2, Revision: 6,
			RuleSources: []string{"NetworkPolicy shop/web isolation"},
		},
	}}}}
	ask := []string{"explain", "--from", "shop/client", "--to", "app=web", "-n", "shop", "--port", "80", "--at"}
	out, _ := n.Want(t, 0, append(ask, "2026-11-30 11:00:00")...)
	nodetest.WantLines(t, out, "10.244.0.2:4000 -> 10.244.0.3:8080, tcp: DROPPED (policy-denied)",
		"decided by node-1 at 2026-11-30 10:00:00.000, 1h0m0s before 2026-11-30 11:00:00",
		"sent to 10.96.0.10:80, service shop/web:http", "from shop/client 300 app=client", "to on node-2 301 -",
		"Ingress, the receiver's policy: dropped by NetworkPolicy shop/web isolation", "policy revision 6", "rule 2")
	at := decided.Add(time.Hour)
	want := &datapathv1.ObserveRequest{
		Since: timestamppb.New(at.Add(-7 * 24 * time.Hour)), Until: timestamppb.New(at), Last: 1,
		Types:     []datapathv1.FlowType{datapathv1.FlowType_FLOW_TYPE_DROP, datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT},
		Protocols: []netv1.Protocol{netv1.Protocol_PROTOCOL_TCP},
		Source: &datapathv1.FlowEndCriteria{
			Pods:   []*datapathv1.PodName{{Namespace: "shop", Name: "client"}},
			Owners: []*workloadv1.Owner{{ContainerId: "shop", InterfaceName: "client"}},
		},
		Destination: &datapathv1.FlowEndCriteria{Ports: []uint32{80}, Selectors: []*datapathv1.LabelSelector{{
			Requirements: []*datapathv1.LabelRequirement{
				{Key: "app", Operator: datapathv1.LabelOperator_LABEL_OPERATOR_IN, Values: []string{"web"}},
				{
					Source: "k8s", Key: "io.kubernetes.pod.namespace", Operator: datapathv1.LabelOperator_LABEL_OPERATOR_IN,
					Values: []string{"shop"},
				},
			},
		}}},
	}
	if got := <-n.Observed; !proto.Equal(got, want) {
		t.Errorf("asked %v\nwant  %v", got, want)
	}
	n.Stored = []*datapathv1.ObserveResponse{{Event: &datapathv1.ObserveResponse_Lost{Lost: &datapathv1.LostEvents{
		Source: datapathv1.LossSource_LOSS_SOURCE_HISTORY, LastTime: timestamppb.New(decided),
	}}}}
	_, errOut := n.Want(t, invocation.ExitFailed, append(ask, "2026-11-30 11:00:00")...)
	nodetest.WantLines(t, errOut, "sluice: no verdict on a connection from shop/client to app=web,"+
		"k8s:io.kubernetes.pod.namespace=shop, tcp port 80, is stored from before 2026-11-30 11:00:00; events up to "+
		"2026-11-30 10:00:00 are missing in the history; `sluice observe --until` shows the stored events")
	<-n.Observed
	n.Want(t, invocation.ExitUsage, append(ask, "yesterday")...)
	n.Stop("hubble")
	_, errOut = n.Want(t, invocation.ExitFailed, append(ask, "1h")...)
	if !strings.Contains(errOut, "sluice-hubble does not run on this node") {
		t.Errorf("without sluice-hubble: %q", errOut)
	}
}

// TestExplainNamesThePod evaluates a packet from a pod to a container without a pod.
func TestExplainNamesThePod(t *testing.T) {
	n := nodetest.New(t, Command)
	owner := &workloadv1.Owner{ContainerId: "0123", InterfaceName: "eth0"}
	n.Explained = map[string]*datapathv1.ExplainResponse{"10.244.0.3": {
		Source: &datapathv1.ExplainedPeer{
			Identity: 300, Known: true, Owner: owner, Pod: &workloadv1.PodReference{Namespace: "shop", Name: "web-0"},
		},
		Destination: &datapathv1.ExplainedPeer{Identity: 301, Known: true, Owner: owner},
	}}
	out, _ := n.Want(t, 0, "explain", "--from", "10.244.0.2", "--to", "10.244.0.3", "--port", "80")
	for _, want := range []string{"from  shop/web-0  300", "to    0123/eth0   301"} {
		if !strings.Contains(out, want) {
			t.Errorf("without %q:\n%s", want, out)
		}
	}
}
