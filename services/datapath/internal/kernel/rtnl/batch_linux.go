// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rtnl implements rtnetlink for operations on every container: it sends several requests with one
// system call, which the kernel executes in order, and needs no replies for successful ones. It only knows the
// format of messages, not their meaning. Rare operations use the netlink library instead.
package rtnl

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Batch is a list of requests, in the order in which the kernel executes them. The zero value is empty.
type Batch struct {
	b      []byte
	starts []int // offset of each request
	goals  []goal
}

// goal describes the purpose of a request; it is only formatted if the request fails.
type goal struct {
	format string
	args   []any
}

// Offsets in struct nlmsghdr, and sizes.
const (
	offsetType  = 4
	offsetFlags = 6
	offsetSeq   = 8
	sizeofHead  = 16
	sizeofAttr  = 4
)

// Add begins a request with a type, NLM_F flags, and the structure that follows the header, such as struct
// ifinfomsg. It returns the index of the request in the batch. Attr, Uint32, String and Nest add attributes to
// it.
func (b *Batch) Add(kind, flags uint16, body []byte) int {
	b.end()
	b.starts = append(b.starts, len(b.b))
	b.goals = append(b.goals, goal{})
	var head [sizeofHead]byte
	binary.NativeEndian.PutUint16(head[offsetType:], kind)
	binary.NativeEndian.PutUint16(head[offsetFlags:], flags|unix.NLM_F_REQUEST)
	b.b = append(b.b, head[:]...)
	b.raw(body)
	return len(b.starts) - 1
}

// For sets the description of the last request for errors of Do.
func (b *Batch) For(format string, args ...any) { b.goals[len(b.goals)-1] = goal{format, args} }

// end sets the length of the last request.
func (b *Batch) end() {
	if n := len(b.starts); n > 0 {
		s := b.starts[n-1]
		binary.NativeEndian.PutUint32(b.b[s:], uint32(len(b.b)-s)) //nolint:gosec // a batch is some kilobytes
	}
}

// raw adds bytes, padded with zeros to a multiple of 4.
func (b *Batch) raw(v []byte) {
	b.b = append(b.b, v...)
	for len(b.b)%4 != 0 {
		b.b = append(b.b, 0)
	}
}

// Attr adds an attribute to the last request.
func (b *Batch) Attr(kind uint16, value []byte) {
	b.attr(kind, sizeofAttr+len(value))
	b.raw(value)
}

func (b *Batch) attr(kind uint16, size int) {
	b.b = binary.NativeEndian.AppendUint16(b.b, uint16(size)) //nolint:gosec // the kernel's own names and addresses
	b.b = binary.NativeEndian.AppendUint16(b.b, kind)
}

// Uint32 adds an attribute with a number in host byte order to the last request.
func (b *Batch) Uint32(kind uint16, v uint32) {
	b.attr(kind, sizeofAttr+4)
	b.b = binary.NativeEndian.AppendUint32(b.b, v)
}

// String adds an attribute with a zero-terminated string to the last request.
func (b *Batch) String(kind uint16, s string) {
	b.attr(kind, sizeofAttr+len(s)+1)
	b.b = append(b.b, s...)
	b.raw([]byte{0})
}

// Nest adds an attribute that contains an optional structure and the attributes that fn adds.
func (b *Batch) Nest(kind uint16, body []byte, fn func()) {
	at := len(b.b)
	b.attr(kind, 0)
	b.raw(body)
	fn()
	binary.NativeEndian.PutUint16(b.b[at:], uint16(len(b.b)-at)) //nolint:gosec // as above
}

// Len returns the number of requests.
func (b *Batch) Len() int { return len(b.starts) }

// typeMask removes the flags from an attribute's type.
const typeMask = ^uint16(unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)

// Attrs calls fn with the attributes after the first skip bytes of a message; use skip 0 for the value of a
// nested attribute. It ignores a truncated attribute at the end.
func Attrs(m []byte, skip int, fn func(kind uint16, value []byte)) {
	if len(m) < skip {
		return
	}
	for m = m[skip:]; len(m) >= sizeofAttr; {
		size := int(binary.NativeEndian.Uint16(m))
		if size < sizeofAttr || size > len(m) {
			return
		}
		fn(binary.NativeEndian.Uint16(m[2:])&typeMask, m[sizeofAttr:size])
		m = m[min((size+3)&^3, len(m)):]
	}
}

// Number returns an attribute's number in host byte order, 0 if its value is too short.
func Number(value []byte) uint32 {
	if len(value) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(value)
}
