// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kernel

import (
	"encoding/binary"
	"net/netip"
	"slices"
)

// Frames are built by hand: a library that always computes correct lengths cannot build malformed frames.

const (
	etherIPv4 = 0x0800
	etherARP  = 0x0806
	etherIPv6 = 0x86dd
	etherVLAN = 0x8100
)

func frame(dst, src [6]byte, ethertype uint16, payload ...[]byte) []byte {
	b := append(dst[:], src[:]...)
	b = binary.BigEndian.AppendUint16(b, ethertype)
	return append(b, slices.Concat(payload...)...)
}

type ip4Header struct {
	src, dst netip.Addr
	proto    byte
	ttl      byte
	frag     uint16 // flags and offset
	options  []byte
	total    int // 0: the correct length
}

func (h ip4Header) with(payload []byte) []byte {
	ihl := 20 + len(h.options)
	total := h.total
	if total == 0 {
		total = ihl + len(payload)
	}
	ttl := h.ttl
	if ttl == 0 {
		ttl = 64
	}
	b := make([]byte, 20, ihl)
	b[0] = 0x40 | byte(ihl/4)
	binary.BigEndian.PutUint16(b[2:], uint16(total))
	binary.BigEndian.PutUint16(b[4:], 0x1234)
	binary.BigEndian.PutUint16(b[6:], h.frag)
	b[8], b[9] = ttl, h.proto
	copy(b[12:], h.src.AsSlice())
	copy(b[16:], h.dst.AsSlice())
	b = append(b, h.options...)
	binary.BigEndian.PutUint16(b[10:], checksum(b))
	return append(b, payload...)
}

type ip6Header struct {
	src, dst netip.Addr
	next     byte
	hops     byte
	length   int // -1: the correct length
}

func ip6(src, dst netip.Addr, next byte, payload []byte) []byte {
	return ip6Header{src: src, dst: dst, next: next, hops: 64, length: -1}.with(payload)
}

func (h ip6Header) with(payload []byte) []byte {
	length := h.length
	if length < 0 {
		length = len(payload)
	}
	b := make([]byte, 40)
	b[0] = 0x60
	binary.BigEndian.PutUint16(b[4:], uint16(length))
	b[6], b[7] = h.next, h.hops
	copy(b[8:], h.src.AsSlice())
	copy(b[24:], h.dst.AsSlice())
	return append(b, payload...)
}

// ext returns an 8-byte IPv6 extension header with the given next header.
func ext(next byte) []byte { return []byte{next, 0, 1, 4, 0, 0, 0, 0} }

func udp(sport, dport uint16, payload ...byte) []byte {
	b := make([]byte, 8)
	binary.BigEndian.PutUint16(b[0:], sport)
	binary.BigEndian.PutUint16(b[2:], dport)
	binary.BigEndian.PutUint16(b[4:], uint16(8+len(payload)))
	return append(b, payload...)
}

const (
	flagSYN = 0x02
	flagACK = 0x10
)

func tcp(sport, dport uint16, flags byte, payload ...byte) []byte {
	b := make([]byte, 20)
	binary.BigEndian.PutUint16(b[0:], sport)
	binary.BigEndian.PutUint16(b[2:], dport)
	b[12], b[13] = 5<<4, flags
	return append(b, payload...)
}

func icmp(kind, code byte, rest ...byte) []byte {
	b := make([]byte, 8)
	b[0], b[1] = kind, code
	return append(b, rest...)
}

func arp(op uint16, senderMAC [6]byte, sender netip.Addr, targetMAC [6]byte, target netip.Addr) []byte {
	b := []byte{0, 1, 8, 0, 6, 4}
	b = binary.BigEndian.AppendUint16(b, op)
	b = append(append(b, senderMAC[:]...), sender.AsSlice()...)
	return append(append(b, targetMAC[:]...), target.AsSlice()...)
}

// icmp6 sets the checksum of an ICMPv6 message.
func icmp6(src, dst netip.Addr, msg []byte) []byte {
	msg[2], msg[3] = 0, 0
	binary.BigEndian.PutUint16(msg[2:], checksum(slices.Concat(pseudo6(src, dst, len(msg)), msg)))
	return msg
}

func pseudo6(src, dst netip.Addr, n int) []byte {
	return slices.Concat(src.AsSlice(), dst.AsSlice(), binary.BigEndian.AppendUint32(nil, uint32(n)), []byte{0, 0, 0, 58})
}

// solicit returns a neighbour solicitation for target.
func solicit(src, dst, target netip.Addr, mac *[6]byte) []byte {
	msg := slices.Concat([]byte{135, 0, 0, 0, 0, 0, 0, 0}, target.AsSlice())
	if mac != nil {
		msg = slices.Concat(msg, []byte{1, 1}, mac[:])
	}
	return ip6Header{src: src, dst: dst, next: 58, hops: 255, length: -1}.with(icmp6(src, dst, msg))
}

// checksum returns the internet checksum. For data with a correct checksum it is 0.
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
