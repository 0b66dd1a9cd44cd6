// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// TestKernelIPsecPoliciesApplyToPodsByTheStack shows that with native routing, packets between pods of two
// nodes obey the IPsec policies of both nodes while they go through the stack. That includes packets of
// established connections and of service connections. If no policy stops them, they are answered.
func TestKernelIPsecPoliciesApplyToPodsByTheStack(t *testing.T) {
	f := newFabric(t, RoutingNative, false)
	n := &serviceNode{T: t, runner: f.a.runner}
	for i, b := range f.b.pod.Addrs() {
		away := netip.AddrPortFrom(b, 8080)
		tell(t, f.b.pod.ns, away)
		vip := serviceAddr(b, 1)
		n.lead(vip, feAddress, away)
		for _, to := range []netip.AddrPort{away, vip} {
			if !answered(t, f.a.pod.ns, to, 64) {
				t.Fatalf("%v does not answer", to)
			}
		}
		c, err := dialIn(t, f.a.pod.ns, "tcp", away)
		must(t, "connect", err)
		f.byStack(t, true)
		before := f.a.counters(t)
		for _, to := range []netip.AddrPort{away, vip} {
			for _, size := range []int{64, 5600} {
				if !answered(t, f.a.pod.ns, to, size) {
					t.Errorf("by the stack %v does not answer to %d bytes: a %v, b %v", to, size, f.a.drops(t), f.b.drops(t))
				}
			}
		}
		if gained := f.a.gained(t, before); gained[cell{event.ForwardedOutside, event.Egress}] == 0 {
			t.Errorf("nothing went by the stack: %v", gained)
		}
		for _, p := range []struct {
			n   *fabricNode
			dir netlink.Dir
		}{{f.a, netlink.XFRM_DIR_OUT}, {f.b, netlink.XFRM_DIR_FWD}} {
			policy := &netlink.XfrmPolicy{Dst: anyOf(f.b, i), Src: anyOf(f.a, i), Dir: p.dir, Action: netlink.XFRM_POLICY_BLOCK}
			inNetns(t, p.n.ns, func() { must(t, "add a policy", netlink.XfrmPolicyAdd(policy)) })
			_, err := c.Write([]byte("stopped"))
			must(t, "write", err)
			wantStopped(t, p.n, p.dir)
			if unacknowledged(t, c) == 0 {
				t.Errorf("despite the policy %v the server acknowledged the data", p.dir)
			}
			inNetns(t, p.n.ns, func() { must(t, "delete the policy", netlink.XfrmPolicyDel(policy)) })
			for got := ""; !strings.Contains(got, "stopped"); { // retransmitted, and echoed
				b := make([]byte, 64)
				n, err := c.Read(b)
				must(t, "read what was stopped", err)
				got += string(b[:n])
			}
		}
		f.byStack(t, false)
		if !answered(t, f.a.pod.ns, away, 64) {
			t.Errorf("%v does not answer when packets bypass the stack again", away)
		}
	}
}

// unacknowledged returns how many segments of a connection wait for an acknowledgement.
func unacknowledged(t *testing.T, c net.Conn) uint32 {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	must(t, "socket of the connection", err)
	var info *unix.TCPInfo
	var infoErr error
	must(t, "read the socket", raw.Control(func(fd uintptr) {
		info, infoErr = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	}))
	must(t, "TCP_INFO", infoErr)
	return info.Unacked
}

// byStack makes packets between pods of both nodes go through the stack, or bypass it.
func (f *fabric) byStack(t *testing.T, by bool) {
	t.Helper()
	for _, n := range []*fabricNode{f.a, f.b} {
		l, err := n.k.Nodes.Local()
		must(t, "read what the node is", err)
		l.ByStack = by
		must(t, "write what the node is", n.k.Nodes.SetLocal(l))
		if have, err := n.k.Nodes.Local(); err != nil || have != l {
			t.Errorf("the node is %+v, %v, want %+v", have, err, l)
		}
	}
}

// anyOf returns the pod CIDR of a node, of a family.
func anyOf(n *fabricNode, family int) *net.IPNet {
	v4, v6 := n.ranges()
	p := []netip.Prefix{v4, v6}[family]
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

// wantStopped waits until an IPsec policy of a node has stopped a packet.
func wantStopped(t *testing.T, n *fabricNode, dir netlink.Dir) {
	t.Helper()
	name := "XfrmOutPolBlock"
	if dir == netlink.XFRM_DIR_FWD {
		name = "XfrmInPolBlock"
	}
	first := n.xfrmStat(t, name)
	servicetest.Eventually(t, "a packet that the policy stops", func() bool { return n.xfrmStat(t, name) > first })
}

// xfrmStat returns an IPsec counter of a node's stack.
func (n *fabricNode) xfrmStat(t *testing.T, name string) (count uint64) {
	t.Helper()
	inNetns(t, n.ns, func() {
		b, err := os.ReadFile("/proc/thread-self/net/xfrm_stat")
		if err != nil {
			t.Errorf("counters: %v", err)
		}
		for line := range strings.Lines(string(b)) {
			if fields := strings.Fields(line); len(fields) == 2 && fields[0] == name {
				count, err = strconv.ParseUint(fields[1], 10, 64)
				if err != nil {
					t.Errorf("counter %s: %v", name, err)
				}
			}
		}
	})
	return count
}
