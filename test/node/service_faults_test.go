// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// served is a node and a service with changing backends.
type served struct {
	*testNode
	lb       lbv1.LoadBalancerServiceClient
	revision uint64 // revision of the latest backends
}

func newServed(t *testing.T, n *testNode) *served {
	t.Helper()
	return &served{testNode: n, lb: lbv1.NewLoadBalancerServiceClient(dial(t, n.Node, devnode.LoadBalancer))}
}

// TestFaultSocketsAreEndedBeforeThePolicyIsKnown: a datapath that starts while the policy service is down ends
// sockets to removed backends before it acknowledges the removal as ended (INV-99).
func TestFaultSocketsAreEndedBeforeThePolicyIsKnown(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	pods := n.addPods(t, "client", "one", "two")
	serveName(t, pods[1])
	serveName(t, pods[2])
	s := newServed(t, n)
	s.lead(t, pods[1])
	c, err := pods[0].DialUDP(netip.AddrPortFrom(serviceAddresses[0], servicePort))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if name, err := askConnected(c); err != nil || name != pods[1].Name {
		t.Fatalf("%q answers, %v", name, err)
	}
	for _, service := range []string{devnode.Policy, devnode.Datapath} {
		if err := n.Kill(t.Context(), service); err != nil {
			t.Fatal(err)
		}
	}
	started := make(chan error, 1)
	go func() { started <- n.Start(t.Context(), devnode.Datapath) }() // serves once the policy is known
	s.lead(t, pods[2])
	if name, err := askConnected(c); !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.EDESTADDRREQ) {
		t.Errorf("the socket to the removed backend: %q, %v, want it ended", name, err)
	}
	if err := errors.Join(n.Start(t.Context(), devnode.Policy), <-started); err != nil {
		t.Error(err)
	}
}

// lead changes the backends, while processes may be killed, and returns when the removals are acknowledged as ended.
func (s *served) lead(t *testing.T, backends ...pod.Pod) {
	t.Helper()
	request := &lbv1.UpsertServicesRequest{Manifests: []byte(serviceManifests(backends...))}
	servicetest.EventuallyNil(t, "the backends are changed", func() error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		r, err := s.lb.UpsertServices(ctx, request)
		if err != nil && status.Code(err) != codes.Unavailable { // killed meanwhile
			t.Fatal(err)
		}
		s.revision = r.GetRevision()
		return err
	})
	s.awaitEnded(t)
}

// awaitEnded waits until a connected datapath has acknowledged the revision's removals as ended.
func (s *served) awaitEnded(t *testing.T) {
	t.Helper()
	servicetest.EventuallyNil(t, fmt.Sprintf("revision %d is ended", s.revision), func() error {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		r, err := s.lb.WaitForRevision(ctx, &lbv1.WaitForRevisionRequest{Revision: s.revision, Ended: true})
		if err == nil && len(r.GetEnforcing()) == 0 {
			return errors.New("no datapath is connected")
		}
		return err
	})
}
