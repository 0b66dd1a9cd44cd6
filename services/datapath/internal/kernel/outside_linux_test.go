// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"bytes"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/event"
)

// outsideAddrs are the outsider's addresses, of both families.
func (f *fabric) outsideAddrs() []netip.Addr {
	return []netip.Addr{f.outside, netip.MustParseAddr("2001:db8::99")}
}

// routeFromOutside has the outsider send what is for an address to a node.
func (f *fabric) routeFromOutside(t *testing.T, to netip.Addr, n *fabricNode) {
	t.Helper()
	via := n.addr4
	if to.Is6() {
		via = n.addr6
	}
	inNetns(t, f.outsider, func() {
		if err := netlink.RouteReplace(&netlink.Route{Dst: ipNet(to), Gw: via.AsSlice()}); err != nil {
			t.Errorf("route to %v: %v", to, err)
		}
	})
}

// askInPieces asks by UDP with more than a packet takes, again until the ends know how
// much that is: of IPv6 nobody but the sender makes pieces.
func (f *fabric) askInPieces(t *testing.T, to netip.AddrPort) (says string) {
	t.Helper()
	var u *net.UDPConn
	inNetns(t, f.outsider, func() {
		var err error
		if u, err = net.ListenUDP("udp", nil); err != nil {
			t.Errorf("open a socket: %v", err)
		}
	})
	if u == nil {
		t.FailNow()
	}
	defer u.Close()
	sent, b := bytes.Repeat([]byte("fragment"), 700), make([]byte, 65536)
	servicetest.Eventually(t, "an answer in pieces", func() bool {
		must(t, "deadline", u.SetDeadline(time.Now().Add(200*time.Millisecond)))
		_, err := u.WriteToUDPAddrPort(sent, to)
		must(t, "send to "+to.String(), err)
		n, from, err := u.ReadFromUDPAddrPort(b)
		if err != nil {
			return false
		}
		if from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port()); from != to {
			t.Errorf("%v answers for %v", from, to)
		}
		var echoed string
		if says, echoed, _ = strings.Cut(string(b[:n]), "\n"); echoed != string(sent) {
			t.Errorf("%v: %d bytes came back of %d", to, len(echoed), len(sent))
		}
		return true
	})
	return says
}

// TestKernelOutsideReachesLocalBackends: node ports and addresses of load balancers lead
// senders outside to a pod of the node that they ask, which sees who asks; answers come
// from what was asked, of every size.
func TestKernelOutsideReachesLocalBackends(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		for i, local := range f.a.pod.Addrs() {
			at := netip.AddrPortFrom(local, 8080)
			tell(t, f.a.pod.ns, at)
			vip := serviceAddr(local, 1)
			f.routeFromOutside(t, vip.Addr(), f.a)
			n.lead(vip, feAddress, at)
			nodePort := netip.AddrPortFrom([]netip.Addr{f.a.addr4, f.a.addr6}[i], 30080)
			n.lead(nodePort, feNode, at)
			f.askInPieces(t, vip)
			f.askInPieces(t, nodePort)
			before := n.counters(t)
			for _, asked := range []netip.AddrPort{vip, nodePort} {
				client := f.outsideAddrs()[i]
				wantServed(t, "tcp", askTCP(t, f.outsider, asked, 1<<20), at, client)
				wantServed(t, "udp", askUDP(t, f.outsider, asked, 64), at, client)
				wantServed(t, "fragments", f.askInPieces(t, asked), at, client)
			}
			wantNoDropsSince(t, n.runner, before)
			if got := f.a.gained(t, before)[cell{event.ForwardFromStack, event.Ingress}]; got == 0 {
				t.Error("nothing came to the pod from the stack")
			}
		}
	})
}

// TestKernelOutsideReachesBackendsElsewhere: senders outside reach pods and the host of
// another node, and sockets of the node itself. A backend elsewhere sees an address of
// the node, a socket of the node sees the sender; the other node's policy is asked about
// the world.
func TestKernelOutsideReachesBackendsElsewhere(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, routing Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		for i, pod := range f.b.pod.Addrs() {
			own := []netip.Addr{f.a.addr4, f.a.addr6}[i]
			toPod := own
			if routing == RoutingOverlay {
				toPod = []netip.Addr{f.a.over4, f.a.over6}[i]
			}
			for j, c := range []struct {
				what   string
				in     netns.NsHandle
				at     netip.Addr
				source netip.Addr // that the backend sees
			}{
				{"pod", f.b.pod.ns, pod, toPod},
				{"host", f.b.ns, []netip.Addr{f.b.addr4, f.b.addr6}[i], own},
				{"own", f.a.ns, own, f.outsideAddrs()[i]},
			} {
				at := netip.AddrPortFrom(c.at, 9000+uint16(j))
				tell(t, c.in, at)
				vip := serviceAddr(pod, byte(20+j))
				f.routeFromOutside(t, vip.Addr(), f.a)
				n.lead(vip, feAddress, at)
				nodePort := netip.AddrPortFrom(own, 30080+uint16(j))
				n.lead(nodePort, feNode, at)
				f.askInPieces(t, vip)
				f.askInPieces(t, nodePort)
				before, beforeB := n.counters(t), f.b.counters(t)
				for _, asked := range []netip.AddrPort{vip, nodePort} {
					wantServed(t, c.what+" by tcp", askTCP(t, f.outsider, asked, 1<<20), at, c.source)
					wantServed(t, c.what+" by udp", askUDP(t, f.outsider, asked, 64), at, c.source)
					wantServed(t, c.what+" in fragments", f.askInPieces(t, asked), at, c.source)
				}
				wantNoDrops(t, "a", f.a.gained(t, before))
				wantNoDrops(t, "b", f.b.gained(t, beforeB))
			}
		}
	})
}

// wantServed compares what a server of tell says with who it is and whom it sees.
func wantServed(t *testing.T, what, says string, at netip.AddrPort, source netip.Addr) {
	t.Helper()
	server, client, _ := strings.Cut(says, " to ")
	from, err := netip.ParseAddrPort(client)
	if err != nil || server != at.String() || from.Addr().Unmap() != source {
		t.Errorf("%s: %q answers, want %v to %v", what, says, at, source)
	}
}
