// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	ipamv1 "github.com/sluice-net/sluice/proto/gen/sluice/ipam/v1"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// manager is the name of this program. Endpoints and policies carry it, and
// Reclaim and SetPolicies change no others.
const manager = "example"

// Node speaks to the services of one node.
type Node struct {
	ipam     ipamv1.IPAMServiceClient
	datapath datapathv1.DatapathServiceClient
	policy   policyv1.PolicyServiceClient
	conns    []*grpc.ClientConn
}

// Dial prepares connections to the sockets below runDir. It succeeds while the
// services are unavailable: calls wait for them until their deadline.
func Dial(runDir string) (*Node, error) {
	n := &Node{}
	to := func(service string) (*grpc.ClientConn, error) {
		path, err := filepath.Abs(filepath.Join(runDir, service, service+".sock"))
		if err != nil {
			return nil, err
		}
		conn, err := grpc.NewClient("unix://"+path,
			grpc.WithTransportCredentials(insecure.NewCredentials()), // services check peer credentials
			grpc.WithDefaultCallOptions(grpc.WaitForReady(true)),
			grpc.WithUnaryInterceptor(noteWait), // a person should know what a command waits for
			// A local service that restarts is back soon.
			grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{
				BaseDelay: 20 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second,
			}}))
		if err == nil {
			n.conns = append(n.conns, conn)
		}
		return conn, err
	}
	ipam, err1 := to("ipam")
	datapath, err2 := to("datapath")
	policy, err3 := to("policy")
	if err := errors.Join(err1, err2, err3); err != nil {
		n.Close()
		return nil, err
	}
	n.ipam = ipamv1.NewIPAMServiceClient(ipam)
	n.datapath = datapathv1.NewDatapathServiceClient(datapath)
	n.policy = policyv1.NewPolicyServiceClient(policy)
	return n, nil
}

// noteWait makes a call, and says after a second if its service is unavailable.
func noteWait(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, call grpc.UnaryInvoker,
	opts ...grpc.CallOption,
) error {
	timer := time.AfterFunc(time.Second, func() {
		if conn.GetState() != connectivity.Ready {
			fmt.Fprintf(os.Stderr, "client: nothing answers at %s; waiting for it\n", conn.Target())
		}
	})
	defer timer.Stop()
	return call(ctx, method, req, reply, conn, opts...)
}

// Close ends the connections.
func (n *Node) Close() {
	for _, conn := range n.conns {
		_ = conn.Close()
	}
}

// Connect gives the network namespace an interface. It is idempotent: a repeated
// call with the same content returns the same answer. If it fails, it undoes what it did.
func (n *Node) Connect(ctx context.Context, owner *workloadv1.Owner, netns string, labels []*workloadv1.Label,
) (*datapathv1.Endpoint, error) {
	for {
		lease, err := retry(ctx, func() (*ipamv1.AllocateResponse, error) {
			return n.ipam.Allocate(ctx, &ipamv1.AllocateRequest{Owner: owner})
		})
		if err != nil {
			return nil, fmt.Errorf("allocate addresses: %w", err)
		}
		request := &datapathv1.CreateEndpointRequest{
			Owner: owner, NetworkNamespace: netns, Labels: labels, Manager: manager,
			LeaseExpireTime: lease.GetAllocation().GetLeaseExpireTime(),
		}
		for _, address := range lease.GetAllocation().GetAddresses() {
			request.Addresses = append(request.Addresses, address.GetAddress())
		}
		// The datapath confirms the lease itself, before the device is up.
		answer, err := retry(ctx, func() (*datapathv1.CreateEndpointResponse, error) {
			return n.datapath.CreateEndpoint(ctx, request)
		})
		if err == nil {
			return answer.GetEndpoint(), nil
		}
		if reason(err) == "LEASE_LOST" && pause(ctx, 50*time.Millisecond) == nil {
			continue // ipam has restarted, or this took longer than the lease
		}
		// Addresses that were confirmed before belong to an endpoint that an earlier
		// call made: it stays.
		if lease.GetAllocation().GetState() == ipamv1.AllocationState_ALLOCATION_STATE_LEASED {
			err = errors.Join(err, n.undo(ctx, owner))
		}
		return nil, fmt.Errorf("create the endpoint: %w", err)
	}
}

// undo removes what a failed Connect may have left. The context of the caller may
// have ended, so undo has a deadline of its own.
func (n *Node) undo(ctx context.Context, owner *workloadv1.Owner) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	// The answer of CreateEndpoint may have been lost: only the datapath knows.
	deleted, err := n.datapath.DeleteEndpoint(ctx, &datapathv1.DeleteEndpointRequest{Owner: owner})
	if err != nil || deleted.GetExisted() {
		return err // the datapath releases the addresses of what it deletes
	}
	_, err = n.ipam.Release(ctx, &ipamv1.ReleaseRequest{Owner: owner})
	return err
}

// Relabel replaces the labels of a connected workload, and with them its identity.
// When it returns, the kernel enforces the new labels.
func (n *Node) Relabel(ctx context.Context, owner *workloadv1.Owner, labels []*workloadv1.Label,
) (*datapathv1.Endpoint, error) {
	answer, err := retry(ctx, func() (*datapathv1.UpdateEndpointResponse, error) {
		return n.datapath.UpdateEndpoint(ctx, &datapathv1.UpdateEndpointRequest{
			Owner: owner, Manager: manager, Labels: &datapathv1.GivenLabels{Labels: labels},
		})
	})
	return answer.GetEndpoint(), err
}

