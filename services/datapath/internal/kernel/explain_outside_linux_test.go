// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/frontend"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/explain"
	"github.com/sluice-net/sluice/services/datapath/internal/service/frontendtx"
)

// TestKernelExplainOfSendersOutsideIsWhatBecomesOfThem: the explanation of a connection from outside agrees
// with a real connection, for each kind of backend, and then shows that connection with the source that the
// backend sees.
func TestKernelExplainOfSendersOutsideIsWhatBecomesOfThem(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, routing Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		for i, client := range f.outsideAddrs() {
			own := []netip.Addr{f.a.addr4, f.a.addr6}[i]
			toPod := own
			if routing == RoutingOverlay {
				toPod = []netip.Addr{f.a.over4, f.a.over6}[i]
			}
			for j, c := range []struct {
				what   string
				in     netns.NsHandle
				at     netip.Addr
				path   explain.Path
				reason event.Reason
				to     identity.Numeric
				source netip.Addr // source address of the node that the backend sees
			}{
				{"pod", f.a.pod.ns, f.a.pod.Addrs()[i], explain.Evaluated, event.ForwardedFromStack, f.a.pod.Identity, netip.Addr{}},
				{"pod elsewhere", f.b.pod.ns, f.b.pod.Addrs()[i], explain.InTransit, event.ForwardedToStack, f.b.pod.Identity, toPod},
				{
					"node elsewhere", f.b.ns, []netip.Addr{f.b.addr4, f.b.addr6}[i],
					explain.InTransit, event.ForwardedToStack, identity.RemoteNode, own,
				},
				{
					"overlay address elsewhere", f.b.ns, []netip.Addr{f.b.over4, f.b.over6}[i],
					explain.InTransit, event.ForwardedToStack, identity.RemoteNode, toPod,
				},
				{"own", f.a.ns, own, explain.HostSocket, event.ForwardedToStack, identity.Host, netip.Addr{}},
			} {
				at := netip.AddrPortFrom(c.at, 9000+uint16(j))
				tell(t, c.in, at)
				asked := netip.AddrPortFrom(own, 30080+uint16(j))
				n.lead(asked, feNode, at)
				x := f.a.explainTo(t, unix.IPPROTO_TCP, client, asked)
				s := x.Service
				if s == nil || !s.Outside || s.Outcome != explain.Translated || len(s.Backends) != 1 {
					t.Fatalf("%s: %+v", c.what, s)
				}
				b := s.Backends[0]
				if b.Path != c.path || b.Source != c.source || b.Explanation.Reason != c.reason ||
					x.Source.Identity != f.a.k.Worlds()[i] || b.Explanation.Destination.Identity != c.to ||
					(b.Explanation.Ingress != nil) != (c.path == explain.Evaluated) || b.Explanation.Tracked {
					t.Errorf("%s: %+v", c.what, b)
				}
				conn, err := dialIn(t, f.outsider, "tcp", asked)
				must(t, "connect to the "+c.what, err)
				says, err := readLine(conn)
				must(t, "read", err)
				_, seen, _ := strings.Cut(says, " to ")
				b = f.a.explainConnection(t, conn, asked)
				want := client.String()
				if c.source.IsValid() {
					want = c.source.String()
				}
				if host, _, err := net.SplitHostPort(seen); err != nil || host != want {
					t.Errorf("%s: the backend sees %s, want %s", c.what, seen, want)
				}
				y := b.Explanation
				if !y.Tracked || y.Connection.Responder != at || y.Connection.Transit != (c.path != explain.Evaluated) ||
					y.Next.Evaluated || y.Next.Reason != c.reason {
					t.Errorf("%s, the connection: %+v", c.what, y)
				}
				if c.source.IsValid() && y.NAT.String() != seen || !c.source.IsValid() && y.NAT.IsValid() {
					t.Errorf("%s: the connection has the source %v, the backend sees %s", c.what, y.NAT, seen)
				}
			}
		}
	})
}

