// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	grpcpeer "google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/fieldmaskpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/services/hubble/internal/api/flow"
	"github.com/sluice-net/sluice/services/hubble/internal/api/observer"
	"github.com/sluice-net/sluice/services/hubble/internal/api/peer"
	"github.com/sluice-net/sluice/services/hubble/internal/client/peers"
	"github.com/sluice-net/sluice/services/hubble/internal/history"
	"github.com/sluice-net/sluice/services/hubble/internal/hubbleflow/record"
	"github.com/sluice-net/sluice/services/hubble/internal/server/remote"
	"github.com/sluice-net/sluice/services/hubble/internal/test/authority"
)

// secret is part of every text of a tenant whose flows a client of another tenant must not see.
const secret = "victim"

// podOf returns an end that is a pod. If tenant is set, the namespace of the pod has the tenant label.
func podOf(namespace, tenant string) *flow.Endpoint {
	e := &flow.Endpoint{
		ID: 7, Identity: 4711, ClusterName: namespace + "-cluster", Namespace: namespace, PodName: namespace + "-pod",
		Labels:    []string{"k8s:app=" + namespace, "k8s:io.kubernetes.pod.namespace=" + namespace},
		Workloads: []*flow.Workload{{Kind: "Deployment", Name: namespace + "-workload"}},
	}
	if tenant != "" {
		e.Labels = append(e.Labels, "k8s:io.cilium.k8s.namespace.labels.sluice.io/tenant="+tenant)
	}
	return e
}

// fullFlow returns a flow with every field that could reveal something about a pod's tenant.
func fullFlow(second int, from, to *flow.Endpoint) *flow.Flow {
	policy := func(e *flow.Endpoint) []*flow.Policy {
		return []*flow.Policy{{Kind: "NetworkPolicy", Namespace: e.GetNamespace(), Name: e.GetNamespace() + "-policy"}}
	}
	service := func(e *flow.Endpoint) *flow.Service {
		return &flow.Service{Namespace: e.GetNamespace(), Name: e.GetNamespace() + "-service"}
	}
	extensions, err := structpb.NewStruct(map[string]any{
		"reason": "policy-denied", "service": to.GetNamespace() + "/web:http", "sourceNode": "node-of-" + from.GetNamespace(),
		"destinationNode": "node-of-" + to.GetNamespace(), "originalDestination": "10.96.0.1", "originalDestinationPort": 80,
		"egressRules":  []any{"NetworkPolicy " + from.GetNamespace() + "/p spec"},
		"ingressRules": []any{"NetworkPolicy " + to.GetNamespace() + "/p spec"}, "unknown": secret,
	})
	if err != nil {
		panic(err) // only if a value has a type that JSON lacks
	}
	packed, err := anypb.New(extensions)
	if err != nil {
		panic(err) // likewise
	}
	return &flow.Flow{
		Time: at(second), Uuid: fmt.Sprintf("%s-%s-%d", from.GetNamespace(), to.GetNamespace(), second), NodeName: "node-1",
		Verdict: flow.Verdict_DROPPED, DropReasonDesc: flow.DropReason_POLICY_DENIED,
		Ethernet: &flow.Ethernet{Source: "mac-of-" + from.GetNamespace()},
		IP:       &flow.IP{Source: "10.0.0.1", Destination: "10.0.0.2", IpVersion: flow.IPVersion_IPv4},
		L4: &flow.Layer4{Protocol: &flow.Layer4_TCP{TCP: &flow.TCP{
			SourcePort: 4000, DestinationPort: 80, Flags: &flow.TCPFlags{SYN: true},
		}}},
		Source: from, Destination: to, SourceNames: []string{from.GetNamespace() + ".example"},
		DestinationNames: []string{to.GetNamespace() + ".example"}, NodeLabels: []string{secret}, ProxyPort: 1,
		EventType: &flow.CiliumEventType{Type: 1}, IsReply: wrapperspb.Bool(false),
		SourceService: service(from), DestinationService: service(to),
		EgressAllowedBy: policy(from), EgressDeniedBy: policy(from),
		IngressAllowedBy: policy(to), IngressDeniedBy: policy(to),
		PolicyLog: []string{secret}, Interface: &flow.NetworkInterface{Index: 9, Name: secret}, Extensions: packed,
		TraceContext: &flow.TraceContext{Parent: &flow.TraceParent{TraceId: secret}},
		L7:           &flow.Layer7{Record: &flow.Layer7_Dns{Dns: &flow.DNS{Query: from.GetNamespace() + ".query."}}},
		Summary:      "TCP Flags: SYN", //nolint:staticcheck // the CLI prints it
	}
}

