// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/timestamppb"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// fakeNode answers as the services of a node with two containers do.
type fakeNode struct {
	runDir   string
	servers  map[string]*grpc.Server
	observed chan *datapathv1.ObserveRequest
	addReady bool
	// knownReady: labels that an endpoint has can be connected all the same.
	knownReady bool
	identity   *fakeIdentity

	ipam        *fakeIPAM
	policy      *fakePolicy
	policyMode  string
	judged      *datapathv1.ExplainRequest
	differences []*datapathv1.Difference
	flows       []*datapathv1.Flow
}

func newFakeNode(t *testing.T) *fakeNode {
	t.Helper()
	dir, err := os.MkdirTemp("", "sl") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	n := &fakeNode{runDir: dir, servers: map[string]*grpc.Server{}, observed: make(chan *datapathv1.ObserveRequest, 1), addReady: true, identity: &fakeIdentity{}, ipam: &fakeIPAM{}, policy: newFakePolicy(), policyMode: "none"}
	for _, service := range []string{"identity", "ipam", "policy", "datapath"} {
		if err := os.Mkdir(filepath.Join(dir, service), 0o750); err != nil {
			t.Fatal(err)
		}
		l, err := net.Listen("unix", filepath.Join(dir, service, service+".sock"))
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer()
		switch service {
		case "identity":
			identityv1.RegisterIdentityServiceServer(s, n.identity)
		case "ipam":
			ipamv1.RegisterIPAMServiceServer(s, n.ipam)
		case "policy":
			policyv1.RegisterPolicyServiceServer(s, n.policy)
		case "datapath":
			datapathv1.RegisterDatapathServiceServer(s, &fakeDatapath{node: n})
			datapathv1.RegisterObserverServiceServer(s, &fakeObserver{node: n})
		}
		grpc_health_v1.RegisterHealthServer(s, health.NewServer())
		n.servers[service] = s
		go s.Serve(l) //nolint:errcheck // ends with Stop
	}
	t.Cleanup(func() {
		for _, s := range n.servers {
			s.Stop()
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return n
}

// sluice runs the command against the node.
func (n *fakeNode) sluice(args ...string) (code int, stdout, stderr string) {
	var out, errOut bytes.Buffer
	code = run(append([]string{"--run-dir", n.runDir}, args...), &out, &errOut, commands...)
	return code, out.String(), errOut.String()
}

func (n *fakeNode) want(t *testing.T, code int, args ...string) (stdout, stderr string) {
	t.Helper()
	got, stdout, stderr := n.sluice(args...)
	if got != code {
		t.Fatalf("sluice %s: exit code %d, want %d\n%s%s", strings.Join(args, " "), got, code, stdout, stderr)
	}
	return stdout, stderr
}

const longID = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

func label(key, value string) *workloadv1.Label {
	return &workloadv1.Label{Source: "k8s", Key: key, Value: value}
}

type fakeIdentity struct {
	identityv1.UnimplementedIdentityServiceServer
	storeError string // why etcd is away
}

func (*fakeIdentity) ListIdentities(r *identityv1.ListIdentitiesRequest, s grpc.ServerStreamingServer[identityv1.ListIdentitiesResponse]) error {
	if len(r.GetScopes()) == 0 || r.GetScopes()[0] == identityv1.Scope_SCOPE_RESERVED {
		host := &identityv1.Identity{Number: 1, Scope: identityv1.Scope_SCOPE_RESERVED, Labels: []*workloadv1.Label{{Source: "reserved", Key: "host"}}}
		if err := s.Send(&identityv1.ListIdentitiesResponse{Identity: host}); err != nil {
			return err
		}
	}
	web := &identityv1.Identity{Number: 300, Scope: identityv1.Scope_SCOPE_CLUSTER, Labels: []*workloadv1.Label{label("tier", ""), label("app", "web")}}
	return s.Send(&identityv1.ListIdentitiesResponse{Identity: web, ReferenceCount: 2})
}

func (*fakeIdentity) GetIdentity(_ context.Context, r *identityv1.GetIdentityRequest) (*identityv1.GetIdentityResponse, error) {
	if r.GetNumber() != 300 {
		return nil, status.Error(codes.NotFound, "no such identity")
	}
	return &identityv1.GetIdentityResponse{
		Identity:   &identityv1.Identity{Number: 300, Scope: identityv1.Scope_SCOPE_CLUSTER, Labels: []*workloadv1.Label{label("app", "web")}},
		References: []string{"a/eth0", "b/eth0"},
	}, nil
}

func (f *fakeIdentity) GetStatus(context.Context, *identityv1.GetStatusRequest) (*identityv1.GetStatusResponse, error) {
	return &identityv1.GetStatusResponse{Version: "v1", NodeName: "node-a", StoreConnected: f.storeError == "", StoreError: f.storeError, ClusterIdentities: 5, HeldIdentities: 1, StartTime: timestamppb.Now()}, nil
}

type fakeIPAM struct {
	ipamv1.UnimplementedIPAMServiceServer
	problems []string
}

func (*fakeIPAM) pools() []*ipamv1.Pool {
	return []*ipamv1.Pool{
		{Cidr: "10.244.0.0/24", Gateway: "10.244.0.1", Size: 256, Reserved: 3, Confirmed: 2, Free: 251},
		{Cidr: "fd00:244::/64", Gateway: "fd00:244::1", Size: 1<<64 - 1, Reserved: 2, Confirmed: 2, Free: 1<<64 - 5},
	}
}

func (f *fakeIPAM) ListPools(context.Context, *ipamv1.ListPoolsRequest) (*ipamv1.ListPoolsResponse, error) {
	return &ipamv1.ListPoolsResponse{Pools: f.pools()}, nil
}

func (*fakeIPAM) ListAllocations(_ *ipamv1.ListAllocationsRequest, s grpc.ServerStreamingServer[ipamv1.ListAllocationsResponse]) error {
	return s.Send(&ipamv1.ListAllocationsResponse{Allocation: &ipamv1.Allocation{
		Owner:           &workloadv1.Owner{ContainerId: longID, InterfaceName: "eth0"},
		Addresses:       []*ipamv1.Address{{Address: []byte{10, 244, 0, 2}}},
		State:           ipamv1.AllocationState_ALLOCATION_STATE_LEASED,
		LeaseExpireTime: timestamppb.New(time.Now().Add(time.Minute)),
	}})
}

func (f *fakeIPAM) GetStatus(context.Context, *ipamv1.GetStatusRequest) (*ipamv1.GetStatusResponse, error) {
	return &ipamv1.GetStatusResponse{Version: "v1", Pools: f.pools(), StartTime: timestamppb.Now(), Problems: f.problems}, nil
}

type fakeDatapath struct {
	datapathv1.UnimplementedDatapathServiceServer
	node *fakeNode
}

func (*fakeDatapath) ListEndpoints(_ *datapathv1.ListEndpointsRequest, s grpc.ServerStreamingServer[datapathv1.ListEndpointsResponse]) error {
	for i, id := range []string{longID, "evil\x1b[2J"} {
		e := &datapathv1.Endpoint{
			Owner: &workloadv1.Owner{ContainerId: id, InterfaceName: "eth0"}, Slot: uint32(i + 1), State: datapathv1.EndpointState_ENDPOINT_STATE_READY,
			Identity: 300, Labels: []*workloadv1.Label{label("app", "web\x1b]0;x\a")}, Mtu: 1500, NetworkNamespace: "/run/netns/x",
			Addresses:          [][]byte{{10, 244, 0, byte(i + 2)}, netip.MustParseAddr("fd00:244::2").AsSlice()},
			HostInterface:      &datapathv1.Interface{Name: "sl0", Index: 7, Mac: []byte{2, 0, 0, 0, 0, 1}},
			ContainerInterface: &datapathv1.Interface{Name: "eth0", Index: 2, Mac: []byte{2, 0, 0, 0, 0, 2}},
			NamedPorts:         []*workloadv1.NamedPort{{Name: "http", Port: 80, Protocol: workloadv1.Protocol_PROTOCOL_TCP}},
			Policy:             &datapathv1.EndpointPolicy{Revision: 6, EgressTable: tableAllow, IngressTable: 17, Generation: 9, Refusal: "no room"},
		}
		if err := s.Send(&datapathv1.ListEndpointsResponse{Endpoint: e}); err != nil {
			return err
		}
	}
	return nil
}

func (f *fakeDatapath) GetStatus(context.Context, *datapathv1.GetStatusRequest) (*datapathv1.GetStatusResponse, error) {
	r := &datapathv1.GetStatusResponse{
		Version: "v1", StartTime: timestamppb.Now(), AddReady: f.node.addReady, KnownAddReady: f.node.knownReady, PolicyMode: f.node.policyMode, KernelRelease: "6.18",
		NodeAddresses: [][]byte{{10, 244, 0, 1}}, PodCidrs: []string{"10.244.0.0/24", "fd00:244::/64"}, PolicyRevision: 5, PolicyRefusals: []string{"identity 300: no room"},
		Warnings:    []string{"a/eth0: tcx program sl1 egress: expected nothing, found passes, program 113"},
		Connections: &datapathv1.ConnectionCounts{Live: 7, Created: 9, Revoked: 1, Expired: 1},
		Maps:        []*datapathv1.MapUsage{{Name: "sl_ct", Entries: -1, MaxEntries: 65536, Bytes: 1024}, {Name: "sl_peer", Entries: 3, MaxEntries: 16, Bytes: 512}},
		Endpoints:   []*datapathv1.EndpointStateCount{{State: datapathv1.EndpointState_ENDPOINT_STATE_READY, Count: 2}},
		PacketCounters: []*datapathv1.PacketCounter{
			{Reason: "no-route", Direction: datapathv1.Direction_DIRECTION_EGRESS, Dropped: true, Packets: 4, Bytes: 400},
			{Reason: "unused", Direction: datapathv1.Direction_DIRECTION_EGRESS},
		},
	}
	if !f.node.addReady {
		r.Problems = []string{"identity does not answer"}
	}
	return r, nil
}

type fakeObserver struct {
	datapathv1.UnimplementedObserverServiceServer
	node *fakeNode
}

func (f *fakeObserver) Observe(r *datapathv1.ObserveRequest, s grpc.ServerStreamingServer[datapathv1.ObserveResponse]) error {
	f.node.observed <- r
	if slices.Contains(r.GetLabelSelectors(), "app in (") {
		return status.Error(codes.InvalidArgument, "label_selectors[0]: at its end: want a comma or )")
	}
	for _, flow := range f.node.flows {
		if err := s.Send(&datapathv1.ObserveResponse{Event: &datapathv1.ObserveResponse_Flow{Flow: flow}}); err != nil {
			return err
		}
	}
	for _, m := range []*datapathv1.ObserveResponse{
		{Event: &datapathv1.ObserveResponse_Flow{Flow: &datapathv1.Flow{
			Time: timestamppb.New(time.Unix(1e9, 0)), Verdict: datapathv1.Verdict_VERDICT_DROPPED, Reason: "spoofed-ip", Direction: datapathv1.Direction_DIRECTION_EGRESS,
			Owner: &workloadv1.Owner{ContainerId: longID, InterfaceName: "eth0"}, SourceAddress: []byte{198, 51, 100, 7}, DestinationAddress: []byte{10, 244, 0, 2},
			Protocol: 17, SourcePort: 1234, DestinationPort: 53, SourceIdentity: 300, Length: 60, SourceMac: []byte{2, 0, 0, 0, 0, 2}, Ethertype: 0x800,
		}}},
		{Event: &datapathv1.ObserveResponse_Lost{Lost: &datapathv1.LostEvents{Source: datapathv1.LossSource_LOSS_SOURCE_KERNEL, Count: 12}}},
	} {
		if err := s.Send(m); err != nil {
			return err
		}
	}
	return nil
}

func wantLines(t *testing.T, out string, lines ...string) {
	t.Helper()
	for _, line := range lines {
		found := false
		for have := range strings.Lines(out) {
			if strings.Join(strings.Fields(have), " ") == line {
				found = true
			}
		}
		if !found {
			t.Errorf("no line %q in\n%s", line, out)
		}
	}
}

func TestEndpointListIsATableOrJSON(t *testing.T) {
	n := newFakeNode(t)
	out, _ := n.want(t, 0, "endpoint", "list")
	wantLines(t, out,
		"CONTAINER SLOT STATE IDENTITY ADDRESSES DEVICE POLICY LABELS",
		`0123456789abc/eth0 1 ready 300 10.244.0.2,fd00:244::2 sl0 revision 6, newer refused k8s:app=web\x1b]0;x\a`,
	)
	if strings.ContainsAny(out, "\x1b\a") {
		t.Errorf("what a container says reaches the terminal: %q", out)
	}
	out, _ = n.want(t, 0, "endpoint", "list", "-o", "json")
	var list []endpoint
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if len(list) != 2 || list[0].Owner.ContainerID != longID || list[0].Addresses[0] != "10.244.0.2" || list[0].Container.MAC != "02:00:00:00:00:02" {
		t.Errorf("list %+v", list)
	}
}

func TestEndpointGetTakesTheStartOfAnID(t *testing.T) {
	n := newFakeNode(t)
	for _, name := range []string{longID, "0123", "0123/eth0"} {
		out, _ := n.want(t, 0, "endpoint", "get", name)
		wantLines(t, out, "Container "+longID, "Named ports http=80/tcp", "MTU 1500")
	}
	n.want(t, exitFailed, "endpoint", "get", "9")
	n.want(t, exitFailed, "endpoint", "get", "0123/eth1")
	n.want(t, exitUsage, "endpoint", "get", "/eth0")
	n.want(t, exitUsage, "endpoint", "get")
}

func TestIdentities(t *testing.T) {
	n := newFakeNode(t)
	out, _ := n.want(t, 0, "identity", "list")
	wantLines(t, out, "300 cluster 2 k8s:app=web,k8s:tier")
	if strings.Contains(out, "reserved:host") {
		t.Errorf("reserved identities are listed unasked:\n%s", out)
	}
	out, _ = n.want(t, 0, "identity", "list", "--all")
	wantLines(t, out, "1 reserved 0 reserved:host")
	out, _ = n.want(t, 0, "identity", "get", "300")
	wantLines(t, out, "Identity 300", "Held by a/eth0", "Held by b/eth0")
	_, errOut := n.want(t, exitFailed, "identity", "get", "301")
	wantLines(t, errOut, "sluice: no such identity")
	for _, bad := range []string{"0", "x", "-1", "16777216"} {
		n.want(t, exitUsage, "identity", "get", "--", bad)
	}
}

func TestAddresses(t *testing.T) {
	n := newFakeNode(t)
	out, _ := n.want(t, 0, "ipam", "pools")
	wantLines(t, out, "10.244.0.0/24 10.244.0.1 256 3 0 2 0 251", "fd00:244::/64 fd00:244::1 2^64 2 0 2 0 ~2^64")
	out, _ = n.want(t, 0, "ipam", "list")
	if !strings.Contains(out, "0123456789abc/eth0") || !strings.Contains(out, "leased") {
		t.Errorf("list\n%s", out)
	}
	out, _ = n.want(t, 0, "ipam", "pools", "-o", "json")
	if !strings.Contains(out, `"free": 18446744073709551611`) {
		t.Errorf("JSON rounds: %s", out)
	}
}

func TestObserveSendsItsCriteria(t *testing.T) {
	n := newFakeNode(t)
	out, _ := n.want(t, 0, "observe", "--since", "1m", "--reason", "spoofed-ip", "--container", "c1", "--container", "c2/net1", "--identity", "300",
		"--address", "10.0.0.7/8", "--address", "fd00::1", "--direction", "egress", "--protocol", "udp,47", "--port", "53")
	r := <-n.observed
	if r.GetFollow() || r.GetSince() == nil || len(r.GetOwners()) != 2 || r.GetOwners()[0].GetInterfaceName() != "eth0" || r.GetOwners()[1].GetInterfaceName() != "net1" ||
		r.GetPrefixes()[0] != "10.0.0.0/8" || r.GetPrefixes()[1] != "fd00::1/128" || r.GetDirection() != datapathv1.Direction_DIRECTION_EGRESS ||
		r.GetProtocols()[0] != 17 || r.GetProtocols()[1] != 47 || r.GetPorts()[0] != 53 || r.GetIdentities()[0] != 300 || r.GetReasons()[0] != "spoofed-ip" {
		t.Errorf("request %v", r)
	}
	n.want(t, 0, "observe", "--container", "0123")
	if r := <-n.observed; r.GetOwners()[0].GetContainerId() != longID {
		t.Errorf("the start of an id is asked for as %v", r.GetOwners())
	}
	for _, want := range []string{"spoofed-ip", "198.51.100.7:1234 (identity 300) -> 10.244.0.2:53", "12 events were lost by the kernel"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
	out, _ = n.want(t, 0, "observe", "-o", "json")
	<-n.observed
	d := json.NewDecoder(strings.NewReader(out))
	var f, lost flow
	if err := d.Decode(&f); err != nil {
		t.Fatal(err)
	}
	if err := d.Decode(&lost); err != nil {
		t.Fatal(err)
	}
	if f.Protocol != "udp" || f.DestinationPort != 53 || lost.Lost != 12 {
		t.Errorf("flows %+v, %+v", f, lost)
	}
	for _, bad := range [][]string{{"--direction", "up"}, {"--address", "x"}, {"--protocol", "300"}, {"--port", "70000"}, {"--identity", "0"}, {"--since", "-1s"}} {
		n.want(t, exitUsage, append([]string{"observe"}, bad...)...)
	}
}

func TestStatusSaysWhatIsWrong(t *testing.T) {
	n := newFakeNode(t)
	out, _ := n.want(t, 0, "status")
	wantLines(t, out, "Identities 5 in the cluster, 1 held here", "etcd reached", "Endpoints 2 ready", "4 egress dropped no-route")
	if strings.Contains(out, "unused") {
		t.Errorf("counters of nothing are shown:\n%s", out)
	}
	n.ipam.problems = []string{"write state file /x/state.db: no space left on device"}
	out, _ = n.want(t, exitNotReady, "status")
	if !strings.Contains(out, "Problem: sluice-ipam: no container can be connected now: write state file /x/state.db: no space left on device") {
		t.Errorf("status\n%s", out)
	}
	n.ipam.problems = nil
	n.addReady = false
	out, _ = n.want(t, exitNotReady, "status")
	if !strings.Contains(out, "Problem: sluice-datapath: no container can be connected now: identity does not answer") {
		t.Errorf("status\n%s", out)
	}
	n.knownReady = true
	out, _ = n.want(t, exitNotReady, "status")
	if !strings.Contains(out, "Problem: sluice-datapath: containers with new labels cannot be connected now: identity does not answer") {
		t.Errorf("status, and known labels can be connected\n%s", out)
	}
	n.addReady, n.identity.storeError = true, "etcd has gone"
	out, _ = n.want(t, exitNotReady, "status")
	wantLines(t, out, "etcd away: etcd has gone", "Problem: sluice-identity: new label sets cannot be connected: etcd is away: etcd has gone")
	n.addReady, n.identity.storeError = false, ""
	n.servers["ipam"].Stop()
	out, _ = n.want(t, exitNotReady, "status", "-o", "json")
	var s nodeStatus
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		t.Fatal(err)
	}
	if s.Ready || len(s.Problems) != 2 || s.Services[1].Serving || s.Services[1].Name != "ipam" {
		t.Errorf("status %+v", s)
	}
}

func TestMistakesOnTheCommandLineAreExitCode2(t *testing.T) {
	n := newFakeNode(t)
	for _, bad := range [][]string{
		{"nonsense"},
		{"endpoint", "nonsense"},
		{"endpoint", "list", "x"},
		{"--nonsense"},
		{"status", "-o", "yaml"},
		{"status", "--timeout", "0s"},
		{"dev", "nonsense"},
		{"dev", "up"}, // with --run-dir, which dev refuses
	} {
		_, errOut := n.want(t, exitUsage, bad...)
		if !strings.HasPrefix(errOut, "sluice: ") {
			t.Errorf("%q: standard error %q", bad, errOut)
		}
	}
	var out, errOut bytes.Buffer
	if code := run([]string{"--instance", "../x", "status"}, &out, &errOut, commands...); code != exitUsage {
		t.Errorf("a bad instance: exit code %d", code)
	}
}

func TestAnAbsentServiceIsExplained(t *testing.T) {
	n := newFakeNode(t)
	n.servers["datapath"].Stop()
	_, errOut := n.want(t, exitFailed, "endpoint", "list")
	for _, want := range []string{"datapath.sock", "Does it run?", n.runDir} {
		if !strings.Contains(errOut, want) {
			t.Errorf("no %q in %q", want, errOut)
		}
	}
}

func TestASocketThatMayNotBeOpenedIsExplained(t *testing.T) {
	c := &command{runDir: "/run/x"}
	got := c.explain(status.Error(codes.Unavailable, `connection error: desc = "transport: Error while dialing: dial unix /run/x/ipam/ipam.sock: connect: permission denied"`))
	want := "dial unix /run/x/ipam/ipam.sock: connect: permission denied\nBe root, or a member of group 65700."
	if got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Who gets as far as a method is root or in the group already: to tell it to be
// that would send it in a circle.
func TestCallForRootIsExplainedAsOne(t *testing.T) {
	c := &command{runDir: "/run/x"}
	got := c.explain(status.Error(codes.PermissionDenied, "uid 65534 may not call /sluice.policy.v1.PolicyService/UpsertPolicies"))
	if !strings.Contains(got, "uid 65534 may not call") || !strings.HasSuffix(got, "\n"+rootOnly) || strings.Contains(got, whoMay) {
		t.Errorf("got %q", got)
	}
}

func TestStatusWithoutRightsSaysWhoMayAsk(t *testing.T) {
	denied := serviceStatus{Name: "ipam", Error: "dial unix /run/x/ipam/ipam.sock: connect: permission denied"}
	away := serviceStatus{Name: "policy", Error: "dial unix /run/x/policy/policy.sock: connect: connection refused"}
	if got := accessHint([]serviceStatus{away, denied}); got != whoMay {
		t.Errorf("a socket that may not be opened: %q", got)
	}
	if got := accessHint([]serviceStatus{away, {Name: "datapath", Serving: true}}); got != "" {
		t.Errorf("no socket is forbidden: %q", got)
	}
}

func TestStatusTellsOfAFamilyWithoutAFreeAddress(t *testing.T) {
	full, room, v6 := pool{CIDR: "10.0.0.0/29", Confirmed: 4, Resting: 1}, pool{CIDR: "10.1.0.0/24", Free: 1}, pool{CIDR: "fd00::/64", Free: 9}
	if got := exhausted([]pool{full, room, v6}); len(got) != 0 {
		t.Errorf("with room in another pool: %q", got)
	}
	got := exhausted([]pool{full, v6})
	if want := "sluice-ipam: no IPv4 address is free (10.0.0.0/29: 4 confirmed, 0 leased, 1 resting)"; len(got) != 1 || got[0] != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
