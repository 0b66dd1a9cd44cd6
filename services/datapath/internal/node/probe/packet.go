// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package probe

import (
	"encoding/binary"
	"errors"
	"math"
	"time"
)

// A packet is a UDP payload, with integers in network byte order:
//
//	0   magic "slpb"
//	4   version, 1
//	5   kind, 1 probe or 2 answer
//	6   length of the payload in bytes
//	8   run of the asking process, random
//	16  sequence number of the probe in that run
//	24  nonce, random
//	40  of an answer: how long ago the answering node heard from the store, in seconds plus 1;
//	    0: unknown
//	44  zeros up to the length
//
// An answer is a copy of the probe with another kind and its own bytes 40 to 44: it returns the random values that
// only the asker knows, and has the same size. Datapaths of earlier versions send probes of 40 bytes, and zeros in
// their answers.
const (
	headerSize = 44
	formerSize = 40
	maxPayload = 1<<16 - 1 - 8 - 20 // of UDP over IPv4
	version    = 1
)

const (
	question kind = 1
	answer   kind = 2
)

const magic uint32 = 0x736c7062 // "slpb"

type kind uint8

// nonce ties an answer to one probe.
type nonce [16]byte

// packet is the content of a probe or an answer.
type packet struct {
	kind     kind
	size     int // of the payload in bytes
	run      uint64
	sequence uint64
	nonce    nonce
	silence  uint32 // of an answer; see above
}

// Reasons why a payload is rejected.
var (
	errMalformed = errors.New("not a probe")
	errVersion   = errors.New("probe of another version")
)

// parse reads a payload. Fields that it does not return must have the values that append writes, except for the zeros,
// which are ignored.
func parse(b []byte) (p packet, err error) {
	switch {
	case len(b) < formerSize || len(b) > maxPayload || binary.BigEndian.Uint32(b) != magic:
		return p, errMalformed
	case b[4] != version:
		return p, errVersion
	case kind(b[5]) != question && kind(b[5]) != answer || int(binary.BigEndian.Uint16(b[6:])) != len(b):
		return p, errMalformed
	}
	p = packet{
		kind: kind(b[5]), size: len(b), run: binary.BigEndian.Uint64(b[8:]), sequence: binary.BigEndian.Uint64(b[16:]),
	}
	copy(p.nonce[:], b[24:])
	if p.kind == answer && len(b) >= headerSize {
		p.silence = binary.BigEndian.Uint32(b[formerSize:])
	}
	return p, nil
}

func (p packet) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, magic)
	b = append(b, version, byte(p.kind))
	b = binary.BigEndian.AppendUint16(b, uint16(p.size)) //nolint:gosec // at most maxPayload
	b = binary.BigEndian.AppendUint64(b, p.run)
	b = binary.BigEndian.AppendUint64(b, p.sequence)
	b = append(b, p.nonce[:]...)
	if p.size < headerSize {
		return append(b, make([]byte, p.size-formerSize)...)
	}
	b = binary.BigEndian.AppendUint32(b, p.silence)
	return append(b, make([]byte, p.size-headerSize)...)
}

// silenceOf encodes how long ago the node heard from the store.
func silenceOf(d time.Duration, known bool) uint32 {
	if !known {
		return 0
	}
	return uint32(min(d/time.Second, math.MaxUint32-1)) + 1 //nolint:gosec // bounded
}
