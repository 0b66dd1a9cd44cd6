// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package message parses DNS queries and answers, and builds error answers to queries.
//
// It is stricter than most resolvers. If two programs interpreted a message differently, wrong addresses could be
// learned, or the message could smuggle data. Each record must be complete, pointers in compressed names must point
// backwards, and nothing may follow the last record. A message that is refused is never forwarded.
//
// The package parses in place and does not allocate memory, except for the text of a new name. It never modifies or
// re-encodes a message that it has received.
package message

import (
	"encoding/binary"
	"errors"
)

// Types of records.
const (
	TypeA     uint16 = 1
	TypeCNAME uint16 = 5
	TypeSOA   uint16 = 6
	TypeAAAA  uint16 = 28
	TypeOPT   uint16 = 41
	TypeSVCB  uint16 = 64
	TypeHTTPS uint16 = 65
	TypeANY   uint16 = 255
)

// ClassIN is the class of the Internet.
const ClassIN uint16 = 1

// RCode is the result in an answer.
type RCode uint16

// Results.
const (
	NoError  RCode = 0
	FormErr  RCode = 1
	NXDomain RCode = 3
	NotImp   RCode = 4
	Refused  RCode = 5
)

// Errors for messages that are refused.
var (
	// ErrHeader is returned for a message that is shorter than a header. Such a message gets no answer.
	ErrHeader = errors.New("the message is shorter than a DNS header")
	// ErrNotQuery is returned for an answer where a query is expected. Such a message gets no answer, because two
	// programs could otherwise answer each other forever.
	ErrNotQuery = errors.New("the message is an answer, not a query")
	// ErrNotAnswer is returned for a query where an answer is expected.
	ErrNotAnswer = errors.New("the message is a query, not an answer")
	// ErrOpcode is returned for an operation other than QUERY.
	ErrOpcode = errors.New("the operation is not QUERY")
	// ErrQuestions is returned for a message that does not have exactly one question.
	ErrQuestions = errors.New("the message does not have exactly one question")
	// ErrRecords is returned for a query that contains records in its answer or authority section.
	ErrRecords = errors.New("the answer or authority section of the query is not empty")
	// ErrName is returned for a name with an invalid label, an invalid pointer or more than 255 bytes.
	ErrName = errors.New("a name is invalid")
	// ErrShort is returned for a message that ends within a record.
	ErrShort = errors.New("the message ends within a record")
	// ErrTrailing is returned for a message with data after its last record.
	ErrTrailing = errors.New("data follows the last record")
	// ErrEDNS is returned for a second OPT record, and for an OPT record that is invalid or not in the last section.
	ErrEDNS = errors.New("the OPT record of EDNS is invalid")
	// ErrData is returned for an address, CNAME, SVCB or HTTPS record whose data is invalid.
	ErrData = errors.New("the data of a record is invalid")
)

const (
	headerSize = 12

	flagQR     = 1 << 15
	opcodeMask = 0xf << 11
	flagTC     = 1 << 9
	flagRD     = 1 << 8
	flagRA     = 1 << 7
	flagCD     = 1 << 4
	rcodeMask  = 0xf
)

// reader parses a message. After the first error, all methods return zero values.
type reader struct {
	b   []byte
	off int
	err error
	// plain is the position of the last name without a pointer that was checked because a name pointed to it. Most
	// records point to the same name as the previous record, which then need not be checked again.
	plain int
}

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
}

func (r *reader) uint16() uint16 {
	if r.err != nil || len(r.b)-r.off < 2 {
		r.fail(ErrShort)
		return 0
	}
	v := binary.BigEndian.Uint16(r.b[r.off:])
	r.off += 2
	return v
}

func (r *reader) uint32() uint32 {
	high := r.uint16()
	return uint32(high)<<16 | uint32(r.uint16())
}

// skip checks that n more bytes exist, and skips them.
func (r *reader) skip(n int) {
	if r.err != nil || len(r.b)-r.off < n {
		r.fail(ErrShort)
		return
	}
	r.off += n
}

// name checks and skips the name at the current position, and returns this position.
func (r *reader) name() int {
	at := r.off
	if r.err != nil {
		return at
	}
	to := 0
	if len(r.b)-at >= 2 && r.b[at]&0xc0 == 0xc0 {
		if to = pointer(r.b, at); to == r.plain && to != 0 {
			r.off = at + 2
			return at
		}
	}
	l := newLabels(r.b, at)
	if err := l.check(); err != nil {
		r.fail(err)
		return at
	}
	if to != 0 && l.pointers == 1 {
		r.plain = to
	}
	r.off = l.end
	return at
}

// record is the fixed part of a record.
type record struct {
	owner       int // position of the name
	kind, class uint16
	ttl         uint32
	data, end   int // positions of the data
}

func (r *reader) record() (out record) {
	out.owner = r.name()
	out.kind, out.class, out.ttl = r.uint16(), r.uint16(), r.uint32()
	n := int(r.uint16())
	out.data = r.off
	r.skip(n)
	out.end = r.off
	return out
}

// edns is the OPT record of a message.
type edns struct {
	present bool
	rcode   RCode // upper bits of the result, shifted to their position
	version uint8
	do      bool // the DO bit: DNSSEC records are requested
}

// opt checks an OPT record. It accepts every EDNS version, because the server itself answers an unsupported version
// with an error.
func (e *edns) opt(b []byte, rec record) error {
	if e.present || b[rec.owner] != 0 {
		return ErrEDNS
	}
	for at := rec.data; at < rec.end; {
		if rec.end-at < 4 {
			return ErrEDNS
		}
		at += 4 + int(binary.BigEndian.Uint16(b[at+2:]))
		if at > rec.end {
			return ErrEDNS
		}
	}
	*e = edns{
		present: true, rcode: RCode(rec.ttl>>24) << 4, do: rec.ttl&(1<<15) != 0,
		version: uint8(rec.ttl >> 16), //nolint:gosec // a single byte
	}
	return nil
}
