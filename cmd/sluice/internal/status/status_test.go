// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package status

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	"github.com/sluice-net/sluice/cmd/sluice/internal/output/message"
	"github.com/sluice-net/sluice/cmd/sluice/internal/service"
	"github.com/sluice-net/sluice/cmd/sluice/internal/test/nodetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	netv1 "github.com/sluice-net/sluice/proto/gen/sluice/net/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
)

func TestStatusTellsOfPolicies(t *testing.T) {
	n := nodetest.New(t, Command)
	n.PolicyMode = datapathv1.PolicyMode_POLICY_MODE_REQUIRED
	out, _ := n.Want(t, invocation.ExitNotReady, "status")
	nodetest.WantLines(t, out, "Policies 3 accepted, 1 refused, revision 6",
		"Tables 4 for 2 subjects, 12 identities known", "Sources identity, file (not complete yet)",
		"Policy required; the kernel enforces revision 5 of 6",
		"Connections 7 live; 9 begun, 1 ended by policy, 1 expired, 0 evicted", "Maps 2, 1.5 KiB",
		"Warning: sluice-policy: 1 policies or files were refused; see `sluice policy list --refused`",
		"Warning: sluice-policy: source file: the directory is gone",
		"Warning: sluice-datapath: not enforced: identity 300: no capacity",
		"Warning: sluice-datapath: a/eth0: tcx program sl1 egress: expected nothing, found passes, program 113")

	n.Stop("policy")
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	if !strings.Contains(out, "Problem: sluice-policy: ") {
		t.Errorf("without the policy service that is required\n%s", out)
	}
	n.PolicyMode = datapathv1.PolicyMode_POLICY_MODE_NONE
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	if strings.Contains(out, "sluice-policy") {
		t.Errorf("without the policy service, which is not needed\n%s", out)
	}
}

func TestStatusSaysWhatIsWrong(t *testing.T) {
	n := nodetest.New(t, Command)
	out, _ := n.Want(t, invocation.ExitNotReady, "status")
	nodetest.WantLines(t, out, "Identities 5 in the cluster, 1 held here", "etcd reached", "Endpoints 2 ready",
		"4 egress dropped no-route")
	if strings.Contains(out, "unused") {
		t.Errorf("counters of nothing are shown:\n%s", out)
	}
	n.IPAM.Problems = []string{"write state file /x/state.db: no space left on device"}
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	if !strings.Contains(out, "Problem: sluice-ipam: no container can be connected now: write state file "+
		"/x/state.db: no space left on device") {
		t.Errorf("status\n%s", out)
	}
	n.IPAM.Problems = nil
	n.AddReady = false
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	if !strings.Contains(out, "Problem: sluice-datapath: no container can be connected now: identity does not answer") {
		t.Errorf("status\n%s", out)
	}
	n.KnownReady = true
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	if !strings.Contains(out, "Problem: sluice-datapath: containers with new labels cannot be connected now: "+
		"identity does not answer") {
		t.Errorf("status, and known labels can be connected\n%s", out)
	}
	n.AddReady, n.Identity.StoreError = true, "etcd has gone"
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	nodetest.WantLines(t, out, "etcd unavailable: etcd has gone",
		"Problem: sluice-identity: containers with new labels cannot be connected: etcd is unavailable: etcd has gone")
	n.AddReady, n.Identity.StoreError = false, ""
	n.Stop("ipam")
	out, _ = n.Want(t, invocation.ExitNotReady, "status", "-o", "json")
	var s Node
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		t.Fatal(err)
	}
	if s.Ready || len(s.Problems) != 2 || s.Services[1].Serving || s.Services[1].Name != "ipam" {
		t.Errorf("status %+v", s)
	}
}

