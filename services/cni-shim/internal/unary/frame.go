// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package unary

import (
	"encoding/binary"
	"io"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/http2/hpack"
)

// Types of frames, RFC 9113 section 6.
const (
	frameData         = 0
	frameHeaders      = 1
	framePriority     = 2
	frameReset        = 3
	frameSettings     = 4
	framePushPromise  = 5
	framePing         = 6
	frameGoAway       = 7
	frameWindowUpdate = 8
	frameContinuation = 9
)

const (
	flagEndStream  = 0x1 // of DATA and HEADERS
	flagAck        = 0x1 // of SETTINGS and PING
	flagEndHeaders = 0x4
	flagPadded     = 0x8
	flagPriority   = 0x20
)

// Settings, RFC 9113 section 6.5.2.
const (
	settingEnablePush        = 2
	settingInitialWindowSize = 4
	settingMaxFrameSize      = 5
	settingMaxHeaderListSize = 6
)

// Error codes, RFC 9113 section 7.
const (
	refusedStream = 7
	cancel        = 8
)

const (
	preface       = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
	headerSize    = 9         // of a frame
	maxFrame      = 16 << 10  // maximum size of the server's frames: the client never raises the default
	defaultWindow = 1<<16 - 1 // initial window of both sides
	maxWindow     = 1<<31 - 1
)

// frame is the header of a frame from the server.
type frame struct {
	kind, flags byte
	stream      uint32
	length      int
}

func (f frame) has(flag byte) bool { return f.flags&flag != 0 }

// appendFrame appends the header of a frame. The caller appends the payload.
func appendFrame(b []byte, kind, flags byte, stream uint32, length int) []byte {
	b = append(b, byte(length>>16), byte(length>>8), byte(length), kind, flags)
	return binary.BigEndian.AppendUint32(b, stream)
}

func appendSetting(b []byte, id uint16, value uint32) []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint16(b, id), value)
}

// readFrame reads the header of a frame.
func readFrame(r io.Reader) (frame, error) {
	var b [headerSize]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return frame{}, err
	}
	f := frame{
		kind: b[3], flags: b[4],
		stream: binary.BigEndian.Uint32(b[5:]) & (1<<31 - 1),
		length: int(b[0])<<16 | int(b[1])<<8 | int(b[2]),
	}
	if f.length > maxFrame {
		return f, broken("the server sent a frame of %d bytes, the maximum is %d", f.length, maxFrame)
	}
	return f, nil
}

// readPayload reads the payload of a frame, and removes padding and the priority of HEADERS. The result is valid until
// the next payload is read.
func (c *call) readPayload(f frame) ([]byte, error) {
	if cap(c.scratch) < f.length {
		c.scratch = make([]byte, max(f.length, 1024))
	}
	b := c.scratch[:f.length]
	if _, err := io.ReadFull(c.in, b); err != nil {
		return nil, err
	}
	pad := 0
	if f.has(flagPadded) && (f.kind == frameData || f.kind == frameHeaders) {
		if len(b) == 0 {
			return nil, broken("the server sent a frame without the length of its padding")
		}
		pad, b = int(b[0]), b[1:]
	}
	if f.kind == frameHeaders && f.has(flagPriority) {
		if len(b) < 5 {
			return nil, broken("the server sent a HEADERS frame with truncated priority fields")
		}
		b = b[5:]
	}
	if pad > len(b) {
		return nil, broken("the server sent padding that is longer than its frame")
	}
	return b[:len(b)-pad], nil
}

// Limits of the headers of an answer. They contain its text and details, of which services send at most 128 KiB, plus a
// third for base64.
const (
	maxBlock = 1 << 20 // encoded
	maxList  = 4 << 20 // decoded: names, values and 32 bytes for each
)

// readBlock reads a complete header block, of which f is the first frame.
func (c *call) readBlock(f frame) ([]byte, error) {
	b, err := c.readPayload(f)
	if err != nil || f.has(flagEndHeaders) {
		return b, err
	}
	block := append([]byte{}, b...)
	for {
		next, err := readFrame(c.in)
		if err != nil {
			return nil, err
		}
		if next.kind != frameContinuation || next.stream != f.stream {
			return nil, broken("the server sent a frame inside a header block")
		}
		if err := c.spend(); err != nil {
			return nil, err
		}
		if b, err = c.readPayload(next); err != nil {
			return nil, err
		}
		if len(block)+len(b) > maxBlock {
			return nil, fail(ResourceExhausted, "the server sent headers of more than %d bytes", maxBlock)
		}
		block = append(block, b...)
		if next.has(flagEndHeaders) {
			return block, nil
		}
	}
}

