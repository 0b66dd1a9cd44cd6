// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/ipcache"
)

// everywhere returns a port of the wildcard address.
func everywhere(port uint16) netip.AddrPort { return netip.AddrPortFrom(netip.IPv6Unspecified(), port) }

// answerUDP runs a server on a socket that is bound to an address of a namespace. A request contains the size
// of the answer.
func answerUDP(t *testing.T, ns netns.NsHandle, at netip.AddrPort) {
	t.Helper()
	var u *net.UDPConn
	inNetns(t, ns, func() {
		var err error
		u, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		must(t, "listen", err)
	})
	t.Cleanup(func() { u.Close() })
	go func() {
		b := make([]byte, 100)
		for {
			n, from, err := u.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			size, _ := strconv.Atoi(string(b[:n]))
			_, _ = u.WriteToUDPAddrPort(bytes.Repeat([]byte("x"), size), from)
		}
	}()
}

// addAddresses adds addresses to a node and to its datapath.
func (n *fabricNode) addAddresses(t *testing.T, addrs ...netip.Addr) {
	t.Helper()
	for _, a := range addrs {
		// deprecated, so that the tunnel does not use it as source
		must(t, "add an address", n.h.AddrAdd(n.uplink, &netlink.Addr{
			IPNet: ipNet(a), Flags: unix.IFA_F_NODAD, ValidLft: 3600,
		}))
		receives(t, n.h, a)
	}
	own := append([]netip.Addr{n.over4, n.over6, n.addr4, n.addr6}, addrs...)
	must(t, "host addresses", n.k.Endpoints.SyncHostAddrs(own))
}

// TestKernelHostAnswersUDPFromTheAddressThatWasAsked: a connected socket of a pod receives the answers of a
// server of the host that is bound to the wildcard address. The pod may use any address of the node, through a
// service or directly, with datagrams of any size.
func TestKernelHostAnswersUDPFromTheAddressThatWasAsked(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, routing Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		more := []netip.Addr{netip.MustParseAddr("192.0.2.101"), netip.MustParseAddr("2001:db8::101")}
		f.a.addAddresses(t, more...)
		for i := range more {
			must(t, "SetRemote", f.b.k.IPCache.SetRemote(netip.PrefixFrom(more[i], more[i].BitLen()),
				ipcache.Remote{Identity: identity.RemoteNode, Node: uint16(f.a.number), OfDevice: true}))
		}
		answerUDP(t, f.a.ns, everywhere(7001))
		for i := range 2 {
			for _, own := range []netip.Addr{
				[]netip.Addr{f.a.addr4, f.a.addr6}[i], more[i], []netip.Addr{f.a.over4, f.a.over6}[i],
			} {
				for _, client := range []struct {
					what string
					in   *pod
				}{{"a pod of the node", f.a.pod}, {"a pod of another node", f.b.pod}} {
					if client.in == f.b.pod && routing == RoutingNative {
						// only the stack carries it, with the addresses of the node's
						// routes
						continue
					}
					for _, size := range []int{8, 1400, 5600} {
						wantBytes(t, fmt.Sprintf("%s, %d bytes", client.what, size), client.in.ns, netip.AddrPortFrom(own, 7001), size)
					}
				}
			}
			vip := serviceAddr(more[i], 40)
			n.lead(vip, feAddress, netip.AddrPortFrom(more[i], 7001))
			wantBytes(t, "by a service", f.a.pod.ns, vip, 8)
			wantBytes(t, "by a service, large", f.a.pod.ns, vip, 5600)
		}
	})
}

// wantBytes requests an answer of a size on a connected socket, which only receives from one address. The first
// attempts may be lost to path MTU discovery.
func wantBytes(t *testing.T, what string, ns netns.NsHandle, to netip.AddrPort, size int) {
	t.Helper()
	u, err := dialIn(t, ns, "udp", to)
	must(t, "open", err)
	defer u.Close()
	b := make([]byte, 1<<16)
	for range 4 {
		must(t, "deadline", u.SetDeadline(time.Now().Add(500*time.Millisecond)))
		_, err = u.Write([]byte(strconv.Itoa(size)))
		must(t, "send", err)
		var k int
		if k, err = u.Read(b); err == nil {
			if k != size {
				t.Errorf("%s: %v answers with %d bytes", what, to, k)
			}
			return
		}
	}
	t.Errorf("%s: %v does not answer: %v", what, to, err)
}

