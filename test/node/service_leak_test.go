// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/devnode"
	"github.com/sluice-net/sluice/kit/servicetest"
	lbv1 "github.com/sluice-net/sluice/proto/gen/sluice/loadbalancer/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// TestFaultServiceAddressesStayOnTheNode: the backends of a service are replaced and removed, and each process is
// killed and restarted with other programs and maps. Meanwhile no packet of a pod to the service's addresses leaves the
// node, neither from connected sockets nor as frames that bypass the socket hooks. After the service is deleted, the
// same packets leave the node.
func TestFaultServiceAddressesStayOnTheNode(t *testing.T) {
	n := newNode(t)
	pods := n.addPods(t, "client", "b0", "b1", "b2")
	world := n.outside(t)
	must(t, pod.In(n.Netns(), func() error {
		var errs []error
		for i, a := range serviceAddresses {
			errs = append(errs, netlink.RouteAdd(&netlink.Route{
				Dst: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(a.BitLen(), a.BitLen())}, Gw: worldHosts[i].Addr().AsSlice(),
			}))
		}
		return errors.Join(errs...)
	}))
	outside := n.newWire(t, world, true)
	for _, p := range pods[1:] {
		serveName(t, p)
	}
	s := newServed(t, n)
	s.lead(t, pods[1])
	client := n.askForever(t, pods[0])

	processes := []string{devnode.LoadBalancer, devnode.Datapath, devnode.Policy, devnode.Identity, devnode.IPAM}
	for _, service := range processes {
		restarted := make(chan error, 1)
		go func() {
			restarted <- errors.Join(n.Kill(t.Context(), service), n.Start(t.Context(), service))
		}()
		for _, backends := range [][]pod.Pod{pods[2:], nil, pods[1:], pods[3:], nil, pods[1:2]} {
			s.lead(t, backends...)
			client.wantMore(t, fmt.Sprintf("%s is restarted, with %d backends", service, len(backends)))
		}
		must(t, <-restarted)
		s.awaitEnded(t)
		client.wantMore(t, service+" is back")
	}
	isService := func(seg segment) bool {
		return slices.Contains(serviceAddresses, seg.to.Addr()) || slices.Contains(serviceAddresses, seg.from.Addr())
	}
	for _, seg := range outside.read(t) {
		if isService(seg) {
			t.Fatalf("left the node: %v", seg)
		}
	}
	t.Logf("%d frames and %d connects", client.frames.Load(), client.connects.Load())
	// Without this, an absence of packets would prove nothing.
	_, err := s.lb.DeleteServices(t.Context(), &lbv1.DeleteServicesRequest{
		Keys: []*lbv1.ObjectKey{{Kind: "Service", Namespace: "test", Name: "web"}},
	})
	must(t, err)
	for _, a := range serviceAddresses {
		outside.await(t, "a packet to the deleted "+a.String(), func(seg segment) bool { return seg.to.Addr() == a })
	}
}

// asking counts packets that a pod sends to a service repeatedly.
type asking struct {
	frames, connects atomic.Uint64
}

// askForever sends SYNs and datagrams that bypass the pod's sockets, and connects, until the test ends.
func (n *testNode) askForever(t *testing.T, from pod.Pod) *asking {
	t.Helper()
	a := &asking{}
	w := n.newWire(t, from, false)
	var working sync.WaitGroup
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(func() {
		cancel()
		working.Wait()
	})
	working.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			at := i % len(serviceAddresses)
			s := segment{
				from: netip.AddrPortFrom(from.Addresses()[at], 20000+uint16(i/4%1000)),
				to:   netip.AddrPortFrom(serviceAddresses[at], servicePort), flags: syn, seq: uint32(i),
			}
			if i/2%2 == 0 {
				s.flags, s.payload = datagram, "anybody?"
			}
			if _, err := unix.Write(w.fd, w.frame(s)); err == nil {
				a.frames.Add(1)
			}
			if i%16 == 0 { // leave time for the device's queue and for other work
				_, _ = unix.Poll(nil, 1)
			}
		}
	})
	working.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			to := netip.AddrPortFrom(serviceAddresses[i%len(serviceAddresses)], servicePort)
			if c, err := from.Dial(ctx, to); err == nil {
				_ = c.Close()
			}
			a.connects.Add(1) // including refused connections
		}
	})
	return a
}

// wantMore waits until packets of each kind were sent from now on.
func (a *asking) wantMore(t *testing.T, when string) {
	t.Helper()
	frames, connects := a.frames.Load(), a.connects.Load()
	servicetest.Eventually(t, "packets while "+when, func() bool {
		return a.frames.Load() >= frames+200 && a.connects.Load() >= connects+20
	})
}
