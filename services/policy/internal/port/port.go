// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package port represents the protocol and port of a packet as a point in one range of 32-bit numbers, protocol<<16 |
// port.
//
// A rule covers ranges of points. For ICMP, type<<8 | code replaces the port; for protocols without ports, the port is
// 0.
package port

import (
	"strconv"
	"strings"
)

// Protocol is an IP protocol number.
type Protocol uint8

// The protocols that policies can refer to.
const (
	ICMP   Protocol = 1
	IGMP   Protocol = 2
	IPIP   Protocol = 4
	TCP    Protocol = 6
	UDP    Protocol = 17
	IPV6   Protocol = 41
	GRE    Protocol = 47
	ESP    Protocol = 50
	AH     Protocol = 51
	ICMPv6 Protocol = 58
	VRRP   Protocol = 112
	SCTP   Protocol = 132
)

var names = map[Protocol]string{
	ICMP: "ICMP", IGMP: "IGMP", IPIP: "IPIP", TCP: "TCP", UDP: "UDP", IPV6: "IPV6",
	GRE: "GRE", ESP: "ESP", AH: "AH", ICMPv6: "ICMPv6", VRRP: "VRRP", SCTP: "SCTP",
}

// String returns the protocol's name, or its number.
func (p Protocol) String() string {
	if s, ok := names[p]; ok {
		return s
	}
	return strconv.Itoa(int(p))
}

// ParseProtocol returns the protocol with a name, ignoring case.
func ParseProtocol(s string) (Protocol, bool) {
	for p, n := range names {
		if strings.EqualFold(n, s) {
			return p, true
		}
	}
	return 0, false
}

// HasPorts reports whether the protocol has ports, which may have names.
func (p Protocol) HasPorts() bool { return p == TCP || p == UDP || p == SCTP }

// WithPorts lists the protocols that ANY means.
var WithPorts = [...]Protocol{TCP, UDP, SCTP}

// Point is protocol<<16 | port.
type Point = uint32

// At returns the point of a protocol and a port.
func At(p Protocol, port uint16) Point { return Point(p)<<16 | Point(port) }

// AtICMP returns the point of an ICMP message.
func AtICMP(p Protocol, typ, code uint8) Point {
	return Point(p)<<16 | Point(typ)<<8 | Point(code)
}

// Last is the last point.
const Last Point = 1<<32 - 1

// Range is a range of points, including both ends.
type Range struct {
	Lo, Hi Point
}

// Everything contains all points.
var Everything = Range{0, Last}

// Whole returns all ports of a protocol.
func Whole(p Protocol) Range { return Range{At(p, 0), At(p, 65535)} }

// Ports returns the ports lo to hi of a protocol.
func Ports(p Protocol, lo, hi uint16) Range { return Range{At(p, lo), At(p, hi)} }

// ICMPType returns all codes of an ICMP type.
func ICMPType(p Protocol, typ uint8) Range {
	return Range{AtICMP(p, typ, 0), AtICMP(p, typ, 255)}
}

// Contains reports whether the point is in the range.
func (r Range) Contains(q Point) bool { return r.Lo <= q && q <= r.Hi }
