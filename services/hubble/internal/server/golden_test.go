// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/encoding/protojson"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/api/observer"
)

// question is a command line of the hubble CLI. request is the request that the CLI sends for it. It is set if the
// CLI prints the answers as JSON. A test without the CLI then sends the same request and must get the same answers.
type question struct {
	args    string
	request *observer.GetFlowsRequest
}

// asked returns a request with one filter.
func asked(f *flow.FlowFilter) *observer.GetFlowsRequest {
	return &observer.GetFlowsRequest{Number: 100, Whitelist: []*flow.FlowFilter{f}}
}

// questions are the command lines of `make test-hubble`. `make test` sends their requests with a client that uses the
// same protos.
var questions = []question{
	{"observe --last 100", nil},
	{"observe --last 100 -o compact", nil},
	{"observe --last 100 -o dict", nil},
	{"observe --last 100 -o table", nil},
	{"observe --last 100 -o json", nil},
	{"observe --last 2 -o compact", nil},
	{"observe --first 2 -o compact", nil},
	{"observe --last 100 -o compact --print-node-name --time-format RFC3339Milli", nil},
	{"observe --last 100 -o compact --not --namespace shop", nil},
	{"observe --last 100 -o compact --pod shop/client", nil},
	{"observe --last 100 -o compact --to-service shop/web", nil},
	{"observe --last 100 -o compact --from-label app=client --to-label app=web", nil},
	{"observe --last 100 -o compact --type drop", nil},
	{"observe --last 100 -o compact --node-name node-1", nil},
	{"observe --since 2027-01-15T08:00:01Z --until 2027-01-15T08:00:03Z -o compact", nil},
	{"status", nil},
	{"list nodes", nil},
	{"list namespaces", nil},
	{"observe --last 100 -o jsonpb", &observer.GetFlowsRequest{Number: 100}},
	{"observe --first 3 -o jsonpb", &observer.GetFlowsRequest{Number: 3, First: true}},
	{"observe --last 100 -o jsonpb --verdict DROPPED", asked(&flow.FlowFilter{
		Verdict: []flow.Verdict{flow.Verdict_DROPPED},
	})},
	{"observe --last 100 -o jsonpb --drop-reason-desc POLICY_DENY", asked(&flow.FlowFilter{
		DropReasonDesc: []flow.DropReason{flow.DropReason_POLICY_DENY},
	})},
	{"observe --last 100 -o jsonpb --protocol udp", asked(&flow.FlowFilter{Protocol: []string{"udp"}})},
	{"observe --last 100 -o jsonpb --to-port 8080", asked(&flow.FlowFilter{DestinationPort: []string{"8080"}})},
	{"observe --last 100 -o jsonpb --from-ip 10.244.0.2", asked(&flow.FlowFilter{SourceIp: []string{"10.244.0.2"}})},
	{"observe --last 100 -o jsonpb --to-pod shop/web", asked(&flow.FlowFilter{DestinationPod: []string{"shop/web"}})},
	{"observe --last 100 -o jsonpb --from-identity 301", asked(&flow.FlowFilter{SourceIdentity: []uint32{301}})},
	{"observe --last 100 -o jsonpb --traffic-direction ingress", asked(&flow.FlowFilter{
		TrafficDirection: []flow.TrafficDirection{flow.TrafficDirection_INGRESS},
	})},
	{"observe --last 100 -o jsonpb --tcp-flags SYN,ACK", asked(&flow.FlowFilter{
		TcpFlags: []*flow.TCPFlags{{SYN: true, ACK: true}},
	})},
	{"observe --last 100 -o jsonpb --uuid 00000000-0000-8000-8000-000000000004", asked(&flow.FlowFilter{
		Uuid: []string{"00000000-0000-8000-8000-000000000004"},
	})},
	{"observe --last 100 -o jsonpb --ip-version v6", asked(&flow.FlowFilter{
		IpVersion: []flow.IPVersion{flow.IPVersion_IPv6},
	})},
}