// TestStatusEndsWithZeroOnlyIfAllIsAsItShouldBe: Ready only depends on ADD, the exit code also depends on warnings.
func TestStatusEndsWithZeroOnlyIfAllIsAsItShouldBe(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Healthy, n.Policy.Healthy = true, true
	want := func(code int, lines ...string) {
		t.Helper()
		out, _ := n.Want(t, code, "status")
		nodetest.WantLines(t, out, lines...)
		if code == 0 && (strings.Contains(out, "Warning") || strings.Contains(out, "Problem")) {
			t.Errorf("exit code 0 beside\n%s", out)
		}
	}
	want(0, "Ready yes", "Relabelled 4 endpoints, 1 pending")
	n.Healthy = false // only a warning
	want(invocation.ExitNotReady, "Ready yes")
	n.Healthy = true
	n.Policy.Unsupported = 1
	want(invocation.ExitNotReady, "Ready yes")
	n.Policy.Unsupported = 0
	n.StreamError = "identity: connection refused"
	want(invocation.ExitNotReady, "Ready yes", "Relabelled 4 endpoints, 1 pending; the stream from identity is not open",
		"Warning: sluice-datapath: label changes are not applied: identity: connection refused")
	n.StreamError = ""

	n.Identity.StoreFull = "etcd (e) has no space left; compact and defragment it, then disarm its alarm: no space"
	want(invocation.ExitNotReady, "Ready only for label sets that this node has",
		"etcd reached; it refuses writes of this node",
		"Problem: sluice-identity: containers with new labels cannot be connected: "+n.Identity.StoreFull)
	n.Identity.StoreFull, n.Identity.StoreError = "", "connection refused"
	want(invocation.ExitNotReady, "Ready only for label sets that this node has", "etcd unavailable: connection refused")
	n.IPAM.Problems = []string{"no space left on device"}
	want(invocation.ExitNotReady, "Ready no")
}

// TestStatusSaysWhatWorksMeanwhile: while a service is unavailable, the status lists what still works. Without
// sluice-identity or sluice-policy, the datapath reports whether containers with labels in use on the node can be
// connected.
func TestStatusSaysWhatWorksMeanwhile(t *testing.T) {
	const known = "Ready only for label sets that this node has"
	for service, c := range map[string]struct {
		knownReady bool
		ready      string
		problem    string
		meanwhile  string
	}{
		"identity": {
			true, known, "Problem: sluice-identity: ", "ADD of containers with the same labels as a container on this node",
		},
		"policy": {true, known, "Problem: sluice-policy: ", "Policies cannot be changed"},
		"ipam":   {false, "Ready no", "Problem: sluice-ipam: ", "whose addresses are released later, continue to"},
		"loadbalancer": {
			true, "Ready yes", "Warning: sluice-loadbalancer: services cannot be changed: ", "Services cannot be changed",
		},
		"datapath": {false, "Ready no", "Problem: sluice-datapath: ", "DEL is recorded and executed later"},
	} {
		n := nodetest.New(t, Command)
		n.Healthy, n.Policy.Healthy, n.Balances = true, true, true
		n.PolicyMode = datapathv1.PolicyMode_POLICY_MODE_REQUIRED
		out, _ := n.Want(t, 0, "status")
		if strings.Contains(out, "Meanwhile") {
			t.Errorf("%s answers:\n%s", service, out)
		}
		n.AddReady, n.KnownReady = service == "loadbalancer", c.knownReady
		n.Stop(service)
		out, _ = n.Want(t, invocation.ExitNotReady, "status")
		nodetest.WantLines(t, out, c.ready)
		for _, want := range []string{
			c.problem, "Meanwhile: without sluice-" + service + ": ", c.meanwhile, "`journalctl -u sluice-" + service + "`",
		} {
			if !strings.Contains(out, want) {
				t.Errorf("without %s the status does not say %q:\n%s", service, want, out)
			}
		}
	}
	n := nodetest.New(t, Command)
	n.Healthy, n.Policy.Healthy, n.Identity.StoreError = true, true, "connection refused"
	out, _ := n.Want(t, invocation.ExitNotReady, "status")
	if nodetest.WantLines(t, out, known); !strings.Contains(out, "Meanwhile: without etcd: ") {
		t.Errorf("without etcd:\n%s", out)
	}
}

// TestStatusOfRangesThatAreNotRegisteredIsAWarning: addresses can be allocated although the pod CIDRs are not
// registered.
func TestStatusOfRangesThatAreNotRegisteredIsAWarning(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Healthy, n.Policy.Healthy = true, true
	n.IPAM.StoreProblems = []string{"register the ranges of this node: connection refused"}
	out, _ := n.Want(t, invocation.ExitNotReady, "status")
	nodetest.WantLines(t, out, "Ready yes",
		"Warning: sluice-ipam: register the ranges of this node: connection refused")
}

