// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// TestKernelDeniedSendersPushOutNoAffinity: affinity is stored only after a packet was allowed, so senders that
// the backend's policy denies do not evict the affinity of other clients.
func TestKernelDeniedSendersPushOutNoAffinity(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	second := f.a.newPod(t, 20)
	kept, closed := netip.AddrPortFrom(f.a.addr4, 30080), netip.AddrPortFrom(f.a.addr4, 30081)
	tell(t, f.a.pod.ns, netip.AddrPortFrom(f.a.pod.IPv4, 8080))
	sticky := func(at netip.AddrPort, backends ...netip.AddrPort) {
		n.lead(at, feNode, backends...)
		for _, number := range []uint32{n.front, n.front + outsideFronts} {
			var front bpf.MapsSlFront
			must(t, "read a front", n.k.Pins.Map(bpf.MapsMapSlFront).Lookup(number, &front))
			front.Timeout, front.Group = 10800, uint16(n.front)
			putFront(t, n.k, number, front)
		}
	}
	sticky(kept, netip.AddrPortFrom(f.a.pod.IPv4, 8080))
	sticky(closed, netip.AddrPortFrom(second.IPv4, 8080))
	setPolicy(t, f.a.k, second.Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny})
	for range 3 {
		askTCP(t, f.outsider, kept, 16)
	}
	a := f.outside.As4()
	key := bpf.MapsSlAffKey4{Group: uint16(n.front - 1)}
	key.Client = uint32(a[0]) | uint32(a[1])<<8 | uint32(a[2])<<16 | uint32(a[3])<<24
	var word uint64
	must(t, "the client's affinity", n.k.Pins.Map(bpf.MapsMapSlAff4).Lookup(&key, &word))
	prog := n.k.program(program.FromUplink)
	header := [14]byte{12: 8}
	for i := range 24_000 {
		src := netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)})
		in := ip4Header{src: src, dst: f.a.addr4, proto: protoUDP}.with(udp(1000, closed.Port()))
		for range 2 { // the LRU map keeps entries that were used
			_, err := prog.Run(&ebpf.RunOptions{Data: append(header[:], in...)})
			must(t, "run", err)
		}
	}
	if n.counters(t)[cell{event.PolicyDenied, event.Ingress}].Packets == 0 {
		t.Error("no packet was denied")
	}
	if err := n.k.Pins.Map(bpf.MapsMapSlAff4).Lookup(&key, &word); err != nil {
		t.Errorf("the affinity of a client of another service was evicted: %v", err)
	}
}
