// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
)

// segmentAt returns a TCP segment with sequence numbers.
func segmentAt(sport, dport uint16, flags byte, seq, ack uint32) []byte {
	b := tcp(sport, dport, flags)
	binary.BigEndian.PutUint32(b[4:], seq)
	binary.BigEndian.PutUint32(b[8:], ack)
	binary.BigEndian.PutUint16(b[14:], 64000)
	return b
}

// summed returns an IPv4 packet with a segment and a correct checksum.
func summed(src, dst netip.Addr, segment []byte) []byte {
	sum := append(append(src.AsSlice(), dst.AsSlice()...), 0, protoTCP, 0, byte(len(segment)))
	binary.BigEndian.PutUint16(segment[16:], 0)
	binary.BigEndian.PutUint16(segment[16:], checksum(append(sum, segment...)))
	return ip4Header{src: src, dst: dst, proto: protoTCP}.with(segment)
}

// TestKernelForgedHandshakesProveNothing: a sender that forges its address does not see the sequence number of
// the SYN+ACK. Its next segments establish no connection, whatever the backend answers: they occupy neither
// ports to a backend on another node nor the capacity for open connections.
func TestKernelForgedHandshakesProveNothing(t *testing.T) {
	f := newFabric(t, RoutingOverlay, false)
	nodePort := nodePortElsewhere(t, f)
	strangers := netip.MustParsePrefix("198.18.0.0/15")
	must(t, "route to strangers", f.a.h.RouteAdd(&netlink.Route{
		Dst: &net.IPNet{IP: strangers.Addr().AsSlice(), Mask: net.CIDRMask(strangers.Bits(), 32)}, Gw: f.outside.AsSlice(),
	}))
	const attempts = 2000
	// send sends a segment from each of a range of strangers.
	send := func(first int, flags byte, seq, ack uint32) {
		packets := make([][]byte, attempts)
		for i := range packets {
			src, segment := silent(first+i), segmentAt(uint16(1024+i), nodePort.Port(), flags, seq, ack)
			packets[i] = summed(src, f.a.addr4, segment)
		}
		f.asOutside(t, packets)
	}
	count := func(first int, is func(conntrack.Flags) bool) (n int) {
		last := silent(first + attempts)
		must(t, "list", f.a.k.Connections.Each(func(cs []conntrack.Connection) error {
			for _, c := range cs {
				at := c.Initiator.Addr()
				if c.Protocol == protoTCP && strangers.Contains(at) && !at.Less(silent(first)) && at.Less(last) && is(c.Flags) {
					n++
				}
			}
			return nil
		}))
		return n
	}
	for i, c := range []struct {
		name     string
		syn      bool
		flags    byte
		seq, ack uint32
	}{
		{"a wrong acknowledgement", true, flagACK, 2, 1 << 30},
		{"a wrong acknowledgement out of the window", true, flagACK, 1 << 30, 1 << 30},
		{"no flag", true, 0, 2, 0},
		{"no flag, out of the window", true, 0, 1 << 30, 0},
		{"FIN alone", true, flagFIN, 2, 0},
		{"an acknowledgement without a SYN", false, flagACK, 2, 1 << 30},
	} {
		first := i * attempts
		if c.syn {
			send(first, flagSYN, 1, 0)
			servicetest.Eventually(t, "the backend to answer", func() bool {
				return count(first, func(f conntrack.Flags) bool { return f&conntrack.SeenReply != 0 }) > attempts/2
			})
		}
		send(first, c.flags, c.seq, c.ack)
		f.wantAllServed(t, c.name, nodePort, 20)
		if n := count(first, func(f conntrack.Flags) bool { return f&conntrack.Established != 0 && !f.Closing() }); n > 0 {
			t.Errorf("%s: %d connections of %d strangers are open", c.name, n, attempts)
		}
		if n := count(first, func(f conntrack.Flags) bool { return f&conntrack.InRing == 0 }); n > 0 {
			t.Errorf("%s: %d connections of %d strangers have left the ring", c.name, n, attempts)
		}
	}
}