func (b *bench) store(part string, f *flow.Flow) {
	b.t.Helper()
	data, err := proto.Marshal(f)
	if err != nil {
		b.t.Fatal(err)
	}
	b.h.Append(history.Entry{Part: part, Time: f.GetTime().AsTime(), Data: data, Facts: record.Facts(f)})
}

// overTLS serves the API of a bench to clients with certificates.
type overTLS struct {
	*bench
	ca      *authority.CA
	address string
}

func (b *bench) overTLS() *overTLS {
	b.t.Helper()
	dir := b.t.TempDir()
	o := &overTLS{bench: b, ca: authority.New(b.t)}
	files := remote.Files{
		Cert: filepath.Join(dir, "tls.crt"), Key: filepath.Join(dir, "tls.key"), ClientCA: filepath.Join(dir, "ca.crt"),
	}
	certificate, key := o.ca.Sign("node-1")
	for file, content := range map[string][]byte{files.Cert: certificate, files.Key: key, files.ClientCA: o.ca.PEM} {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			b.t.Fatal(err)
		}
	}
	s, err := remote.Listen(remote.Options{
		Address: "127.0.0.1:0", Files: files, Healthy: []string{""}, Log: log.Discard(), Register: b.RegisterRemote,
	})
	if err != nil {
		b.t.Fatal(err)
	}
	o.address = s.Address()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- s.Run(ctx) }()
	b.t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			b.t.Error(err)
		}
	})
	return o
}

// certified is a client with a certificate.
type certified struct {
	observer.ObserverClient
	peer.PeerClient
	t testing.TB
}

func (o *overTLS) reader(name string) *certified {
	o.t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+o.address,
		grpc.WithTransportCredentials(credentials.NewTLS(o.ca.Client(name, "node-1"))))
	if err != nil {
		o.t.Fatal(err)
	}
	o.t.Cleanup(func() { _ = conn.Close() })
	return &certified{observer.NewObserverClient(conn), peer.NewPeerClient(conn), o.t}
}

// asks returns the IDs of the flows in an answer, and "lost N" for losses. No message may contain the secret.
func (r *certified) asks(q *observer.GetFlowsRequest) (ids []string, err error) {
	r.t.Helper()
	stream, err := r.GetFlows(r.t.Context(), q)
	if err != nil {
		return nil, err
	}
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return ids, nil
		}
		if err != nil {
			return ids, err
		}
		id := m.GetFlow().GetUuid()
		if l := m.GetLostEvents(); l != nil {
			id = fmt.Sprint("lost ", l.GetNumEventsLost())
		}
		ids = append(ids, id)
		if f := m.GetFlow(); f != nil {
			f.Uuid = "" // the ID is from the test and contains both names
		}
		if text := prototext.Format(m); strings.Contains(text, secret) {
			r.t.Errorf("%v: an answer contains\n%s", q, text)
		}
	}
}