// Disconnect removes the endpoint. The datapath releases the addresses and the
// identity afterwards. Without an endpoint it succeeds.
func (n *Node) Disconnect(ctx context.Context, owner *workloadv1.Owner) error {
	_, err := retry(ctx, func() (*datapathv1.DeleteEndpointResponse, error) {
		return n.datapath.DeleteEndpoint(ctx, &datapathv1.DeleteEndpointRequest{Owner: owner})
	})
	return err
}

// Reclaim deletes the endpoints of this manager whose owners are not valid, after a
// crash of the orchestrator for example.
func (n *Node) Reclaim(ctx context.Context, valid []*workloadv1.Owner) ([]*workloadv1.Owner, error) {
	answer, err := retry(ctx, func() (*datapathv1.ReclaimEndpointsResponse, error) {
		return n.datapath.ReclaimEndpoints(ctx, &datapathv1.ReclaimEndpointsRequest{
			Manager: manager, ValidOwners: valid, NoneValid: len(valid) == 0,
		})
	})
	return answer.GetReclaimed(), err
}

// SetPolicies replaces the policies of this manager with the manifests, all of
// them or none, and returns when the kernel enforces them.
func (n *Node) SetPolicies(ctx context.Context, manifests []byte) (uint64, error) {
	replaced, err := retry(ctx, func() (*policyv1.ReplacePoliciesResponse, error) {
		return n.policy.ReplacePolicies(ctx, &policyv1.ReplacePoliciesRequest{
			Manager: manager, Manifests: manifests, AllowEmpty: len(manifests) == 0,
		})
	})
	if err != nil {
		return 0, fmt.Errorf("replace policies: %w", err)
	}
	revision := replaced.GetRevision()
	enforced, err := retry(ctx, func() (*policyv1.WaitForRevisionResponse, error) {
		return n.policy.WaitForRevision(ctx, &policyv1.WaitForRevisionRequest{Revision: revision})
	})
	switch {
	case err != nil:
		return 0, fmt.Errorf("revision %d is stored; wait for the kernel: %w", revision, err)
	case len(enforced.GetEnforcing()) == 0:
		return 0, fmt.Errorf("revision %d is stored, and no datapath is connected", revision)
	}
	return revision, nil
}

// Watch calls changed for every existing, new or changed endpoint, and removed for
// every removed one. It reconnects after a restart of the datapath, and returns
// when the context ends.
func (n *Node) Watch(ctx context.Context, changed func(*datapathv1.Endpoint), removed func(owner string)) error {
	known := map[string]bool{} // by owner
	var token []byte
	for {
		err := n.watchOnce(ctx, &token, known, changed, removed)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		switch status.Code(err) {
		case codes.OutOfRange: // another run of the datapath, or away for too long
			token = nil
		case codes.PermissionDenied, codes.Unimplemented, codes.InvalidArgument:
			return err // another attempt fails as this one did
		}
		if err := pause(ctx, 200*time.Millisecond); err != nil {
			return err
		}
	}
}

// watchOnce follows one stream. Without a token, it starts with a listing: known
// endpoints that are not listed were removed. With a token, it continues where the
// last stream ended.
func (n *Node) watchOnce(ctx context.Context, token *[]byte, known map[string]bool,
	changed func(*datapathv1.Endpoint), removed func(owner string),
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := n.datapath.WatchEndpoints(ctx, &datapathv1.WatchEndpointsRequest{ResumeToken: *token})
	if err != nil {
		return err
	}
	listed := map[string]bool{}
	for {
		message, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch event := message.GetEvent().(type) {
		case *datapathv1.WatchEndpointsResponse_Upsert:
			owner := ownerText(event.Upsert.GetOwner())
			known[owner], listed[owner] = true, true
			changed(event.Upsert)
		case *datapathv1.WatchEndpointsResponse_Delete:
			owner := ownerText(event.Delete)
			if known[owner] {
				delete(known, owner)
				removed(owner)
			}
		case *datapathv1.WatchEndpointsResponse_Bookmark:
			if !event.Bookmark.GetSnapshotComplete() || len(*token) > 0 {
				break
			}
			for owner := range known {
				if !listed[owner] {
					delete(known, owner)
					removed(owner)
				}
			}
		}
		if len(message.GetResumeToken()) > 0 { // empty until the listing is complete
			*token = message.GetResumeToken()
		}
	}
}

// retry repeats a call that may succeed later, until it does or the context ends.
// All calls of this program are idempotent.
func retry[T any](ctx context.Context, call func() (T, error)) (T, error) {
	for delay := 50 * time.Millisecond; ; delay = min(2*delay, 2*time.Second) {
		answer, err := call()
		switch status.Code(err) {
		case codes.Unavailable, codes.ResourceExhausted, codes.Aborted:
		default:
			return answer, err
		}
		wait := delay
		for _, detail := range status.Convert(err).Details() {
			if info, ok := detail.(*errdetails.RetryInfo); ok {
				wait = max(wait, info.GetRetryDelay().AsDuration())
			}
		}
		// Jitter, so that many callers do not retry at once.
		if pause(ctx, wait+rand.N(wait/2)) != nil { //nolint:gosec // no secret
			return answer, err
		}
	}
}

// reason returns the reason of the error's ErrorInfo; empty if it has none.
func reason(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info.GetReason()
		}
	}
	return ""
}

// pause waits for a time or the end of the context.
func pause(ctx context.Context, wait time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(wait):
		return nil
	}
}
