// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probe

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/netns/netnstest"
)

// underlay is two nodes with a router between them.
type underlay struct {
	t          *testing.T
	a, r, b    *netns.Namespace
	atA, atB   []netip.Addr
	self, peer *Prober // of a and b
}

// run runs a command of iproute2 or nft in a namespace.
func run(t *testing.T, ns *netns.Namespace, command string) string {
	t.Helper()
	args := strings.Fields(command)
	var out []byte
	if err := ns.Do(func() (err error) {
		out, err = exec.Command(args[0], args[1:]...).CombinedOutput() //nolint:gosec // from this test
		return err
	}); err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
	return string(out)
}

// quick is like usual, with shorter times.
func quick() timing {
	return timing{
		answer: 200 * time.Millisecond, interval: 300 * time.Millisecond, full: 500 * time.Millisecond,
		followUp: 10 * time.Millisecond,
	}
}

func newUnderlay(t *testing.T) *underlay {
	t.Helper()
	u := &underlay{t: t, a: netnstest.New(t), r: netnstest.New(t), b: netnstest.New(t)}
	for i, node := range []*netns.Namespace{u.a, u.b} {
		v6 := fmt.Sprintf("2001:db8:%d::", i)
		at4, at6 := fmt.Sprintf("192.0.2.%d", i*16+1), v6+"1"
		router := fmt.Sprintf("192.0.2.%d", i*16+2)
		name := []string{"toA", "toB"}[i]
		run(t, u.r, fmt.Sprintf("ip link add %s type veth peer name u0 netns /proc/%d/fd/%d", name, os.Getpid(), node.Fd()))
		for _, c := range []struct {
			ns       *netns.Namespace
			dev      string
			ip4, ip6 string
		}{{u.r, name, router, v6 + "2"}, {node, "u0", at4, at6}} {
			run(t, c.ns, "ip address add "+c.ip4+"/28 dev "+c.dev)
			run(t, c.ns, "ip address add "+c.ip6+"/64 dev "+c.dev+" nodad")
			run(t, c.ns, "ip link set "+c.dev+" up")
		}
		run(t, node, "ip route add default via "+router)
		run(t, node, "ip -6 route add default via "+v6+"2")
		addrs := []netip.Addr{netip.MustParseAddr(at4), netip.MustParseAddr(at6)}
		if i == 0 {
			u.atA = addrs
		} else {
			u.atB = addrs
		}
	}
	for _, name := range []string{"net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"} {
		set := func() error { return os.WriteFile("/proc/sys/"+name, []byte("1"), 0) }
		if err := u.r.Do(set); err != nil {
			t.Fatal(err)
		}
	}
	u.self = u.start(u.a, u.atA, Peer{"b", u.atB, 1500})
	u.peer = u.start(u.b, u.atB, Peer{"a", u.atA, 1500})
	return u
}

func (u *underlay) start(ns *netns.Namespace, local []netip.Addr, peers ...Peer) *Prober {
	u.t.Helper()
	p := New(Options{Port: port, Listen: func(f Family) (c Conn, err error) {
		err = ns.Do(func() (err error) { c, err = Listen(f, port); return err })
		return c, err
	}})
	p.timing = quick()
	p.SetLocal(local)
	if err := p.SetPeers(peers); err != nil {
		u.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- p.Run(ctx) }()
	u.t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			u.t.Errorf("Run: %v", err)
		}
	})
	return p
}

// wait waits until every path of both nodes is as wanted.
func (u *underlay) wait(what string, ok func(Path) bool) {
	u.t.Helper()
	var seen []Path
	defer func() {
		if u.t.Failed() {
			u.t.Logf("%s: %+v", what, seen)
		}
	}()
	servicetest.Eventually(u.t, what, func() bool {
		seen = append(u.self.State().Paths, u.peer.State().Paths...)
		for _, w := range seen {
			if !ok(w) {
				return false
			}
		}
		return len(seen) >= 4
	})
}

func carries(mtu int) func(Path) bool {
	return func(w Path) bool { return w.State == Reachable && w.MTU == mtu && !w.Searching }
}

func TestKernelNodeIsLostAndFoundAgain(t *testing.T) {
	u := newUnderlay(t)
	u.wait("reachable", carries(1500))
	for _, w := range u.self.State().Paths {
		if w.Trouble != "" || w.Latency <= 0 || w.Latency > time.Second {
			t.Errorf("path %+v", w)
		}
	}
	run(t, u.r, "ip link set toB down")
	u.wait("unreachable", func(w Path) bool { return w.State == Unreachable && w.Trouble != "" && w.MTU == 0 })
	if s := u.self.State(); s.Nodes != 1 || s.Answering != 0 {
		t.Errorf("state %+v", s)
	}
	run(t, u.r, "ip link set toB up")
	run(t, u.r, "ip address replace 2001:db8:1::2/64 dev toB nodad") // the kernel removed it with the link
	u.wait("reachable again", carries(1500))
	if s := u.self.State(); s.Answering != 1 || s.Counts.Dropped[Forged] != 0 {
		t.Errorf("state %+v", s)
	}
}

