// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/kit/watch"
	"github.com/sluice-net/sluice/services/datapath/internal/endpoint/netdev"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/node/cluster"
)

// mirror answers each line with the address and port of its sender. It listens on one port for TCP and UDP.
func (p *pod) mirror(a netip.Addr) netip.AddrPort {
	p.t.Helper()
	l := p.listen("tcp", netip.AddrPortFrom(a, 0).String()).(net.Listener)
	at := l.Addr().(*net.TCPAddr).AddrPort()
	u := p.listen("udp", at.String()).(net.PacketConn)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 100)
		for {
			_, from, err := u.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = u.WriteTo([]byte(from.String()+"\n"), from) // the client asks again
		}
	})
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if err := abortOnClose(c); err != nil {
				p.t.Error(err)
			}
			stop := context.AfterFunc(ctx, func() { c.Close() })
			wg.Go(func() {
				defer stop()
				defer c.Close()
				for r := bufio.NewReader(c); ; {
					if _, err := r.ReadString('\n'); err != nil {
						return
					}
					if _, err := io.WriteString(c, c.RemoteAddr().String()+"\n"); err != nil {
						return
					}
				}
			})
		}
	})
	p.t.Cleanup(func() {
		cancel()
		l.Close()
		u.Close()
		wg.Wait()
	})
	return at
}

// ask returns the source address that the mirror at the other end of c sees.
func ask(c net.Conn) (netip.AddrPort, error) {
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		return netip.AddrPort{}, err
	}
	if _, err := io.WriteString(c, "who am I?\n"); err != nil {
		return netip.AddrPort{}, err
	}
	text, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return netip.AddrPort{}, err
	}
	return netip.ParseAddrPort(strings.TrimSpace(text))
}

func (w *world) dial(ns *netns.Namespace, network string, to netip.AddrPort) net.Conn {
	w.t.Helper()
	c, err := dialIn(ns, network, to, patience)
	if err != nil {
		w.t.Fatalf("%s to %v: %v", network, to, err)
	}
	w.t.Cleanup(func() { c.Close() })
	return c
}

// sees fails unless the mirror sees the wanted source address.
func (w *world) sees(what string, c net.Conn, want netip.Addr) netip.AddrPort {
	w.t.Helper()
	got, err := ask(c)
	if err != nil || got.Addr() != want {
		w.t.Errorf("%s: seen as %v (%v), want %v", what, got, err, want)
	}
	return got
}

// beyond adds an address of another network to the outside, and a route to the node.
func (w *world) beyond(out *pod, a netip.Addr) {
	w.t.Helper()
	bits := a.BitLen()
	err := out.ns.Do(func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		return netlink.AddrAdd(lo, &netlink.Addr{
			IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, bits)}, Flags: unix.IFA_F_NODAD,
		})
	})
	gw := "192.0.2.2"
	if a.Is6() {
		gw = "2001:db8::2"
	}
	err = errors.Join(err, w.home.Do(func() error {
		dst := &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, bits)}
		return netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(gw)})
	}))
	if err != nil {
		w.t.Fatal(err)
	}
}

