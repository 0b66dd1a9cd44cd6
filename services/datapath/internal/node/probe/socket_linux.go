// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probe

import (
	"fmt"
	"net"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// socket is a Conn bound to every address of the network namespace.
type socket struct {
	conn   *net.UDPConn
	family Family
	oob    []byte // buffer of Read
}

// Listen opens the socket of a family in the network namespace of the calling thread. It only uses system calls that
// the datapath's sandbox allows: package net would first open TCP sockets to find out what the machine supports.
func Listen(f Family, port uint16) (_ Conn, err error) {
	domain, addr := unix.AF_INET, unix.Sockaddr(&unix.SockaddrInet4{Port: int(port)})
	if f == IPv6 {
		domain, addr = unix.AF_INET6, &unix.SockaddrInet6{Port: int(port)}
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open a UDP socket for %s: %w", f, err)
	}
	file := os.NewFile(uintptr(fd), "probe") // FilePacketConn duplicates the descriptor
	defer file.Close()
	for _, o := range options[f] {
		if err := unix.SetsockoptInt(fd, o.level, o.name, o.value); err != nil {
			return nil, fmt.Errorf("set %s of the UDP socket for %s: %w", o.text, f, err)
		}
	}
	if err := unix.Bind(fd, addr); err != nil {
		return nil, fmt.Errorf("listen on UDP port %d for %s: %w", port, f, err)
	}
	pc, err := net.FilePacketConn(file)
	if err != nil {
		return nil, fmt.Errorf("UDP socket for %s: %w", f, err)
	}
	return &socket{conn: pc.(*net.UDPConn), family: f, oob: make([]byte, 128)}, nil
}

type option struct {
	level, name, value int
	text               string
}

// options of the sockets. PMTUDISC_PROBE sets DF and limits packets only by the device's MTU.
var options = [families][]option{
	IPv4: {
		{unix.SOL_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE, "IP_MTU_DISCOVER"},
		{unix.SOL_IP, unix.IP_PKTINFO, 1, "IP_PKTINFO"},
	},
	IPv6: {
		{unix.SOL_IPV6, unix.IPV6_V6ONLY, 1, "IPV6_V6ONLY"},
		{unix.SOL_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE, "IPV6_MTU_DISCOVER"},
		{unix.SOL_IPV6, unix.IPV6_DONTFRAG, 1, "IPV6_DONTFRAG"},
		{unix.SOL_IPV6, unix.IPV6_RECVPKTINFO, 1, "IPV6_RECVPKTINFO"},
	},
}

// Read implements Conn.
func (s *socket) Read(b []byte) (n int, from netip.AddrPort, to netip.Addr, err error) {
	n, oobn, _, from, err := s.conn.ReadMsgUDPAddrPort(b, s.oob)
	if err != nil {
		return 0, from, to, err
	}
	return n, from, destination(s.oob[:oobn]), nil
}

// destination returns the address of this node that a packet was sent to; invalid if it was a broadcast address, or if
// the kernel does not report it.
func destination(oob []byte) netip.Addr {
	for len(oob) > 0 {
		header, data, rest, err := unix.ParseOneSocketControlMessage(oob)
		if err != nil {
			break
		}
		switch {
		case header.Level == unix.SOL_IP && header.Type == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
			local, sent := [4]byte(data[4:8]), [4]byte(data[8:12]) // Spec_dst, Addr
			if local != sent {
				return netip.Addr{}
			}
			return netip.AddrFrom4(local)
		case header.Level == unix.SOL_IPV6 && header.Type == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
			return netip.AddrFrom16([16]byte(data[:16])) // Addr
		}
		oob = rest
	}
	return netip.Addr{}
}

// Write implements Conn.
func (s *socket) Write(b []byte, to netip.AddrPort, from netip.Addr) error {
	var oob []byte
	switch {
	case !from.IsValid():
	case s.family == IPv4:
		oob = unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: from.As4()})
	default:
		oob = unix.PktInfo6(&unix.Inet6Pktinfo{Addr: from.As16()})
	}
	_, _, err := s.conn.WriteMsgUDPAddrPort(b, oob, to)
	return err
}

// Close implements Conn.
func (s *socket) Close() error { return s.conn.Close() }
