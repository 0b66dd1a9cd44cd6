// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/endpointmap"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// TestKernelMasqueradedUDPIsNotTheHostsFlow: a container behind the node's masquerade does not continue a UDP flow of
// the node itself, although it gets the same address and port.
func TestKernelMasqueradedUDPIsNotTheHostsFlow(t *testing.T) {
	n := newFragmentNode(t)
	var l *net.UDPConn
	inNetns(t, n.pod.ns, func() {
		var err error
		l, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(n.pod.IPv4, 53)))
		must(t, "listen in the pod", err)
	})
	defer l.Close()
	container := func(port uint16) {
		t.Helper()
		inNetns(t, n.outside, func() {
			sendRaw(t, "slup1", frame([6]byte(n.uplink.Attrs().HardwareAddr), [6]byte{2, 0, 0, 0, 9, 2}, etherIPv4,
				ip4Header{src: outside4, dst: n.pod.IPv4, proto: 17}.with(udp(port, 53, []byte("container")...))))
		})
	}
	buf := make([]byte, 100)
	receive := func(want string) netip.AddrPort {
		t.Helper()
		must(t, "set a deadline", l.SetReadDeadline(time.Now().Add(servicetest.Patience)))
		size, from, err := l.ReadFromUDPAddrPort(buf)
		must(t, "receive in the pod", err)
		if string(buf[:size]) != want {
			t.Errorf("the pod has received %q, want %q", buf[:size], want)
		}
		return from
	}
	denied := func() uint64 { return n.counters(t)[cell{event.PolicyPending, event.Ingress}].Packets }

	setPolicy(t, n.k, n.pod.Slot, endpointmap.Policy{Egress: nodetable.Deny, Ingress: nodetable.Allow})
	container(4000)
	masquerade := receive("container").Addr().Unmap()
	if masquerade == outside4 {
		t.Fatal("what the container sends is not masqueraded")
	}

	// Only the local host may send to the pod.
	setPolicy(t, n.k, n.pod.Slot, endpointmap.Policy{Egress: nodetable.Deny, Ingress: nodetable.Pending})
	own := netip.AddrPortFrom(masquerade, 4001)
	c, err := net.DialUDP("udp", net.UDPAddrFromAddrPort(own), net.UDPAddrFromAddrPort(netip.AddrPortFrom(n.pod.IPv4, 53)))
	must(t, "dial from the node", err)
	_, err = c.Write([]byte("node"))
	must(t, "send from the node", err)
	if from := receive("node"); netip.AddrPortFrom(from.Addr().Unmap(), from.Port()) != own {
		t.Errorf("the node's datagram came from %v, want %v", from, own)
	}
	must(t, "close the node's socket", c.Close())
	// as after the timeout, so that the container gets the port
	must(t, "forget the translations", netlink.ConntrackTableFlush(netlink.ConntrackTable))
	before := denied()
	container(4001)
	servicetest.Eventually(t, "a verdict about the container", func() bool {
		must(t, "set a deadline", l.SetReadDeadline(time.Now().Add(time.Millisecond)))
		size, from, err := l.ReadFromUDPAddrPort(buf)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("the pod has received %q from %v, %v", buf[:size], from, err)
		}
		return denied() > before
	})
}