func TestStatusShowsTheCluster(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Healthy, n.Policy.Healthy = true, true
	out, _ := n.Want(t, 0, "status")
	nodetest.WantLines(t, out, "Cluster 2 nodes, 3 mappings of others")
	n.Identity.Cluster = &identityv1.ClusterStatus{
		Nodes: 1, RefusedMappings: 4, RefusedRanges: 1, PendingPublications: 5,
		PublicationError: "register this node: refused",
	}
	n.Identity.Problems = []*statusv1.Problem{{
		Reason: statusv1.ProblemReason_PROBLEM_REASON_SERVICE, Text: "the range 10.0.0.0/24 is not accepted",
	}}
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	nodetest.WantLines(t, out, "Ready yes",
		"Cluster not registered; 1 node, 0 mappings of others; 4 of others refused; 1 range of this node refused; "+
			"5 endpoints not yet published",
		"Warning: sluice-identity: the range 10.0.0.0/24 is not accepted",
		"Warning: sluice-identity: this node is not registered: other nodes do not know the addresses of its containers; "+
			"sluice-ipam registers it if it has the setting identity",
		"Warning: sluice-identity: this node cannot publish its state to the cluster: register this node: refused",
		"Warning: sluice-identity: 4 addresses that other nodes wrote are refused; `sluice node list` names the nodes, "+
			"`sluice ip get` gives the reason for an address")
	n.Identity.StoreError = "etcd has gone"
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	if strings.Contains(out, "does not reach the cluster") {
		t.Errorf("the loss of etcd is reported twice:\n%s", out)
	}
	n.Identity.StoreError, n.Identity.Problems, n.Identity.Cluster = "", nil, nil
	out, _ = n.Want(t, 0, "status")
	if strings.Contains(out, "Cluster") {
		t.Errorf("of an identity service that reports no cluster:\n%s", out)
	}
}

// TestStatusTellsOfServices: without the load balancer, containers can be connected, and the status has a warning.
func TestStatusTellsOfServices(t *testing.T) {
	n := nodetest.New(t, Command, service.Command)
	n.Healthy, n.Policy.Healthy, n.Balances = true, true, true
	n.Want(t, 0, "service", "apply", "-f", nodetest.Write(t, t.TempDir(), "web.yaml", nodetest.WebService))
	out, _ := n.Want(t, 0, "status")
	nodetest.WantLines(t, out, "Services 1 with 1 endpoint slice, revision 7",
		"Frontends 1 to 2 backends; datapath enforces revision 6", "Service sources grpc")
	nodetest.WantLines(t, out, "Translated 1 frontend to 2 backends, of revision 6")
	n.FrontendError = "loadbalancer: connection refused"
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	nodetest.WantLines(t, out, "Ready yes",
		"Warning: sluice-datapath: the kernel keeps its present services: loadbalancer: connection refused")
	n.FrontendError = ""
	n.Balancer.Problems = []string{"datapath does not enforce 10.96.0.10:80/TCP of service shop/web: no capacity"}
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	nodetest.WantLines(t, out, "Ready yes",
		"Warning: sluice-loadbalancer: datapath does not enforce 10.96.0.10:80/TCP of service shop/web: no capacity")
	n.Balancer.Problems = nil
	n.Balancer.Sources = append(n.Balancer.Sources, &lbv1.SourceStatus{Name: "file"})
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	nodetest.WantLines(t, out, "Service sources grpc, file (not complete yet)",
		"Warning: sluice-loadbalancer: source file is not complete yet")
	n.Balancer.Sources = n.Balancer.Sources[:1]
	n.Balancer.Subscribers[0].Connected = false
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	nodetest.WantLines(t, out,
		"Warning: sluice-loadbalancer: datapath is not connected: the kernel keeps the services of revision 6")
	n.Balancer.Subscribers = nil
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	if !strings.Contains(out, "Warning: sluice-loadbalancer: no datapath enforces the services") {
		t.Errorf("without a datapath\n%s", out)
	}
	// With mode off there is no warning.
	n.Balances = false
	out, _ = n.Want(t, 0, "status")
	nodetest.WantLines(t, out, "Frontends 1 to 2 backends; the datapath translates none (loadBalancing.mode is off)")
	n.Balances = true
	n.Stop("loadbalancer")
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	if !strings.Contains(out, "Warning: sluice-loadbalancer: services cannot be changed: ") ||
		!strings.Contains(out, "Ready") || strings.Contains(out, "Problem") {
		t.Errorf("without the load balancer that the datapath uses\n%s", out)
	}
	n.Balances = false
	out, _ = n.Want(t, 0, "status")
	if strings.Contains(out, "loadbalancer") {
		t.Errorf("without a load balancer, which is not needed\n%s", out)
	}
}

