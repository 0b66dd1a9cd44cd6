// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/bound"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// TestKernelRefusalsAreCountedByEndpoint: a pod exceeds its share of each bound. The refusals are counted for
// this pod and bound only. A new endpoint with the same ID begins without refusals.
func TestKernelRefusalsAreCountedByEndpoint(t *testing.T) {
	stayOnOneCPU(t)
	const times = 50
	for _, c := range []struct {
		of    bound.Bound
		tight func(t *testing.T, n *serviceNode, p *pod)
		send  func(n *serviceNode, p *pod, i int)
		want  func(refused uint64) bool
	}{
		{
			of: bound.Translations4,
			tight: func(t *testing.T, n *serviceNode, _ *pod) {
				update(t, n.k, bpf.MapsMapSlBound, uint32(bound.Translations4), bpf.MapsSlBound{Guarantee: 10})
			},
			send: func(n *serviceNode, p *pod, i int) {
				n.send(p, serviceAddr(p.IPv4, 1), protoTCP, tcp(uint16(1000+i), serviceAddr(p.IPv4, 1).Port(), flagSYN))
			},
			want: func(refused uint64) bool { return refused == times-10 },
		},
		{
			of: bound.Fragments,
			tight: func(t *testing.T, n *serviceNode, _ *pod) {
				update(t, n.k, bpf.MapsMapSlBound, uint32(bound.Fragments), bpf.MapsSlBound{Guarantee: 10})
			},
			send: func(n *serviceNode, p *pod, i int) { n.piece(p, serviceAddr(p.IPv4, 77).Addr(), uint16(i), false) },
			want: func(refused uint64) bool { return refused == times-10 },
		},
		{
			of: bound.Connections4,
			tight: func(t *testing.T, n *serviceNode, p *pod) {
				update(t, n.k, bpf.MapsMapSlBudget, uint32(p.Slot)<<1, bpf.MapsSlBudget{Limit: 10})
			},
			send: func(n *serviceNode, p *pod, i int) {
				n.ask(p, netip.AddrPortFrom(serviceAddr(p.IPv4, 77).Addr(), 53), uint16(1000+i))
			},
			want: func(refused uint64) bool { return refused == times-10 },
		},
		{
			of: bound.Answers,
			tight: func(t *testing.T, n *serviceNode, p *pod) {
				n.lead(serviceAddr(p.IPv4, 3), feAddress)
				for range 3000 {
					n.answers(p, serviceAddr(p.IPv4, 3))
				}
			},
			send: func(*serviceNode, *pod, int) {},
			want: func(refused uint64) bool { return refused > 0 },
		},
	} {
		t.Run(c.of.String(), func(t *testing.T) {
			n := newServiceNode(t)
			greedy := newPod(t, n.k, "sl-greedy", 10, endpointmap.DeliverPeer)
			other := newPod(t, n.k, "sl-other", 11, endpointmap.DeliverPeer)
			server := newPod(t, n.k, "sl-server", 12, endpointmap.DeliverPeer)
			n.lead(serviceAddr(greedy.IPv4, 1), feAddress, netip.AddrPortFrom(server.IPv4, 8080))
			c.tight(t, n, greedy)
			for i := range times {
				c.send(n, greedy, i)
			}
			if got := n.k.Bounds.Refusals(c.of, greedy.Slot); !c.want(got) {
				t.Errorf("%d refusals of %s are counted", got, c.of)
			}
			for of := bound.Translations4; of <= bound.Connections6; of++ {
				for _, p := range []*pod{greedy, other} {
					if got := n.k.Bounds.Refusals(of, p.Slot); got != 0 && (of != c.of || p != greedy) {
						t.Errorf("%d refusals of %s are counted for slot %d, whose share was not exceeded", got, of, p.Slot)
					}
				}
			}
		})
	}
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	var refused bpf.MapsSlRefused
	refused.N[bound.Connections6] = 7
	for s := range uint32(endpointmap.MaxEndpoints) {
		update(t, k, bpf.MapsMapSlRefused, s+1, refused)
	}
	e := publish(t, k, a)
	if got := k.Bounds.Refusals(bound.Connections6, e.Slot); got != 0 {
		t.Errorf("the new endpoint with ID %d has %d refusals of its predecessor", e.Slot, got)
	}
}

// ask runs the program of a pod's device on a datagram from the pod to an address.
func (n *serviceNode) ask(p *pod, to netip.AddrPort, from uint16) {
	n.Helper()
	n.send(p, to, protoUDP, udp(from, to.Port()))
}

// send runs the program of a pod's device on a packet from the pod to an address.
func (n *serviceNode) send(p *pod, to netip.AddrPort, proto byte, payload []byte) {
	n.Helper()
	in := frame(p.HostMAC, p.MAC, etherIPv4, ip4Header{src: p.IPv4, dst: to.Addr(), proto: proto}.with(payload))
	_, err := n.k.program(program.FromPod).Run(&ebpf.RunOptions{
		Data: in, DataOut: make([]byte, len(in)+256), Context: skbContext{Ifindex: p.Ifindex},
	})
	must(n.T, "run", err)
}
