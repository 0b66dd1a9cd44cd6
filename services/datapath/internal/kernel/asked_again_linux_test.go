// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netns"

	"github.com/sluice-net/sluice/kit/servicetest"
)

// asker is a socket that keeps its port.
type asker struct {
	*testing.T
	*net.UDPConn
}

func newAsker(t *testing.T, ns netns.NsHandle) asker {
	t.Helper()
	var u *net.UDPConn
	inNetns(t, ns, func() {
		var err error
		u, err = net.ListenUDP("udp", nil)
		must(t, "open a socket", err)
	})
	t.Cleanup(func() { u.Close() })
	return asker{t, u}
}

// wantAnswer asks until the answer comes from the requested address: a port that is in use for another service
// is refused until it has been idle.
func (a asker) wantAnswer(what string, to netip.AddrPort) {
	a.Helper()
	servicetest.EventuallyNil(a.T, fmt.Sprintf("%s: an answer from %v", what, to), func() error {
		must(a.T, "deadline", a.SetDeadline(time.Now().Add(2*time.Second)))
		_, err := a.WriteToUDPAddrPort([]byte("8"), to)
		must(a.T, "send", err)
		_, from, err := a.ReadFromUDPAddrPort(make([]byte, 256))
		if from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port()); err == nil && from != to {
			err = fmt.Errorf("%v answers", from)
		}
		return err
	})
}

// TestKernelAPortMayAskManyAddressesOfOneBackend: a UDP socket that keeps its port asks one node port at several
// addresses of the node, another Service, and a socket of the node directly, all with one backend. Each answer comes
// from the requested address.
func TestKernelAPortMayAskManyAddressesOfOneBackend(t *testing.T) {
	for name, routing := range map[string]Routing{"overlay": RoutingOverlay, "native": RoutingNative} {
		t.Run(name, func(t *testing.T) {
			f := newFabric(t, routing, false)
			n := &serviceNode{T: t, runner: f.a.runner}
			local := f.a.newPod(t, 20)
			more := []netip.Addr{netip.MustParseAddr("192.0.2.101"), netip.MustParseAddr("2001:db8::101")}
			f.a.addAddresses(t, more...)
			port := uint16(30080)
			for family, own := range []netip.Addr{f.a.addr4, f.a.addr6} {
				f.routeFromOutside(t, more[family], f.a)
				for _, c := range []struct {
					name   string
					from   netns.NsHandle
					server netns.NsHandle
					addr   netip.Addr
				}{
					{"outside, local backend", f.outsider, local.ns, local.Addrs()[family]},
					{"outside, backend elsewhere", f.outsider, f.b.pod.ns, f.b.pod.Addrs()[family]},
					{"outside, socket of the node", f.outsider, f.a.ns, own},
					{"pod, local backend", f.a.pod.ns, local.ns, local.Addrs()[family]},
					{"pod, backend elsewhere", f.a.pod.ns, f.b.pod.ns, f.b.pod.Addrs()[family]},
				} {
					port += 2
					backend := netip.AddrPortFrom(c.addr, port+1000)
					answerUDP(t, c.server, backend)
					for i := range uint16(2) {
						n.lead(netip.AddrPortFrom(own, port+i), feNode, backend)
					}
					what := fmt.Sprintf("IPv%d, %s", 4+2*family, c.name)
					client := newAsker(t, c.from)
					client.wantAnswer(what+", at first", netip.AddrPortFrom(own, port))
					client.wantAnswer(what+", another address", netip.AddrPortFrom(more[family], port))
					client.wantAnswer(what+", the first again", netip.AddrPortFrom(own, port))
					client.wantAnswer(what+", another Service", netip.AddrPortFrom(own, port+1))
					client.wantAnswer(what+", its other address", netip.AddrPortFrom(more[family], port+1))
					if c.server == f.a.ns {
						client.wantAnswer(what+", directly", backend)
						client.wantAnswer(what+", the Service again", netip.AddrPortFrom(own, port))
					}
				}
			}
		})
	}
}
