// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendstream"
	"github.com/sluice-net/sluice/services/datapath/internal/service/sockets"
)

// silentBalancer is a sluice-loadbalancer that sends nothing.
type silentBalancer struct{}

func (silentBalancer) Subscribe(ctx context.Context, _ frontendstream.Subscription) (frontendstream.Stream, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// wantNamespaces compares the map of namespaces with the node and its pods, by endpoint ID.
func (w *world) wantNamespaces(when string, pods ...*pod) {
	w.t.Helper()
	cookie, err := w.home.Cookie()
	if err != nil {
		w.t.Fatal(err)
	}
	want := []sockets.Namespace{{Cookie: cookie, Slot: endpointmap.HostID}}
	for _, p := range pods {
		if cookie, err = p.ns.Cookie(); err != nil {
			w.t.Fatal(err)
		}
		now, err := w.node.Endpoints.Report.Get(p.owner)
		if err != nil {
			w.t.Fatal(err)
		}
		want = append(want, sockets.Namespace{Cookie: cookie, Slot: now.Slot})
	}
	slices.SortFunc(want[1:], func(a, b sockets.Namespace) int { return int(a.Slot) - int(b.Slot) })
	got, err := w.node.Kernel.Namespaces.List()
	slices.SortFunc(got, func(a, b sockets.Namespace) int { return int(a.Slot) - int(b.Slot) })
	if err != nil || !slices.Equal(got, want) {
		w.t.Errorf("%s: the namespaces are %+v, %v, want %+v", when, got, err, want)
	}
}

// TestKernelSocketsAreNamedAfterServicesWereOff enables services again. While they were off, the map of namespaces was
// not updated, so its entry for an endpoint ID is of the endpoint that had the ID before.
func TestKernelSocketsAreNamedAfterServicesWereOff(t *testing.T) {
	w := newWorld(t)
	w.frontends = silentBalancer{}
	w.start(false)
	gone, stays := w.pod("gone"), w.pod("stays")
	if err := w.node.Services.NameSockets(true); err != nil {
		t.Fatal(err)
	}
	w.wantNamespaces("with services", gone, stays)
	w.stop()

	w.frontends = nil
	w.start(false)
	if _, err := w.delete(gone.owner); err != nil {
		t.Fatal(err)
	}
	w.stop()
	w.start(false) // endpoint IDs are assigned from the first again
	later := w.pod("later")
	if later.ep.Slot != gone.ep.Slot {
		t.Fatalf("the later pod has slot %d, the earlier one had %d: the test proves nothing", later.ep.Slot, gone.ep.Slot)
	}
	w.stop()

	w.frontends = silentBalancer{}
	w.start(false)
	if err := w.node.Services.NameSockets(true); err != nil {
		t.Fatal(err)
	}
	w.wantNamespaces("with services again", later, stays)
}

// TestKernelSocketsStayThoseOfTheEndpointThatHasTheNamespace claims a namespace for an endpoint that is deleted
// meanwhile. If another endpoint uses the namespace, its entry must remain.
func TestKernelSocketsStayThoseOfTheEndpointThatHasTheNamespace(t *testing.T) {
	w := newWorld(t)
	w.frontends = silentBalancer{}
	w.start(false)
	p := w.pod("stays")
	if err := w.node.Services.NameSockets(false); err != nil {
		t.Fatal(err)
	}
	gone := p.ep
	gone.Spec.Owner.ContainerID, gone.Slot = "gone", p.ep.Slot+1
	if err := w.node.Services.ClaimSockets(gone); err != nil {
		t.Fatal(err)
	}
	w.wantNamespaces("after it", p)
	// In a namespace without another endpoint, it leaves no entry.
	alone := w.pod("alone")
	if err := w.node.Kernel.Namespaces.Release(alone.ep.Slot); err != nil {
		t.Fatal(err)
	}
	gone.Spec.Netns = alone.spec.Netns
	if err := w.node.Services.ClaimSockets(gone); err != nil {
		t.Fatal(err)
	}
	w.wantNamespaces("after it in another", p)
}
