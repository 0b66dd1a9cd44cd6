// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package frame parses the Ethernet frames of the TAP device, and builds the frames of replies.
//
// A frame contains a packet of a redirected connection. The eBPF programs have replaced its Ethernet addresses by a
// tag. The content comes from pods and servers, so every length is checked before it is used. The package parses in
// place and does not allocate memory.
package frame

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// Sizes in bytes.
const (
	EthernetSize = 14
	// MaxSize is the size of a frame with the largest IP packet.
	MaxSize = EthernetSize + ipv6Size + 65_535

	ipv4Size     = 20
	ipv6Size     = 40
	udpSize      = 8
	fragmentSize = 8
)

// Version is the version of the tag that this package reads and writes.
const Version = 1

const (
	local = 0x02 // first byte of both addresses: locally administered

	typeIPv4 = 0x0800
	typeIPv6 = 0x86dd

	protocolHopByHop    = 0
	protocolUDP         = 17
	protocolFragment    = 44
	protocolDestination = 60

	maxExtensions = 6 // as in the eBPF programs
	hopLimit      = 64
)

// Errors for frames that are dropped.
var (
	// ErrTag is returned for a frame without a tag of this version.
	ErrTag = errors.New("the frame has no tag of a known version")
	// ErrShort is returned for a frame that ends before its headers, or before its packet.
	ErrShort = errors.New("the frame is shorter than its packet")
	// ErrHeader is returned for an IP header that is invalid or not supported.
	ErrHeader = errors.New("the IP header is invalid or not supported")
	// ErrProtocol is returned for a packet that is not UDP.
	ErrProtocol = errors.New("the packet is not UDP")
	// ErrLength is returned for a UDP datagram whose length differs from the length in its packet, so that receivers
	// could disagree about its end.
	ErrLength = errors.New("the length of the UDP datagram is not the length of its packet")
)

// Role tells which end of the connection has sent a packet.
type Role uint8

// The roles.
const (
	Initiator Role = 1 // the client
	Responder Role = 2 // the server
)

// Tag describes a packet. The eBPF programs write it in place of the Ethernet addresses.
type Tag struct {
	Set      uint16 // rule set of the client's egress policy
	Endpoint uint16 // endpoint ID of the client
	Role     Role
}

// Frame is a parsed frame. A Frame can be reused for the next frame. Its slices refer to the bytes that Read was
// given.
type Frame struct {
	Tag
	// Source and Destination have port 0 in every fragment except the first.
	Source, Destination netip.AddrPort
	// Payload is the content of the UDP datagram. It is nil in a fragment.
	Payload []byte
	// Fragmented is set if the packet is a fragment, which Fragment describes.
	Fragmented bool
	Fragment   Fragment

	ipv6     bool
	datagram []byte // the UDP header and its payload
}

// Fragment is a part of an IP packet.
type Fragment struct {
	ID       uint32
	Protocol uint8
	Offset   int // offset of Data in the data of the whole packet
	More     bool
	Data     []byte
}

// Read reads a frame.
func (f *Frame) Read(b []byte) error {
	*f = Frame{}
	if len(b) < EthernetSize {
		return ErrShort
	}
	role := Role(b[7])
	if b[0] != local || b[1] != Version || b[6] != local || role != Initiator && role != Responder ||
		binary.BigEndian.Uint32(b[8:]) != 0 {
		return ErrTag
	}
	f.Tag = Tag{Set: binary.BigEndian.Uint16(b[2:]), Endpoint: binary.BigEndian.Uint16(b[4:]), Role: role}
	if f.Endpoint == 0 || f.Set == 0 && role == Initiator { // set 0 would allow every name
		return ErrTag
	}
	switch binary.BigEndian.Uint16(b[12:]) {
	case typeIPv4:
		return f.readIPv4(b[EthernetSize:])
	case typeIPv6:
		f.ipv6 = true
		return f.readIPv6(b[EthernetSize:])
	}
	return ErrProtocol
}

