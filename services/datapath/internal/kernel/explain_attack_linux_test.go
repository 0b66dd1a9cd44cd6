// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/explain"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/kerneltest"
)

// questions returns tuples of every protocol and kind of address, for a pod.
func questions(own4, own6 netip.Addr, others ...netip.Addr) (ts []conntrack.Tuple) {
	for _, addr := range others {
		own := own4
		if addr.Is6() {
			own = own6
		}
		for _, proto := range []uint8{1, 6, 17, 47, 58, 132} {
			for _, port := range []uint16{80, 8 << 8, 128 << 8, 3 << 8, 4789} {
				here, there := netip.AddrPortFrom(own, 40000), netip.AddrPortFrom(addr, port)
				ts = append(ts, conntrack.Tuple{Initiator: here, Responder: there, Protocol: proto})
				here, there = netip.AddrPortFrom(own, port), netip.AddrPortFrom(addr, 40000)
				ts = append(ts, conntrack.Tuple{Initiator: there, Responder: here, Protocol: proto})
			}
		}
	}
	return ts
}

// TestKernelExplainLeavesNoTrace compares every map and the ring before and after a thousand explanations of
// all packets for which a program would create or delete entries.
func TestKernelExplainLeavesNoTrace(t *testing.T) {
	r, cast := newStage(t)
	egress, ingress := explained(t, r.k)
	setPolicy(t, r.k, cast["a"].Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Allow})
	setPolicy(t, r.k, cast["b"].Slot, endpointmap.Policy{Egress: egress, Ingress: nodetable.Allow})
	ts := questions(a.IPv4, a.IPv6, b.IPv4, b.IPv6, host4, host6, world4, world6, nobody4, gateway6,
		netip.MustParseAddr("127.0.0.1"))
	// the programs track all connections that may begin, and half of them are terminated
	for _, q := range ts {
		_, local := map[netip.Addr]bool{b.IPv4: true, b.IPv6: true}[q.Initiator.Addr()]
		if q.Initiator.Addr() == a.IPv4 || q.Initiator.Addr() == a.IPv6 {
			r.run(t, program.FromPod, frameOf(q), skbContext{}, 0)
		} else if !local && !q.Initiator.Addr().IsLoopback() {
			r.run(t, program.ToPod, frameOf(q), skbContext{}, 0)
		}
	}
	setPolicy(t, r.k, cast["b"].Slot, endpointmap.Policy{Egress: egress, Ingress: ingress})
	// one endpoint's budget is used up
	update(t, r.k, bpf.MapsMapSlBudget, uint32(cast["b"].Slot)<<1, bpf.MapsSlBudget{Begun: 9, Limit: 5})
	events, err := r.k.Events.Read()
	must(t, "Events", err)
	defer events.Close()
	waiting := events.Waiting()

	before := everything(t, r.k)
	asked, tracked, reasons, next := 0, 0, map[event.Reason]int{}, map[event.Reason]int{}
	for asked < 1000 {
		for _, q := range ts {
			x, err := r.k.explainer().Explain(q)
			must(t, fmt.Sprint("Explain ", q), err)
			asked++
			reasons[x.Reason]++
			if x.Tracked {
				tracked++
				next[x.Next.Reason]++
			}
		}
	}
	if after := everything(t, r.k); !maps.Equal(before, after) {
		for name := range after {
			if before[name] != after[name] {
				t.Errorf("%s has changed", name)
			}
		}
	}
	if n := events.Waiting(); n != waiting {
		t.Errorf("%d bytes of events in the ring, before %d", n, waiting)
	}
	t.Logf("%d explanations, %d of tracked connections: %v, next packets %v", asked, tracked, reasons, next)
	if tracked == 0 || next[event.PolicyDenied] == 0 || next[event.ForwardedOutside] == 0 || len(reasons) < 8 {
		t.Errorf("too little has occurred: %d tracked, %v, next packets %v", tracked, reasons, next)
	}
}

// frameOf returns the first packet of a connection of pod a.
func frameOf(q conntrack.Tuple) []byte {
	var payload []byte
	from, to := q.Initiator, q.Responder
	switch q.Protocol {
	case 1, 58:
		payload = icmp(byte(to.Port()>>8), byte(to.Port()))
		payload[4], payload[5] = byte(from.Port()>>8), byte(from.Port())
	case 6:
		payload = tcp(from.Port(), to.Port(), flagSYN)
	case 17:
		payload = udp(from.Port(), to.Port())
	case 132:
		payload = append(udp(from.Port(), to.Port()), 0, 0, 0, 0, 1, 0, 0, 4)
	default:
		payload = make([]byte, 8)
	}
	dst, src := a.HostMAC, a.MAC
	if to.Addr() == a.IPv4 || to.Addr() == a.IPv6 {
		dst, src = src, dst
	}
	if from.Addr().Is4() {
		return frame(dst, src, etherIPv4, ip4Header{src: from.Addr(), dst: to.Addr(), proto: q.Protocol}.with(payload))
	}
	return frame(dst, src, etherIPv6, ip6(from.Addr(), to.Addr(), q.Protocol, payload))
}

