// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
)

// TestKernelForgedEndsMoveNoConnection: a machine on the uplink knows the addresses and ports of another machine's
// connection to a node port, and not its sequence numbers. It forges an end and a new beginning. The connection stays
// with its backend, on this or another node.
func TestKernelForgedEndsMoveNoConnection(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		nodePort := netip.AddrPortFrom(f.a.addr4, 30080)
		var backends []netip.AddrPort
		for _, p := range []*pod{f.a.newPod(t, 20), f.b.pod} {
			at := netip.AddrPortFrom(p.IPv4, 8080)
			echoServer(t, p.ns, at)
			backends = append(backends, at)
		}
		n.lead(nodePort, feNode, backends...)
		for range 12 {
			var c net.Conn
			var err error
			inNetns(t, f.outsider, func() { c, err = net.DialTimeout("tcp", nodePort.String(), 5*time.Second) })
			must(t, "connect", err)
			must(t, "deadline", c.SetDeadline(time.Now().Add(servicetest.Patience)))
			exchangeText(t, c, "hello")
			port := c.LocalAddr().(*net.TCPAddr).AddrPort().Port()
			for _, flags := range [][]byte{
				{flagRST, flagSYN}, {flagRST | flagACK, flagSYN}, {flagFIN | flagACK, flagRST, flagSYN},
			} {
				for i, flag := range flags {
					forged := segmentAt(port, nodePort.Port(), flag, 0x10000000*uint32(i+1), 0x70000000)
					f.fromOutside(t, f.a, summed(f.outside, f.a.addr4, forged))
				}
				exchangeText(t, c, fmt.Sprintf("after %x", flags))
			}
			c.Close()
		}
	})
}

// TestKernelForgedEndsMoveNoAssociation is the same with SCTP: an ABORT with a wrong verification tag ends nothing.
func TestKernelForgedEndsMoveNoAssociation(t *testing.T) {
	eachFabric(t, func(t *testing.T, f *fabric, _ Routing) {
		n := &serviceNode{T: t, runner: f.a.runner}
		nodePort := netip.AddrPortFrom(f.a.addr4, 30081)
		var backends []netip.AddrPort
		servers := map[netip.AddrPort]*sctpEnd{}
		for _, p := range []*pod{f.a.newPod(t, 20), f.b.pod} {
			at := netip.AddrPortFrom(p.IPv4, nodePort.Port())
			servers[at] = openSCTP(t, p.ns, at, netip.AddrPort{})
			backends = append(backends, at)
		}
		n.lead(nodePort, feNode, backends...)
		for i := range uint16(12) {
			client := openSCTP(t, f.outsider, netip.AddrPortFrom(f.outside, 5000+i), nodePort)
			must(t, "begin", client.send(sctpInit))
			var server *sctpEnd
			for _, s := range servers {
				if s.hear(sctpInit) == nil {
					server = s
					break
				}
			}
			if server == nil {
				t.Fatal("no backend hears the beginning")
			}
			for j, chunk := range []byte{sctpInitAck, sctpCookieEcho, sctpCookieAck} {
				from, to := server, client
				if j == 1 {
					from, to = client, server
				}
				must(t, "associate", from.say(to, chunk))
			}
			for _, chunk := range []byte{sctpAbort, sctpInit} {
				f.fromOutside(t, f.a, ip4Header{src: f.outside, dst: f.a.addr4, proto: unix.IPPROTO_SCTP}.with(
					sctp(5000+i, nodePort.Port(), chunk)))
			}
			if err := client.say(server, sctpData); err != nil {
				t.Errorf("association %d, a forged end and beginning: %v", i, err)
			}
			if err := server.say(client, sctpData); err != nil {
				t.Errorf("association %d, the backend answers: %v", i, err)
			}
			client.Close()
		}
	})
}
