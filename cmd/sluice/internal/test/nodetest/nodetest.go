// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nodetest provides a node for tests of commands: fakes of the services on real sockets.
package nodetest

import (
	"bytes"
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
	controllerv1 "github.com/sluice-net/sluice/proto/gen/sluice/controller/v1"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	dnsv1 "github.com/sluice-net/sluice/proto/gen/sluice/dns/v1"
	hubblev1 "github.com/sluice-net/sluice/proto/gen/sluice/hubble/v1"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	sharesv1 "github.com/sluice-net/sluice/proto/gen/sluice/shares/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	storev1 "github.com/sluice-net/sluice/proto/gen/sluice/store/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Write writes a file into a directory and returns its path.
func Write(t *testing.T, dir, name, content string) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// WebPolicy is the manifest of a NetworkPolicy.
const WebPolicy = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: web, namespace: " +
	"shop}\nspec: {podSelector: {}}\n"

// Node is a fake node with two containers.
type Node struct {
	commands []func(*invocation.Invocation) *cobra.Command
	level    atomic.Int32 // log level of every process; 0: info
	RunDir   string
	servers  map[string]*server
	Health   map[string]*health.Server
	Observed chan *datapathv1.ObserveRequest
	AddReady bool
	// KnownReady means that containers with label sets in use on the node can be connected, even if other
	// containers cannot.
	KnownReady bool
	Healthy    bool // the datapath has no warnings
	// Settings are added to the usual settings of each process.
	Settings map[string]string
	// MetricsAddress is the metrics address that each process reports; may be empty.
	MetricsAddress string
	// StreamError is the error of the datapath's stream from identity; empty if the stream is open.
	StreamError string
	// Probes contains the results of the datapath's probes of other nodes; nil if it sends none.
	Probes *datapathv1.NodeProbes
	// Proxies are the proxies of the datapath.
	Proxies []*datapathv1.ProxyStatus
	// Routing is the routing between pods of two nodes; nil: none.
	Routing *datapathv1.PodRouting
	// Balances means that the datapath translates services.
	Balances bool
	// Connections are the connections of backends, unless ConnectionsError is set.
	Connections      []*datapathv1.BackendConnections
	ConnectionsError error
	// FrontendError is the error of the datapath's stream from the load balancer; empty if the stream is open.
	FrontendError string
	Identity      *identity
	Cluster       *cluster
	IPAM          *ipam
	Policy        *policy
	DNS           *DNS
	Balancer      *loadBalancer
	PolicyMode    datapathv1.PolicyMode
	Evaluated     *datapathv1.ExplainRequest
	Explained     map[string]*datapathv1.ExplainResponse // by destination; replaces the default answers
	Frontends     []*datapathv1.KernelFrontend           // in the kernel
	Differences   []*datapathv1.Difference
	// Endpoints are the listed endpoints; nil: the default two.
	Endpoints    []*datapathv1.Endpoint
	Pod          *workloadv1.PodReference // of the first of the default endpoints
	Flows        []*datapathv1.Flow
	DeletedFlows *hubblev1.DeleteFlowsRequest // the last request to delete stored events
	// Stored are the messages of sluice-hubble, which answers instead of the datapath.
	Stored  []*datapathv1.ObserveResponse
	Deleted *datapathv1.DeleteEndpointRequest   // the last
	Listed  *datapathv1.ListConnectionsRequest  // the last
	Flushed *datapathv1.FlushConnectionsRequest // the last
	Audited *datapathv1.SetAuditModeRequest     // the last

	mu sync.Mutex
	// endpointStreams are the successive streams of WatchEndpoints, and Watched its requests.
	endpointStreams []EndpointStream                    // guarded by mu
	Watched         []*datapathv1.WatchEndpointsRequest // guarded by mu
}

// EndpointStream is the script of one watch of endpoints with its end.
type EndpointStream struct {
	Messages []*datapathv1.WatchEndpointsResponse
	End      error
}

// GiveEndpointStreams sets the next streams of WatchEndpoints.
func (n *Node) GiveEndpointStreams(streams ...EndpointStream) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.endpointStreams = streams
}

// WatchedEndpoints returns the requests of WatchEndpoints.
func (n *Node) WatchedEndpoints() []*datapathv1.WatchEndpointsRequest {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.Watched)
}

// server is a fake service.
type server struct {
	*grpc.Server
	served chan struct{} // closed when nothing listens any more
}

func (s *server) serve(l net.Listener) {
	defer close(s.served)
	_ = s.Serve(l) // ends with stop
}

