// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package client calls the services that the datapath depends on and converts their answers to types and errors of the
// core.
package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/netip"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/rpc/rpcerr"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/model/label"
	"github.com/sluice-net/sluice/model/workload"
	identityv1 "github.com/sluice-net/sluice/proto/gen/sluice/identity/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	statusv1 "github.com/sluice-net/sluice/proto/gen/sluice/status/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
	"github.com/sluice-net/sluice/proto/wire"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
	"github.com/sluice-net/sluice/services/datapath/internal/node/podrange"
)

// Health stores the result of the last call to a service. It is safe for concurrent use.
type Health struct {
	Name string

	mu  sync.Mutex
	err error // guarded by mu
}

// Err returns the error of the last call if the service did not answer, else nil.
func (h *Health) Err() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.err
}

// note records the outcome of a call. Any answer of the service, even an error, counts as healthy.
func (h *Health) note(err error) {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Unimplemented:
	case codes.Canceled:
		return
	default:
		err = nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.err = err
}

// translate adds the service's name and the matching error of package endpoint to err: ErrLease for the codes in lease.
// The gRPC status stays in the chain, so that the server passes on its reason and details.
func (h *Health) translate(err error, lease ...codes.Code) error {
	h.note(err)
	if err == nil {
		return nil
	}
	code := status.Code(err)
	var meaning error
	switch {
	case slices.Contains(lease, code):
		meaning = endpoint.ErrLease
	case code == codes.Unavailable, code == codes.DeadlineExceeded:
		meaning = endpoint.ErrUnavailable
	case code == codes.ResourceExhausted:
		meaning = endpoint.ErrExhausted
	case code == codes.InvalidArgument:
		meaning = endpoint.ErrInvalid
	case code == codes.AlreadyExists:
		meaning = endpoint.ErrExists
	default:
		return fmt.Errorf("%s: %s: %w", h.Name, code, rpcerr.Answer(err))
	}
	return fmt.Errorf("%s: %w: %w", h.Name, meaning, rpcerr.Answer(err))
}

// IPAM implements endpoint.Leases.
type IPAM struct {
	Health
	client ipamv1.IPAMServiceClient
	health healthpb.HealthClient
}

// NewIPAM returns a client that uses cc, a connection to ipam's socket.
func NewIPAM(cc grpc.ClientConnInterface) *IPAM {
	return &IPAM{Health: Health{Name: "ipam"}, client: ipamv1.NewIPAMServiceClient(cc), health: healthpb.NewHealthClient(cc)}
}

// Confirm implements endpoint.Leases.
func (i *IPAM) Confirm(ctx context.Context, o workload.Owner, addrs []netip.Addr) error {
	req := &ipamv1.ConfirmAllocationRequest{Owner: wire.Owner(o), Addresses: wire.Addresses(addrs)}
	_, err := i.client.ConfirmAllocation(ctx, req)
	return i.translate(err, codes.NotFound, codes.FailedPrecondition)
}

// Claim implements endpoint.Leases.
func (i *IPAM) Claim(ctx context.Context, o workload.Owner, addrs []netip.Addr) error {
	req := &ipamv1.AllocateRequest{Owner: wire.Owner(o), RequestedAddresses: wire.Addresses(addrs)}
	for _, a := range addrs {
		family := ipamv1.Family_FAMILY_IPV6
		if a.Is4() {
			family = ipamv1.Family_FAMILY_IPV4
		}
		req.Families = append(req.Families, family)
	}
	if _, err := i.client.Allocate(ctx, req); err != nil {
		return i.translate(err, codes.AlreadyExists, codes.FailedPrecondition)
	}
	return i.Confirm(ctx, o, addrs)
}

// watchAgain is the pause before the health watch is opened again.
const watchAgain = 50 * time.Millisecond

