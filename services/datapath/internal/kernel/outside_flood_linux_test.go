// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"
)

// TestKernelFloodsLeaveClientsWithALongRoundTrip: strangers with random addresses send 5,000 SYNs, or pairs of
// datagrams, in a second to a node port with a backend on another node. Clients whose round trip takes 0.4 s are
// served: the answer to their first packet reaches them, and their later packets have the same port of the node.
func TestKernelFloodsLeaveClientsWithALongRoundTrip(t *testing.T) {
	const (
		perSecond = 5000
		roundTrip = perSecond * 2 / 5 // strangers between a request and its answer
		before    = 17_000            // strangers before the clients: more than the rings and the ports hold
		every     = 100               // strangers between two clients
		clients   = 40
	)
	f := newFabric(t, RoutingNative, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	at, asked := netip.AddrPortFrom(f.b.pod.IPv4, 8080), netip.AddrPortFrom(f.a.addr4, 30080)
	n.lead(asked, feNode, at)
	for _, c := range []struct {
		name    string
		proto   byte
		strange func(sport, dport uint16) []byte
		copies  int
		first   func(sport, dport uint16) []byte
		answer  func(sport, dport uint16) []byte
		later   func(sport, dport uint16) []byte
	}{
		{"SYNs", protoTCP, syn, 1, syn, flagged(flagSYN | flagACK), flagged(flagACK)},
		{"pairs of datagrams", protoUDP, justUDP, 2, justUDP, justUDP, justUDP},
	} {
		t.Run(c.name, func(t *testing.T) {
			send := func(from, to netip.AddrPort, payload func(sport, dport uint16) []byte) []byte {
				h := ip4Header{src: from.Addr(), dst: to.Addr(), proto: c.proto}
				return n.throughUplink(h.with(payload(from.Port(), to.Port())))
			}
			random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // the same addresses in each run
			strangers := func(count int) {
				for range count {
					r := random.Uint64()
					from := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 18, byte(r), byte(r >> 8)}), uint16(r>>16)|1024)
					for range c.copies {
						send(from, asked, c.strange)
					}
				}
			}
			strangers(before)
			// from here on, the strangers so far have been idle for longer than a round trip
			time.Sleep(time.Second) // the round trip
			type waiting struct{ client, source netip.AddrPort }
			var queue []waiting
			served := 0
			serve := func(w waiting) {
				out := send(at, w.source, c.answer)
				if out == nil {
					t.Errorf("the answer to %v was dropped", w.client)
					return
				}
				if src, dst := endsOf(out); src != asked || dst != w.client {
					t.Errorf("the answer to %v goes from %v to %v", w.client, src, dst)
					return
				}
				out = send(w.client, asked, c.later)
				if out == nil {
					t.Errorf("the second packet of %v was dropped", w.client)
					return
				}
				if src, dst := endsOf(out); src != w.source || dst != at {
					t.Errorf("the second packet of %v goes from %v to %v, want %v and %v", w.client, src, dst, w.source, at)
					return
				}
				served++
			}
			began := time.Now()
			for i := range clients + roundTrip/every {
				if i >= roundTrip/every {
					serve(queue[0])
					queue = queue[1:]
				}
				if i < clients {
					client := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 19, 255, byte(i)}), 5000)
					out := send(client, asked, c.first)
					if out == nil {
						t.Fatalf("the first packet of %v was refused", client)
					}
					source, _ := endsOf(out)
					queue = append(queue, waiting{client, source})
				}
				strangers(every)
				// not faster than the strangers send: claims are compared by their age
				due := began.Add(time.Duration(i+1) * every * time.Second / perSecond)
				time.Sleep(time.Until(due)) // paces the strangers
			}
			if served != clients {
				t.Errorf("%d of %d clients were served", served, clients)
			}
		})
	}
}

func syn(sport, dport uint16) []byte { return tcp(sport, dport, flagSYN) }

func justUDP(sport, dport uint16) []byte { return udp(sport, dport) }

// flagged returns a function that makes segments with the flags.
func flagged(flags byte) func(sport, dport uint16) []byte {
	return func(sport, dport uint16) []byte { return tcp(sport, dport, flags) }
}