// stop waits for Serve. If a server is stopped before it serves, Serve closes the listener only later, which would
// reset connections made in between.
func (s *server) stop() {
	s.Stop()
	<-s.served
}

// New starts the fakes of a node. Its method Sluice runs the given commands.
func New(t *testing.T, commands ...func(*invocation.Invocation) *cobra.Command) *Node {
	t.Helper()
	dir, err := os.MkdirTemp("", "sl") // t.TempDir may be too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	n := &Node{
		commands: commands, RunDir: dir,
		servers: map[string]*server{}, Health: map[string]*health.Server{},
		Observed: make(chan *datapathv1.ObserveRequest, 1), AddReady: true, Identity: newIdentity(), IPAM: &ipam{},
		Policy: newPolicy(), Balancer: newLoadBalancer(), DNS: &DNS{},
		PolicyMode: datapathv1.PolicyMode_POLICY_MODE_NONE,
	}
	n.Cluster = &cluster{node: n}
	for _, service := range []string{
		"identity", "ipam", "policy", "loadbalancer", "datapath", "dns", "http", "controller", "hubble",
		"store",
	} {
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
			identityv1.RegisterIdentityServiceServer(s, n.Identity)
			identityv1.RegisterClusterServiceServer(s, n.Cluster)
		case "ipam":
			ipamv1.RegisterIPAMServiceServer(s, n.IPAM)
		case "policy":
			policyv1.RegisterPolicyServiceServer(s, n.Policy)
		case "loadbalancer":
			lbv1.RegisterLoadBalancerServiceServer(s, n.Balancer)
		case "dns":
			dnsv1.RegisterDNSServiceServer(s, n.DNS)
		case "controller":
			controllerv1.RegisterControllerServiceServer(s, &controller{})
		case "store":
			storev1.RegisterStoreServiceServer(s, &keeper{})
		case "hubble":
			datapathv1.RegisterObserverServiceServer(s, &stored{observer{node: n}})
			hubblev1.RegisterHistoryServiceServer(s, deletions{node: n})
			hubblev1.RegisterPageServiceServer(s, pages{})
		case "datapath":
			datapathv1.RegisterDatapathServiceServer(s, &datapath{node: n})
			datapathv1.RegisterObserverServiceServer(s, &observer{node: n})
			datapathv1.RegisterConnectionServiceServer(s, &connections{node: n})
		}
		n.Health[service] = health.NewServer()
		statusv1.RegisterProcessServiceServer(s, process{node: n})
		if slices.Contains([]string{"policy", "loadbalancer", "identity", "datapath"}, service) {
			sharesv1.RegisterSharesServiceServer(s, tenants{process: service})
		}
		grpc_health_v1.RegisterHealthServer(s, n.Health[service])
		n.servers[service] = &server{Server: s, served: make(chan struct{})}
		go n.servers[service].serve(l)
	}
	t.Cleanup(func() {
		for _, s := range n.servers {
			s.stop()
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return n
}

// Stop stops a service of the node. Its socket is removed when Stop returns.
func (n *Node) Stop(service string) { n.servers[service].stop() }

// Crash stops a service of the node and leaves its socket, as a process that is killed does.
func (n *Node) Crash(t *testing.T, service string) {
	t.Helper()
	n.Stop(service)
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(n.RunDir, service, service+".sock")})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
}

// Sluice runs the command against the node.
func (n *Node) Sluice(args ...string) (code int, stdout, stderr string) {
	var out, errOut bytes.Buffer
	code = invocation.Run(append([]string{"--run-dir", n.RunDir}, args...), &out, &errOut, n.commands...)
	return code, out.String(), errOut.String()
}

// Want is Sluice, but fails the test unless the exit code is code.
func (n *Node) Want(t *testing.T, code int, args ...string) (stdout, stderr string) {
	t.Helper()
	got, stdout, stderr := n.Sluice(args...)
	if got != code {
		t.Fatalf("sluice %s: exit code %d, want %d\n%s%s", strings.Join(args, " "), got, code, stdout, stderr)
	}
	return stdout, stderr
}

const LongID = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

// Label returns a Kubernetes label.
func Label(key, value string) *workloadv1.Label {
	return &workloadv1.Label{Source: "k8s", Key: key, Value: value}
}

// WantLines fails the test if the output lacks a line. It ignores the alignment of columns.
func WantLines(t *testing.T, out string, lines ...string) {
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

// UnmarshalItems decodes the items of a list that a command has printed as JSON.
func UnmarshalItems(out string, to any) error {
	list := struct {
		Items any `json:"items"`
	}{to}
	return json.Unmarshal([]byte(out), &list)
}
