// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// send runs the program on the packet of an act and checks the reason.
func (th *theatre) send(t *testing.T, when string, a act) {
	t.Helper()
	prog, ctx, in := th.frame(a)
	if o := th.run(t, prog, in, ctx, 0); o.reason != a.want {
		t.Errorf("%s: %s to %s: %v, want %v", when, a.from, a.to, o.reason, a.want)
	}
}

// TestKernelLateErrorsAreOfNoConnection: a pod that denies all ingress has sent a packet to the world, and an
// ICMP error about it is delivered. The same error is dropped once the entry is gone, once another pod has the
// address, and once another pod has the endpoint ID; the entry of the former pod may still exist.
func TestKernelLateErrorsAreOfNoConnection(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		t.Run(fmt.Sprintf("IPv6 %t", v6), func(t *testing.T) {
			th := newTheatre(t, v6)
			closed := endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny}
			setPolicy(t, th.k, th.pods["a"].Slot, closed)
			ask := say("a", "world", datagram(4000, 53), event.ForwardedOutside)
			late := func(to string, want event.Reason) act {
				return say("router", to, failure(3, "a", "world", datagram(4000, 53)), want)
			}
			th.send(t, "asked", ask)
			th.send(t, "the entry is there", late("a", event.ForwardedFromStack))
			th.forget(t)
			th.send(t, "the entry is gone", late("a", event.PolicyDenied))
			th.send(t, "asked again", ask)
			th.send(t, "the entry is there again", late("a", event.ForwardedFromStack))

			// another pod has the address, at another device
			former := th.pods["a"]
			must(t, "Unpublish", th.k.Endpoints.Unpublish(former.Slot))
			e := former
			e.Identity, e.Policy = stranger, closed
			must(t, "Barrier", th.k.Endpoints.Barrier(t.Context()))
			th.pods["a"] = publish(t, th.k, e)
			if n := len(th.connections(t)); n != 1 {
				t.Fatalf("%d connections are there, want the former pod's", n)
			}
			th.send(t, "another pod has the address", late("a", event.PolicyDenied))

			// another pod has the endpoint ID
			next := th.pods["a"]
			must(t, "Unpublish", th.k.Endpoints.Unpublish(next.Slot))
			must(t, "Barrier", th.k.Endpoints.Barrier(t.Context()))
			other := testEndpoint(next.Ifindex, 77)
			other.Policy = closed
			th.pods["c"] = publish(t, th.k, other)
			delete(th.pods, "a")
			th.pods["gone"] = former
			th.send(t, "another pod has the slot",
				say("router", "c", failure(3, "gone", "world", datagram(4000, 53)), event.PolicyDenied))
		})
	}
}

// TestKernelLateErrorsAboutServicesNameWhatThePodHasAsked: a pod sends packets to a Service, and then from the
// same port to another Service with the same backend. An error about its packets quotes the address that the
// pod has requested last. Without an entry, a policy that denies drops the error.
func TestKernelLateErrorsAboutServicesNameWhatThePodHasAsked(t *testing.T) {
	n := newServiceNode(t)
	client := newPod(t, n.k, "sl-client", 10, endpointmap.DeliverPeer)
	first, second := serviceAddr(client.IPv4, 1), serviceAddr(client.IPv4, 2)
	backend := netip.AddrPortFrom(world4, 9)
	n.lead(first, feAddress, backend)
	n.lead(second, feAddress, backend)
	setPolicy(t, n.k, client.Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny})
	late := func(want event.Reason, what string, quoted netip.AddrPort) {
		t.Helper()
		in := frame(client.MAC, client.HostMAC, etherIPv4, ip4Header{src: remote4, dst: client.IPv4, proto: 1}.with(
			icmp(3, 3, ip4Header{src: client.IPv4, dst: backend.Addr(), proto: protoUDP}.with(udp(4000, 9))...)))
		o := n.run(t, program.ToPod, in, skbContext{Ifindex: client.Ifindex, IngressIfindex: 1}, 0)
		if o.reason != want {
			t.Errorf("an error while %s was requested: %v, want %v", what, o.reason, want)
		}
		const at = 14 + 20 + 8 + 16 // offset of the quoted destination
		if got := netip.AddrFrom4([4]byte(o.out[at : at+4])); quoted.IsValid() && got != quoted.Addr() {
			t.Errorf("an error while %s was requested quotes a packet to %v, want %v", what, got, quoted.Addr())
		}
	}
	late(event.PolicyDenied, "nothing", netip.AddrPort{})
	n.ask(client, first, 4000)
	late(event.ForwardedFromStack, "the first Service", first)
	n.forget(t)
	late(event.PolicyDenied, "nothing any more", netip.AddrPort{})
	n.ask(client, second, 4000)
	late(event.ForwardedFromStack, "the second Service", second)
	n.forget(t)
	n.ask(client, backend, 4000)
	late(event.ForwardedFromStack, "the backend itself", backend)
}