// TestReaderOfATenantSeesOnlyItsFlows: whatever a client with the certificate of a tenant requests, it gets only
// flows of the tenant's pods. Of the other ends of their connections, it sees only addresses and ports.
func TestReaderOfATenantSeesOnlyItsFlows(t *testing.T) {
	b := newBench(t, 64<<20)
	b.others = func() ([]peers.Node, <-chan struct{}) {
		return []peers.Node{other("node-of-victim", "192.0.2.2")}, make(chan struct{})
	}
	acme1, acme2, victim := podOf("a1", "acme"), podOf("a2", "acme"), podOf(secret, "")
	second := 3000
	var visible []string
	add := func(part string, from, to *flow.Endpoint) {
		f := fullFlow(second, from, to)
		second++
		b.store(part, f)
		if strings.Contains(f.GetUuid(), "a1") || strings.Contains(f.GetUuid(), "a2") {
			visible = append(visible, f.GetUuid())
		}
	}
	// These ends look like pods of the tenant, but are not: they have a namespace with the tenant's name, the tenant
	// label on the pod, or another label source.
	named := podOf("acme", "")
	named.Labels = append(named.Labels, "k8s:sluice.io/tenant=acme",
		"cni:io.cilium.k8s.namespace.labels.sluice.io/tenant=acme")
	named.PodName, named.Labels[0] = secret, "k8s:app="+secret
	// The labels of this pod are unknown, and so is its tenant.
	unknown := &flow.Endpoint{ID: 9, Namespace: "unknown", PodName: secret}
	for range 5 {
		add("namespace victim", victim, victim)
		add("tenant acme", acme1, victim)
		add("namespace victim", victim, acme2)
		add("namespace acme", named, victim)
		add("namespace unknown", unknown, named)
		add("from outside to tenant acme", &flow.Endpoint{Labels: []string{"reserved:world"}}, acme1)
	}
	own := fullFlow(second, acme1, acme2)
	own.NodeLabels, own.PolicyLog, own.Interface, own.TraceContext, own.L7, own.Extensions = nil, nil, nil, nil, nil, nil
	b.store("tenant acme", own)
	visible = append(visible, own.GetUuid())
	for _, reopened := range []bool{false, true} {
		if reopened { // the flows are then only in files
			if err := b.h.Close(); err != nil {
				t.Fatal(err)
			}
			b.open(64 << 20)
		}
		o := b.overTLS()
		tenant, all := o.reader("tenant.acme.sluice"), o.reader("operator")
		if got, err := tenant.asks(&observer.GetFlowsRequest{}); err != nil || !slices.Equal(got, visible) {
			t.Errorf("everything: %q, %v; want %q", got, err, visible)
		}
		asksByPages(t, tenant, visible, second)
		asksByFilters(t, tenant, visible, victim)
		asksByOtherCalls(t, tenant, all)
	}
}

// asksByPages requests every range of the flows.
func asksByPages(t *testing.T, tenant *certified, visible []string, last int) {
	t.Helper()
	for n := range len(visible) + 3 {
		first, newest := visible[:min(n, len(visible))], visible[max(0, len(visible)-n):]
		if n == 0 {
			first, newest = visible, visible
		}
		got, err := tenant.asks(&observer.GetFlowsRequest{Number: uint64(n), First: true})
		if err != nil || !slices.Equal(got, first) {
			t.Errorf("the first %d: %q, %v", n, got, err)
		}
		if got, err = tenant.asks(&observer.GetFlowsRequest{Number: uint64(n)}); err != nil || !slices.Equal(got, newest) {
			t.Errorf("the last %d: %q, %v", n, got, err)
		}
	}
	mask := &fieldmaskpb.FieldMask{Paths: []string{
		"uuid", "source.pod_name", "source.labels", "destination.pod_name", "destination.labels", "ethernet", "interface",
		"l7", "extensions", "source_service", "destination_service", "egress_denied_by", "ingress_denied_by", "node_labels",
	}}
	if got, err := tenant.asks(&observer.GetFlowsRequest{FieldMask: mask}); err != nil || !slices.Equal(got, visible) {
		t.Errorf("with a mask: %q, %v", got, err)
	}
	var pages []string
	for s := 3000; s <= last; s++ {
		got, err := tenant.asks(&observer.GetFlowsRequest{Since: at(s), Until: at(s), Number: 10})
		if err != nil {
			t.Fatal(err)
		}
		pages = append(pages, got...)
	}
	if !slices.Equal(pages, visible) {
		t.Errorf("second by second: %q, want %q", pages, visible)
	}
}

