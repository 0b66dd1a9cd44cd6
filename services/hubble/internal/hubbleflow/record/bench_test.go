// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package record

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/log"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/hubble/internal/history"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/flowmetrics"
)

// podEnd returns an end that is a pod with the usual labels of a pod of a Deployment.
func podEnd(n int) *datapathv1.FlowEnd {
	label := func(key, value string) *workloadv1.Label {
		return &workloadv1.Label{Source: "k8s", Key: key, Value: value}
	}
	return &datapathv1.FlowEnd{
		Address: fmt.Sprintf("10.244.0.%d", n), Port: uint32(8000 + n), Identity: uint32(17_000 + n),
		Labels: []*workloadv1.Label{
			label("app", "web"), label("io.cilium.k8s.namespace.labels.kubernetes.io/metadata.name", "shop"),
			label("io.kubernetes.pod.namespace", "shop"), label("io.cilium.k8s.policy.serviceaccount", "default"),
		},
		EndpointIndex: uint32(n + 1), Pod: &workloadv1.PodReference{Namespace: "shop", Name: fmt.Sprint("web-5d9c6-", n)},
	}
}

// BenchmarkFlow measures the processing of an event from the datapath's message to the history and the metrics.
func BenchmarkFlow(b *testing.B) {
	h, err := history.Open(history.Options{
		Dir: b.TempDir(), MaxBytes: 64 << 20, MaxAge: time.Hour, Describe: Describe, Now: time.Now, Log: log.Discard(),
	})
	if err != nil {
		b.Fatal(err)
	}
	defer h.Close() //nolint:errcheck // nothing reads the history afterwards
	metrics := flowmetrics.New(flowmetrics.Options{Names: flowmetrics.Names, MaxSeries: 10_000})
	r := New(Options{History: h, Metrics: metrics, Now: time.Now, Log: log.Discard()})
	var flows []*datapathv1.Flow
	for i := range 64 {
		flows = append(flows, &datapathv1.Flow{
			Uuid: "9f2d4f6a-0c51-8a3e-8000-000000001234", NodeName: "node-1", Ethertype: 0x0800, Length: 74,
			Type: datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT, Verdict: datapathv1.Verdict_VERDICT_FORWARDED,
			Reason: datapathv1.Reason_REASON_POLICY_DENIED, Direction: netv1.Direction_DIRECTION_EGRESS,
			Protocol: netv1.Protocol_PROTOCOL_TCP, TcpFlags: 2, SourceMac: "0a:58:0a:f4:00:02", InterfaceIndex: 9,
			Source: podEnd(i), Destination: podEnd(i + 64), Egress: &datapathv1.SideVerdict{
				Verdict: datapathv1.Verdict_VERDICT_FORWARDED, Rule: 3, Table: 4, Epoch: 5, Revision: 6,
				RuleSources: []string{"NetworkPolicy shop/web spec.egress[0]"},
			},
		})
	}
	b.ReportAllocs()
	began := spent(b)
	for i := 0; b.Loop(); i++ {
		f := flows[i%len(flows)]
		f.Time = timestamppb.Now()
		r.Flow(f)
	}
	// Other processes on the machine affect the elapsed time, but hardly the CPU time.
	b.ReportMetric(float64(spent(b)-began)/float64(b.N), "cpu-ns/op")
}

// spent returns the CPU time of this process, including the compression of segments.
func spent(b *testing.B) time.Duration {
	b.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
