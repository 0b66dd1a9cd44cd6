// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"encoding/binary"
	"errors"
)

// Query is a query that was read. Use it again for the next message: this saves memory.
type Query struct {
	ID          uint16
	Type, Class uint16

	name  []byte // text
	flags uint16
	edns  edns
	// question is the question in the message, or empty if it cannot be read. It refers to the message.
	question []byte
	header   bool // the header could be read, so an answer can be made
}

// Name returns the name of the question: in lower case, with a final dot. A byte that cannot be part of a host name's
// text is written as \DDD. The slice is valid until the next Read.
func (q *Query) Name() []byte { return q.name }

// Read reads a query. After an error, AppendAnswer can still make the answer that Reply names.
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

// Reply returns the result for a query that Read refused with an error. ok is false if it must not be answered.
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

// udpSize is the size of messages that made answers offer in EDNS: it fits into every path without fragments.
const udpSize = 1232

// negativeTTL is how long a client may remember a name as missing, in seconds. It is short, because a change of the
// rules should have effect soon.
const negativeTTL = 5

// AppendAnswer appends an answer to the query that was read last, as its server would send it: with the ID, the
// question, the flags RD and CD and the version of EDNS of the query. zone is the zone of the SOA record of an answer
// NXDomain, which is needed for the answer to be remembered; without a valid zone it has no such record.
func (q *Query) AppendAnswer(dst []byte, code RCode, zone string) []byte {
	begin := len(dst)
	flags := flagQR | q.flags&(opcodeMask|flagRD|flagCD) | uint16(code)
	if q.flags&flagRD != 0 {
		flags |= flagRA // resolvers warn of, and some avoid, servers that do not offer recursion
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
	const server = "\x06sluice\x07invalid\x00" // RFC 6761 keeps this domain free
	dst = append(dst, server+server...)
	for _, v := range []uint32{1, 3600, 600, 86400, negativeTTL} { // serial, refresh, retry, expire, minimum
		dst = binary.BigEndian.AppendUint32(dst, v)
	}
	binary.BigEndian.PutUint16(dst[length:], uint16(len(dst)-length-2)) //nolint:gosec // less than 100
	return dst, true
}
