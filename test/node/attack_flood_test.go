// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package node

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/servicetest"
	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	"github.com/sluice-net/sluice/test/internal/pod"
)

// isolatedVictim denies all ingress to the victim, and lets it connect to the web.
const isolatedVictim = `
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: victim}
spec:
  podSelector: {matchLabels: {app: victim}}
  policyTypes: [Ingress, Egress]
  egress:
  - to: [{podSelector: {matchLabels: {app: web}}}]
`

// questions are UDP flows from one pod to another that are not answered yet.
type questions struct {
	server *net.UDPConn
	asked  []*net.UDPConn
	from   []netip.AddrPort
}

func ask(t *testing.T, from, to pod.Pod, count int) *questions {
	t.Helper()
	server, err := to.ListenPacket(at(to.IPv4, 5353))
	must(t, err)
	t.Cleanup(func() { _ = server.Close() })
	q := &questions{server: server}
	for range count {
		c, err := from.ListenPacket(at(from.IPv4, 0))
		must(t, err)
		t.Cleanup(func() { _ = c.Close() })
		_, err = c.WriteToUDPAddrPort([]byte("question"), at(to.IPv4, 5353))
		must(t, err)
		must(t, server.SetReadDeadline(time.Now().Add(patience)))
		_, sender, err := server.ReadFromUDPAddrPort(make([]byte, 100))
		must(t, err)
		q.asked, q.from = append(q.asked, c), append(q.from, sender)
	}
	return q
}

// answer answers every question and requires that all answers arrive.
func (q *questions) answer(t *testing.T) {
	t.Helper()
	got := 0
	for i, c := range q.asked {
		_, err := q.server.WriteToUDPAddrPort([]byte("answer"), q.from[i])
		must(t, err)
		must(t, c.SetReadDeadline(time.Now().Add(patience/10)))
		if _, _, err := c.ReadFromUDPAddrPort(make([]byte, 100)); err == nil {
			got++
		}
	}
	if got != len(q.asked) {
		t.Errorf("%d of %d late answers have arrived", got, len(q.asked))
	}
}

// TestKernelADeniedFloodFromOutsideTakesNoConnections: denied packets create no connections in the table and evict
// none.
func TestKernelADeniedFloodFromOutsideTakesNoConnections(t *testing.T) {
	n := newNode(t)
	policies := n.policies(t)
	world := n.outside(t)
	pods := n.addPods(t, "web", "victim")
	web, victim := pods[0], pods[1]
	enforce(t, policies, isolatedVictim)
	q := ask(t, victim, web, 25)
	created, denied := n.connections(t).GetCreated(), n.counters(t)[policyDenied]
	const count = 100_000
	n.newWire(t, world, false).flood(t, count, 1, func(i int) segment {
		return segment{from: at(world.IPv4, port(i)), to: at(victim.IPv4, port(i/60000)), flags: ack, seq: 1, ack: 1}
	})
	servicetest.EventuallyNil(t, "the flood is over", func() error {
		if got := n.counters(t)[policyDenied] - denied; got < count*9/10 {
			return fmt.Errorf("%d of %d segments were denied", got, count)
		}
		return nil
	})
	if got := n.connections(t); got.GetCreated() != created || got.GetEvicted() != 0 {
		t.Errorf("%d connections were made, %d evicted, want none", got.GetCreated()-created, got.GetEvicted())
	}
	q.answer(t)
}

// TestKernelAnAllowedFloodFromOutsideHasABudget: connections from outside to an open port have a budget in the map and
// replace each other. The idle flows of pods stay, and pods can open new connections.
func TestKernelAnAllowedFloodFromOutsideHasABudget(t *testing.T) {
	n := newNode(t)
	policies := n.policies(t)
	world := n.outside(t)
	pods := n.addPods(t, "web", "victim", "open")
	web, victim, open := pods[0], pods[1], pods[2]
	serve(t, web, 8080)
	enforce(t, policies, isolatedVictim)
	q := ask(t, victim, web, 25)
	n.sluice(t, 0, "", "status")
	const count = 100_000
	n.newWire(t, world, false).flood(t, count, 1, func(i int) segment {
		// An address of the network of worldHosts.
		source := netip.AddrFrom4([4]byte{203, 0, 113, byte(10 + i%200)})
		return segment{from: at(source, port(i/200)), to: at(open.IPv4, 5000), flags: datagram}
	})
	if got := n.counters(t)[datapathv1.Reason_REASON_CONNECTION_BUDGET]; got != 0 {
		t.Errorf("%d datagrams were refused, want none", got)
	}
	wantAllowed(t, victim, web, 8080)
	q.answer(t)
	servicetest.EventuallyNil(t, "the collector has counted", func() error {
		if n.connections(t).GetLive() == 0 {
			return fmt.Errorf("no pass yet")
		}
		return nil
	})
	const part = 1 << 14 // an eighth of the map
	if got := n.connections(t); got.GetEvicted() != 0 || got.GetLive() > 2*part {
		t.Errorf("%d connections were evicted, want 0; %d are live, want <= %d", got.GetEvicted(), got.GetLive(),
			2*part)
	}
	n.sluice(t, 0, "", "status")
}
