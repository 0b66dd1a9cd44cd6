// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"

	"golang.org/x/net/http2"
)

const (
	bufferSize  = 64 << 10
	frameHeader = 9
)

// buffers are for connections with bytes to relay. An idle connection has none.
var buffers = sync.Pool{New: func() any { return new([bufferSize]byte) }}

// input reads frames from one end.
type input struct {
	conn     net.Conn
	raw      syscall.RawConn // nil: conn is not a socket
	activity *activity
	buffer   *[bufferSize]byte
	at, end  int // bytes in the buffer that are not consumed
	busy     bool
	hold     bool // the end stays busy, because a header block is not complete
	try      func(fd uintptr) bool
	n        int
	err      error
}

func (in *input) open(conn net.Conn, a *activity) {
	in.conn, in.activity = conn, a
	if c, ok := conn.(syscall.Conn); ok {
		in.raw, _ = c.SyscallConn()
	}
	in.try = in.attempt
}

// begin puts the first bytes into the buffer.
func (in *input) begin(first []byte) {
	if len(first) > 0 {
		in.take()
		in.end = copy(in.buffer[:], first)
	}
}

// bytes are the bytes that are not consumed.
func (in *input) bytes() []byte {
	if in.buffer == nil {
		return nil
	}
	return in.buffer[in.at:in.end]
}

// take makes the end busy, and gets a buffer.
func (in *input) take() {
	if !in.busy {
		in.busy = true
		in.activity.add(1)
	}
	if in.buffer == nil {
		in.buffer = buffers.Get().(*[bufferSize]byte) //nolint:forcetypeassert // New makes no other
	}
}

// release is the opposite of take. It has no effect while the buffer contains bytes.
func (in *input) release() {
	if in.end > 0 || in.hold {
		return
	}
	if in.buffer != nil {
		buffers.Put(in.buffer)
		in.buffer = nil
	}
	if in.busy {
		in.busy = false
		in.activity.add(-1)
	}
}

// fill reads more bytes behind those that are not consumed. The end is busy before bytes leave the kernel, so that a
// process that is killed while the end is not busy has taken nothing.
func (in *input) fill() error {
	if in.buffer != nil {
		in.end = copy(in.buffer[:], in.buffer[in.at:in.end])
		in.at = 0
	}
	in.release()
	if in.raw != nil {
		if err := in.raw.Read(in.try); err != nil {
			return err
		}
	} else {
		in.take()
		in.n, in.err = in.conn.Read(in.buffer[in.end:])
	}
	in.end += in.n
	switch {
	case in.n > 0:
		return nil
	case in.err != nil:
		return in.err
	}
	return io.EOF
}

// attempt reads once. It returns false if no bytes have arrived.
func (in *input) attempt(fd uintptr) bool {
	in.take()
	for {
		in.n, in.err = syscall.Read(int(fd), in.buffer[in.end:]) //nolint:gosec // a descriptor
		if !errors.Is(in.err, syscall.EINTR) {
			break
		}
	}
	in.n = max(in.n, 0)
	if errors.Is(in.err, syscall.EAGAIN) {
		in.release()
		return false
	}
	return true
}

// frame is a whole frame. It is valid until the next fill.
type frame struct {
	whole  []byte // with the header
	kind   http2.FrameType
	flags  http2.Flags
	stream uint32
}

func (f *frame) payload() []byte { return f.whole[frameHeader:] }

func (f *frame) has(flag http2.Flags) bool { return f.flags&flag != 0 }

// next returns the next frame, or false if it is not complete. Its length is at most maxFrame.
func (in *input) next(f *frame) (ok bool, code http2.ErrCode) {
	b := in.bytes()
	if len(b) < frameHeader {
		return false, http2.ErrCodeNo
	}
	length := int(b[0])<<16 | int(b[1])<<8 | int(b[2])
	if length > maxFrame {
		return false, http2.ErrCodeFrameSize
	}
	if len(b) < frameHeader+length {
		return false, http2.ErrCodeNo
	}
	b[5] &= 0x7f // reserved
	*f = frame{b[:frameHeader+length], http2.FrameType(b[3]), http2.Flags(b[4]), binary.BigEndian.Uint32(b[5:])}
	in.at += frameHeader + length
	return true, http2.ErrCodeNo
}

// mask clears flags without a meaning.
func (f *frame) mask(flags http2.Flags) {
	f.flags &= flags
	f.whole[4] = byte(f.flags)
}

// unpadded returns the payload without padding and, for HEADERS, without the priority.
func (f *frame) unpadded() (content []byte, code http2.ErrCode) {
	b := f.payload()
	padding := 0
	if f.has(http2.FlagDataPadded) {
		if len(b) == 0 {
			return nil, http2.ErrCodeFrameSize
		}
		padding, b = int(b[0]), b[1:]
	}
	if f.kind == http2.FrameHeaders && f.has(http2.FlagHeadersPriority) {
		if len(b) < 5 {
			return nil, http2.ErrCodeFrameSize
		}
		b = b[5:]
	}
	if padding > len(b) {
		return nil, http2.ErrCodeProtocol
	}
	return b[:len(b)-padding], http2.ErrCodeNo
}

func appendHeader(b []byte, length int, kind http2.FrameType, flags http2.Flags, stream uint32) []byte {
	b = append(b, byte(length>>16), byte(length>>8), byte(length), byte(kind), byte(flags))
	return binary.BigEndian.AppendUint32(b, stream)
}