// readIPv4 reads an IPv4 packet. Bytes after the packet are Ethernet padding.
func (f *Frame) readIPv4(b []byte) error {
	if len(b) < ipv4Size {
		return ErrShort
	}
	header, total := int(b[0]&0xf)*4, int(binary.BigEndian.Uint16(b[2:]))
	if b[0]>>4 != 4 || header < ipv4Size || total < header {
		return ErrHeader
	}
	if len(b) < total {
		return ErrShort
	}
	f.Source = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[12:16])), 0)
	f.Destination = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[16:20])), 0)
	data := b[header:total]
	if part := binary.BigEndian.Uint16(b[6:]); part&0x3fff != 0 {
		return f.readFragment(Fragment{
			ID: uint32(binary.BigEndian.Uint16(b[4:])), Protocol: b[9], Offset: int(part&0x1fff) * 8, More: part&0x2000 != 0,
			Data: data,
		})
	}
	return f.readData(b[9], data)
}

// readIPv6 reads an IPv6 packet.
func (f *Frame) readIPv6(b []byte) error {
	if len(b) < ipv6Size {
		return ErrShort
	}
	size := int(binary.BigEndian.Uint16(b[4:]))
	if b[0]>>4 != 6 || size == 0 { // 0: a jumbogram, whose length is in an option
		return ErrHeader
	}
	if len(b) < ipv6Size+size {
		return ErrShort
	}
	f.Source = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[8:24])), 0)
	f.Destination = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b[24:40])), 0)
	next, data := b[6], b[ipv6Size:ipv6Size+size]
	if next == protocolHopByHop { // the hop-by-hop header is valid only as the first extension header
		var err error
		if next, data, err = extension(data); err != nil {
			return err
		}
	}
	return f.readData(next, data)
}

// extension returns the data after an extension header with options, and its type.
func extension(b []byte) (next uint8, rest []byte, err error) {
	if len(b) < 8 {
		return 0, nil, ErrShort
	}
	size := 8 + int(b[1])*8
	if len(b) < size {
		return 0, nil, ErrShort
	}
	return b[0], b[size:], nil
}

// readData reads the data after the IP header.
func (f *Frame) readData(next uint8, b []byte) (err error) {
	whole := f.Fragmented // no fragment header may follow
	for range maxExtensions {
		switch {
		case next == protocolUDP:
			return f.readUDP(b)
		case f.ipv6 && next == protocolDestination:
			if next, b, err = extension(b); err != nil {
				return err
			}
		case f.ipv6 && next == protocolFragment && !whole:
			if len(b) < fragmentSize {
				return ErrShort
			}
			part := binary.BigEndian.Uint16(b[2:])
			fragment := Fragment{
				ID: binary.BigEndian.Uint32(b[4:]), Protocol: b[0], Offset: int(part & 0xfff8), More: part&1 != 0,
				Data: b[fragmentSize:],
			}
			if fragment.Offset != 0 || fragment.More {
				return f.readFragment(fragment)
			}
			next, b, whole = fragment.Protocol, fragment.Data, true // RFC 6946
		default:
			return ErrProtocol
		}
	}
	return ErrHeader
}

// readFragment reads a fragment, and the ports if it is the first one.
func (f *Frame) readFragment(p Fragment) error {
	f.Fragmented, f.Fragment = true, p
	if len(p.Data) == 0 || p.More && len(p.Data)%8 != 0 || p.Offset+len(p.Data) > 65_535 {
		return ErrHeader
	}
	if p.Offset != 0 {
		return nil
	}
	next, b := p.Protocol, p.Data
	for i := 0; f.ipv6 && next == protocolDestination && i < maxExtensions; i++ {
		var err error
		if next, b, err = extension(b); err != nil {
			return err
		}
	}
	if next != protocolUDP {
		return ErrProtocol
	}
	if len(b) < udpSize { // RFC 7112
		return ErrShort
	}
	f.readPorts(b)
	return nil
}

func (f *Frame) readPorts(b []byte) {
	f.Source = netip.AddrPortFrom(f.Source.Addr(), binary.BigEndian.Uint16(b))
	f.Destination = netip.AddrPortFrom(f.Destination.Addr(), binary.BigEndian.Uint16(b[2:]))
}

func (f *Frame) readUDP(b []byte) error {
	if len(b) < udpSize {
		return ErrShort
	}
	if int(binary.BigEndian.Uint16(b[4:])) != len(b) {
		return ErrLength
	}
	f.readPorts(b)
	f.datagram, f.Payload = b, b[udpSize:]
	return nil
}

