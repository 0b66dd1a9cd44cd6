// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package client

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

// ipam lists count allocations, endlessly if count is negative, every second one confirmed, and has pools.
type ipam struct {
	ipamv1.IPAMServiceClient
	count    int
	pools    []*ipamv1.Pool
	problems []*statusv1.Problem
}

func (i ipam) GetStatus(context.Context, *ipamv1.GetStatusRequest, ...grpc.CallOption) (
	*ipamv1.GetStatusResponse, error,
) {
	return &ipamv1.GetStatusResponse{Service: &statusv1.ServiceStatus{Problems: i.problems}}, nil
}

func TestOnlyTheDiskOfIPAMKeepsItFromGivingAddresses(t *testing.T) {
	problem := func(reason statusv1.ProblemReason, text string) []*statusv1.Problem {
		return []*statusv1.Problem{{Reason: reason, Text: text}}
	}
	for _, c := range []struct {
		problems []*statusv1.Problem
		want     string
	}{
		{nil, ""},
		{problem(statusv1.ProblemReason_PROBLEM_REASON_SETTINGS, "a range is refused"), ""},
		{problem(statusv1.ProblemReason_PROBLEM_REASON_STORE, "etcd is unavailable"), ""},
		{problem(statusv1.ProblemReason_PROBLEM_REASON_STORAGE, "no space left on device"), "ipam: no space left on device"},
	} {
		i := &IPAM{Health: Health{Name: "ipam"}, client: ipam{problems: c.problems}}
		err := i.Writable(t.Context())
		if c.want == "" && err != nil || c.want != "" && (err == nil || err.Error() != c.want) {
			t.Errorf("%v: %v, want %q", c.problems, err, c.want)
		}
	}
}

type listing struct {
	grpc.ClientStream
	sent, count int
}

func (l *listing) Recv() (*ipamv1.ListAllocationsResponse, error) {
	if l.sent == l.count {
		return nil, io.EOF
	}
	l.sent++
	state := ipamv1.AllocationState_ALLOCATION_STATE_CONFIRMED
	if l.sent%2 == 0 {
		state = ipamv1.AllocationState_ALLOCATION_STATE_LEASED
	}
	manager := ""
	if l.sent == 3 {
		manager = "nomad"
	}
	return &ipamv1.ListAllocationsResponse{Allocation: &ipamv1.Allocation{
		Owner: &workloadv1.Owner{ContainerId: "c", InterfaceName: "eth0"}, State: state, Manager: manager,
	}}, nil
}

func (i ipam) ListAllocations(context.Context, *ipamv1.ListAllocationsRequest, ...grpc.CallOption) (grpc.ServerStreamingClient[ipamv1.ListAllocationsResponse], error) {
	return &listing{count: i.count}, nil
}

func (i ipam) ListPools(context.Context, *ipamv1.ListPoolsRequest, ...grpc.CallOption) (*ipamv1.ListPoolsResponse, error) {
	return &ipamv1.ListPoolsResponse{Pools: i.pools}, nil
}

func TestListingThatDoesNotEndIsRefused(t *testing.T) {
	good := &IPAM{Health: Health{Name: "ipam"}, client: ipam{count: 10}}
	if ours, others, err := good.Confirmed(t.Context()); err != nil || len(ours) != 4 || len(others) != 1 {
		t.Errorf("10 allocations: %d and %d confirmed, %v, want 4 and 1", len(ours), len(others), err)
	}
	endless := &IPAM{Health: Health{Name: "ipam"}, client: ipam{count: -1}}
	owners, _, err := endless.Confirmed(t.Context())
	if err == nil || !strings.Contains(err.Error(), "more than") || owners != nil {
		t.Errorf("without end: %d owners, %v", len(owners), err)
	}
}

func TestTooManyPoolsAreRefused(t *testing.T) {
	pool := &ipamv1.Pool{Prefix: "10.0.0.0/24", Gateway: "10.0.0.1"}
	for n, ok := range map[int]bool{2: true, maxPools + 1: false} {
		i := &IPAM{Health: Health{Name: "ipam"}, client: ipam{pools: make([]*ipamv1.Pool, n)}}
		for at := range i.client.(ipam).pools {
			i.client.(ipam).pools[at] = pool
		}
		pools, err := i.Pools(t.Context())
		if ok != (err == nil) || ok && len(pools) != n {
			t.Errorf("%d pools: %d, %v", n, len(pools), err)
		}
	}
}