// TestKernelMasqueradeExcludes proves INV-90 by the source addresses that peers see.
func TestKernelMasqueradeExcludes(t *testing.T) {
	w := newWorld(t)
	w.masquerade = MasqueradeConfig{Enabled: true, Except: []netip.Prefix{
		netip.MustParsePrefix("198.51.100.0/24"), netip.MustParsePrefix("2001:db8:ff::/64"),
	}}
	w.start(true)
	a, b, out := w.pod("a"), w.pod("b"), w.outside()
	host := &pod{t: t, ns: w.home}
	for i, c := range []struct{ node, outside, excepted string }{
		{"192.0.2.1", "192.0.2.2", "198.51.100.7"}, {"2001:db8::1", "2001:db8::2", "2001:db8:ff::7"},
	} {
		node, excepted := netip.MustParseAddr(c.node), netip.MustParseAddr(c.excepted)
		w.beyond(out, excepted)
		own := a.spec.Addrs[i]
		there, apart := out.mirror(netip.MustParseAddr(c.outside)), out.mirror(excepted)
		pod, here := b.mirror(b.spec.Addrs[i]), host.mirror(w.node.Ranges.NodeAddrs()[i])
		mine := a.mirror(own)
		for _, network := range []string{"tcp", "udp"} {
			for range 20 {
				got := w.sees(network+" beyond the node", w.dial(a.ns, network, there), node)
				if got.Port() < 32768 || got.Port() > 60999 {
					t.Errorf("%s beyond the node: from port %d", network, got.Port())
				}
			}
			kept := w.dial(a.ns, network, apart)
			if got := w.sees(network+" to an exception", kept, own); got.Port() != portOf(kept) {
				t.Errorf("%s to an exception: from port %d, want %d", network, got.Port(), portOf(kept))
			}
			w.sees(network+" to another pod", w.dial(a.ns, network, pod), own)
			w.sees(network+" to the node", w.dial(a.ns, network, here), own)
			w.sees(network+" of the node itself", w.dial(w.home, network, there), node)
			if network == "tcp" {
				w.fromPodSide(there, w.node.Ranges.NodeAddrs()[i])
			}
			// replies of a pod keep its address, or the peer would not accept them
			w.sees(network+" from outside", w.dial(out.ns, network, mine), netip.MustParseAddr(c.outside))
		}
	}
	if diffs, err := w.node.Node.Firewall.Check(); err != nil || len(diffs) > 0 {
		t.Errorf("the firewall table is wrong: %+v, %v", diffs, err)
	}
}

// fromPodSide fails unless the node's own connections keep the node's address on the pod side.
func (w *world) fromPodSide(to netip.AddrPort, own netip.Addr) {
	w.t.Helper()
	var c net.Conn
	err := w.home.Do(func() (err error) {
		d := net.Dialer{Timeout: patience, LocalAddr: &net.TCPAddr{IP: own.AsSlice()}}
		c, err = d.Dial("tcp", to.String())
		return err
	})
	if err != nil {
		w.t.Errorf("the node from %v: %v", own, err)
		return
	}
	defer c.Close()
	w.sees("the node by its address on the pod side", c, own)
}

// TestKernelMasqueradeLeavesPodsAlone sends through a device of the instance's group, as the host stack does with a
// packet between pods that no program can deliver.
func TestKernelMasqueradeLeavesPodsAlone(t *testing.T) {
	w := newWorld(t)
	w.masquerade.Enabled = true
	w.start(false)
	a, out := w.pod("a"), w.outside()
	u := out.listen("udp", "192.0.2.2:0").(net.PacketConn)
	defer u.Close()
	from := func() netip.Addr {
		t.Helper()
		c := w.dial(a.ns, "udp", u.LocalAddr().(*net.UDPAddr).AddrPort())
		if _, err := io.WriteString(c, "one way"); err != nil {
			t.Fatal(err)
		}
		if err := u.SetReadDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		_, source, err := u.ReadFrom(make([]byte, 100))
		if err != nil {
			t.Fatal(err)
		}
		return source.(*net.UDPAddr).AddrPort().Addr()
	}
	if got := from(); got != netip.MustParseAddr("192.0.2.1") {
		t.Errorf("beyond the node: seen as %v", got)
	}
	for _, group := range []uint32{netdev.Group("test"), netdev.Group("test") | 1} {
		err := w.home.Do(func() error {
			link, err := netlink.LinkByName("up0")
			if err != nil {
				return err
			}
			return netlink.LinkSetGroup(link, int(group))
		})
		if err != nil {
			t.Fatal(err)
		}
		if got := from(); got != a.spec.Addrs[0] {
			t.Errorf("out of a device of group %#x: seen as %v", group, got)
		}
	}
}

func portOf(c net.Conn) uint16 { return netip.MustParseAddrPort(c.LocalAddr().String()).Port() }

