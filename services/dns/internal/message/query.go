// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"encoding/binary"
	"errors"
)

// Query is a parsed query. Reusing it for the next message saves memory.
type Query struct {
	ID          uint16
	Type, Class uint16

	name  []byte // text
	flags uint16
	edns  edns
	// question is the question in the message; empty if it cannot be parsed. It refers to the bytes of the message.
	question []byte
	header   bool // the header could be parsed, so an answer is possible
}

// Name returns the name in the question, in lower case and with a final dot. A byte that cannot be part of a host
// name is written as \DDD. The slice is valid until the next Read.
func (q *Query) Name() []byte { return q.name }

// Read parses a query. After an error, Reply returns whether the query gets an error answer, which AppendAnswer can
// build.
func (q *Query) Read(b []byte) error {
	*q = Query{name: q.name[:0]}
	if len(b) < headerSize {
		return ErrHeader
	}
	q.ID, q.flags = binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])
	if q.flags&flagQR != 0 {
		return ErrNotQuery
	}
	q.header = true
	questions, answers := binary.BigEndian.Uint16(b[4:]), binary.BigEndian.Uint16(b[6:])
	authorities, others := binary.BigEndian.Uint16(b[8:]), binary.BigEndian.Uint16(b[10:])
	if q.flags&opcodeMask != 0 {
		return ErrOpcode
	}
	if questions != 1 {
		return ErrQuestions
	}
	if answers != 0 || authorities != 0 {
		return ErrRecords
	}
	r := reader{b: b, off: headerSize}
	at := r.name()
	q.Type, q.Class = r.uint16(), r.uint16()
	if r.err != nil {
		return r.err
	}
	q.question = b[headerSize:r.off]
	q.name = appendName(q.name, b, at)
	for range others {
		rec := r.record()
		if r.err != nil {
			return r.err
		}
		if rec.kind == TypeOPT {
			if err := q.edns.opt(b, rec); err != nil {
				return err
			}
		}
	}
	if r.off != len(b) {
		return ErrTrailing
	}
	return nil
}

// Reply returns the result code for a query for which Read returned an error. ok is false if the query must not be
// answered.
func (q *Query) Reply(err error) (code RCode, ok bool) {
	switch {
	case !q.header:
		return 0, false
	case errors.Is(err, ErrOpcode):
		return NotImp, true
	default:
		return FormErr, true
	}
}

// udpSize is the maximum message size that error answers announce in EDNS. Messages of this size need no
// fragmentation on common paths.
const udpSize = 1232

// negativeTTL is the number of seconds for which a client may cache that a name does not exist. It is short, so that
// a change of the rules takes effect soon.
const negativeTTL = 5

// AppendAnswer appends an answer to the last query, in the form that the server would use: with the ID, the question,
// the flags RD and CD and the EDNS version of the query. zone is the zone of the SOA record in an NXDomain answer.
// Clients cache the answer only if it has this record, which is omitted if zone is not valid.
func (q *Query) AppendAnswer(dst []byte, code RCode, zone string) []byte {
	begin := len(dst)
	flags := flagQR | q.flags&(opcodeMask|flagRD|flagCD) | uint16(code)
	if q.flags&flagRD != 0 {
		flags |= flagRA // resolvers warn about servers without recursion, and some avoid them
	}
	dst = binary.BigEndian.AppendUint16(dst, q.ID)
	dst = binary.BigEndian.AppendUint16(dst, flags)
	dst = append(dst, 0, 0, 0, 0, 0, 0, 0, 0)
	if len(q.question) > 0 {
		dst[begin+5] = 1
		dst = append(dst, q.question...)
	}
	if code == NXDomain {
		if out, ok := appendSOA(dst, zone); ok {
			dst, out[begin+9] = out, 1
		}
	}
	if q.edns.present {
		dst[begin+11] = 1
		ttl := uint32(q.edns.version) << 16
		if q.edns.do {
			ttl |= 1 << 15
		}
		dst = append(dst, 0)
		dst = binary.BigEndian.AppendUint16(dst, TypeOPT)
		dst = binary.BigEndian.AppendUint16(dst, udpSize)
		dst = binary.BigEndian.AppendUint32(dst, ttl)
		dst = append(dst, 0, 0)
	}
	return dst
}

// appendSOA appends the SOA record of a zone.
func appendSOA(dst []byte, zone string) (out []byte, ok bool) {
	dst, ok = packName(dst, zone)
	if !ok {
		return nil, false
	}
	dst = binary.BigEndian.AppendUint16(dst, TypeSOA)
	dst = binary.BigEndian.AppendUint16(dst, ClassIN)
	dst = binary.BigEndian.AppendUint32(dst, negativeTTL)
	length := len(dst)
	dst = append(dst, 0, 0)
	const server = "\x06sluice\x07invalid\x00" // RFC 6761 reserves this domain
	dst = append(dst, server+server...)
	for _, v := range []uint32{1, 3600, 600, 86400, negativeTTL} { // serial, refresh, retry, expire, minimum
		dst = binary.BigEndian.AppendUint32(dst, v)
	}
	binary.BigEndian.PutUint16(dst[length:], uint16(len(dst)-length-2)) //nolint:gosec // less than 100
	return dst, true
}
