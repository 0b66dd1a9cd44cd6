// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"context"
	"fmt"
	"os"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// TestKernelDeniedPortsCannotBeScanned: a denied port looks like a host that does not answer. Segments with any flags
// are dropped without an answer.
func TestKernelDeniedPortsCannotBeScanned(t *testing.T) {
	n := newNode(t)
	policies := n.policies(t)
	world := n.outside(t)
	pods := n.addPods(t, "web", "evil", "client")
	web, evil, client := pods[0], pods[1], pods[2]
	serve(t, web, 80, 8080)
	enforce(t, policies, ingressOf("client"))
	// The world has a route to the web, and the node has one to the world.
	inside := n.newWire(t, web, true)
	for _, from := range []pod.Pod{evil, world} {
		own := n.newWire(t, from, true)
		sport := uint16(20000)
		before := n.drops(t)
		sent := uint64(0)
		for _, address := range web.Addresses() {
			source, _ := sameFamily(from, address)
			for _, p := range []uint16{80, 8080, 22} {
				for _, flags := range []int{fin, 0, fin | psh | urg, ack | psh, syn | ack, rst, rst | ack, fin | ack, syn} {
					s := segment{from: at(source, sport), to: at(address, p), seq: 1, ack: 1}
					for _, s.flags = range []int{ack, flags} {
						own.send(t, own.frame(s))
						sent++
					}
					sport++
				}
			}
		}
		servicetest.EventuallyNil(t, "every segment is dropped", func() error {
			if got := n.drops(t) - before; got < sent {
				return fmt.Errorf("%d of %d", got, sent)
			}
			return nil
		})
		// This packet arrives last on both wires, after all other packets.
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		for _, address := range web.Addresses() {
			must(t, talk(ctx, client, at(address, 80)))
		}
		cancel()
		for _, s := range inside.read(t) {
			if s.from.Port() >= 20000 && s.from.Port() < sport && s.to.Port() != 0 {
				if source, _ := sameFamily(from, s.from.Addr()); source == s.from.Addr() {
					t.Errorf("in the web arrived %v", s)
				}
			}
		}
		for _, s := range own.read(t) {
			if s.to.Port() >= 20000 && s.to.Port() < sport && (s.from.Addr() == web.IPv4 || s.from.Addr() == web.IPv6) {
				t.Errorf("%s was answered %v", from.Name, s)
			}
		}
	}
}

// drops returns the number of packets that the programs have dropped, except for some reasons.
func (n *testNode) drops(t *testing.T, but ...datapathv1.Reason) (sum uint64) {
	t.Helper()
	counters := n.counters(t)
	for _, reason := range append([]datapathv1.Reason{datapathv1.Reason_REASON_MALFORMED}, deniedReasons...) {
		if !slices.Contains(but, reason) {
			sum += counters[reason]
		}
	}
	return sum
}

// TestKernelSYNCookiesOpenNoDeniedPort: a SYN cookie that was sent while the policy allowed the port completes no
// handshake after the policy denies it.
func TestKernelSYNCookiesOpenNoDeniedPort(t *testing.T) {
	n := newNode(t)
	policies := n.policies(t)
	pods := n.addPods(t, "web", "evil")
	web, evil := pods[0], pods[1]
	must(t, pod.In(web.Netns, func() error {
		return os.WriteFile("/proc/sys/net/ipv4/tcp_syncookies", []byte("2"), 0)
	}))
	l, err := web.Listen(at(web.IPv4, 80))
	must(t, err)
	defer l.Close()
	enforce(t, policies, ingressOf("evil"))
	inside, own := n.newWire(t, web, true), n.newWire(t, evil, true)
	// Of two cookies, one is used while the port is allowed, which shows that it is valid.
	s := segment{from: at(evil.IPv4, 4000), to: at(web.IPv4, 80)}
	take := func(s segment) segment {
		s.flags, s.seq = syn, 100
		own.send(t, own.frame(s))
		answer := own.await(t, "a cookie",
			func(a segment) bool { return a.from == s.to && a.to == s.from && a.flags&(syn|ack) == syn|ack })
		s.flags, s.seq, s.ack, s.payload = ack|psh, 101, answer.seq+1, "hello"
		return s
	}
	good := take(segment{from: at(evil.IPv4, 4001), to: s.to})
	own.send(t, own.frame(good))
	c, err := l.AcceptTCP()
	must(t, err)
	_ = c.Close()

	late, later := take(s), take(segment{from: at(evil.IPv4, 4002), to: s.to})
	enforce(t, policies, ingressOf("client"))
	inside.read(t)
	for i, end := range []segment{late, later} {
		if i == 1 { // the entry of the SYN determines the direction
			n.forgetConnections(t)
		}
		before := n.drops(t)
		own.send(t, own.frame(end))
		servicetest.EventuallyNil(t, "the end of the handshake is dropped", func() error {
			if n.drops(t) == before {
				return fmt.Errorf("not yet")
			}
			return nil
		})
	}
	for _, got := range inside.read(t) {
		if (got.from == late.from || got.from == later.from) && got.flags&syn == 0 {
			t.Errorf("in the web arrived %v", got)
		}
	}
}
