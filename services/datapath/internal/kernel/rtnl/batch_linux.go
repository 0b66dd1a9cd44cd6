// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package rtnl speaks rtnetlink for what is done to every container: several
// requests go to the kernel by one system call, which carries them out in order,
// and what succeeds needs no answer. It knows the form of messages and no meaning
// of any; what is seldom done goes through the netlink library.
package rtnl

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// Batch is requests in the order in which the kernel carries them out. The zero
// value is empty.
type Batch struct {
	b      []byte
	starts []int // where each request begins
	goals  []goal
}

// goal is what a request is for; it is only put into words if it fails.
type goal struct {
	format string
	args   []any
}

// Offsets in struct nlmsghdr, and its size.
const (
	offsetType  = 4
	offsetFlags = 6
	offsetSeq   = 8
	sizeofHead  = 16
	sizeofAttr  = 4
)

// Add begins a request of a type with NLM_F flags and the structure that follows
// the header, such as struct ifinfomsg, and returns its number in the batch. Attr
// and its like add to it.
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

// For says what the last request is for, in the words of an error of Do.
func (b *Batch) For(format string, args ...any) { b.goals[len(b.goals)-1] = goal{format, args} }

// end writes the length of the last request.
func (b *Batch) end() {
	if n := len(b.starts); n > 0 {
		s := b.starts[n-1]
		binary.NativeEndian.PutUint32(b.b[s:], uint32(len(b.b)-s)) //nolint:gosec // a batch is some kilobytes
	}
}

// raw adds bytes, and zeros up to the next multiple of 4.
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

// Uint32 adds an attribute with a number in host byte order.
func (b *Batch) Uint32(kind uint16, v uint32) {
	b.attr(kind, sizeofAttr+4)
	b.b = binary.NativeEndian.AppendUint32(b.b, v)
}

// String adds an attribute with a string that ends with a zero byte.
func (b *Batch) String(kind uint16, s string) {
	b.attr(kind, sizeofAttr+len(s)+1)
	b.b = append(b.b, s...)
	b.raw([]byte{0})
}

// Nest adds an attribute that has what fn adds, after a structure if body is not
// empty.
func (b *Batch) Nest(kind uint16, body []byte, fn func()) {
	at := len(b.b)
	b.attr(kind, 0)
	b.raw(body)
	fn()
	binary.NativeEndian.PutUint16(b.b[at:], uint16(len(b.b)-at)) //nolint:gosec // as above
}

// Len is how many requests there are.
func (b *Batch) Len() int { return len(b.starts) }

// typeMask leaves out the bits of an attribute's type that say how its value is to be
// read.
const typeMask = ^uint16(unix.NLA_F_NESTED | unix.NLA_F_NET_BYTEORDER)

// Attrs calls fn with the attributes after the first skip bytes of a message, or of
// the value of a nested attribute with skip 0. What is cut off is left
// out.
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

// Number is an attribute's number in host byte order, 0 if its value is too short.
func Number(value []byte) uint32 {
	if len(value) < 4 {
		return 0
	}
	return binary.NativeEndian.Uint32(value)
}
