// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/node/nodemap"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
	"github.com/sluice-net/sluice/services/datapath/internal/service/translation"
)

// TestKernelPodLearnsOfClosedPortsBehindServices: packet-translated requests of a pod to a service whose
// backend's port is closed fail with ECONNREFUSED, as requests to the backend itself do.
func TestKernelPodLearnsOfClosedPortsBehindServices(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		second := f.a.newPod(t, 20)
		for i, local := range f.a.pod.Addrs() {
			nodePort := netip.AddrPortFrom([]netip.Addr{f.a.addr4, f.a.addr6}[i], 30080)
			n.lead(nodePort, feNode, netip.AddrPortFrom(second.Addrs()[i], 9))
			for j, backend := range []netip.Addr{
				second.Addrs()[i], f.b.pod.Addrs()[i], []netip.Addr{f.b.over4, f.b.over6}[i], local,
				[]netip.Addr{f.a.over4, f.a.over6}[i], f.outsideAddrs()[i],
			} {
				f.routeFromOutside(t, local, f.a)
				vip := serviceAddr(local, byte(1+j))
				n.lead(vip, feAddress, netip.AddrPortFrom(backend, 9))
				wantRefused(t, f.a.pod, vip, "backend "+backend.String())
			}
			wantRefused(t, f.a.pod, nodePort, "node port")
		}
	})
}

func wantRefused(t *testing.T, from *pod, to netip.AddrPort, what string) {
	t.Helper()
	u, err := dialIn(t, from.ns, "udp", to)
	must(t, "open a socket", err)
	must(t, "deadline", u.SetDeadline(time.Now().Add(time.Second)))
	_, err = u.Write([]byte("anybody?"))
	must(t, "send", err)
	if _, err := u.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%v, %s, a closed port: %v, want %v", to, what, err, syscall.ECONNREFUSED)
	}
}

// TestKernelPodLearnsThePathMTUToAServicesBackend: the path to a backend through the stack has a smaller MTU
// than the pod assumes.
func TestKernelPodLearnsThePathMTUToAServicesBackend(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	for i, outside := range f.outsideAddrs() {
		host := netip.AddrPortFrom(outside, 8081)
		tell(t, f.outsider, host)
		f.routeFromOutside(t, f.a.pod.Addrs()[i], f.a)
		must(t, "narrow route", f.a.h.RouteReplace(&netlink.Route{
			Dst: ipNet(host.Addr()), LinkIndex: f.a.uplink.Attrs().Index, MTU: 1300,
		}))
		vip := serviceAddr(host.Addr(), 2)
		n.lead(vip, feAddress, host)
		for _, to := range []netip.AddrPort{vip, host} {
			c, err := dialIn(t, f.a.pod.ns, "tcp", to)
			must(t, "connect", err)
			_, err = readLine(c)
			must(t, "read", err)
			go func() { _, _ = c.Write(make([]byte, 1<<18)) }()
			if _, err = io.ReadFull(c, make([]byte, 1<<18)); err != nil {
				t.Errorf("256 KiB to %v and back: %v", to, err)
			}
		}
	}
}

// TestKernelServiceCutsWhatMayBeCut: IPv4 packets without DF that exceed the MTU of the path to a backend
// arrive, as they do when sent to the backend itself, whether they are fragments or not.
func TestKernelServiceCutsWhatMayBeCut(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	way := nodemap.NextHop{Ifindex: uint32(f.a.tunnel.Attrs().Index), MTU: 1300, Flags: nodemap.Overlay}
	must(t, "a narrower way", f.a.k.Nodes.SetNextHops(2, way, way))
	must(t, "a narrower route", f.a.h.RouteReplace(&netlink.Route{
		Dst: &net.IPNet{IP: net.IPv4(10, 244, 2, 0).To4(), Mask: net.CIDRMask(24, 32)}, LinkIndex: f.a.tunnel.Attrs().Index,
		Scope: netlink.SCOPE_LINK, Src: f.a.over4.AsSlice(), MTU: 1300,
	}))
	second := f.a.newPodMTU(t, 20, 1300)
	away, local := netip.AddrPortFrom(f.b.pod.IPv4, 8080), netip.AddrPortFrom(second.IPv4, 8080)
	tell(t, f.b.pod.ns, away)
	tell(t, second.ns, local)
	vip, vipLocal := serviceAddr(away.Addr(), 1), serviceAddr(away.Addr(), 2)
	n.lead(vip, feAddress, away)
	n.lead(vipLocal, feAddress, local)
	before := n.counters(t)
	for _, to := range []netip.AddrPort{away, vip, local, vipLocal} {
		// the MTU of the pod's device is 1,450: the last size is sent in fragments
		for _, size := range []int{100, 1390, 4000} {
			if err := askOmittingDF(t, f.a.pod, to, size); err != nil {
				t.Errorf("%d bytes without DF to %v: %v; %v", size, to, err, f.a.gained(t, before))
			}
		}
	}
	for _, reason := range []event.Reason{event.RewriteFailed, event.AnsweredTooBig} {
		if got := f.a.gained(t, before)[cell{reason, event.Egress}]; got != 0 {
			t.Errorf("%d packets are counted as %v", got, reason)
		}
	}
}

