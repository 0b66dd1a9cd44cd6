// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package nodetest is a node for tests of the plugin: stand-ins of sluice-ipam and sluice-datapath that keep leases and
// endpoints in memory, obey the rules of their API, and listen on real unix sockets.
package nodetest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// Node is both services under one run directory.
type Node struct {
	ipamv1.UnimplementedIPAMServiceServer
	datapathv1.UnimplementedDatapathServiceServer

	RunDir, StateDir string
	Health           *health.Server // of ipam
	Lease            time.Duration  // how long a lease waits to be confirmed; two minutes

	mu          sync.Mutex
	allocations map[string]*ipamv1.Allocation // guarded by mu
	asked       string                        // the namespace in the last request
	endpoints   map[string]*datapathv1.Endpoint
	requests    map[string]*datapathv1.CreateEndpointRequest
	next        int
	device      uint32
	gone        map[string]bool // endpoints whose device was removed
	calls       []string
	requestIDs  map[string]bool
	status      *datapathv1.GetStatusResponse
	differences []*datapathv1.Difference
	fail        map[string]func(ctx context.Context) error // by method; called before the method does anything
	failAfter   map[string]func(ctx context.Context) error // by method; called after the method has done its work

	stops map[string]func() // by service
}

// New starts both services below a fresh directory and stops them at the end
// of the test.
func New(t testing.TB) *Node {
	t.Helper()
	// t.TempDir may be too long for a socket's path.
	root, err := os.MkdirTemp("", "cni")
	if err != nil {
		t.Fatal(err)
	}
	n := &Node{
		RunDir:      filepath.Join(root, "run", "sluice"),
		StateDir:    filepath.Join(root, "var/lib/sluice"),
		Health:      health.NewServer(),
		Lease:       2 * time.Minute,
		allocations: map[string]*ipamv1.Allocation{},
		endpoints:   map[string]*datapathv1.Endpoint{},
		requests:    map[string]*datapathv1.CreateEndpointRequest{},
		gone:        map[string]bool{},
		requestIDs:  map[string]bool{},
		status:      &datapathv1.GetStatusResponse{AddReady: true},
		fail:        map[string]func(context.Context) error{},
		failAfter:   map[string]func(context.Context) error{},
		stops:       map[string]func(){},
	}
	// `sluice prepare` creates it; the plugin does not.
	deletes := filepath.Join(n.StateDir, "cni", "deletes")
	if err := os.MkdirAll(deletes, 0o755); err != nil { //nolint:gosec // the mode that the directory has on a node
		t.Fatal(err)
	}
	if os.Geteuid() == 0 {
		if err := os.Chown(deletes, int(instance.DatapathID), int(instance.GroupID)); err != nil {
			t.Fatal(err)
		}
	}
	n.Health.SetServingStatus("sluice.ipam.v1.IPAMService", grpc_health_v1.HealthCheckResponse_SERVING)
	n.Start(t, "ipam")
	n.Start(t, "datapath")
	t.Cleanup(func() {
		n.Stop("ipam")
		n.Stop("datapath")
		if err := os.RemoveAll(root); err != nil {
			t.Error(err)
		}
	})
	return n
}

// Start starts one service again, with its former state.
func (n *Node) Start(t testing.TB, service string) {
	t.Helper()
	dir := filepath.Join(n.RunDir, service)
	if err := os.MkdirAll(dir, 0o750); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, service+".sock")
	if err := os.RemoveAll(path); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	// As after kill -9, the socket outlives its server.
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	s := grpc.NewServer(grpc.UnaryInterceptor(n.intercept))
	switch service {
	case "ipam":
		ipamv1.RegisterIPAMServiceServer(s, n)
		grpc_health_v1.RegisterHealthServer(s, n.Health)
	case "datapath":
		datapathv1.RegisterDatapathServiceServer(s, datapath{n})
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = s.Serve(l) // Serve returns after Stop
	}()
	n.mu.Lock()
	defer n.mu.Unlock()
	// A server that is stopped before Serve begins closes its listener only when Serve begins. Until then, clients
	// would connect.
	n.stops[service] = func() { s.Stop(); <-served }
}

// Stop ends one service as a kill would: connections break, and the socket
// refuses new ones when Stop returns.
func (n *Node) Stop(service string) {
	n.mu.Lock()
	stop := n.stops[service]
	n.mu.Unlock()
	stop()
}

// Fail makes the method (given by its short name) call f first. If f returns an error, the method fails with it and
// does nothing.
func (n *Node) Fail(method string, f func(context.Context) error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.fail[method] = f
}

// FailAfter is like Fail, but the method calls f after it has done its work.
func (n *Node) FailAfter(method string, f func(context.Context) error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.failAfter[method] = f
}

// SetStatus sets the answer of GetStatus.
func (n *Node) SetStatus(s *datapathv1.GetStatusResponse) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.status = s
}

// SetDifferences sets the differences that CheckEndpoint returns.
func (n *Node) SetDifferences(d ...*datapathv1.Difference) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.differences = d
}