// TestKernelExplainOfAnAddressFromOutsideIsWhatBecomesOfIt: for each kind of address that is routed to the
// node, explain reports a service exactly where one answers.
func TestKernelExplainOfAnAddressFromOutsideIsWhatBecomesOfIt(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	at := netip.AddrPortFrom(f.a.pod.IPv4, 8080)
	tell(t, f.a.pod.ns, at)
	proxied := clusterAt(serviceAddr(at.Addr(), 3), frontend.TCP, nil)
	proxied.Outside = leadsTo(at)
	tx := &frontendtx.Transaction{}
	for i, fe := range []*frontend.Frontend{
		clusterAt(serviceAddr(at.Addr(), 1), frontend.TCP, leadsTo(at)),
		clusterAt(serviceAddr(at.Addr(), 2), frontend.TCP, leadsTo(at)), proxied,
	} {
		fe.Kind = []frontend.Kind{frontend.ClusterIP, frontend.ExternalIP, frontend.LoadBalancer}[i]
		tx.Upsert(fe)
	}
	_, err := f.a.k.Services.Apply(t.Context(), tx)
	must(t, "apply the services", err)
	for _, change := range tx.Changes() {
		asked := netip.AddrPortFrom(change.Key.Addr, change.Key.Port)
		f.routeFromOutside(t, asked.Addr(), f.a)
		s := f.a.explainTo(t, unix.IPPROTO_TCP, f.outside, asked).Service
		if s == nil || !s.Outside {
			t.Fatalf("%v: %+v", asked, s)
		}
		want, patience := explain.Translated, servicetest.Patience
		if change.Frontend.Kind == frontend.ClusterIP {
			want, patience = explain.InsideOnly, time.Second
		}
		inNetns(t, f.outsider, func() {
			var c net.Conn
			if c, err = net.DialTimeout("tcp", asked.String(), patience); err == nil {
				c.Close()
			}
		})
		if answers := err == nil; s.Outcome != want || answers != (s.Outcome == explain.Translated) {
			t.Errorf("%v, kind %v: Explain returns %v, connect %v", asked, change.Frontend.Kind, s.Outcome, err)
		}
	}
}

// explainConnection explains a connection from the outsider to a service with one backend.
func (r runner) explainConnection(t *testing.T, c net.Conn, asked netip.AddrPort) explain.Backend {
	t.Helper()
	x, err := r.k.explainer().Explain(conntrack.Tuple{
		Initiator: netip.MustParseAddrPort(c.LocalAddr().String()), Responder: asked, Protocol: unix.IPPROTO_TCP,
	})
	must(t, "Explain", err)
	if x.Service == nil || len(x.Service.Backends) != 1 {
		t.Fatalf("the service: %+v", x.Service)
	}
	return x.Service.Backends[0]
}

// TestKernelExplainOfSendersOutsideSaysWhatIsDropped: explain reports packets that the program drops before any
// policy, and packets that a pod's policy denies.
func TestKernelExplainOfSendersOutsideSaysWhatIsDropped(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, routing Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		lead := func(port uint16, at netip.AddrPort) netip.AddrPort {
			asked := netip.AddrPortFrom(f.a.addr4, port)
			n.lead(asked, feNode, at)
			return asked
		}
		local := lead(30080, netip.AddrPortFrom(f.a.pod.IPv4, 8080))
		away := lead(30081, netip.AddrPortFrom(f.b.pod.IPv4, 8080))
		tunnel := lead(30082, netip.AddrPortFrom(f.b.addr4, 4789))
		gone := lead(30083, netip.AddrPortFrom(netip.MustParseAddr("10.244.1.78"), 8080))
		setPolicy(t, f.a.k, f.a.pod.Slot, endpointmap.Policy{Egress: nodetable.Allow, Ingress: nodetable.Deny})
		for _, c := range []struct {
			what string
			src  netip.Addr
			to   netip.AddrPort
			want event.Reason
		}{
			{"denied by policy", f.outside, local, event.PolicyDenied},
			{"an unassigned address of the node", netip.MustParseAddr("10.244.1.77"), local, event.SpoofedIP},
			{"an unassigned address of the node, to another node", netip.MustParseAddr("10.244.1.77"), away, event.SpoofedIP},
			{"a pod of the other node", f.b.pod.IPv4, local, event.SpoofedNode},
			{"a pod of the other node, to itself", f.b.pod.IPv4, away, event.SpoofedNode},
			{"the other node, by its overlay address", f.b.over4, local, event.SpoofedNode},
			{"the other node", f.b.addr4, local, event.PolicyDenied},
			{"the outsider, to a tunnel", f.outside, tunnel, event.TunnelPort},
			{"the outsider, to a pod that is gone", f.outside, gone, event.NoRoute},
		} {
			if routing == RoutingNative && c.want == event.SpoofedNode {
				continue // native routing accepts it from the network: see routing.md
			}
			x := f.a.explainTo(t, protoUDP, c.src, c.to)
			if s := x.Service; s == nil || !s.Outside || len(s.Backends) != 1 || s.Backends[0].Explanation.Reason != c.want {
				t.Errorf("%s: %+v, want %v", c.what, s, c.want)
			}
			before := f.a.counters(t)
			f.fromOutside(t, f.a, ip4Header{src: c.src, dst: c.to.Addr(), proto: protoUDP}.with(udp(40000, c.to.Port())))
			eventuallyGains(t, f.a, before, c.what, c.want)
		}
	})
}

// eventuallyGains waits until the node has counted one packet under a reason.
func eventuallyGains(t *testing.T, n *fabricNode, before map[cell]event.Counter, what string, want event.Reason) {
	t.Helper()
	servicetest.Eventually(t, what, func() bool { return len(n.gained(t, before)) > 0 })
	if got := n.gained(t, before); got[cell{want, event.Ingress}] != 1 {
		t.Errorf("%s: %v, want one %v", what, got, want)
	}
}