// TestKernelHostKeepsTheAddressOfABoundSocket: a host socket that is bound to one of its addresses keeps it as
// source, even towards a port of a pod that has sent a request to another address.
func TestKernelHostKeepsTheAddressOfABoundSocket(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	for _, at := range []netip.Addr{f.a.addr4, f.a.over4, f.a.addr6, f.a.over6} {
		answerUDP(t, f.a.ns, netip.AddrPortFrom(at, 7002))
	}
	for _, client := range []*pod{f.a.pod, f.b.pod} {
		for _, asked := range [][]netip.Addr{{f.a.addr4, f.a.over4}, {f.a.addr6, f.a.over6}} {
			var u *net.UDPConn
			inNetns(t, client.ns, func() {
				var err error
				u, err = net.ListenUDP("udp", nil)
				must(t, "open", err)
			})
			defer u.Close()
			for round := range 4 {
				to := netip.AddrPortFrom(asked[round%2], 7002)
				must(t, "deadline", u.SetDeadline(time.Now().Add(servicetest.Patience)))
				_, err := u.WriteToUDPAddrPort([]byte("8"), to)
				must(t, "send", err)
				_, from, err := u.ReadFromUDPAddrPort(make([]byte, 100))
				must(t, "read", err)
				if got := netip.AddrPortFrom(from.Addr().Unmap(), from.Port()); got != to {
					t.Errorf("%v sends to %v, the answer comes from %v", client.IPv4, to, got)
				}
			}
		}
	}
}

// TestKernelHostAnswersFromTheAddressThatWasAskedLast: a port of a pod alternates between two addresses of the
// host, several times within a second. The route selects neither of them as source.
func TestKernelHostAnswersFromTheAddressThatWasAskedLast(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	more := []netip.Addr{netip.MustParseAddr("192.0.2.101"), netip.MustParseAddr("2001:db8::101")}
	f.a.addAddresses(t, more...)
	answerUDP(t, f.a.ns, everywhere(7003))
	for _, asked := range [][]netip.Addr{{f.a.addr4, more[0]}, {f.a.addr6, more[1]}} {
		var u *net.UDPConn
		inNetns(t, f.a.pod.ns, func() {
			var err error
			u, err = net.ListenUDP("udp", nil)
			must(t, "open", err)
		})
		defer u.Close()
		for i := range 24 {
			to := netip.AddrPortFrom(asked[i/4%2], 7003)
			must(t, "deadline", u.SetDeadline(time.Now().Add(servicetest.Patience)))
			_, err := u.WriteToUDPAddrPort([]byte("8"), to)
			must(t, "send", err)
			_, from, err := u.ReadFromUDPAddrPort(make([]byte, 100))
			must(t, "read", err)
			if got := netip.AddrPortFrom(from.Addr().Unmap(), from.Port()); got != to {
				t.Errorf("datagram %d goes to %v, the answer comes from %v", i, to, got)
			}
		}
	}
}

// TestKernelAskedAddressIsRecordedAgain: the record of a requested address may be evicted, and is created
// again. Lists of connections do not contain it.
func TestKernelAskedAddressIsRecordedAgain(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	answerUDP(t, f.a.ns, everywhere(7001))
	u, err := dialIn(t, f.a.pod.ns, "udp", netip.AddrPortFrom(f.a.addr4, 7001))
	must(t, "open", err)
	ask := func() {
		t.Helper()
		servicetest.Eventually(t, "an answer", func() bool {
			// a connection checks its record once a second
			must(t, "deadline", u.SetDeadline(time.Now().Add(200*time.Millisecond)))
			_, err := u.Write([]byte("8"))
			must(t, "send", err)
			_, err = u.Read(make([]byte, 100))
			return err == nil
		})
	}
	for range 3 {
		ask()
		if n := len(f.a.askedRecords(t)); n != 1 {
			t.Fatalf("%d records of requested addresses, want 1", n)
		}
		for _, c := range f.a.askedRecords(t) {
			if deleted, err := f.a.k.Connections.Remove(c); err != nil || deleted != 1 {
				t.Fatalf("remove: %d, %v", deleted, err)
			}
		}
	}
	ask()
	must(t, "list", f.a.k.Connections.List(t.Context(), conntrack.Filter{}, func(c *conntrack.Connection) error {
		if c.Asked || !c.Responder.Addr().IsValid() || c.Responder.Addr().IsUnspecified() {
			t.Errorf("a connection: %v", c.Tuple)
		}
		return nil
	}))
}

// askedRecords returns the records of requested addresses of the node.
func (n *fabricNode) askedRecords(t *testing.T) (records []conntrack.Connection) {
	t.Helper()
	must(t, "list", n.k.Connections.Each(func(cs []conntrack.Connection) error {
		for _, c := range cs {
			if c.Asked {
				records = append(records, c)
			}
		}
		return nil
	}))
	return records
}