// TestStatusTellsOfDNS: containers can be connected without sluice-dns. A node may lack it; then its socket does not
// exist. The socket of a killed process does.
func TestStatusTellsOfDNS(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Healthy, n.Policy.Healthy = true, true
	out, _ := n.Want(t, 0, "status")
	nodetest.WantLines(t, out, "sluice-dns yes 0s v1")
	n.Health["dns"].SetServingStatus("", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	nodetest.WantLines(t, out, "Ready yes",
		"Warning: sluice-dns is not ready: addresses are not learned from DNS answers")
	n.Stop("dns")
	if out, _ = n.Want(t, 0, "status"); strings.Contains(out, "dns") {
		t.Errorf("a node without sluice-dns:\n%s", out)
	}
	if err := os.WriteFile(filepath.Join(n.RunDir, "dns", "dns.sock"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	out, _ = n.Want(t, invocation.ExitNotReady, "status")
	nodetest.WantLines(t, out, "Ready yes")
	for _, want := range []string{
		"Warning: sluice-dns: addresses are not learned from DNS answers: dial unix ", "Meanwhile: without sluice-dns: ",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q after sluice-dns was killed:\n%s", want, out)
		}
	}
}

func TestStatusWithoutRightsSaysWhoMayAsk(t *testing.T) {
	denied := serviceStatus{
		Name: "ipam", Error: "dial unix /run/x/ipam/ipam.sock: connect: permission denied",
		denied: true,
	}
	away := serviceStatus{Name: "policy", Error: "dial unix /run/x/policy/policy.sock: connect: connection refused"}
	if got := accessHint([]serviceStatus{away, denied}); got != invocation.WhoMay {
		t.Errorf("a socket that may not be opened: %q", got)
	}
	if got := accessHint([]serviceStatus{away, {Name: "datapath", Serving: true}}); got != "" {
		t.Errorf("no socket is forbidden: %q", got)
	}
}

func TestStatusTellsOfAFamilyWithoutAFreeAddress(t *testing.T) {
	full, room, v6 := &ipamv1.Pool{Prefix: "10.0.0.0/29", ConfirmedCount: 4, QuarantinedCount: 1},
		&ipamv1.Pool{Prefix: "10.1.0.0/24", FreeCount: 1},
		&ipamv1.Pool{Prefix: "fd00::/64", FreeCount: 9}
	if got := exhausted([]*ipamv1.Pool{full, room, v6}); len(got) != 0 {
		t.Errorf("with capacity in another pool: %q", got)
	}
	got := exhausted([]*ipamv1.Pool{full, v6, {
		Prefix: "10.2.0.0/24", State: ipamv1.RangeState_RANGE_STATE_DRAINING, ConfirmedCount: 3,
	}})
	want := "sluice-ipam: no IPv4 address is free (10.0.0.0/29: 4 confirmed, 0 leased, 1 in quarantine)"
	if len(got) != 1 || got[0] != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestStatusShowsWhichNodesAnswer: the table has one line for all nodes, and JSON has each path.
func TestStatusShowsWhichNodesAnswer(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Healthy, n.Policy.Healthy = true, true
	for _, c := range []struct {
		probes *datapathv1.NodeProbes
		want   string
	}{
		{nil, ""},
		{&datapathv1.NodeProbes{}, ""}, // a single node
		{&datapathv1.NodeProbes{Nodes: 2}, "Nodes 0 of 2 other nodes answer"},
		{
			&datapathv1.NodeProbes{Nodes: 2, AnsweringNodes: 2, SlowestUs: 312},
			"Nodes 2 of 2 other nodes answer, slowest 0.3 ms",
		},
		{
			&datapathv1.NodeProbes{Nodes: 2, AnsweringNodes: 1, SlowestUs: 45},
			"Nodes 1 of 2 other nodes answer, slowest 0.04 ms",
		},
	} {
		n.Probes = c.probes
		out, _ := n.Want(t, 0, "status")
		if c.want != "" {
			nodetest.WantLines(t, out, c.want)
		} else if strings.Contains(out, "other nodes") {
			t.Errorf("%v:\n%s", c.probes, out)
		}
	}
	n.Probes = &datapathv1.NodeProbes{Nodes: 2, AnsweringNodes: 1, Paths: []*datapathv1.NodePath{{
		Node: "b", Address: "192.0.2.2", State: datapathv1.NodePathState_NODE_PATH_STATE_REACHABLE, LatencyUs: 300,
		SmoothedLatencyUs: 312, PathMtu: 1400, ExpectedMtu: 1500, RecentLosses: 1, RecentQuestions: 9,
		Trouble: "path MTU 1400 < 1500 expected",
	}}}
	out, _ := n.Want(t, 0, "status", "-o", "json")
	if p := datapathOf(t, out).GetNodeProbes(); !proto.Equal(p, n.Probes) {
		t.Errorf("probes %v, want %v", p, n.Probes)
	}
}

// datapathOf returns the datapath's part of a status.
func datapathOf(t *testing.T, status string) *datapathv1.GetStatusResponse {
	t.Helper()
	var s struct{ Datapath json.RawMessage }
	d := &datapathv1.GetStatusResponse{}
	if err := errors.Join(json.Unmarshal([]byte(status), &s), message.Unmarshal(s.Datapath, d)); err != nil {
		t.Fatal(err)
	}
	return d
}

// TestStatusShowsHowPacketsTravelBetweenNodes: the status has the routing mode, and with native routing the path of
// packets and its reason.
func TestStatusShowsHowPacketsTravelBetweenNodes(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Healthy, n.Policy.Healthy = true, true
	for _, c := range []struct {
		routing *datapathv1.PodRouting
		want    string
	}{
		{nil, ""},
		{&datapathv1.PodRouting{Mode: "overlay"}, "Routing overlay"},
		{
			&datapathv1.PodRouting{Mode: "overlay", TunnelPaths: []*datapathv1.TunnelPath{
				{Node: "a", BypassesDevice: true},
				{Node: "b", Reason: "wg0 has no Ethernet header"},
				{Node: "c", Reason: "the tunnel uses IPv6"},
				{Node: "d", Reason: "wg0 has no Ethernet header"},
			}},
			"Routing overlay, bypassing the tunnel device to 1 of 4 nodes (c: the tunnel uses IPv6; " +
				"b, d: wg0 has no Ethernet header)",
		},
		{
			&datapathv1.PodRouting{
				Mode: "overlay", TunnelPaths: []*datapathv1.TunnelPath{{Node: "a", BypassesDevice: true}},
				BypassedRules: []string{"rule 4", "rule 5", "rule 6", "rule 7"},
			},
			"Routing overlay, bypassing the tunnel device to 1 of 1 node; the packets bypass 4 firewall rules " +
				"for the tunnel's port: rule 4, rule 5, rule 6, ...",
		},
		{
			&datapathv1.PodRouting{Mode: "overlay", Reason: "xfrm policies: 1 in", TunnelPaths: []*datapathv1.TunnelPath{
				{Node: "a", Reason: "xfrm policies: 1 in"},
			}},
			"Routing overlay, through the tunnel device (xfrm policies: 1 in)",
		},
		{
			&datapathv1.PodRouting{Mode: "native", Reason: "no xfrm policies"},
			"Routing native, bypassing the host's stack (no xfrm policies)",
		},
		{
			&datapathv1.PodRouting{Mode: "native", ByStack: true, Reason: "xfrm policies: 2 out"},
			"Routing native, through the host's stack (xfrm policies: 2 out)",
		},
	} {
		n.Routing = c.routing
		out, _ := n.Want(t, 0, "status")
		if c.want != "" {
			nodetest.WantLines(t, out, c.want)
		} else if strings.Contains(out, "Routing") {
			t.Errorf("%v:\n%s", c.routing, out)
		}
		out, _ = n.Want(t, 0, "status", "-o", "json")
		if r := datapathOf(t, out).GetPodRouting(); !proto.Equal(r, c.routing) {
			t.Errorf("routing %v, want %v", r, c.routing)
		}
	}
}

// TestStatusShowsProxies: the status has a row for each kind of proxy, with its device or with the reason why none can
// attach.
func TestStatusShowsProxies(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Healthy, n.Policy.Healthy = true, true
	out, _ := n.Want(t, 0, "status")
	if strings.Contains(out, "Proxy") {
		t.Errorf("without proxies:\n%s", out)
	}
	since := timestamppb.New(time.Now().Add(-100 * time.Hour))
	for _, c := range []struct {
		proxy *datapathv1.ProxyStatus
		want  string
	}{
		{&datapathv1.ProxyStatus{Device: "slp0"}, "Proxy dns: none attached"},
		{
			&datapathv1.ProxyStatus{Device: "slp0", Problem: "open /dev/net/tun: no such file"},
			"Proxy dns: none can attach: open /dev/net/tun: no such file",
		},
		{
			&datapathv1.ProxyStatus{Attached: true, AttachedSince: since, Device: "slp0"},
			"Proxy dns: attached for 4d to slp0, no heartbeat yet",
		},
		{
			&datapathv1.ProxyStatus{
				Attached: true, AttachedSince: since, Device: "slp0", HeartbeatAge: durationpb.New(12345 * time.Microsecond),
			},
			"Proxy dns: attached for 4d to slp0, last heartbeat 12ms ago",
		},
	} {
		c.proxy.Proxy = netv1.Proxy_PROXY_DNS
		n.Proxies = []*datapathv1.ProxyStatus{c.proxy}
		out, _ := n.Want(t, 0, "status")
		nodetest.WantLines(t, out, c.want)
		out, _ = n.Want(t, 0, "status", "-o", "json")
		if p := datapathOf(t, out).GetProxies(); len(p) != 1 || !proto.Equal(p[0], c.proxy) {
			t.Errorf("proxies %v, want %v", p, c.proxy)
		}
	}
}

// TestNodeIsNotReadyWithoutTheServicesOfTheCluster: a container would start without DNS.
func TestNodeIsNotReadyWithoutTheServicesOfTheCluster(t *testing.T) {
	why := "datapath does not enforce 10.96.0.10:53/UDP of service kube-system/kube-dns: no capacity"
	n := &Node{LoadBalancer: message.One[*lbv1.GetStatusResponse]{Message: &lbv1.GetStatusResponse{SystemRefused: why}}}
	n.judge()
	if n.Ready || n.Known || !slices.Equal(n.Problems, []string{"sluice-loadbalancer: " + why}) {
		t.Errorf("ready: %t, for known label sets: %t, problems %q", n.Ready, n.Known, n.Problems)
	}
}

// TestStatusComparesTheNamesOfTheNode: settings that contain the name of the node must match its name in the cluster.
func TestStatusComparesTheNamesOfTheNode(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Healthy = true
	for _, c := range []struct {
		settings map[string]string
		want     string
	}{
		{map[string]string{"node.name": "node-a", "kubernetes.node": "other"}, ""}, // ipam does not use it
		{map[string]string{"node.name": ""}, ""},
		{
			map[string]string{"node.name": "node-A"},
			`Warning: sluice-loadbalancer: the setting node.name is "node-A", but sluice-identity calls this node "node-a"`,
		},
		{
			map[string]string{"mode": "kubernetes", "kubernetes.node": "other"},
			`Warning: sluice-ipam: the setting kubernetes.node is "other", but sluice-identity calls this node "node-a"`,
		},
	} {
		n.Settings = c.settings
		_, out, _ := n.Sluice("status")
		if strings.Contains(out, "make the two equal") != (c.want != "") || !strings.Contains(out, c.want) {
			t.Errorf("%v: want %q in\n%s", c.settings, c.want, out)
		}
	}
}

func TestStatusOfAnInstanceThatDoesNotExistIsOneLine(t *testing.T) {
	var out, errOut bytes.Buffer
	code := invocation.Run([]string{"--instance", "nosuch", "status"}, &out, &errOut, Command)
	if text := errOut.String(); code != invocation.ExitFailed || out.Len() > 0 ||
		!strings.HasPrefix(text, "sluice: no instance nosuch on this machine: /run/sluice-nosuch does not exist\n") {
		t.Errorf("exit code %d: %s%s", code, out.String(), text)
	}
}

// TestStatusWithoutADirectoryPromisesNothing: on a machine without Sluice, there is no traffic that could continue.
func TestStatusWithoutADirectoryPromisesNothing(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "absent")
	var out, errOut bytes.Buffer
	code := invocation.Run([]string{"--run-dir", dir, "status"}, &out, &errOut, Command)
	if text := out.String(); code != invocation.ExitNotReady || strings.Contains(text, "Meanwhile") ||
		!strings.Contains(text, "Warning: "+dir+" does not exist: Sluice is not installed on this machine") {
		t.Errorf("exit code %d: %s%s", code, text, errOut.String())
	}
}

// TestStatusWithoutServicesSaysOnce: hints about the loss of one service are wrong if several services are unavailable.
func TestStatusWithoutServicesSaysOnce(t *testing.T) {
	n := nodetest.New(t, Command)
	n.Stop("identity")
	n.Stop("ipam")
	out, _ := n.Want(t, invocation.ExitNotReady, "status")
	if strings.Count(out, "Meanwhile: ") != 1 ||
		!strings.Contains(out, "Meanwhile: without sluice-identity, sluice-ipam: traffic") {
		t.Errorf("%s", out)
	}
}