// TestKernelBlackHoleIsFoundAndHeals uses a router with a small MTU that sends no ICMP errors.
func TestKernelBlackHoleIsFoundAndHeals(t *testing.T) {
	u := newUnderlay(t)
	run(t, u.r, "nft add table inet silent")
	run(t, u.r, "nft add chain inet silent output { type filter hook output priority 0 ; }")
	run(t, u.r, "nft add rule inet silent output icmp type destination-unreachable drop")
	run(t, u.r, "nft add rule inet silent output icmpv6 type packet-too-big drop")
	u.wait("reachable", carries(1500))
	run(t, u.r, "ip link set toB mtu 1400")
	u.wait("1400", carries(1400))
	for _, w := range u.self.State().Paths {
		if w.Trouble != "path MTU 1400 < 1500 expected" {
			t.Errorf("path %+v", w)
		}
	}
	run(t, u.r, "ip link set toB mtu 1300")
	u.wait("1300", carries(1300))
	run(t, u.r, "ip link set toB mtu 1500")
	u.wait("1500", carries(1500))
}

// TestKernelLearnedPathMTUIsLeftOut: the router reports its MTU, which the kernel would cache for ten minutes. Probes
// must ignore the cached value.
func TestKernelLearnedPathMTUIsLeftOut(t *testing.T) {
	u := newUnderlay(t)
	u.wait("reachable", carries(1500))
	run(t, u.r, "ip link set toB mtu 1400")
	u.wait("1400", carries(1400))
	for i, to := range u.atB {
		if got := run(t, u.a, "ip route get "+to.String()); !strings.Contains(got, "mtu 1400") {
			t.Fatalf("%d: the kernel of a has not learned the path MTU: %s", i, got)
		}
	}
	run(t, u.r, "ip link set toB mtu 1500")
	u.wait("1500", carries(1500))
}

// TestKernelDeviceWithASmallMTUIsSeen: packets of the expected size cannot even be sent.
func TestKernelDeviceWithASmallMTUIsSeen(t *testing.T) {
	u := newUnderlay(t)
	run(t, u.a, "ip link set u0 mtu 1420")
	u.wait("1420", carries(1420))
	run(t, u.a, "ip link set u0 mtu 1500")
	u.wait("1500", carries(1500))
}

// TestKernelStrangersAreNotAnswered sends from an unregistered node, from other ports of a registered one, and from a
// peer under a flood, which gets a limited number of answers.
func TestKernelStrangersAreNotAnswered(t *testing.T) {
	u := newUnderlay(t)
	u.wait("reachable", carries(1500))
	for i := range u.atB {
		f := Family(i)
		stranger := u.dial(u.r, f, netip.AddrPort{})
		ask(t, stranger, u.atA[i], 40)
		other := u.dial(u.b, f, netip.AddrPortFrom(u.atB[i], 5000))
		ask(t, other, u.atA[i], 40)
	}
	servicetest.Eventually(t, "both are counted", func() bool {
		d := u.self.State().Counts.Dropped
		return d[Unregistered] == 2*40 && d[WrongPort] == 2*40
	})
	if s := u.self.State(); s.Answering != 1 || s.Counts.Dropped[Forged]+s.Counts.Dropped[Malformed] != 0 {
		t.Errorf("state %+v", s)
	}
}

// dial opens a socket in a namespace, on any port if the address is not valid.
func (u *underlay) dial(ns *netns.Namespace, f Family, at netip.AddrPort) *net.UDPConn {
	u.t.Helper()
	var c Conn
	if err := ns.Do(func() (err error) { c, err = Listen(f, at.Port()); return err }); err != nil {
		u.t.Fatal(err)
	}
	u.t.Cleanup(func() { _ = c.Close() })
	return c.(*socket).conn
}

// ask sends n probes, and does not wait for answers.
func ask(t *testing.T, c *net.UDPConn, to netip.Addr, n int) {
	t.Helper()
	for range n {
		if _, err := c.WriteToUDPAddrPort(payload(question, 1200), netip.AddrPortFrom(to, port)); err != nil {
			t.Fatal(err)
		}
	}
}

// TestKernelFloodIsAnsweredWithinBounds: a process at the probe port of a registered node sends as fast as it can. The
// replies are rate-limited, and have fewer bytes in total than the probes.
func TestKernelFloodIsAnsweredWithinBounds(t *testing.T) {
	u := newUnderlay(t)
	u.wait("reachable", carries(1500))
	near := netip.MustParseAddr("192.0.2.2") // of the router
	if err := u.self.SetPeers([]Peer{{"b", u.atB, 1500}, {"r", []netip.Addr{near}, 0}}); err != nil {
		t.Fatal(err)
	}
	flooder := u.dial(u.r, IPv4, netip.AddrPortFrom(near, port))
	received := make(chan int)
	go func() {
		bytes := 0
		b := make([]byte, 1<<16)
		for {
			n, err := flooder.Read(b)
			if err != nil {
				received <- bytes
				return
			}
			if kind(b[5]) == answer {
				bytes += n
			}
		}
	}()
	begin, sent := time.Now(), 0
	for range 20000 {
		ask(t, flooder, u.atA[0], 1)
		sent++
	}
	servicetest.Eventually(t, "the flood is counted", func() bool { return u.self.State().Counts.Dropped[TooMany] > 100 })
	took := time.Since(begin)
	if err := flooder.SetReadDeadline(time.Now().Add(time.Second)); err != nil {
		t.Fatal(err)
	}
	got := <-received
	most := int((took.Seconds()+2)*AnswerRate) + AnswerRate
	if got == 0 || got > most*1200 {
		t.Errorf("%d bytes of answers to %d questions of 1200 bytes in %s, want <= %d answers", got, sent, took, most)
	}
	t.Logf("%d questions in %s, %d answers", sent, took, got/1200)
	u.wait("the other node is reachable", func(w Path) bool { return w.Node == "r" || carries(1500)(w) })
}