// Reconnected sends each time that a lost connection is re-established. The channel is closed when ctx ends. The
// service may have lost state while it was disconnected, even if no call failed in that time.
func (i *IPAM) Reconnected(ctx context.Context) <-chan struct{} {
	ch := make(chan struct{}, 1)
	go func() {
		defer close(ch)
		for again := false; ctx.Err() == nil; {
			// The stream ends with its connection, however quickly the next connection is established.
			stream, err := i.health.Watch(ctx, &healthpb.HealthCheckRequest{}, grpc.WaitForReady(true))
			if err == nil {
				if _, err = stream.Recv(); err == nil && again {
					select {
					case ch <- struct{}{}:
					default:
					}
				}
				for again = true; err == nil; {
					_, err = stream.Recv()
				}
			}
			select {
			case <-time.After(watchAgain):
			case <-ctx.Done():
			}
		}
	}()
	return ch
}

// Release implements endpoint.Leases.
func (i *IPAM) Release(ctx context.Context, o workload.Owner) error {
	_, err := i.client.Release(ctx, &ipamv1.ReleaseRequest{Owner: wire.Owner(o)})
	return i.translate(err)
}

// Limits that a correct ipam never exceeds. The datapath has more privileges than ipam, so ipam must not control how
// much memory or time a call takes.
const (
	maxListed   = 1 << 18 // four times the allocations of a /16
	maxPools    = 64
	listTimeout = 30 * time.Second
)

// Confirmed implements endpoint.Leases.
func (i *IPAM) Confirmed(ctx context.Context) (ours, others []workload.Owner, err error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	stream, err := i.client.ListAllocations(ctx, &ipamv1.ListAllocationsRequest{})
	if err != nil {
		return nil, nil, i.translate(err)
	}
	for range maxListed {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			i.note(nil)
			return ours, others, nil
		}
		if err != nil {
			return nil, nil, i.translate(err)
		}
		a := m.GetAllocation()
		switch {
		case a.GetState() != ipamv1.AllocationState_ALLOCATION_STATE_CONFIRMED:
		case a.GetManager() == "":
			ours = append(ours, wire.OwnerOf(a.GetOwner()))
		default:
			others = append(others, wire.OwnerOf(a.GetOwner()))
		}
	}
	return nil, nil, fmt.Errorf("ipam: the list has more than %d allocations", maxListed)
}

// Pools lists the pod ranges of ipam.
func (i *IPAM) Pools(ctx context.Context) ([]endpoint.Pool, error) {
	resp, err := i.client.ListPools(ctx, &ipamv1.ListPoolsRequest{})
	if err != nil {
		return nil, i.translate(err)
	}
	i.note(nil)
	if n := len(resp.GetPools()); n > maxPools {
		return nil, fmt.Errorf("ipam: the list has %d pools, at most %d are accepted", n, maxPools)
	}
	var pools []endpoint.Pool
	for _, p := range resp.GetPools() {
		cidr, err := netip.ParsePrefix(p.GetPrefix())
		if err != nil {
			return nil, fmt.Errorf("ipam: pool %q: %w", p.GetPrefix(), err)
		}
		gw, err := wire.AddressOf(p.GetGateway())
		if err != nil {
			return nil, fmt.Errorf("ipam: gateway of pool %s: %w", p.GetPrefix(), err)
		}
		pools = append(pools, endpoint.Pool{CIDR: cidr, Gateway: gw})
	}
	return pools, nil
}

// Writable returns the reason why ipam cannot write its state, and therefore cannot allocate addresses; nil if it can.
func (i *IPAM) Writable(ctx context.Context) error {
	resp, err := i.client.GetStatus(ctx, &ipamv1.GetStatusRequest{})
	if err != nil {
		return i.translate(err)
	}
	for _, p := range resp.GetService().GetProblems() {
		if p.GetReason() == statusv1.ProblemReason_PROBLEM_REASON_STORAGE {
			return errors.New("ipam: " + p.GetText())
		}
	}
	return nil
}

// Watch implements podrange.Source.
func (i *IPAM) Watch(ctx context.Context, token []byte) iter.Seq2[watch.Event[netip.Prefix, podrange.Range], error] {
	return watch.Receive(func() (grpc.ServerStreamingClient[ipamv1.WatchPoolsResponse], error) {
		return i.client.WatchPools(ctx, &ipamv1.WatchPoolsRequest{ResumeToken: token})
	}, rangeEvent)
}

