// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/servicetest"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/program"
	"github.com/sluice-net/sluice/services/datapath/internal/observation/event"
)

// sendUnsummed sends a frame whose checksum is left to the device: the sum over all bytes from start on is
// written at offset at.
func sendUnsummed(t *testing.T, dev string, b []byte, start, at int) {
	t.Helper()
	link, err := net.InterfaceByName(dev)
	if err != nil {
		t.Errorf("find %s: %v", dev, err)
		return
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Errorf("packet socket: %v", err)
		return
	}
	defer unix.Close(fd)
	if err := unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_VNET_HDR, 1); err != nil {
		t.Errorf("prepare a packet socket: %v", err)
		return
	}
	const needsChecksum = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM
	header := make([]byte, 10)
	header[0] = needsChecksum
	binary.NativeEndian.PutUint16(header[6:], uint16(start))
	binary.NativeEndian.PutUint16(header[8:], uint16(at-start))
	if err := unix.Sendto(fd, append(header, b...), 0, &unix.SockaddrLinklayer{Ifindex: link.Index}); err != nil {
		t.Errorf("send: %v", err)
	}
}

// TestKernelChecksumsOfDevicesChangeNothingEvaluated: a pod leaves its packet's checksum to the device, and
// places it over an address or a port. The fields that were evaluated must be the fields that leave the node.
func TestKernelChecksumsOfDevicesChangeNothingEvaluated(t *testing.T) {
	for _, cast := range []bool{true, false} {
		t.Run(fmt.Sprintf("cast %t", cast), func(t *testing.T) {
			has, err := program.HasCast()
			must(t, "look for the function", err)
			f := newFabricWith(t, func(o *Options) {
				o.build.cast = func() (bool, error) { return cast && has, nil }
			})
			inNetns(t, f.a.ns, func() { addNoChecksums(t, "up0") })
			f.wantPortKept(t)
			f.wantPlaces(t)
		})
	}
}

// wantPortKept sends a datagram whose checksum equals the port of a listener, placed over the destination port.
func (f *fabric) wantPortKept(t *testing.T) {
	t.Helper()
	const sport, asked, wanted = 4000, 80, 9999
	heard := map[uint16]*net.UDPConn{}
	inNetns(t, f.outsider, func() {
		for _, port := range []uint16{asked, wanted} {
			c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(f.outside, port)))
			must(t, "listen", err)
			t.Cleanup(func() { c.Close() })
			heard[port] = c
		}
	})
	datagram := udp(sport, asked, 0, 0)
	binary.BigEndian.PutUint16(datagram[8:], checksum(append(binary.BigEndian.AppendUint16(nil, wanted), datagram...)))
	packet := ip4Header{src: f.a.pod.IPv4, dst: f.outside, proto: protoUDP}.with(datagram)
	b := frame(f.a.pod.HostMAC, f.a.pod.MAC, etherIPv4, packet)
	inNetns(t, f.a.pod.ns, func() {
		sendUnsummed(t, "eth0", b, 14+20, 14+20+2)
		sendRaw(t, "eth0", b) // arrives after it
	})
	got := make([]byte, 100)
	_ = heard[asked].SetReadDeadline(time.Now().Add(servicetest.Patience))
	if _, _, err := heard[asked].ReadFrom(got); err != nil {
		t.Errorf("a datagram whose checksum is not left to the device: %v", err)
	}
	_ = heard[wanted].SetReadDeadline(time.Now().Add(time.Millisecond))
	if _, from, err := heard[wanted].ReadFrom(got); err == nil {
		t.Errorf("%v reaches port %d with a packet that was evaluated for port %d", from, wanted, asked)
	}
}

// wantPlaces sends packets with the checksum at every offset; packets whose evaluated fields would be
// overwritten must count as malformed.
func (f *fabric) wantPlaces(t *testing.T) {
	t.Helper()
	pod, body := f.a.pod, make([]byte, 64)
	sctpPacket := append(sctp(5000, 80, sctpData), body...)
	for _, c := range []struct {
		name           string
		proto          byte
		four, six      []byte
		place, headers int // of the checksum; length of the evaluated headers
	}{
		{"TCP", protoTCP, append(tcp(5000, 80, flagSYN), body...), nil, 16, 20},
		{"UDP", protoUDP, udp(5000, 80, body...), nil, 6, 8},
		{"SCTP", unix.IPPROTO_SCTP, sctpPacket, nil, 8, 16},
		{"ICMP", unix.IPPROTO_ICMP, icmp(8, 0, body...), icmp6(pod.IPv6, f.outsideAddrs()[1], append([]byte{128, 0, 0, 0}, body...)), 2, 8},
		{"another protocol", 200, body, nil, 0, 0},
	} {
		for family, to := range f.outsideAddrs() {
			payload, proto, ethertype, header := c.four, c.proto, uint16(etherIPv4), 14+20
			if to.Is6() {
				ethertype, header = etherIPv6, 14+40
				if c.six != nil {
					payload, proto = c.six, unix.IPPROTO_ICMPV6
				}
			}
			packet := ip6(pod.IPv6, to, proto, payload)
			if to.Is4() {
				packet = ip4Header{src: pod.IPv4, dst: to, proto: proto}.with(payload)
			}
			b := frame(pod.HostMAC, pod.MAC, ethertype, packet)
			const first = 20 // the kernel does not allow a sum to start earlier
			before, sent, malformed := f.a.counters(t), uint64(0), uint64(0)
			inNetns(t, pod.ns, func() {
				for at := first; at+2 <= header+c.headers+8; at++ {
					sent++
					if at < header || at < header+c.headers && at != header+c.place {
						malformed++
					}
					sendUnsummed(t, "eth0", b, first, at)
				}
			})
			name := fmt.Sprintf("%s over IPv%d", c.name, 4+2*family)
			gained := f.a.gained(t, before)
			if n := gained[cell{event.Malformed, event.Egress}]; n != malformed {
				t.Errorf("%s: %d of %d are malformed, want %d; %v", name, n, sent, malformed, gained)
			}
			if n := gained[cell{event.ForwardedOutside, event.Egress}]; n != sent-malformed {
				t.Errorf("%s: %d of %d leave, want %d; %v", name, n, sent, sent-malformed, gained)
			}
		}
	}
}
