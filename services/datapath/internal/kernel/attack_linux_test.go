// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A process of the node's namespace that may set marks (CAP_NET_RAW is enough
// since Linux 5.17) is evaluated like one that sets none.
func TestKernelSocketMarksOpenNothing(t *testing.T) {
	k := openKernel(t, testOptions(newBPFFS(t)))
	makeNode(t, k)
	p := newPod(t, k, "slmark", 33, DeliverPeer)
	routeToPod(t, "slmark", p)
	th := &theatre{runner: runner{k}, pods: map[string]Endpoint{}}
	th.putTables(t)
	var l *net.UDPConn
	inNetns(t, p.ns, func() {
		var err error
		l, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(p.IPv4, 5353)))
		must(t, "listen in the pod", err)
	})
	defer l.Close()
	send := func(mark uint32) {
		t.Helper()
		d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) (err error) {
			return c.Control(func(fd uintptr) {
				must(t, "set the mark", unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark)))
			})
		}}
		c, err := d.Dial("udp", netip.AddrPortFrom(p.IPv4, 5353).String())
		must(t, "dial", err)
		defer c.Close()
		_, err = c.Write([]byte("marked"))
		must(t, "send", err)
	}
	for name, policy := range map[string]Policy{
		"deny": {Egress: TableDeny, Ingress: TableDeny}, "friends": {Egress: TableDeny, Ingress: friends},
	} {
		setPolicy(t, k, p.Slot, policy)
		denied := func() uint64 { return th.counters(t)[cell{DropPolicyDenied, Ingress}].Packets }
		before := denied()
		marks := []uint32{markJudged | p.Ifindex<<16, markPod | uint32(friend)<<16, 0x0a00 | uint32(friend)<<16}
		for _, mark := range marks {
			send(mark)
		}
		waitFor(t, name+": every datagram is denied", func() bool { return denied() == before+uint64(len(marks)) })
	}
	must(t, "set a deadline", l.SetReadDeadline(time.Unix(1, 0)))
	if n, from, err := l.ReadFromUDPAddrPort(make([]byte, 100)); err == nil {
		t.Errorf("%d bytes of %v have arrived", n, from)
	}
}