// Calls returns the methods called so far.
func (n *Node) Calls() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return append([]string(nil), n.calls...)
}

// RequestIDs returns the number of different request IDs so far.
func (n *Node) RequestIDs() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.requestIDs)
}

// Held returns the numbers of allocations and endpoints.
func (n *Node) Held() (allocations, endpoints int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.allocations), len(n.endpoints)
}

// Forget removes the allocation of the owner "container/interface".
func (n *Node) Forget(owner string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.allocations, owner)
}

// Renew removes the device of the endpoint "container/interface" together with its namespace: the next creation makes a
// new endpoint.
func (n *Node) Renew(owner string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.gone[owner] = true
}

// Request returns the CreateEndpoint request of the endpoint "container/interface".
func (n *Node) Request(owner string) *datapathv1.CreateEndpointRequest {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.requests[owner]
}

func (n *Node) intercept(ctx context.Context, req any, info *grpc.UnaryServerInfo, next grpc.UnaryHandler) (any, error) {
	method := filepath.Base(info.FullMethod)
	n.mu.Lock()
	n.calls = append(n.calls, method)
	if md, ok := metadata.FromIncomingContext(ctx); ok {
		for _, id := range md.Get("sluice-request-id") {
			n.requestIDs[id] = true
		}
	}
	before, after := n.fail[method], n.failAfter[method]
	n.mu.Unlock()
	if before != nil {
		if err := before(ctx); err != nil {
			return nil, err
		}
	}
	resp, err := next(ctx, req)
	if err == nil && after != nil {
		if err := after(ctx); err != nil {
			return nil, err
		}
	}
	return resp, err
}

func key(o *workloadv1.Owner) string { return o.GetContainerId() + "/" + o.GetInterfaceName() }

// AskedNamespace returns the namespace of the last request for addresses.
func (n *Node) AskedNamespace() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.asked
}

// Allocate allocates 10.244.0.x and fd00:244::x, or the requested addresses.
func (n *Node) Allocate(_ context.Context, r *ipamv1.AllocateRequest) (*ipamv1.AllocateResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked = r.GetNamespace()
	if a := n.allocations[key(r.GetOwner())]; a != nil {
		if a.GetState() == ipamv1.AllocationState_ALLOCATION_STATE_LEASED {
			a.LeaseExpireTime = timestamppb.New(time.Now().Add(n.Lease))
		}
		return &ipamv1.AllocateResponse{Allocation: proto.Clone(a).(*ipamv1.Allocation)}, nil
	}
	n.next++
	v4, v6 := fmt.Sprintf("10.244.0.%d", n.next+1), fmt.Sprintf("fd00:244::%x", n.next+1)
	for _, want := range r.GetRequestedAddresses() {
		if strings.Contains(want, ".") {
			v4 = want
		} else {
			v6 = want
		}
	}
	a := &ipamv1.Allocation{
		Owner:           r.GetOwner(),
		Addresses:       []*ipamv1.Address{{Address: v4, PoolPrefixLength: 24}, {Address: v6, PoolPrefixLength: 64}},
		State:           ipamv1.AllocationState_ALLOCATION_STATE_LEASED,
		LeaseExpireTime: timestamppb.New(time.Now().Add(n.Lease)),
	}
	n.allocations[key(r.GetOwner())] = a
	return &ipamv1.AllocateResponse{Allocation: proto.Clone(a).(*ipamv1.Allocation)}, nil
}

// Release removes an allocation.
func (n *Node) Release(_ context.Context, r *ipamv1.ReleaseRequest) (*ipamv1.ReleaseResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	a := n.allocations[key(r.GetOwner())]
	delete(n.allocations, key(r.GetOwner()))
	return &ipamv1.ReleaseResponse{Released: a}, nil
}

// datapath is the second service of Node. It is a separate type, because both services have a GetStatus.
type datapath struct{ *Node }

func (d datapath) GetStatus(context.Context, *datapathv1.GetStatusRequest) (*datapathv1.GetStatusResponse, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.status, nil
}

// GetStatus of ipam is not used by the plugin.
func (n *Node) GetStatus(context.Context, *ipamv1.GetStatusRequest) (*ipamv1.GetStatusResponse, error) {
	return nil, status.Error(codes.Unimplemented, "not in this test")
}

