// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package dryrun

import (
	"encoding/binary"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/services/datapath/internal/kernel/conntrack"
)

// Frame returns a packet of a connection, sent by its initiator, as short as the protocol allows. For ICMP, the
// responder's port is type << 8 | code, and the initiator's port is the identifier. If begins is set, the packet opens
// a connection. Checksums are 0, because the programs do not verify them.
func Frame(src, dst [6]byte, t conntrack.Tuple, begins bool) []byte {
	b := append(dst[:], src[:]...)
	payload := transport(t, begins)
	from, to := t.Initiator.Addr(), t.Responder.Addr()
	if from.Is4() {
		b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IP)
		b = append(b, 0x45, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(20+len(payload)))
		b = append(b, 0, 0, 0, 0, 64, t.Protocol, 0, 0)
	} else {
		b = binary.BigEndian.AppendUint16(b, unix.ETH_P_IPV6)
		b = append(b, 0x60, 0, 0, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(len(payload)))
		b = append(b, t.Protocol, 64)
	}
	b = append(b, from.AsSlice()...)
	b = append(b, to.AsSlice()...)
	return append(b, payload...)
}

// Values that open connections: TCP flags, and SCTP's first chunk.
const (
	tcpSYN, tcpACK = 0x02, 0x10
	sctpInit       = 1
)

func transport(t conntrack.Tuple, begins bool) []byte {
	b := make([]byte, 8, 20)
	sport, dport := t.Initiator.Port(), t.Responder.Port()
	switch t.Protocol {
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		binary.BigEndian.PutUint16(b, dport)
		binary.BigEndian.PutUint16(b[4:], sport)
		return b
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP:
		binary.BigEndian.PutUint16(b, sport)
		binary.BigEndian.PutUint16(b[2:], dport)
	}
	switch t.Protocol {
	case unix.IPPROTO_UDP:
		binary.BigEndian.PutUint16(b[4:], uint16(len(b)))
	case unix.IPPROTO_TCP:
		b = b[:20]
		b[12], b[13] = 5<<4, tcpACK
		if begins {
			b[13] = tcpSYN
		}
	case unix.IPPROTO_SCTP:
		b = b[:16]
		b[15] = 4 // length of the chunk
		if begins {
			b[12] = sctpInit
		}
	}
	return b
}