// TestKernelMasqueradeLeavesOldConnectionsAlone enables masquerading while connections of both directions are open.
func TestKernelMasqueradeLeavesOldConnectionsAlone(t *testing.T) {
	w := newWorld(t)
	w.start(false)
	a, out := w.pod("a"), w.outside()
	there, mine := out.mirror(netip.MustParseAddr("192.0.2.2")), a.mirror(a.spec.Addrs[0])
	leaving, coming := w.dial(a.ns, "tcp", there), w.dial(out.ns, "tcp", mine)
	before := w.sees("before", leaving, a.spec.Addrs[0])
	w.sees("from outside before", coming, netip.MustParseAddr("192.0.2.2"))
	w.stop()
	w.masquerade.Enabled = true
	w.start(false)
	w.sees("a new one", w.dial(a.ns, "tcp", there), netip.MustParseAddr("192.0.2.1"))
	for range 3 {
		if got := w.sees("of the pod", leaving, a.spec.Addrs[0]); got != before {
			t.Errorf("seen as %v, want %v as before", got, before)
		}
		w.sees("from outside", coming, netip.MustParseAddr("192.0.2.2"))
	}
}

// others replaces the cluster watch of sluice-identity by a hub in the test process.
type others struct {
	*watch.Hub[cluster.Key, cluster.Item]
}

func (o others) Watch(ctx context.Context, token []byte) iter.Seq2[watch.Event[cluster.Key, cluster.Item], error] {
	return func(yield func(watch.Event[cluster.Key, cluster.Item], error) bool) {
		s, err := o.Subscribe(token)
		if err != nil {
			yield(watch.Event[cluster.Key, cluster.Item]{}, err)
			return
		}
		defer s.Close()
		for err == nil {
			var e watch.Event[cluster.Key, cluster.Item]
			if e, err = s.Next(ctx); !yield(e, err) {
				return
			}
		}
	}
}

// TestKernelMasqueradeFollowsTheClustersRanges adds and removes ranges of another node. Pods there see the pod's
// address, also after a restart before the source has sent its listing. An existing connection keeps its source
// address.
func TestKernelMasqueradeFollowsTheClustersRanges(t *testing.T) {
	w := newWorld(t)
	source := others{watch.NewHub[cluster.Key](watch.Options[cluster.Item]{Loading: true})}
	w.cluster, w.masquerade.Enabled = source, true
	w.start(true)
	a, out := w.pod("a"), w.outside()
	remote, own, node := netip.MustParseAddr("198.18.5.9"), a.spec.Addrs[0], netip.MustParseAddr("192.0.2.1")
	w.beyond(out, remote)
	there := out.mirror(remote)
	early := w.dial(a.ns, "tcp", there)
	w.sees("an address of no known range", early, node)

	key := cluster.Key{Node: "other"}
	say := func(ranges ...netip.Prefix) {
		source.Upsert(key, cluster.Item{Node: &cluster.Node{
			Incarnation: "0123456789abcdef", Addresses: []netip.Addr{netip.MustParseAddr("192.0.2.2")}, Ranges: ranges,
		}})
		source.Loaded()
	}
	becomes := func(what string, want netip.Addr) {
		t.Helper()
		servicetest.EventuallyNil(t, what, func() error {
			c, err := dialIn(a.ns, "tcp", there, patience)
			if err != nil {
				return err
			}
			defer c.Close()
			got, err := ask(c)
			if err == nil && got.Addr() != want {
				err = fmt.Errorf("seen as %v, want %v", got, want)
			}
			return err
		})
	}
	say(netip.MustParsePrefix("198.18.5.0/24"))
	becomes("after another node's range was added", own)
	w.sees("a connection from before", early, node)
	late := w.dial(a.ns, "tcp", there)
	w.sees("a new connection", late, own)

	w.stop()
	w.cluster = others{watch.NewHub[cluster.Key](watch.Options[cluster.Item]{Loading: true})} // sends nothing
	w.start(true)
	w.sees("after a restart", w.dial(a.ns, "tcp", there), own)
	w.sees("an older connection after a restart", late, own)
	w.sees("the oldest connection after a restart", early, node)

	source = w.cluster.(others)
	source.Loaded() // with no node
	becomes("after the node was removed", node)
	w.sees("a connection to a pod of the removed node", late, own)
}