// rangeEvent converts a message. It ignores a range that it cannot parse. Value.Node is the zero Addr if the message
// has no valid node address.
func rangeEvent(m *ipamv1.WatchPoolsResponse) watch.Event[netip.Prefix, podrange.Range] {
	out := watch.Event[netip.Prefix, podrange.Range]{Kind: watch.Bookmark, Token: m.GetResumeToken()}
	switch e := m.GetEvent().(type) {
	case *ipamv1.WatchPoolsResponse_Upsert:
		if p, err := netip.ParsePrefix(e.Upsert.GetPrefix()); err == nil {
			out.Kind, out.Key, out.Value.Primary = watch.Upsert, p, e.Upsert.GetPrimary()
			for _, text := range e.Upsert.GetNodeAddresses() {
				if a, err := wire.AddressOf(text); err == nil && !out.Value.Node.IsValid() {
					out.Value.Node = a
				}
			}
		}
	case *ipamv1.WatchPoolsResponse_Delete:
		if p, err := netip.ParsePrefix(e.Delete); err == nil {
			out.Kind, out.Key = watch.Delete, p
		}
	case *ipamv1.WatchPoolsResponse_Bookmark:
		out.SnapshotComplete = e.Bookmark.GetSnapshotComplete()
	}
	return out
}

// Identity implements endpoint.Identities.
type Identity struct {
	Health
	client identityv1.IdentityServiceClient
	health healthpb.HealthClient
}

// NewIdentity returns a client that uses cc, a connection to identity's socket.
func NewIdentity(cc grpc.ClientConnInterface) *Identity {
	return &Identity{Health: Health{Name: "identity"}, client: identityv1.NewIdentityServiceClient(cc), health: healthpb.NewHealthClient(cc)}
}

func resolveRequest(s endpoint.Spec) *identityv1.ResolveEndpointRequest {
	return &identityv1.ResolveEndpointRequest{
		Owner: wire.Owner(s.Owner), Labels: wire.Labels(s.Labels), NamedPorts: wire.NamedPorts(s.Ports),
		Manager: s.Manager, Network: s.Network, Pod: wire.Pod(s.Pod), Addresses: wire.Addresses(s.Addrs),
	}
}

// Resolve implements endpoint.Identities.
func (i *Identity) Resolve(ctx context.Context, s endpoint.Spec) (endpoint.Identity, error) {
	resp, err := i.client.ResolveEndpoint(ctx, resolveRequest(s))
	if err != nil {
		return endpoint.Identity{}, i.unresolved(err)
	}
	i.note(nil)
	id, err := identityOf(resp)
	if err != nil {
		return endpoint.Identity{}, fmt.Errorf("identity: answer for endpoint %s: %s", s.Owner, err.Error())
	}
	return withTenant(id, resp), nil
}

// unresolved converts an error like translate, and adds ErrPodUnknown if the error concerns the pod.
func (i *Identity) unresolved(err error) error {
	if !rpcerr.Is(err, identityv1.ErrorReason_ERROR_REASON_POD_NOT_FOUND,
		identityv1.ErrorReason_ERROR_REASON_KUBERNETES_UNAVAILABLE) {
		return i.translate(err)
	}
	i.note(nil) // the service did answer
	return fmt.Errorf("identity: %w: %w: %w", endpoint.ErrUnavailable, endpoint.ErrPodUnknown, rpcerr.Answer(err))
}

// Preview implements endpoint.Identities.
func (i *Identity) Preview(ctx context.Context, s endpoint.Spec) (endpoint.Identity, error) {
	req := resolveRequest(s)
	req.ValidateOnly = true
	resp, err := i.client.ResolveEndpoint(ctx, req)
	if err != nil {
		return endpoint.Identity{}, i.unresolved(err)
	}
	i.note(nil)
	return withTenant(identityUnchecked(resp), resp), nil
}

// Confirm implements endpoint.Identities.
func (i *Identity) Confirm(ctx context.Context, o workload.Owner, number uint32) error {
	_, err := i.client.ConfirmEndpoint(ctx, &identityv1.ConfirmEndpointRequest{Owner: wire.Owner(o), Number: number})
	return i.translate(err)
}

