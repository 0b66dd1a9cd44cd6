// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// TestKernelAPodIsToldOfHopsAndSizesOnTheWayToAnotherPod sends packets that need an ICMP error. The programs pass such
// packets to the host stack. The firewall around the pod range and the check of source addresses must let them through.
func TestKernelAPodIsToldOfHopsAndSizesOnTheWayToAnotherPod(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	from := w.pod("from")
	ns := netnstest.New(t)
	narrow := w.spec("narrow", ns)
	narrow.MTU = 1280
	if _, err := w.node.Endpoints.Lifecycle.Create(t.Context(), narrow, false); err != nil {
		t.Fatal(err)
	}
	type option struct{ level, name, value int }
	hops4 := []option{{unix.IPPROTO_IP, unix.IP_TTL, 1}, {unix.IPPROTO_IP, unix.IP_RECVERR, 1}}
	hops6 := []option{{unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, 1}, {unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1}}
	size4 := []option{{unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO}, {unix.IPPROTO_IP, unix.IP_RECVERR, 1}}
	size6 := []option{{unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO}, {unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1}}
	for _, c := range []struct {
		name    string
		dst     netip.Addr
		options []option
		size    int
		want    error
	}{
		{"IPv4 hops", narrow.Addrs[0], hops4, 10, unix.EHOSTUNREACH},
		{"IPv6 hops", narrow.Addrs[1], hops6, 10, unix.EHOSTUNREACH},
		{"IPv4 size", narrow.Addrs[0], size4, 1400, unix.EMSGSIZE},
		{"IPv6 size", narrow.Addrs[1], size6, 1400, unix.EMSGSIZE},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn, err := dialIn(from.ns, "udp", netip.AddrPortFrom(c.dst, 9), patience)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			raw, err := conn.(*net.UDPConn).SyscallConn()
			if err != nil {
				t.Fatal(err)
			}
			err = raw.Control(func(fd uintptr) {
				for _, o := range c.options {
					if err := unix.SetsockoptInt(int(fd), o.level, o.name, o.value); err != nil {
						t.Errorf("option %d: %v", o.name, err)
					}
				}
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Write(make([]byte, c.size)); err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, c.want) {
				t.Errorf("the pod got %v, want %v", err, c.want)
			}
		})
	}
}

// TestKernelAddressThatTheHostGotMeanwhileIsTheHosts adds a host address while the datapath is down. The programs
// distinguish the host from the world by its addresses, so the next start must notice the address even if nothing else
// changed.
func TestKernelAddressThatTheHostGotMeanwhileIsTheHosts(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	w.pod("a")
	w.stop()
	late := netip.MustParseAddr("192.0.2.7")
	err := w.home.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(lo, &netlink.Addr{IPNet: &net.IPNet{IP: late.AsSlice(), Mask: net.CIDRMask(32, 32)}})
	})
	if err != nil {
		t.Fatal(err)
	}
	w.start(true)
	servicetest.EventuallyNil(t, "the address is known as the host's", func() error {
		have, err := w.node.Kernel.Endpoints.HostAddrs()
		if err == nil && !slices.Contains(have, late) {
			err = fmt.Errorf("host addresses %v", have)
		}
		return err
	})
}

// TestKernelAddressesThatTheUplinkSharesAreTheHosts sends from a pod to the broadcast address and the subnet-router
// anycast address of the uplink. The packets reach the host, so they must be evaluated as packets to the host.
func TestKernelAddressesThatTheUplinkSharesAreTheHosts(t *testing.T) {
	w := newWorld(t)
	w.start(true)
	a := w.pod("a")
	w.outside()
	// A kernel worker joins the anycast address. Packets before that are lost.
	servicetest.EventuallyNil(t, "the node has the anycast address", func() error {
		return w.home.Do(func() error {
			routes, err := netlink.RouteGet(net.ParseIP("2001:db8::"))
			if err == nil && (len(routes) != 1 || routes[0].Type != unix.RTN_ANYCAST) {
				err = fmt.Errorf("routes %v", routes)
			}
			return err
		})
	})
	if err := w.node.Node.Host.SyncAddrs(); err != nil {
		t.Fatal(err)
	}
	host := &pod{t: t, ns: w.home}
	for _, c := range []struct{ network, listen, to string }{
		{"udp4", "0.0.0.0:0", "192.0.2.255"},
		{"udp6", "[::]:0", "2001:db8::"},
	} {
		l := host.listen(c.network, c.listen).(*net.UDPConn)
		defer l.Close()
		before := w.counted(event.ForwardedToHost)
		to := netip.AddrPortFrom(netip.MustParseAddr(c.to), l.LocalAddr().(*net.UDPAddr).AddrPort().Port())
		conn, err := dialIn(a.ns, "udp", to, patience)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := conn.Write([]byte("everybody")); err != nil {
			t.Fatal(err)
		}
		if err := l.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 20)
		if n, err := l.Read(got); err != nil || string(got[:n]) != "everybody" {
			t.Errorf("%s: the host received %q, %v: so this case tests nothing", c.to, got[:n], err)
		}
		if after := w.counted(event.ForwardedToHost); after != before+1 {
			t.Errorf("%s: %d packets were evaluated as packets to the host, want 1", c.to, after-before)
		}
	}
}
