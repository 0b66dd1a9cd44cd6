// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// TestKernelABumpedAddressIsEvaluatedAgain checks that Go and the programs use the same bucket for an address:
// the next packet to it, and to no other address, is evaluated again.
func TestKernelABumpedAddressIsEvaluatedAgain(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	publish(t, k, a)
	reevaluated := func() uint64 {
		c, err := k.Connections.Counters()
		if err != nil {
			t.Fatal(err)
		}
		return c.Reevaluated
	}
	send := func(dst netip.Addr) {
		frame := from4
		if dst.Is6() {
			frame = from6
		}
		if _, err := k.program(program.FromPod).Run(&ebpf.RunOptions{Data: frame(dst, 17, udp(1000, 2000))}); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range []string{"192.0.2.1", "203.0.113.77", "8.8.4.4", "2001:db8::1", "2001:db8:1234:5678:9abc:def0:1357:2468"} {
		dst := netip.MustParseAddr(s)
		send(dst)
		was := reevaluated()
		send(dst)
		if n := reevaluated(); n != was {
			t.Fatalf("%v: evaluated again without a reason", dst)
		}
		for _, other := range []netip.Addr{dst.Next(), dst.Prev()} {
			if err := k.Addresses.Bump(other); err != nil {
				t.Fatal(err)
			}
		}
		send(dst)
		if n := reevaluated(); n != was {
			t.Errorf("%v: evaluated again after a neighbour was bumped", dst)
		}
		if err := k.Addresses.Bump(dst); err != nil {
			t.Fatal(err)
		}
		send(dst)
		send(dst)
		if n := reevaluated(); n != was+1 {
			t.Errorf("%v: evaluated again %d times after a bump, want 1", dst, n-was)
		}
	}
}

// TestKernelAuditModeAndEpochsChangeOneEntry reads the endpoint's entry back.
func TestKernelAuditModeAndEpochsChangeOneEntry(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	one, two := publish(t, k, testEndpoint(1001, 11)), publish(t, k, testEndpoint(1002, 12))
	epochs := func() (g [3]uint32) {
		for i, s := range []endpointmap.ID{endpointmap.HostID, one.Slot, two.Slot} {
			e, err := k.Endpoints.At(s)
			must(t, "At", err)
			g[i] = e.Policy.Epoch
		}
		return g
	}
	was := epochs()
	if err := k.Endpoints.BumpEpochs(one.Slot); err != nil {
		t.Fatal(err)
	}
	now := epochs()
	if now[0] != was[0] || now[1] == was[1] || now[2] != was[2] {
		t.Errorf("epochs %v after %v", now, was)
	}
	if err := k.Endpoints.BumpEpochs(); err != nil {
		t.Fatal(err)
	}
	for i, g := range epochs() {
		if g == now[i] {
			t.Errorf("epoch %d is still %d", i, g)
		}
	}
	for _, on := range []bool{true, true, false} {
		if err := k.Endpoints.SetAudit(t.Context(), on, one.Slot); err != nil {
			t.Fatal(err)
		}
		e, err := k.Endpoints.At(one.Slot)
		must(t, "At", err)
		if e.Audit != on || e.MTU != 1500 || e.Deliver != endpointmap.DeliverPeer {
			t.Errorf("audit %t: %+v", on, e)
		}
	}
	if err := k.Endpoints.BumpEpochs(77); err == nil {
		t.Error("a slot without an endpoint is no error")
	}
	// it was deleted meanwhile
	must(t, "SetAudit of an unused slot", k.Endpoints.SetAudit(t.Context(), true, 77))
	if e, err := k.Endpoints.At(77); err != nil || e.Audit {
		t.Errorf("an unused slot: %+v, %v", e, err)
	}
}