// resolved is a message with the identity of an endpoint.
type resolved interface {
	GetIdentity() *identityv1.Identity
	GetNamedPorts() []*workloadv1.NamedPort
	GetFromPod() bool
}

// withTenant adds the tenant of the answer, if the answer has one.
func withTenant(id endpoint.Identity, m *identityv1.ResolveEndpointResponse) endpoint.Identity {
	id.Tenant, _ = wire.ReadTenant(m.GetTenant())
	return id
}

func identityUnchecked(m resolved) endpoint.Identity {
	id := endpoint.Identity{
		Number: m.GetIdentity().GetNumber(), Labels: wire.LabelsOf(m.GetIdentity().GetLabels()), FromPod: m.GetFromPod(),
	}
	if id.FromPod {
		id.Ports = wire.NamedPortsOf(m.GetNamedPorts())
	}
	return id
}

// identityOf returns the endpoint's identity from a message. The datapath has more privileges than sluice-identity, so
// it rejects reserved identities: sluice-identity cannot give a container the identity of the host. The error is not
// ErrInvalid, because the caller made no mistake.
func identityOf(m resolved) (endpoint.Identity, error) {
	id := identityUnchecked(m)
	if err := id.Validate(); err != nil {
		return endpoint.Identity{}, errors.New(err.Error())
	}
	if len(id.Labels) > maxLabels || len(id.Ports) > maxPorts {
		return endpoint.Identity{}, fmt.Errorf(
			"identity %d has %d labels and %d named ports, at most %d and %d are accepted",
			id.Number, len(id.Labels), len(id.Ports), maxLabels, maxPorts)
	}
	return id, nil
}

// Limits on the answers of the identity service, equal to the limits of an endpoint.
const (
	maxLabels = 1024
	maxPorts  = workload.MaxNamedPorts
)

// Labels implements observe.LabelSource. It returns endpoint.ErrNotFound for an unassigned identity.
func (i *Identity) Labels(ctx context.Context, identity uint32) ([]label.Label, error) {
	resp, err := i.client.GetIdentity(ctx, &identityv1.GetIdentityRequest{Number: identity})
	if status.Code(err) == codes.NotFound {
		return nil, fmt.Errorf("identity %d: %w", identity, endpoint.ErrNotFound)
	}
	if err != nil {
		return nil, i.translate(err)
	}
	if n := len(resp.GetIdentity().GetLabels()); n > maxLabels {
		return nil, fmt.Errorf("identity: identity %d has %d labels, at most %d are accepted", identity, n, maxLabels)
	}
	return wire.LabelsOf(resp.GetIdentity().GetLabels()), nil
}

// Release implements endpoint.Identities.
func (i *Identity) Release(ctx context.Context, o workload.Owner) error {
	_, err := i.client.ReleaseIdentity(ctx, &identityv1.ReleaseIdentityRequest{
		Holder: &identityv1.ReleaseIdentityRequest_Owner{Owner: wire.Owner(o)},
	})
	return i.translate(err)
}

// Ping reports whether the service answers.
func (i *Identity) Ping(ctx context.Context) error {
	_, err := i.client.GetStatus(ctx, &identityv1.GetStatusRequest{})
	return i.translate(err)
}

// Ready returns the reason why a new label set would get no identity: the service does not answer, or its store is
// unavailable.
func (i *Identity) Ready(ctx context.Context) error {
	resp, err := i.health.Check(ctx, &healthpb.HealthCheckRequest{})
	if err == nil && resp.GetStatus() != healthpb.HealthCheckResponse_SERVING {
		return errors.New("identity: not ready; new label sets get no identity")
	}
	if err != nil {
		return i.translate(err)
	}
	resp, err = i.health.Check(ctx, &healthpb.HealthCheckRequest{Service: wire.NewLabelSets})
	switch {
	case status.Code(err) == codes.NotFound: // an earlier version of identity, which has no readiness check
		return nil
	case err == nil && resp.GetStatus() != healthpb.HealthCheckResponse_SERVING:
		return errors.New("identity: new label sets get no identity now; see the problems of sluice-identity " +
			"with etcd and its disk")
	}
	return i.translate(err)
}
