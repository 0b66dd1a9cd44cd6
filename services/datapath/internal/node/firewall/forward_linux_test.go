// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package firewall

import (
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
)

// TestKernelForwardedPacketsKeepForeignMarkBits forwards packets whose mark has foreign bits and stale bits of the
// instance to a pod. An independent table drops all packets except those with the foreign bits and the bit
// "forwarded".
func TestKernelForwardedPacketsKeepForeignMarkBits(t *testing.T) {
	const (
		foreign, stale, forwarded = 0x40000001, 0xe00, 0x100
		port                      = 7100
	)
	pod, client := netip.MustParseAddr("203.0.113.9"), netip.MustParseAddr("203.0.113.50")
	w := newRoutingWorld(t)
	if err := w.guard.Repair(); err != nil {
		t.Fatal(err)
	}
	w.in(w.home, func() error {
		link, err := netlink.LinkByName("pod0")
		if err != nil {
			return err
		}
		return leadTo(link, pod, net.HardwareAddr{2, 0, 0, 0, 1, 1}, 1)
	})
	w.in(w.outside, func() error {
		link, err := netlink.LinkByName("up0")
		if err != nil {
			return err
		}
		return errors.Join(addAddrs("lo", client.String()), leadTo(link, pod, net.HardwareAddr{2, 0, 0, 0, 0, 0}, 1))
	})
	var listen net.PacketConn
	w.in(w.inside, func() (err error) {
		err = errors.Join(sysctl("ipv4/conf/all/rp_filter", "0"), sysctl("ipv4/conf/pod0/rp_filter", "0"),
			addAddrs("lo", pod.String()))
		if err == nil {
			listen, err = net.ListenPacket("udp", netip.AddrPortFrom(pod, port).String())
		}
		return err
	})
	defer listen.Close()

	c, err := nftables.New(nftables.WithNetNSFd(w.home.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	table := c.AddTable(&nftables.Table{Name: "witness", Family: nftables.TableFamilyINet})
	toPort := func(more ...expr.Any) []expr.Any {
		return append([]expr.Any{
			&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_UDP}},
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binary.BigEndian.AppendUint16(nil, port)},
		}, more...)
	}
	before := c.AddChain(&nftables.Chain{
		Name: "before", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward,
		Priority: nftables.ChainPriorityRef(0),
	})
	c.AddRule(&nftables.Rule{Table: table, Chain: before, Exprs: toPort(
		&expr.Immediate{Register: 1, Data: native(foreign | stale)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1})})
	after := c.AddChain(&nftables.Chain{
		Name: "after", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPostrouting,
		Priority: nftables.ChainPriorityRef(0),
	})
	c.AddRule(&nftables.Rule{Table: table, Chain: after, Exprs: toPort(
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: native(foreign | forwarded)},
		&expr.Verdict{Kind: expr.VerdictDrop})})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}

	sender := w.from("up0", client)
	if _, err := sender.WriteTo([]byte("marked"), net.UDPAddrFromAddrPort(netip.AddrPortFrom(pod, port))); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 100)
	err = listen.SetReadDeadline(time.Now().Add(servicetest.Patience))
	if err == nil {
		_, _, err = listen.ReadFrom(buf)
	}
	if err != nil {
		t.Errorf("a packet forwarded to a pod: %v: its mark is not the foreign bits with the bit %#x", err, forwarded)
	}
}