// TestKernelExplainAndPacketsDoNotMeet requests explanations of many kinds concurrently, while packets of pods
// are processed on the same CPUs: their results are never mixed up.
func TestKernelExplainAndPacketsDoNotMeet(t *testing.T) {
	k := openKernel(t, testOptions(kerneltest.NewBPFFS(t)))
	r := runner{k}
	client := newPod(t, k, "sl-client", 10, endpointmap.DeliverPeer)
	server := newPod(t, k, "sl-server", 20, endpointmap.DeliverPeer)
	silent := newPod(t, k, "sl-silent", 30, endpointmap.DeliverPeer)
	egress, ingress := explained(t, k)
	setPolicy(t, k, silent.Slot, endpointmap.Policy{Egress: egress, Ingress: ingress})
	echo(t, client, client.IPv4, server, server.IPv4) // so that the gateway's address is resolved
	ts := questions(silent.IPv4, silent.IPv6, client.IPv4, server.IPv4, server.IPv6, world4, world6, nobody4)
	expect := make([]explain.Explanation, len(ts))
	for i, q := range ts {
		var err error
		expect[i], err = k.explainer().Explain(q)
		must(t, fmt.Sprint("Explain ", q), err)
	}
	events, err := k.Events.Read()
	must(t, "Events", err)
	defer events.Close()
	drain(t, events)

	var there, here *net.UDPConn
	inNetns(t, server.ns, func() {
		var err error
		if there, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(server.IPv4, 7))); err != nil {
			t.Errorf("listen: %v", err)
		}
	})
	inNetns(t, client.ns, func() {
		var err error
		from, to := netip.AddrPortFrom(client.IPv4, 5000), netip.AddrPortFrom(server.IPv4, 7)
		if here, err = net.DialUDP("udp", net.UDPAddrFromAddrPort(from), net.UDPAddrFromAddrPort(to)); err != nil {
			t.Errorf("dial: %v", err)
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	defer here.Close()
	var working sync.WaitGroup
	defer working.Wait()
	defer there.Close()
	working.Go(func() {
		for buf := make([]byte, 16); ; {
			n, from, err := there.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			_, _ = there.WriteToUDPAddrPort(buf[:n], from)
		}
	})

	before := r.counters(t)
	done := make(chan struct{})
	var asking sync.WaitGroup
	asked := make([]int, 3)
	for who := range asked {
		asking.Go(func() {
			for i := who; ; i++ {
				select {
				case <-done:
					if asked[who] >= 500 {
						return
					}
				default:
				}
				n := i % len(ts)
				x, err := k.explainer().Explain(ts[n])
				if err != nil || !reflect.DeepEqual(x, expect[n]) {
					t.Errorf("Explain %v: %+v, %v, want %+v", ts[n], x, err, expect[n])
					return
				}
				asked[who]++
			}
		})
	}
	const rounds = 3000
	sent := func() error {
		for i := range rounds {
			buf := []byte{byte(i), byte(i >> 8)}
			if _, err := here.Write(buf); err != nil {
				return err
			}
			if err := here.SetReadDeadline(time.Now().Add(servicetest.Patience)); err != nil {
				return err
			}
			if n, err := here.Read(buf); err != nil || n != 2 || buf[0] != byte(i) || buf[1] != byte(i>>8) {
				return fmt.Errorf("answer %d of %d: %x, %w", i, rounds, buf[:n], err)
			}
		}
		return nil
	}()
	close(done)
	asking.Wait()
	must(t, "talk", sent)

	for c, n := range r.counters(t) {
		moved := n.Packets - before[c].Packets
		switch {
		case c.reason == event.ForwardedToPod && c.direction == event.Egress:
			if moved != 2*rounds {
				t.Errorf("%d packets counted as %v, want %d", moved, c.reason, 2*rounds)
			}
		case moved != 0 && !c.reason.Quiet() && c.reason != event.AnsweredARP && c.reason != event.AnsweredNDP:
			t.Errorf("%d packets counted as %v, %v", moved, c.reason, c.direction)
		}
	}
	for tu := range k.tracked(t) {
		if tu.Protocol != 17 || !slices.Contains([]netip.Addr{client.IPv4, server.IPv4}, tu.Initiator.Addr()) {
			t.Errorf("tracked: %v", tu)
		}
	}
	for _, e := range drain(t, events) {
		if e.Source.Addr() != client.IPv4 || e.Type != event.ConnectionEvaluated {
			t.Errorf("event %+v", e)
		}
	}
	t.Logf("%v explanations during %d packets", asked, 2*rounds)
}
