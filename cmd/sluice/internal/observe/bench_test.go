// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package observe

import (
	"bytes"
	"io"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// BenchmarkEventsAsJSON writes 10,000 events of connections between pods.
func BenchmarkEventsAsJSON(b *testing.B) {
	labels := []*workloadv1.Label{
		{Source: "k8s", Key: "app", Value: "web"},
		{Source: "k8s", Key: "io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name", Value: "shop"},
		{Source: "k8s", Key: "io.cilium.k8s.policy.cluster", Value: "default"},
		{Source: "k8s", Key: "io.kubernetes.pod.namespace", Value: "shop"},
	}
	end := func(address string, identity uint32) *datapathv1.FlowEnd {
		return &datapathv1.FlowEnd{
			Address: address, Port: 8080, Identity: identity, Labels: labels, EndpointIndex: 12,
			Owner: &workloadv1.Owner{ContainerId: string(bytes.Repeat([]byte("0123456789abcdef"), 4)), InterfaceName: "eth0"},
			Pod:   &workloadv1.PodReference{Namespace: "shop", Name: "web-0", Uid: "6ba7b810-9dad-11d1-80b4-00c04fd430c8"},
		}
	}
	event := &datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Flow{Flow: &datapathv1.Flow{
		Time: timestamppb.New(time.Unix(1e9, 123456789)), Uuid: "6ba7b810-9dad-11d1-80b4-00c04fd430c8", NodeName: "node1",
		Type: datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT, Verdict: datapathv1.Verdict_VERDICT_FORWARDED,
		Reason: datapathv1.Reason_REASON_FORWARDED_TO_POD, Direction: netv1.Direction_DIRECTION_INGRESS,
		Source: end("10.244.0.2", 300), Destination: end("10.244.0.3", 301), Protocol: 6, TcpFlags: 2, Length: 74,
		Ingress: &datapathv1.SideVerdict{
			Verdict: datapathv1.Verdict_VERDICT_FORWARDED, Rule: 1, Table: 17, Epoch: 3, Revision: 6,
			RuleSources: []string{"NetworkPolicy shop/web spec.ingress[0]"}, DecidedBy: netv1.DecidedBy_DECIDED_BY_RULE,
		},
	}}}
	lines := newLines(&invocation.Invocation{Out: io.Discard, Format: "json"})
	for b.Loop() {
		for range 10_000 {
			if err := lines.Write(Event{ObserveResponse: event}); err != nil {
				b.Fatal(err)
			}
		}
	}
}