// labelled is an identity service that knows one identity.
type labelled struct {
	identityv1.IdentityServiceClient
	number uint32
	labels int
}

func (l labelled) GetIdentity(_ context.Context, r *identityv1.GetIdentityRequest, _ ...grpc.CallOption) (*identityv1.GetIdentityResponse, error) {
	if r.GetNumber() != l.number {
		return nil, status.Error(codes.NotFound, "no such number")
	}
	id := &identityv1.Identity{Number: l.number}
	for range l.labels {
		id.Labels = append(id.Labels, &workloadv1.Label{Source: "k8s", Key: "app", Value: "web"})
	}
	return &identityv1.GetIdentityResponse{Identity: id}, nil
}

func (l labelled) ResolveEndpoint(context.Context, *identityv1.ResolveEndpointRequest, ...grpc.CallOption) (*identityv1.ResolveEndpointResponse, error) {
	return &identityv1.ResolveEndpointResponse{Identity: &identityv1.Identity{Number: l.number}}, nil
}

// TestReservedIdentitiesAreRefusedForEndpoints: if sluice-identity could give a container the identity of the host or
// the world, the container would get everything that policies allow to the host or the world.
func TestReservedIdentitiesAreRefusedForEndpoints(t *testing.T) {
	for number, ok := range map[uint32]bool{
		0: false, 1: false, 2: false, 4: false, 5: true, 6: false, 255: false, 256: true, 65_535: true, 65_536: true,
		0xFEFFFF: true, 0xFF0000: false, 0xFF0FFF: false, 0xFFFFFF: false, 0x1000000: false,
	} {
		i := &Identity{Health: Health{Name: "identity"}, client: labelled{number: number}}
		id, err := i.Resolve(t.Context(), endpoint.Spec{Owner: workload.Owner{ContainerID: "c1", Interface: "eth0"}})
		switch {
		case ok && (err != nil || id.Number != number):
			t.Errorf("%d: %+v, %v", number, id, err)
		case !ok && (err == nil || errors.Is(err, endpoint.ErrInvalid) || !strings.Contains(err.Error(), "c1/eth0")):
			t.Errorf("%d: %+v, %v, want an error that names the endpoint and is not ErrInvalid", number, id, err)
		}
	}
}

func TestLabelsOfAnIdentityHaveABound(t *testing.T) {
	i := &Identity{Health: Health{Name: "identity"}, client: labelled{number: 300, labels: 2}}
	labels, err := i.Labels(t.Context(), 300)
	if want := (label.Label{Source: "k8s", Key: "app", Value: "web"}); err != nil || len(labels) != 2 || labels[0] != want {
		t.Errorf("labels %v, %v", labels, err)
	}
	if _, err := i.Labels(t.Context(), 301); !errors.Is(err, endpoint.ErrNotFound) {
		t.Errorf("an unassigned identity: %v", err)
	}
	i.client = labelled{number: 300, labels: maxLabels + 1}
	if _, err := i.Labels(t.Context(), 300); err == nil || !strings.Contains(err.Error(), "1025 labels") {
		t.Errorf("too many labels: %v", err)
	}
}

// watchedHealth reports when it is watched.
type watchedHealth struct {
	*health.Server
	watched chan<- struct{}
}

func (w watchedHealth) Watch(req *healthpb.HealthCheckRequest, stream grpc.ServerStreamingServer[healthpb.HealthCheckResponse]) error {
	select {
	case w.watched <- struct{}{}:
	default:
	}
	return w.Server.Watch(req, stream)
}