// askOmittingDF sends a datagram without DF and waits for its echo.
func askOmittingDF(t *testing.T, from *pod, to netip.AddrPort, size int) (err error) {
	t.Helper()
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_OMIT)
		})
	}}
	var u net.Conn
	inNetns(t, from.ns, func() { u, err = d.Dial("udp", to.String()) })
	must(t, "open", err)
	defer u.Close()
	must(t, "deadline", u.SetDeadline(time.Now().Add(time.Second)))
	_, err = u.Write(make([]byte, size))
	must(t, "send", err)
	_, err = u.Read(make([]byte, 1<<16))
	return err
}

// TestKernelFramesForOtherMachinesAreLeftAlone: frames with another destination MAC address, which a device in
// promiscuous mode receives, are neither answered nor redirected to a backend.
func TestKernelFramesForOtherMachinesAreLeftAlone(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		n.lead(netip.AddrPortFrom(f.a.addr4, 30080), feNode) // without backends
		n.lead(netip.AddrPortFrom(f.a.addr4, 30081), feNode, netip.AddrPortFrom(f.a.pod.IPv4, 8080))
		before := f.a.counters(t)
		inNetns(t, f.outsider, func() {
			l, err := netlink.LinkByName("up0")
			must(t, "find", err)
			src := [6]byte(l.Attrs().HardwareAddr)
			for _, dst := range [][6]byte{{2, 0x77, 0, 0, 0, 1}, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, {1, 0, 0x5e, 0, 0, 1}} {
				for _, p := range []uint16{30080, 30081} {
					sendRaw(t, "up0",
						frame(dst, src, etherIPv4,
							ip4Header{src: f.outside, dst: f.a.addr4, proto: protoTCP}.with(tcp(4000, p, flagSYN))),
						frame(dst, src, etherIPv4, ip4Header{src: f.outside, dst: f.a.addr4, proto: protoUDP}.with(udp(4000, p))))
				}
			}
		})
		// the next frame of the same sender is processed after them
		f.fromOutside(t, f.a, ip4Header{src: f.outside, dst: f.a.addr4, proto: protoUDP}.with(udp(4001, 30081)))
		servicetest.Eventually(t, "the last frame", func() bool { return len(f.a.gained(t, before)) > 0 })
		for c, v := range f.a.gained(t, before) {
			if !c.reason.Quiet() && (v != 1 || c.reason.Dropped()) {
				t.Errorf("frames for other machines: %v %v counted %d", c.reason, c.direction, v)
			}
		}
		must(t, "list", n.k.Translations.Each(func(tr translation.Translation) error {
			if tr.Source.Port() != 4001 {
				t.Errorf("a translation: %v", tr)
			}
			return nil
		}))
		for tuple := range n.k.tracked(t) {
			if tuple.Initiator.Port() != 4001 {
				t.Errorf("a connection: %v", tuple)
			}
		}
	})
}

// TestKernelAnswersOfBackendsComeByTheTunnelAlone: in an overlay, a packet or ICMP error with the address of a
// backend's pod that arrives outside the tunnel does not reach the client.
func TestKernelAnswersOfBackendsComeByTheTunnelAlone(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	at := netip.AddrPortFrom(f.b.pod.IPv4, 8080)
	tell(t, f.b.pod.ns, at)
	nodePort := netip.AddrPortFrom(f.a.addr4, 30080)
	n.lead(nodePort, feNode, at)
	u, err := dialIn(t, f.outsider, "udp", nodePort)
	must(t, "open", err)
	wantAnswers(t, "the client", u, at)
	var claim netip.AddrPort
	must(t, "list", n.k.Translations.Each(func(tr translation.Translation) error {
		if tr.Answer {
			claim = tr.Asked
		}
		return nil
	}))
	before := f.a.counters(t)
	quoted := ip4Header{src: claim.Addr(), dst: at.Addr(), proto: protoUDP}.with(udp(claim.Port(), at.Port()))
	f.fromOutside(t, f.a,
		ip4Header{src: at.Addr(), dst: claim.Addr(), proto: protoUDP}.with(udp(at.Port(), claim.Port(), []byte("forged")...)),
		ip4Header{src: at.Addr(), dst: claim.Addr(), proto: 1}.with(icmp(3, 3, quoted...)))
	servicetest.Eventually(t, "both are dropped", func() bool {
		return f.a.gained(t, before)[cell{event.SpoofedNode, event.Ingress}] == 2
	})
	// the next answer must belong to the next request
	wantAnswers(t, "the client afterwards", u, at)
}

// TestKernelHairpinEndsAtTheLastHop: a hairpin packet whose hop limit has expired is not delivered.
func TestKernelHairpinEndsAtTheLastHop(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	for i, local := range f.a.pod.Addrs() {
		vip := serviceAddr(local, 1)
		n.lead(vip, feAddress, netip.AddrPortFrom(local, 8080))
		for _, hops := range []int{1, 2} {
			d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
				return c.Control(func(fd uintptr) {
					if i == 0 {
						_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_TTL, hops)
					} else {
						_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, hops)
					}
				})
			}}
			before := f.a.counters(t)
			inNetns(t, f.a.pod.ns, func() {
				u, err := d.Dial("udp", vip.String())
				must(t, "open", err)
				defer u.Close()
				_, err = u.Write([]byte("x"))
				must(t, "send", err)
			})
			want := cell{event.StackTimeExceeded, event.Egress}
			if hops > 1 {
				want = cell{event.ForwardedToPod, event.Egress}
			}
			servicetest.Eventually(t, "the packet is counted", func() bool { return f.a.gained(t, before)[want] > 0 })
		}
	}
}