// Join turns the first fragment of a packet into the whole packet. data is the data of all fragments.
func (f *Frame) Join(data []byte) error {
	next := f.Fragment.Protocol
	f.Fragment = Fragment{}
	err := f.readData(next, data) // Fragmented stays set, so that a fragment inside of a fragment is refused
	f.Fragmented = false
	return err
}

// Intact reports whether the UDP checksum is correct. If it is not, the receiver would drop the datagram.
func (f *Frame) Intact() bool {
	if binary.BigEndian.Uint16(f.datagram[6:]) == 0 {
		return !f.ipv6 // 0: the sender has computed no checksum, which IPv6 forbids
	}
	return f.checksum(f.Source.Addr(), f.Destination.Addr(), f.datagram) == 0
}

// checksum returns the UDP checksum of a datagram. If the datagram contains its correct checksum, the result is 0.
func (f *Frame) checksum(source, destination netip.Addr, datagram []byte) uint16 {
	var sum uint64
	if f.ipv6 {
		a, b := source.As16(), destination.As16()
		sum = add(add(0, a[:]), b[:])
	} else {
		a, b := source.As4(), destination.As4()
		sum = add(add(0, a[:]), b[:])
	}
	return ^fold(add(sum+uint64(len(datagram))+protocolUDP, datagram))
}

// add adds the 16-bit words of b to sum, which is large enough for the carries of a whole frame.
func add(sum uint64, b []byte) uint64 {
	for len(b) >= 4 {
		sum += uint64(binary.BigEndian.Uint32(b))
		b = b[4:]
	}
	if len(b) >= 2 {
		sum += uint64(binary.BigEndian.Uint16(b))
		b = b[2:]
	}
	if len(b) == 1 {
		sum += uint64(b[0]) << 8
	}
	return sum
}

func fold(sum uint64) uint16 {
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum) //nolint:gosec // it fits
}

// ReplySize returns the size of the headers before the message of a reply.
func (f *Frame) ReplySize() int {
	if f.ipv6 {
		return EthernetSize + ipv6Size + udpSize
	}
	return EthernetSize + ipv4Size + udpSize
}

// CompleteReply writes the headers of a reply to the packet. The source of the reply is the destination of the
// packet. The message begins at ReplySize, and must have at most 65,000 bytes.
func (f *Frame) CompleteReply(b []byte) {
	clear(b[:f.ReplySize()])
	b[0], b[1] = local, Version
	binary.BigEndian.PutUint16(b[2:], f.Set)
	binary.BigEndian.PutUint16(b[4:], f.Endpoint)
	b[6], b[7] = local, byte(Responder)
	ip := b[EthernetSize:]
	datagram := ip[f.ReplySize()-EthernetSize-udpSize:]
	source, destination := f.Destination, f.Source
	if f.ipv6 {
		binary.BigEndian.PutUint16(b[12:], typeIPv6)
		ip[0], ip[6], ip[7] = 6<<4, protocolUDP, hopLimit
		binary.BigEndian.PutUint16(ip[4:], uint16(len(datagram))) //nolint:gosec // replies are short
		from, to := source.Addr().As16(), destination.Addr().As16()
		copy(ip[8:], from[:])
		copy(ip[24:], to[:])
	} else {
		binary.BigEndian.PutUint16(b[12:], typeIPv4)
		ip[0], ip[6], ip[8], ip[9] = 4<<4|ipv4Size/4, 0x40, hopLimit, protocolUDP // 0x40: do not fragment
		binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)))                       //nolint:gosec // replies are short
		from, to := source.Addr().As4(), destination.Addr().As4()
		copy(ip[12:], from[:])
		copy(ip[16:], to[:])
		binary.BigEndian.PutUint16(ip[10:], ^fold(add(0, ip[:ipv4Size])))
	}
	binary.BigEndian.PutUint16(datagram, source.Port())
	binary.BigEndian.PutUint16(datagram[2:], destination.Port())
	binary.BigEndian.PutUint16(datagram[4:], uint16(len(datagram))) //nolint:gosec // replies are short
	sum := f.checksum(source.Addr(), destination.Addr(), datagram)
	if sum == 0 {
		sum = 0xffff // 0 would mean that there is no checksum
	}
	binary.BigEndian.PutUint16(datagram[6:], sum)
}
