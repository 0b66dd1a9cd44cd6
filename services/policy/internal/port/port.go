// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package port holds what a packet's protocol and port are to policy: a point
// on one line of 32-bit numbers, protocol<<16 | port.
//
// Rules are intervals on that line. ICMP has type<<8 | code in the place of
// the port; protocols without ports have 0.
package port

import (
	"strconv"
	"strings"
)

// Protocol is an IP protocol number.
type Protocol uint8

// The protocols that policies can name.
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

// String is the protocol's name, or its number.
func (p Protocol) String() string {
	if s, ok := names[p]; ok {
		return s
	}
	return strconv.Itoa(int(p))
}

// ParseProtocol returns the protocol of that name, in any case.
func ParseProtocol(s string) (Protocol, bool) {
	for p, n := range names {
		if strings.EqualFold(n, s) {
			return p, true
		}
	}
	return 0, false
}

// HasPorts reports whether the protocol has ports that can carry a name.
func (p Protocol) HasPorts() bool { return p == TCP || p == UDP || p == SCTP }

// WithPorts are the protocols that ANY stands for.
var WithPorts = [...]Protocol{TCP, UDP, SCTP}

// Point is protocol<<16 | port.
type Point = uint32

// At is the point of a protocol and a port.
func At(p Protocol, port uint16) Point { return Point(p)<<16 | Point(port) }

// AtICMP is the point of an ICMP message.
func AtICMP(p Protocol, typ, code uint8) Point {
	return Point(p)<<16 | Point(typ)<<8 | Point(code)
}

// Last is the end of the line.
const Last Point = 1<<32 - 1

// Range is an interval of points, both ends included.
type Range struct {
	Lo, Hi Point
}

// Everything covers the whole line.
var Everything = Range{0, Last}

// Whole covers all ports of a protocol.
func Whole(p Protocol) Range { return Range{At(p, 0), At(p, 65535)} }

// Ports covers lo to hi of a protocol.
func Ports(p Protocol, lo, hi uint16) Range { return Range{At(p, lo), At(p, hi)} }

// ICMPType covers all codes of an ICMP type.
func ICMPType(p Protocol, typ uint8) Range {
	return Range{AtICMP(p, typ, 0), AtICMP(p, typ, 255)}
}

// Contains reports whether the point lies in the range.
func (r Range) Contains(q Point) bool { return r.Lo <= q && q <= r.Hi }
