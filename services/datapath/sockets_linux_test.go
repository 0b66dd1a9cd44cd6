// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/frontendstream"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/slotmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/sockets"
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
	want := []sockets.Namespace{{Cookie: cookie, Slot: slotmap.HostSlot}}
	for _, p := range pods {
		if cookie, err = p.ns.Cookie(); err != nil {
			w.t.Fatal(err)
		}
		now, err := w.node.Core.Get(p.owner)
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

// TestKernelSocketsStayThoseOfTheEndpointThatHasTheNamespace: an endpoint that has gone
// while its namespace was opened takes nothing from another one there.
func TestKernelSocketsStayThoseOfTheEndpointThatHasTheNamespace(t *testing.T) {
	w := newWorld(t)
	w.frontends = silentBalancer{}
	w.start(false)
	p := w.pod("stays")
	if err := w.node.nameSockets(); err != nil {
		t.Fatal(err)
	}
	gone := p.ep
	gone.Spec.Owner.ContainerID, gone.Slot = "gone", p.ep.Slot+1
	if err := w.node.nameSocketsOf(gone); err != nil {
		t.Fatal(err)
	}
	w.wantNamespaces("after it", p)
	// In a namespace of its own it leaves nothing.
	alone := w.pod("alone")
	if err := w.node.Kernel.Namespaces.Release(alone.ep.Slot); err != nil {
		t.Fatal(err)
	}
	gone.Spec.Netns = alone.spec.Netns
	if err := w.node.nameSocketsOf(gone); err != nil {
		t.Fatal(err)
	}
	w.wantNamespaces("after it in another", p)
}
