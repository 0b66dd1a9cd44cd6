// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package capture

import (
	"encoding/binary"
	"time"
)

// Blocks and options of pcapng, draft-ietf-opsawg-pcapng.
const (
	blockSection    = 0x0a0d0d0a
	blockInterface  = 1
	blockPacket     = 6
	blockStatistics = 5

	optionSectionApplication   = 4
	optionInterfaceName        = 2
	optionInterfaceDescription = 3
	optionInterfaceResolution  = 9
	optionPacketFlags          = 2
	optionStatisticsReceived   = 4
	optionStatisticsDropped    = 5
	linkEthernet               = 1
	nanoseconds                = 9
)

// packet is a captured packet.
type packet struct {
	time     time.Time
	data     []byte // the captured bytes
	length   int    // length of the whole packet
	outgoing bool   // sent by the container
}

// block appends a block with the content that body appends.
func block(b []byte, kind uint32, body func(b []byte) []byte) []byte {
	start := len(b)
	b = binary.LittleEndian.AppendUint32(b, kind)
	b = binary.LittleEndian.AppendUint32(b, 0)
	b = body(b)
	size := uint32(len(b) - start + 4)
	binary.LittleEndian.PutUint32(b[start+4:], size)
	return binary.LittleEndian.AppendUint32(b, size)
}

func padded(b, data []byte) []byte {
	b = append(b, data...)
	return append(b, make([]byte, -len(data)&3)...)
}

func option(b []byte, code uint16, value []byte) []byte {
	b = binary.LittleEndian.AppendUint16(b, code)
	b = binary.LittleEndian.AppendUint16(b, uint16(len(value)))
	return padded(b, value)
}

func endOfOptions(b []byte) []byte { return append(b, 0, 0, 0, 0) }

// fileHeader returns the first blocks of a file with one interface.
func fileHeader(b []byte, application, name, description string, snaplen uint32) []byte {
	b = block(b, blockSection, func(b []byte) []byte {
		b = binary.LittleEndian.AppendUint32(b, 0x1a2b3c4d)
		b = binary.LittleEndian.AppendUint16(b, 1)
		b = binary.LittleEndian.AppendUint16(b, 0)
		b = binary.LittleEndian.AppendUint64(b, ^uint64(0)) // the length of the section is unknown
		return endOfOptions(option(b, optionSectionApplication, []byte(application)))
	})
	return block(b, blockInterface, func(b []byte) []byte {
		b = binary.LittleEndian.AppendUint16(b, linkEthernet)
		b = binary.LittleEndian.AppendUint16(b, 0)
		b = binary.LittleEndian.AppendUint32(b, snaplen)
		b = option(b, optionInterfaceName, []byte(name))
		b = option(b, optionInterfaceDescription, []byte(description))
		return endOfOptions(option(b, optionInterfaceResolution, []byte{nanoseconds}))
	})
}

func timestamp(b []byte, t time.Time) []byte {
	n := uint64(t.UnixNano())
	b = binary.LittleEndian.AppendUint32(b, uint32(n>>32))
	return binary.LittleEndian.AppendUint32(b, uint32(n))
}

func packetBlock(b []byte, p packet) []byte {
	return block(b, blockPacket, func(b []byte) []byte {
		b = binary.LittleEndian.AppendUint32(b, 0) // the interface
		b = timestamp(b, p.time)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(p.data)))
		b = binary.LittleEndian.AppendUint32(b, uint32(p.length))
		b = padded(b, p.data)
		flags := uint32(1) // inbound
		if p.outgoing {
			flags = 2
		}
		return endOfOptions(option(b, optionPacketFlags, binary.LittleEndian.AppendUint32(nil, flags)))
	})
}

// statisticsBlock appends the last block of a file: how many packets matched the filter, and how many of them were
// lost.
func statisticsBlock(b []byte, now time.Time, received, lost uint64) []byte {
	return block(b, blockStatistics, func(b []byte) []byte {
		b = binary.LittleEndian.AppendUint32(b, 0)
		b = timestamp(b, now)
		b = option(b, optionStatisticsReceived, binary.LittleEndian.AppendUint64(nil, received))
		return endOfOptions(option(b, optionStatisticsDropped, binary.LittleEndian.AppendUint64(nil, lost)))
	})
}