// goldenEvents returns events of every kind, one per second.
func goldenEvents() []*datapathv1.Flow {
	label := func(key, value string) *workloadv1.Label {
		return &workloadv1.Label{Source: "k8s", Key: key, Value: value}
	}
	pod := func(name, address string, port, identity uint32) *datapathv1.FlowEnd {
		return &datapathv1.FlowEnd{
			Address: address, Port: port, Identity: identity, EndpointIndex: identity - 290,
			Pod:    &workloadv1.PodReference{Namespace: "shop", Name: name, Uid: "u-" + name},
			Labels: []*workloadv1.Label{label("app", name), label("io.kubernetes.pod.namespace", "shop")},
		}
	}
	client, web := pod("client", "10.244.0.2", 40000, 300), pod("web", "10.244.0.3", 8080, 301)
	there := &datapathv1.FlowEnd{
		Address: "10.244.1.2", Port: 5432, Identity: 302, NodeName: "node-2",
		Labels: []*workloadv1.Label{label("app", "db"), label("io.kubernetes.pod.namespace", "data")},
	}
	world := &datapathv1.FlowEnd{
		Address: "2001:db8::7", Port: 443, Identity: 2, Labels: []*workloadv1.Label{{Source: "reserved", Key: "world"}},
	}
	allowed := &datapathv1.SideVerdict{
		Verdict: datapathv1.Verdict_VERDICT_FORWARDED, DecidedBy: netv1.DecidedBy_DECIDED_BY_RULE, Rule: 1, Revision: 7,
		RuleSources: []string{"NetworkPolicy shop/client spec.egress[0]"},
	}
	denied := &datapathv1.SideVerdict{
		Verdict: datapathv1.Verdict_VERDICT_DROPPED, DecidedBy: netv1.DecidedBy_DECIDED_BY_RULE, Rule: 2, Revision: 8,
		RuleSources: []string{"CiliumNetworkPolicy data/db spec.ingressDeny[0]"},
	}
	const (
		verdict = datapathv1.FlowType_FLOW_TYPE_POLICY_VERDICT
		drop    = datapathv1.FlowType_FLOW_TYPE_DROP
		closed  = datapathv1.FlowType_FLOW_TYPE_CONNECTION_CLOSED
	)
	events := []*datapathv1.Flow{
		{Type: verdict, Source: client, Destination: web, TcpFlags: 2, Egress: allowed},
		{Type: verdict, Source: web, Destination: client, TcpFlags: 0x12, Reply: true, Egress: allowed},
		{Type: drop, Source: client, Destination: there, TcpFlags: 2, Ingress: denied},
		{
			Type: verdict, Source: client, Destination: web, TcpFlags: 2, Egress: allowed, Service: "shop/web:http",
			OriginalDestinationAddress: "10.96.0.10", OriginalDestinationPort: 80,
		},
		{Type: closed, Source: client, Destination: web, TcpFlags: 0x11, Egress: allowed},
		{Type: verdict, Source: web, Destination: world, Protocol: netv1.Protocol_PROTOCOL_UDP, Ethertype: 0x86dd},
		{
			Type: drop, Source: web, Destination: world, Protocol: netv1.Protocol_PROTOCOL_ICMPV6, Ethertype: 0x86dd,
			Icmp: &datapathv1.IcmpHeader{Type: 128}, Reason: datapathv1.Reason_REASON_NO_ROUTE,
		},
	}
	for i, f := range events {
		f.Time, f.NodeName, f.SourceMac = at(i), "node-1", "02:00:00:00:00:01"
		f.Uuid = fmt.Sprintf("00000000-0000-8000-8000-%012d", i+1)
		f.Direction, f.Verdict = netv1.Direction_DIRECTION_EGRESS, datapathv1.Verdict_VERDICT_FORWARDED
		if f.GetIngress() != nil {
			f.Direction = netv1.Direction_DIRECTION_INGRESS
		}
		if f.GetProtocol() == 0 {
			f.Protocol = netv1.Protocol_PROTOCOL_TCP
		}
		if f.GetEthertype() == 0 {
			f.Ethertype = 0x0800
		}
		if f.GetType() == drop {
			f.Verdict = datapathv1.Verdict_VERDICT_DROPPED
			if f.GetReason() == 0 {
				f.Reason = datapathv1.Reason_REASON_POLICY_DENIED
			}
		}
	}
	return events
}

// golden serves the golden events on a socket and returns the path of the socket.
func golden(t *testing.T) string {
	t.Helper()
	b := newBench(t, 8<<20)
	sink := b.recorder()
	for _, f := range goldenEvents() {
		sink.Flow(f)
	}
	dir, err := os.MkdirTemp("", "sl") // the path of t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := filepath.Join(dir, "hubble.sock")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	b.RegisterRemote(s)
	h := health.NewServer()
	h.SetServingStatus(HealthName, grpc_health_v1.HealthCheckResponse_SERVING)
	grpc_health_v1.RegisterHealthServer(s, h)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return path
}

// goldenOutput is the file with the output of a command line.
func goldenOutput(args string) string {
	name := strings.Map(func(r rune) rune {
		if r == ' ' || r == '/' || r == ':' || r == '=' {
			return '_'
		}
		return r
	}, strings.ReplaceAll(args, "--", ""))
	return filepath.Join("testdata", "hubble", name+".txt")
}

// canonical returns JSON lines with sorted keys, because protojson varies the order of keys and the spaces.
func canonical(text []byte) (string, error) {
	var out strings.Builder
	for decoder := json.NewDecoder(bytes.NewReader(text)); ; {
		var v any
		if err := decoder.Decode(&v); errors.Is(err, io.EOF) {
			return out.String(), nil
		} else if err != nil {
			return "", err
		}
		line, err := json.Marshal(v)
		if err != nil {
			return "", err
		}
		out.Write(append(line, '\n'))
	}
}

// TestClientGetsTheGoldenAnswers: a client that uses the same protos gets the answers that the CLI has printed. `make
// test-hubble` compares the output of the CLI.
func TestClientGetsTheGoldenAnswers(t *testing.T) {
	conn, err := grpc.NewClient("unix://"+golden(t), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, q := range questions {
		if q.request == nil {
			continue
		}
		want, err := os.ReadFile(goldenOutput(q.args))
		if err != nil {
			t.Error(err)
			continue
		}
		stream, err := observer.NewObserverClient(conn).GetFlows(t.Context(), q.request)
		if err != nil {
			t.Fatal(err)
		}
		var lines []byte
		for {
			m, err := stream.Recv()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", q.args, err)
			}
			line, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(m)
			if err != nil {
				t.Fatal(err)
			}
			lines = append(append(lines, line...), '\n')
		}
		if got, err := canonical(lines); err != nil || got != string(want) {
			t.Errorf("%s: %v\ngot\n%swant\n%s", q.args, err, got, want)
		}
	}
}