// asksByFilters sends requests with filters for hidden properties. No filter may match because of a hidden property,
// neither in the allow list nor in the deny list.
func asksByFilters(t *testing.T, tenant *certified, visible []string, hidden *flow.Endpoint) {
	t.Helper()
	workload := []*flow.Workload{{Name: secret + "-workload"}}
	for name, f := range map[string]*flow.FlowFilter{
		"source pod":          {SourcePod: []string{"victim/victim-pod"}},
		"destination pod":     {DestinationPod: []string{"victim/"}},
		"source label":        {SourceLabel: []string{"k8s:app=victim"}},
		"destination label":   {DestinationLabel: []string{"app in (victim)"}},
		"source identity":     {SourceIdentity: []uint32{hidden.GetIdentity()}, SourceLabel: []string{"!app"}},
		"destination service": {DestinationService: []string{"victim/victim-service"}},
		"source service":      {SourceService: []string{"victim/"}},
		"source workload":     {SourceWorkload: workload}, "destination workload": {DestinationWorkload: workload},
		"source name":           {SourceFqdn: []string{"victim.example"}},
		"destination name":      {DestinationFqdn: []string{"victim.example"}},
		"cluster of the source": {SourceClusterName: []string{"victim-cluster"}},
		"node labels":           {NodeLabels: []string{secret}},
		"node name":             {NodeName: []string{"node-of-victim"}},
		"ID":                    {Uuid: []string{"victim-victim-3000"}},
		"interface":             {Interface: []*flow.NetworkInterface{{Name: secret}}},
		"trace":                 {TraceId: []string{secret}},
		"query":                 {DnsQuery: []string{secret}},
		"namespace of the tenant's name": {
			SourcePod: []string{"acme/"},
		},
	} {
		got, err := tenant.asks(&observer.GetFlowsRequest{Whitelist: []*flow.FlowFilter{f}})
		if err != nil || len(got) > 0 {
			t.Errorf("%s finds %q, %v", name, got, err)
		}
		got, err = tenant.asks(&observer.GetFlowsRequest{Blacklist: []*flow.FlowFilter{f}})
		if err != nil || !slices.Equal(got, visible) {
			t.Errorf("%s leaves out some of %q: %q, %v", name, visible, got, err)
		}
	}
	// Filters on visible properties find the flows.
	for name, f := range map[string]*flow.FlowFilter{
		"own pods": {SourcePod: []string{"a1/"}}, "addresses": {SourceIp: []string{"10.0.0.1"}},
		"verdicts": {Verdict: []flow.Verdict{flow.Verdict_DROPPED}}, "world": {SourceLabel: []string{"reserved:world"}},
	} {
		got, err := tenant.asks(&observer.GetFlowsRequest{Whitelist: []*flow.FlowFilter{f}})
		if err != nil || len(got) == 0 || len(got) > len(visible) {
			t.Errorf("%s find %d of %d, %v", name, len(got), len(visible), err)
		}
	}
}