// TestReconnectionIsToldWithoutACall: ipam may have been restarted without its state while the datapath made no calls.
func TestReconnectionIsToldWithoutACall(t *testing.T) {
	dir, err := os.MkdirTemp("", "ipam") // t.TempDir may be too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	socket := filepath.Join(dir, "s")
	watched := make(chan struct{}, 1)
	serve := func() (stop func()) {
		l, err := net.Listen("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer()
		healthpb.RegisterHealthServer(s, watchedHealth{health.NewServer(), watched})
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := s.Serve(l); err != nil {
				t.Error(err)
			}
		})
		return func() { s.Stop(); wg.Wait() }
	}
	stop := serve()
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithCancel(t.Context())
	told := NewIPAM(conn).Reconnected(ctx)
	<-watched
	for range 3 {
		stop()
		stop = serve()
		if _, ok := <-told; !ok {
			t.Fatal("the channel is closed")
		}
	}
	stop()
	cancel()
	for range told { //nolint:revive // drain the channel until it is closed
	}
}

// refusing is an ipam that answers every call with an error.
type refusing struct {
	ipamv1.IPAMServiceClient
	err error
}

func (r refusing) ConfirmAllocation(context.Context, *ipamv1.ConfirmAllocationRequest, ...grpc.CallOption) (*ipamv1.ConfirmAllocationResponse, error) {
	return nil, r.err
}

func (r refusing) Allocate(context.Context, *ipamv1.AllocateRequest, ...grpc.CallOption) (*ipamv1.AllocateResponse, error) {
	return nil, r.err
}

// TestAnswersKeepTheirReasonAndDetails: errors of services are mapped to errors of the core, and keep their reason and
// details for the server's answer.
func TestAnswersKeepTheirReasonAndDetails(t *testing.T) {
	owner := workload.Owner{ContainerID: "c1", Interface: "eth0"}
	answer := func(code codes.Code, reason ipamv1.ErrorReason, text string, details ...protoadapt.MessageV1) error {
		return rpcerr.New(code, rpcerr.Of(reason), errors.New(text), details...)
	}
	for _, c := range []struct {
		err  error
		call func(*IPAM) error
		want error
		text string
	}{
		{
			answer(codes.NotFound, ipamv1.ErrorReason_ERROR_REASON_ALLOCATION_NOT_FOUND, "nothing"),
			func(i *IPAM) error { return i.Confirm(t.Context(), owner, nil) }, endpoint.ErrLease, "ipam: lease is gone: nothing",
		},
		{
			answer(codes.ResourceExhausted, ipamv1.ErrorReason_ERROR_REASON_POOL_EXHAUSTED, "full", rpcerr.Quota("pool:10.0.0.0/24", "full"), rpcerr.Retry(time.Hour)),
			func(i *IPAM) error { return i.Claim(t.Context(), owner, nil) }, endpoint.ErrExhausted, "ipam: exhausted: full",
		},
		{
			answer(codes.Unavailable, ipamv1.ErrorReason_ERROR_REASON_STORAGE_FAILED, "no space", rpcerr.Retry(time.Second)),
			func(i *IPAM) error { return i.Confirm(t.Context(), owner, nil) }, endpoint.ErrUnavailable, "ipam: unavailable: no space",
		},
		{
			answer(codes.Internal, ipamv1.ErrorReason_ERROR_REASON_INTERNAL, "a bug"),
			func(i *IPAM) error { return i.Confirm(t.Context(), owner, nil) }, nil, "ipam: Internal: a bug",
		},
	} {
		i := &IPAM{Health: Health{Name: "ipam"}, client: refusing{err: c.err}}
		got := c.call(i)
		if got == nil || got.Error() != c.text || c.want != nil && !errors.Is(got, c.want) {
			t.Errorf("%v becomes %v, want %q and %v", c.err, got, c.text, c.want)
		}
		theirs, _ := rpcerr.ReasonIn(c.err)
		if ours, ok := rpcerr.ReasonIn(got); !ok || ours != theirs {
			t.Errorf("%v: the reason is %v, want %v", c.err, ours, theirs)
		}
		delay, _ := rpcerr.RetryDelay(c.err)
		if d, _ := rpcerr.RetryDelay(got); d != delay || len(rpcerr.Quotas(got)) != len(rpcerr.Quotas(c.err)) {
			t.Errorf("%v: details are lost: retry after %v, quotas %v", c.err, d, rpcerr.Quotas(got))
		}
	}
}
