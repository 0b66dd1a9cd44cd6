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

// silentBalancer is a sluice-loadbalancer that says nothing.
type silentBalancer struct{}

func (silentBalancer) Subscribe(ctx context.Context, _ frontendstream.Subscription) (frontendstream.Stream, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

// wantNamespaces compares the map of namespaces with the node and its pods, by slot.
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
		now, err := w.node.Endpoints.Core.Get(p.owner)
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

// TestKernelSocketsAreNamedAfterServicesWereOff: the map of namespaces was left alone
// meanwhile, and what it says of a slot is of the pod that had it before.
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
	if _, err := w.node.Endpoints.Core.Delete(t.Context(), gone.owner); err != nil {
		t.Fatal(err)
	}
	w.stop()
	w.start(false) // slots are given out from the first one on again
	later := w.pod("later")
	if later.ep.Slot != gone.ep.Slot {
		t.Fatalf("the later pod has slot %d, that of before had %d: this shows nothing", later.ep.Slot, gone.ep.Slot)
	}
	w.stop()

	w.frontends = silentBalancer{}
	w.start(false)
	if err := w.node.Services.NameSockets(true); err != nil {
		t.Fatal(err)
	}
	w.wantNamespaces("with services again", later, stays)
}

// TestKernelSocketsStayThoseOfTheEndpointThatHasTheNamespace: an endpoint that has gone
// while its namespace was opened takes nothing from another one there.
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
	// In a namespace of its own it leaves nothing.
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