// asksByOtherCalls makes all calls that return something other than flows, on the same connections, alternating with
// a client that may see everything.
func asksByOtherCalls(t *testing.T, tenant, all *certified) {
	t.Helper()
	const total, own = 31, 11
	for range 2 {
		st, err := all.ServerStatus(t.Context(), &observer.ServerStatusRequest{})
		if err != nil || st.GetNumFlows() != total || st.GetFlowsRate() == 0 {
			t.Errorf("status for all: %v, %v", st, err)
		}
		st, err = tenant.ServerStatus(t.Context(), &observer.ServerStatusRequest{})
		if err != nil || st.GetNumFlows() != own || st.GetMaxFlows() != own || st.GetSeenFlows() != 0 ||
			st.GetFlowsRate() != 0 {
			t.Errorf("status for the tenant: %v, %v", st, err)
		}
		nodes, err := tenant.GetNodes(t.Context(), &observer.GetNodesRequest{})
		if err != nil || len(nodes.GetNodes()) != 1 || nodes.GetNodes()[0].GetNumFlows() != own ||
			nodes.GetNodes()[0].GetSeenFlows() != 0 {
			t.Errorf("nodes: %v, %v", nodes, err)
		}
		names, err := all.GetNamespaces(t.Context(), &observer.GetNamespacesRequest{})
		if err != nil || len(names.GetNamespaces()) != 5 {
			t.Errorf("namespaces for all: %v, %v", names, err)
		}
		names, err = tenant.GetNamespaces(t.Context(), &observer.GetNamespacesRequest{})
		if err != nil || len(names.GetNamespaces()) != 2 || names.GetNamespaces()[0].GetNamespace() != "a1" ||
			names.GetNamespaces()[1].GetNamespace() != "a2" {
			t.Errorf("namespaces for the tenant: %v, %v", names, err)
		}
		stream, err := tenant.Notify(t.Context(), &peer.NotifyRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if m, err := stream.Recv(); status.Code(err) != codes.PermissionDenied {
			t.Errorf("peers: %v, %v", m, err)
		}
		if got, err := all.GetFlows(t.Context(), &observer.GetFlowsRequest{}); err != nil {
			t.Error(err)
		} else if m, err := got.Recv(); err != nil || m.GetFlow().GetSource().GetNamespace() != secret {
			t.Errorf("flows for all begin with %v, %v", m, err)
		}
	}
}

// TestReaderOfATenantFollowsOnlyItsFlows: a client of one tenant follows only its own flows while other tenants have
// many. A loss has no number.
func TestReaderOfATenantFollowsOnlyItsFlows(t *testing.T) {
	b := newBench(t, 64<<20)
	o := b.overTLS()
	tenant := o.reader("namespace.shop.sluice")
	stream, err := tenant.GetFlows(t.Context(), &observer.GetFlowsRequest{Follow: true, Since: at(0)})
	if err != nil {
		t.Fatal(err)
	}
	shop, victim := podOf("shop", ""), podOf(secret, "")
	b.store("namespace shop", fullFlow(1, shop, victim))
	if m, err := stream.Recv(); err != nil || m.GetFlow().GetSource().GetPodName() != "shop-pod" {
		t.Fatalf("%v, %v", m, err)
	}
	for i := range 3 * history.Recent {
		b.store("namespace victim", fullFlow(i, victim, victim))
	}
	b.addLoss(12_345, 4000)
	b.store("namespace shop", fullFlow(4001, victim, shop))
	for {
		m, err := stream.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if l := m.GetLostEvents(); l != nil {
			if l.GetNumEventsLost() != 0 {
				t.Errorf("a loss has the number %d", l.GetNumEventsLost())
			}
			continue
		}
		f := m.GetFlow()
		f.Uuid = ""
		if text := prototext.Format(f); strings.Contains(text, secret) || f.GetDestination().GetPodName() != "shop-pod" {
			t.Errorf("after the flows of others comes\n%s", text)
		}
		return
	}
}

// asTenant returns the context of a call by a client with a tenant's certificate.
func asTenant(ctx context.Context, name string) context.Context {
	return grpcpeer.NewContext(ctx, &grpcpeer.Peer{AuthInfo: credentials.TLSInfo{State: tls.ConnectionState{
		VerifiedChains: [][]*x509.Certificate{{{DNSNames: []string{name}}}},
	}}})
}

// TestReaderOfATenantLearnsOnlyOfItsOwnLosses: flows of another tenant displace no flows of the client's tenant, and
// the client cannot see their number. Displaced, corrupt and unreadable records in the tenant's own part are reported
// as losses.
func TestReaderOfATenantLearnsOnlyOfItsOwnLosses(t *testing.T) {
	asks := func(b *bench, name string) []string {
		t.Helper()
		s := &stream{}
		if err := b.answers(asTenant(t.Context(), name), &observer.GetFlowsRequest{Since: at(0)}, s); err != nil {
			t.Fatal(err)
		}
		return s.texts()
	}
	b := newBench(t, history.MinBytes)
	shop, victim := podOf("shop", ""), podOf(secret, "")
	own := fullFlow(1, shop, shop)
	b.store("namespace shop", own)
	b.h.Append(history.Entry{Part: "namespace victim", Time: at(2).AsTime(), Data: []byte{0xff}})
	const flows = 30_000
	for i := range flows {
		f := &flow.Flow{Time: at(i), Source: victim, Destination: victim, SourceNames: []string{noise(300)}}
		b.store("namespace victim", f)
	}
	b.h.Append(history.Entry{Part: "namespace victim", Time: at(2).AsTime(), Data: []byte{0xff}})
	b.h.Flush()
	if got := asks(b, "namespace.victim.sluice"); got[0] != "lost 0" || len(got) > flows {
		t.Fatalf("the answer to the tenant whose flows were displaced has %d parts and begins with %q", len(got), got[0])
	}
	if got := asks(b, "namespace.shop.sluice"); !slices.Equal(got, []string{own.GetUuid()}) {
		t.Errorf("the answer to the other tenant: %q, want its only flow", got)
	}
	// First a file of the other tenant is corrupt, and then a file of the client's tenant.
	if err := b.h.Close(); err != nil {
		t.Fatal(err)
	}
	corrupt := func(pattern, text string) {
		t.Helper()
		files, err := filepath.Glob(filepath.Join(b.dir, pattern))
		if err != nil || len(files) == 0 {
			t.Fatalf("files %s: %v, %v", pattern, files, err)
		}
		for _, file := range files {
			content, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if strings.Contains(string(content), text) {
				content[len(content)-1] ^= 1
				if err := os.WriteFile(file, content, 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	corrupt("*.segment", "namespace victim")
	b.open(history.MinBytes)
	if got := asks(b, "namespace.shop.sluice"); !slices.Equal(got, []string{own.GetUuid()}) {
		t.Errorf("with corrupt files of another tenant: %q, want the only flow", got)
	}
	b.h.Append(history.Entry{Part: "namespace shop", Time: at(70_000).AsTime(), Data: []byte{0xff}})
	if got := asks(b, "namespace.shop.sluice"); !slices.Equal(got, []string{own.GetUuid(), "lost 0"}) {
		t.Errorf("with a record of its own that cannot be read: %q, want the flow and a loss", got)
	}
}

// TestReaderOfATenantThatFallsBehindLosesNoFlow: between two answers, more flows of other tenants arrive than are
// kept in memory. A loss would reveal their number, so the call reads the files.
func TestReaderOfATenantThatFallsBehindLosesNoFlow(t *testing.T) {
	b := newBench(t, 64<<20)
	shop, victim := podOf("shop", ""), podOf(secret, "")
	var want []string
	add := func(second int) {
		f := fullFlow(second, shop, shop)
		b.store("namespace shop", f)
		want = append(want, f.GetUuid())
	}
	add(1)
	s := &stream{enough: 4, first: func() {
		add(2)
		for i := range 3 * history.Recent {
			b.store("namespace victim", fullFlow(i, victim, victim))
			if i == history.Recent {
				add(3)
			}
		}
		add(4)
		add(5)
	}}
	err := b.answers(asTenant(t.Context(), "namespace.shop.sluice"),
		&observer.GetFlowsRequest{Follow: true, Since: at(0)}, s)
	if got := s.texts(); status.Code(err) != codes.Canceled || len(got) < 4 || !slices.Equal(got[:4], want[:4]) {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
}

// TestNamespacesWithoutTheLabelCanBeOneTenant: all namespaces without the label are one tenant. A certificate for one
// of these namespaces is refused, because the namespace is not a tenant.
func TestNamespacesWithoutTheLabelCanBeOneTenant(t *testing.T) {
	b := newBench(t, 64<<20)
	b.o.Parts.Settings.Together = true
	b.store("x", fullFlow(1, podOf("shop", ""), podOf("shop", "")))
	b.store("x", fullFlow(2, podOf("shop", "acme"), podOf("shop", "acme")))
	o := b.overTLS()
	if got, err := o.reader("namespace.shop.sluice").asks(&observer.GetFlowsRequest{}); status.Code(err) !=
		codes.PermissionDenied || !strings.Contains(err.Error(), "shares.unlabelled") {
		t.Errorf("a namespace: %q, %v", got, err)
	}
	stream, err := o.reader("tenant.acme.sluice").GetFlows(t.Context(), &observer.GetFlowsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if m, err := stream.Recv(); err != nil || m.GetFlow().GetUuid() != "shop-shop-2" {
		t.Errorf("a tenant: %v, %v", m, err)
	}
}
