// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package frametest builds frames of pods and servers for tests. It shares no code with package frame.
package frametest

import (
	"encoding/binary"
	"net/netip"

	"github.com/sluice-net/sluice/services/dns/internal/frame"
)

// Packet is a UDP packet.
type Packet struct {
	frame.Tag
	Source, Destination netip.AddrPort
	Payload             []byte
	ID                  uint32 // of fragments
	Options             int    // bytes of options in the IP header, a multiple of 8
	NoChecksum          bool
	Atomic              bool // with an IPv6 fragment header, although it is not fragmented
}

// Bytes returns the frame of the packet.
func (p Packet) Bytes() []byte { return p.frame(p.datagram(), 0, false, false) }

// Fragments returns the frames of the packet's fragments. size is the maximum size of the data of a fragment.
func (p Packet) Fragments(size int) (frames [][]byte) {
	data := p.datagram()
	size -= size % 8
	for at := 0; at < len(data); at += size {
		end := min(at+size, len(data))
		frames = append(frames, p.frame(data[at:end], at, end < len(data), true))
	}
	return frames
}

// Fragment returns the frame of a fragment with the given data.
func (p Packet) Fragment(data []byte, offset int, more bool) []byte {
	return p.frame(data, offset, more, true)
}

func (p Packet) datagram() []byte {
	b := binary.BigEndian.AppendUint16(nil, p.Source.Port())
	b = binary.BigEndian.AppendUint16(b, p.Destination.Port())
	b = binary.BigEndian.AppendUint16(b, uint16(8+len(p.Payload))) //nolint:gosec // tests are shorter
	b = append(append(b, 0, 0), p.Payload...)
	if p.NoChecksum {
		return b
	}
	pseudo := append(append(p.Source.Addr().AsSlice(), p.Destination.Addr().AsSlice()...), 0, 17)
	pseudo = append(binary.BigEndian.AppendUint16(pseudo, uint16(len(b))), b...) //nolint:gosec // tests are shorter
	sum := ^Sum(pseudo)
	if sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(b[6:], sum)
	return b
}

func (p Packet) frame(data []byte, offset int, more, fragment bool) []byte {
	b := []byte{2, 1, byte(p.Set >> 8), byte(p.Set), byte(p.Endpoint >> 8), byte(p.Endpoint), 2, byte(p.Role), 0, 0, 0, 0}
	if p.Source.Addr().Is4() {
		return append(append(b, 8, 0), p.ipv4(data, offset, more)...)
	}
	return append(append(b, 0x86, 0xdd), p.ipv6(data, offset, more, fragment || p.Atomic)...)
}

func (p Packet) ipv4(data []byte, offset int, more bool) []byte {
	header := 20 + p.Options
	b := make([]byte, header)
	b[0], b[8], b[9] = byte(0x40|header/4), 63, 17                    //nolint:gosec // at most 60
	binary.BigEndian.PutUint16(b[2:], uint16(header+len(data)))       //nolint:gosec // tests are shorter
	binary.BigEndian.PutUint16(b[4:], uint16(p.ID))                   //nolint:gosec // 16 bits in IPv4
	binary.BigEndian.PutUint16(b[6:], uint16(offset/8)|bit(more)<<13) //nolint:gosec // tests are shorter
	copy(b[12:], p.Source.Addr().AsSlice())
	copy(b[16:], p.Destination.Addr().AsSlice())
	for i := range p.Options {
		b[20+i] = 1 // no operation
	}
	binary.BigEndian.PutUint16(b[10:], ^Sum(b))
	return append(b, data...)
}

func (p Packet) ipv6(data []byte, offset int, more, fragment bool) []byte {
	var headers []byte
	next := byte(17)
	if fragment {
		headers = binary.BigEndian.AppendUint16([]byte{next, 0}, uint16(offset)|bit(more)) //nolint:gosec // short
		headers = binary.BigEndian.AppendUint32(headers, p.ID)
		next = 44
	}
	for range p.Options / 8 {
		headers = append([]byte{next, 0, 1, 4, 0, 0, 0, 0}, headers...)
		next = 60
	}
	b := make([]byte, 40)
	b[0], b[6], b[7] = 0x60, next, 63
	binary.BigEndian.PutUint16(b[4:], uint16(len(headers)+len(data))) //nolint:gosec // tests are shorter
	copy(b[8:], p.Source.Addr().AsSlice())
	copy(b[24:], p.Destination.Addr().AsSlice())
	return append(append(b, headers...), data...)
}

func bit(b bool) uint16 {
	if b {
		return 1
	}
	return 0
}

// Sum returns the ones' complement sum of b.
func Sum(b []byte) uint16 {
	sum := 0
	for i, v := range b {
		if i%2 == 0 {
			sum += int(v) << 8
		} else {
			sum += int(v)
		}
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum) //nolint:gosec // it fits
}