// headers contains the headers of an answer that the client uses.
type headers struct {
	status      string // HTTP status
	contentType string
	encoding    string
	trailers
}

// decode reads a header block.
func (c *call) decode(block []byte) (*headers, error) {
	h := &headers{}
	var wrong *Error
	size, regular := 0, false
	c.hpack.SetEmitFunc(func(f hpack.HeaderField) {
		size += len(f.Name) + len(f.Value) + 32
		switch {
		case wrong != nil:
		case size > maxList:
			wrong = fail(ResourceExhausted, "the server sent headers of more than %d bytes", maxList)
		case f.IsPseudo() && (regular || f.Name != ":status" || h.status != ""), f.Name == "",
			f.Name != strings.ToLower(f.Name):
			wrong = odd("the server sent a header that HTTP/2 forbids")
		default:
			regular = !f.IsPseudo()
			h.set(f.Name, f.Value)
		}
	})
	if _, err := c.hpack.Write(block); err != nil {
		return nil, broken("the server's headers: %v", err)
	}
	if err := c.hpack.Close(); err != nil {
		return nil, broken("the server's headers: %v", err)
	}
	if wrong != nil {
		return nil, wrong
	}
	return h, nil
}

// isGRPC reports whether the answer is a gRPC answer.
func (h *headers) isGRPC() bool {
	rest, ok := strings.CutPrefix(h.contentType, "application/grpc")
	return h.status == "200" && ok && (rest == "" || rest[0] == '+' || rest[0] == ';')
}

func (h *headers) set(name, value string) {
	switch name {
	case ":status":
		h.status = value
	case "content-type":
		h.contentType = value
	case "grpc-encoding":
		h.encoding = value
	case "grpc-status":
		h.hasCode, h.code = true, Unknown
		if n, err := strconv.ParseInt(value, 10, 32); err == nil {
			h.code = Code(n)
		}
	case "grpc-message":
		h.text = value
	case "grpc-status-details-bin":
		h.details = value
	}
}

// appendHeaders encodes the headers of a request. It adds no headers to the server's dynamic table, because the next
// request is rarely similar. It does not use Huffman coding, which would only save the kernel from copying some bytes.
func appendHeaders(b []byte, method, requestID string, timeout time.Duration) []byte {
	b = append(b, 0x83, 0x86) // :method POST, :scheme http
	b = appendLiteral(b, ":path", method)
	b = appendLiteral(b, ":authority", "localhost")
	b = appendLiteral(b, "content-type", "application/grpc")
	b = appendLiteral(b, "te", "trailers")
	if timeout > 0 {
		b = appendLiteral(b, "grpc-timeout", timeoutText(timeout))
	}
	if requestID != "" {
		b = appendLiteral(b, "sluice-request-id", requestID)
	}
	return b
}

func appendLiteral(b []byte, name, value string) []byte {
	b = append(b, 0) // without indexing, new name
	b = append(appendLength(b, len(name)), name...)
	return append(appendLength(b, len(value)), value...)
}

// appendLength appends an integer with a 7-bit prefix, RFC 7541 section 5.1.
func appendLength(b []byte, n int) []byte {
	if n < 127 {
		return append(b, byte(n))
	}
	return binary.AppendUvarint(append(b, 127), uint64(n-127)) //nolint:gosec // at least 127
}

// timeoutText formats a duration for the header grpc-timeout, with at most 8 digits. It rounds up, so that the server's
// deadline is not before the caller's.
func timeoutText(d time.Duration) string {
	for _, u := range []struct {
		unit time.Duration
		text string
	}{{time.Nanosecond, "n"}, {time.Microsecond, "u"}, {time.Millisecond, "m"}, {time.Second, "S"}} {
		n := d / u.unit
		if d%u.unit > 0 {
			n++
		}
		if n < 1e8 {
			return strconv.FormatInt(int64(n), 10) + u.text
		}
	}
	return "99999999S"
}