// CreateEndpoint confirms the lease and stores the endpoint.
func (n *Node) CreateEndpoint(_ context.Context, r *datapathv1.CreateEndpointRequest) (*datapathv1.CreateEndpointResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	k := key(r.GetOwner())
	if e := n.endpoints[k]; e != nil && !n.gone[k] {
		if !proto.Equal(withoutLease(n.requests[k]), withoutLease(r)) {
			return nil, status.Error(codes.AlreadyExists, "the owner has another endpoint")
		}
		return &datapathv1.CreateEndpointResponse{Endpoint: e}, nil
	}
	a := n.allocations[k]
	if a == nil {
		return nil, rpcerr.New(codes.FailedPrecondition, rpcerr.Of(datapathv1.ErrorReason_ERROR_REASON_LEASE_LOST), errors.New("the lease is gone"))
	}
	a.State = ipamv1.AllocationState_ALLOCATION_STATE_CONFIRMED
	a.LeaseExpireTime = nil
	mac := r.GetMac()
	if mac == "" {
		mac = fmt.Sprintf("0a:58:0a:f4:00:%02x", len(n.endpoints)+2)
	}
	mtu := r.GetMtu()
	if mtu == 0 {
		mtu = 1500
	}
	n.device++
	delete(n.gone, k)
	e := &datapathv1.Endpoint{
		Owner:              r.GetOwner(),
		Manager:            r.GetManager(),
		Network:            r.GetNetwork(),
		EndpointIndex:      uint32(len(n.endpoints) + 1),
		State:              datapathv1.EndpointState_ENDPOINT_STATE_READY,
		Identity:           256,
		Labels:             r.GetLabels(),
		Addresses:          r.GetAddresses(),
		HostInterface:      &datapathv1.Interface{Name: "sl0123456789a", Index: 6 + n.device, Mac: "02:00:00:00:00:01"},
		ContainerInterface: &datapathv1.Interface{Name: r.GetOwner().GetInterfaceName(), Index: 2, Mac: mac},
		NetworkNamespace:   r.GetNetworkNamespace(),
		Mtu:                mtu,
		CreateTime:         timestamppb.Now(),
		Gateways:           []string{"169.254.1.1", "fe80::1"},
	}
	for _, other := range n.endpoints {
		if other.GetNetworkNamespace() == e.GetNetworkNamespace() {
			e.SourceRouted = e.GetAddresses()
		}
	}
	n.endpoints[k], n.requests[k] = e, proto.Clone(r).(*datapathv1.CreateEndpointRequest)
	return &datapathv1.CreateEndpointResponse{Endpoint: e}, nil
}

// GetEndpoint returns the endpoint, even if its device was removed.
func (n *Node) GetEndpoint(_ context.Context, r *datapathv1.GetEndpointRequest) (*datapathv1.GetEndpointResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.endpoints[key(r.GetOwner())]
	if e == nil {
		return nil, status.Error(codes.NotFound, "no such endpoint")
	}
	return &datapathv1.GetEndpointResponse{Endpoint: e}, nil
}

func withoutLease(r *datapathv1.CreateEndpointRequest) *datapathv1.CreateEndpointRequest {
	c := proto.Clone(r).(*datapathv1.CreateEndpointRequest)
	c.LeaseExpireTime = nil
	return c
}

// DeleteEndpoint removes the endpoint and its allocation.
func (n *Node) DeleteEndpoint(_ context.Context, r *datapathv1.DeleteEndpointRequest) (*datapathv1.DeleteEndpointResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return &datapathv1.DeleteEndpointResponse{Existed: n.drop(key(r.GetOwner()))}, nil
}

// drop wants mu.
func (n *Node) drop(k string) bool {
	_, existed := n.endpoints[k]
	if existed {
		delete(n.endpoints, k)
		delete(n.requests, k)
		delete(n.allocations, k)
	}
	return existed
}

// CheckEndpoint compares addresses and namespace, and adds the differences of SetDifferences.
func (n *Node) CheckEndpoint(_ context.Context, r *datapathv1.CheckEndpointRequest) (*datapathv1.CheckEndpointResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	e := n.endpoints[key(r.GetOwner())]
	if e == nil {
		return nil, status.Error(codes.NotFound, "no such endpoint")
	}
	found := append([]*datapathv1.Difference(nil), n.differences...)
	if e.GetNetworkNamespace() != r.GetNetworkNamespace() {
		found = append(found, &datapathv1.Difference{Subject: "namespace", Want: e.GetNetworkNamespace(), Have: r.GetNetworkNamespace()})
	}
	for i, a := range r.GetAddresses() {
		if i >= len(e.GetAddresses()) || a != e.GetAddresses()[i] {
			found = append(found, &datapathv1.Difference{Subject: "address", Key: fmt.Sprint(i)})
		}
	}
	return &datapathv1.CheckEndpointResponse{Differences: found}, nil
}

// ReclaimEndpoints removes the endpoints of the manager's network that are not listed.
func (n *Node) ReclaimEndpoints(_ context.Context, r *datapathv1.ReclaimEndpointsRequest) (*datapathv1.ReclaimEndpointsResponse, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if r.GetManager() == "" || (len(r.GetValidOwners()) == 0) != r.GetNoneValid() {
		return nil, status.Error(codes.InvalidArgument, "manager, none_valid")
	}
	keep := map[string]bool{}
	for _, o := range r.GetValidOwners() {
		keep[key(o)] = true
	}
	resp := &datapathv1.ReclaimEndpointsResponse{}
	for k, e := range n.endpoints {
		if !keep[k] && e.GetManager() == r.GetManager() && e.GetNetwork() == r.GetNetwork() {
			resp.Reclaimed = append(resp.Reclaimed, e.GetOwner())
			n.drop(k)
		}
	}
	return resp, nil
}
