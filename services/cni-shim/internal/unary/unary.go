// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package unary makes unary gRPC calls over unix sockets, for a process that makes two calls and ends.
//
// It implements only the necessary part of HTTP/2: a connection for each call, no goroutine, and the request in the
// same write as the connection's preface. grpc-go does far more, which would be most of such a process's CPU time; the
// tests compare this package with its server. An idle connection would not answer the server's pings, and a second
// call is rare, so connections are not reused.
//
// It does not implement streams, compression, keepalive (every call has a deadline), retries (the caller retries) and
// TLS.
package unary

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/net/http2/hpack"
	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/kit/requestid"
	"github.com/sluice-net/sluice/services/cni-shim/internal/message"
)

const (
	// MaxReceive is the maximum size of an answer in bytes.
	MaxReceive = 16 << 20

	prefixSize = 5 // of a message: whether it is compressed, and its length

	stream = 1 // number of the call's stream

	// maxOther is the maximum number of frames without bytes of the answer that a server may send in one call.
	maxOther = 10_000

	maxPath = 107 // maximum length of a unix socket's path
)

// Client makes calls to the server of one socket. It has no state, so any number of
// goroutines may use it.
type Client struct {
	path    string
	maxSend int
}

// New returns a client of the socket at path, which sends requests of at most
// maxSend bytes.
func New(path string, maxSend int) (Client, error) {
	if !filepath.IsAbs(path) {
		return Client{}, fmt.Errorf("dial %q: the socket's path is not absolute", path)
	}
	if len(path) > maxPath {
		return Client{}, fmt.Errorf("dial %q: the path is %d bytes long; at most %d fit into a unix socket address", path,
			len(path), maxPath)
	}
	return Client{path: path, maxSend: maxSend}, nil
}

// Path returns the path of the socket.
func (c Client) Path() string { return c.path }

// Probe opens a connection and closes it. Its error wraps the kernel's error.
func (c Client) Probe() error {
	f, err := dial(c.path)
	if err == nil {
		f.Close()
	}
	return err
}

// Call makes one call, and merges the answer into answer. It returns at the end of ctx at the latest, and sends the
// deadline and the request ID of ctx to the server. The error is an *Error. No call is sent twice.
func (c Client) Call(ctx context.Context, method string, request, answer message.Message) error {
	if err := ctx.Err(); err != nil {
		e := ended(err)
		e.Unsent = true
		return e
	}
	body := message.Marshal(request)
	if len(body) > c.maxSend {
		e := fail(ResourceExhausted, "the request has %d bytes; %d are sent", len(body), c.maxSend)
		e.Unsent = true
		return e
	}
	file, err := dial(c.path)
	if err != nil {
		return &Error{Code: Unavailable, Message: err.Error(), Unsent: true, Cause: err}
	}
	defer file.Close()
	got, err := exchange(ctx, file, method, body)
	if err != nil {
		return err
	}
	if err := message.Unmarshal(got, answer); err != nil {
		return odd("the server's answer: %v", err)
	}
	return nil
}

// dial does not wait. A server whose queue of connections is full counts as unavailable.
func dial(path string) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("dial unix %s: socket: %w", path, err)
	}
	for {
		err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
		if err == nil {
			return os.NewFile(uintptr(fd), path), nil //nolint:gosec // a descriptor
		}
		if !errors.Is(err, unix.EINTR) {
			unix.Close(fd)
			return nil, fmt.Errorf("dial unix %s: connect: %w", path, err)
		}
	}
}

// past is a deadline in the past.
var past = time.Unix(1, 0)

// exchange makes one call on a new connection.
func exchange(ctx context.Context, file *os.File, method string, body []byte) ([]byte, error) {
	deadline, _ := ctx.Deadline() // the zero time means no deadline
	if err := file.SetDeadline(deadline); err != nil {
		return nil, &Error{Code: Unavailable, Message: err.Error(), Unsent: true}
	}
	defer context.AfterFunc(ctx, func() { file.SetDeadline(past) })() //nolint:errcheck // it was set before

	c := &call{
		file: file, in: bufio.NewReaderSize(file, 4096), hpack: hpack.NewDecoder(4096, nil), out: make([]byte, 0,
			512+len(body)),
		body: make([]byte, prefixSize, prefixSize+len(body)), window: defaultWindow, streamWindow: defaultWindow,
		initialWindow: defaultWindow, maxFrame: maxFrame,
	}
	c.hpack.SetMaxStringLength(maxBlock)
	binary.BigEndian.PutUint32(c.body[1:], uint32(len(body))) //nolint:gosec // bounded by maxSend
	c.body = append(c.body, body...)

	var timeout time.Duration
	if !deadline.IsZero() {
		timeout = max(time.Until(deadline), 1)
	}
	c.begin(appendHeaders(nil, method, requestid.From(ctx), timeout))
	err := c.run()
	if err == nil {
		return c.got[prefixSize:], nil
	}
	return nil, c.explain(ctx, err)
}

// call is a call in progress and its connection.
type call struct {
	file    *os.File
	in      *bufio.Reader
	hpack   *hpack.Decoder
	scratch []byte // payload of the current frame
	others  int    // number of frames without bytes of the answer

	out   []byte // frames to send with the next write
	body  []byte // the rest of the request, with its prefix, that is not in frames yet
	sent  bool   // at least one byte was sent
	whole bool   // the whole request is in frames

	window        int64 // the server's window for the connection in bytes
	streamWindow  int64 // the server's window for the call
	initialWindow int64 // initial window of a call in the server's settings
	maxFrame      int   // maximum frame size of the server

	head    *headers // headers of the answer; nil until they have arrived
	got     []byte   // body of the answer, including its prefix
	over    bool     // the server has ended the call
	trailed bool     // the server has ended it with headers
}

// explain chooses the error for a broken call. An error of os.File means that the deadline has passed, or that the
// server has closed the connection.
func (c *call) explain(ctx context.Context, err error) error {
	// A server that detects the passed deadline first resets the call.
	deadline, ok := ctx.Deadline()
	late := ok && CodeOf(err) == Canceled && !time.Now().Before(deadline)
	if e, ok := errors.AsType[*Error](err); ok && !late {
		return e
	}
	if late || errors.Is(err, os.ErrDeadlineExceeded) {
		e := ended(ctx.Err())
		e.Unsent = !c.sent
		return e
	}
	text := err.Error()
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		text = "the server closed the connection"
	}
	return &Error{Code: Unavailable, Message: text, Unsent: !c.sent}
}

// begin appends all frames that precede the body of the request. The windows are as large as the largest answer, so the
// server never waits for a window update.
func (c *call) begin(block []byte) {
	b := append(c.out, preface...)
	b = appendFrame(b, frameSettings, 0, 0, 3*6)
	b = appendSetting(b, settingEnablePush, 0)
	b = appendSetting(b, settingInitialWindowSize, maxWindow)
	b = appendSetting(b, settingMaxHeaderListSize, maxBlock)
	b = appendFrame(b, frameWindowUpdate, 0, 0, 4)
	b = binary.BigEndian.AppendUint32(b, maxWindow-defaultWindow)
	b = appendFrame(b, frameHeaders, flagEndHeaders, stream, len(block))
	c.out = append(b, block...)
}

// run sends the request and reads until the call has ended.
func (c *call) run() error {
	for !c.over {
		if err := c.send(); err != nil {
			return err
		}
		f, err := readFrame(c.in)
		if err != nil {
			return err
		}
		if err := c.handle(f); err != nil {
			return err
		}
	}
	return c.end()
}

// spend counts a frame without bytes of the answer.
func (c *call) spend() error {
	if c.others++; c.others > maxOther {
		return fail(ResourceExhausted, "the server sent %d frames without an answer", maxOther)
	}
	return nil
}

// send writes pending frames, and as much of the request as the windows allow.
func (c *call) send() error {
	for !c.whole {
		n := min(int64(len(c.body)), c.window, c.streamWindow, int64(c.maxFrame))
		if n <= 0 {
			break
		}
		flags := byte(0)
		if n == int64(len(c.body)) {
			flags, c.whole = flagEndStream, true
		}
		c.out = append(appendFrame(c.out, frameData, flags, stream, int(n)), c.body[:n]...)
		c.body, c.window, c.streamWindow = c.body[n:], c.window-n, c.streamWindow-n
	}
	if len(c.out) == 0 {
		return nil
	}
	n, err := c.file.Write(c.out)
	c.sent = c.sent || n > 0
	c.out = c.out[:0]
	if err == nil || !errors.Is(err, syscall.EPIPE) && !errors.Is(err, syscall.ECONNRESET) {
		return err
	}
	// The server has closed the connection, but its earlier data can still be read.
	c.whole = true
	return nil
}

// handle processes one frame of the server.
func (c *call) handle(f frame) error {
	if f.kind != frameData {
		if err := c.spend(); err != nil {
			return err
		}
	}
	if f.stream != 0 && f.stream != stream {
		return broken("the server sent a frame of stream %d", f.stream)
	}
	switch f.kind {
	case frameData:
		return c.data(f)
	case frameHeaders:
		return c.takeHeaders(f)
	case frameContinuation:
		return broken("the server sent a CONTINUATION frame without a HEADERS frame")
	case framePushPromise:
		return broken("the server sent PUSH_PROMISE, although push is disabled")
	}
	b, err := c.readPayload(f)
	if err != nil {
		return err
	}
	switch f.kind {
	case frameReset:
		return c.reset(f, b)
	case frameSettings:
		return c.settings(f, b)
	case framePing:
		if f.stream != 0 || len(b) != 8 {
			return broken("the server sent an invalid PING frame of %d bytes", len(b))
		}
		if !f.has(flagAck) {
			c.out = append(appendFrame(c.out, framePing, flagAck, 0, 8), b...)
		}
	case frameGoAway:
		return c.goAway(f, b)
	case frameWindowUpdate:
		return c.windowUpdate(f, b)
	}
	return nil // PRIORITY, and frame types of later versions of HTTP/2
}

func (c *call) data(f frame) error {
	if f.stream == 0 || c.head == nil {
		return broken("the server sent unexpected data")
	}
	b, err := c.readPayload(f)
	if err != nil {
		return err
	}
	c.over = f.has(flagEndStream)
	// Do not read the text of an HTTP error.
	if !c.head.isGRPC() || len(b) == 0 {
		return c.spend()
	}
	c.got = append(c.got, b...)
	if len(c.got) < prefixSize {
		return nil
	}
	size := binary.BigEndian.Uint32(c.got[1:])
	switch {
	case c.got[0] > 1:
		return odd("the server's message has the flag %d", c.got[0])
	case c.got[0] == 1:
		return odd("the server's message is compressed by %.64q", c.head.encoding)
	case size > MaxReceive:
		return fail(ResourceExhausted, "the server's answer has %d bytes; the limit is %d", size, MaxReceive)
	case int64(len(c.got)) > prefixSize+int64(size):
		return odd("the server sent more than one answer")
	}
	return nil
}

func (c *call) takeHeaders(f frame) error {
	if f.stream == 0 {
		return broken("the server sent headers without a stream")
	}
	block, err := c.readBlock(f)
	if err != nil {
		return err
	}
	h, err := c.decode(block)
	if err != nil {
		return err
	}
	end := f.has(flagEndStream)
	switch {
	case c.head == nil && len(h.status) == 3 && h.status[0] == '1':
		if end {
			return odd("the server ended the call with status %s", h.status)
		}
		return nil // only the first number of the frame is needed
	case c.head == nil:
		if h.status == "" {
			return odd("the server sent headers without a status")
		}
		c.head = h
	case !end:
		return odd("the server sent headers twice")
	case h.status != "":
		return odd("the server sent a status at the end")
	default:
		c.head.trailers = h.trailers
	}
	c.over, c.trailed = end, end
	return nil
}

// end returns the result of a call that the server has ended.
func (c *call) end() error {
	h := c.head
	switch {
	case h.hasCode && h.code != OK:
		return h.err()
	case h.status != "200":
		return fail(ofHTTP(h.status), "the server answered with the HTTP status %.64q", h.status)
	case !h.isGRPC():
		return fail(Unknown, "the server answered with the content type %.64q", h.contentType)
	case !h.hasCode && c.trailed:
		return fail(Unknown, "the server's trailers have no status")
	case !h.hasCode:
		return odd("the server ended the call without trailers")
	case len(c.got) == 0:
		return odd("the server ended the call without an answer")
	case len(c.got) < prefixSize || int(binary.BigEndian.Uint32(c.got[1:])) > len(c.got)-prefixSize:
		return odd("the answer of the server is truncated")
	}
	return nil
}

func (c *call) reset(f frame, b []byte) error {
	if f.stream == 0 || len(b) != 4 {
		return broken("the server sent an invalid RST_STREAM frame of %d bytes", len(b))
	}
	code := binary.BigEndian.Uint32(b)
	e := fail(ofReset(code), "the server reset the call with HTTP/2's code %d", code)
	e.Unsent = code == refusedStream
	return e
}

func (c *call) settings(f frame, b []byte) error {
	if f.stream != 0 || len(b)%6 != 0 || f.has(flagAck) && len(b) > 0 {
		return broken("the server sent an invalid SETTINGS frame of %d bytes", len(b))
	}
	if f.has(flagAck) {
		return nil
	}
	for ; len(b) > 0; b = b[6:] {
		value := binary.BigEndian.Uint32(b[2:])
		switch binary.BigEndian.Uint16(b) {
		case settingInitialWindowSize:
			if value > maxWindow {
				return broken("the server wants a window of %d bytes", value)
			}
			c.streamWindow += int64(value) - c.initialWindow
			c.initialWindow = int64(value)
			if c.streamWindow > maxWindow {
				return broken("the server's flow control window exceeds 2^31-1 bytes")
			}
		case settingMaxFrameSize:
			if value < maxFrame || value > 1<<24-1 {
				return broken("the server wants frames of %d bytes", value)
			}
			c.maxFrame = int(value)
		}
	}
	c.out = appendFrame(c.out, frameSettings, flagAck, 0, 0)
	return nil
}

func (c *call) windowUpdate(f frame, b []byte) error {
	if len(b) != 4 || binary.BigEndian.Uint32(b)&maxWindow == 0 {
		return broken("the server sent WINDOW_UPDATE with an increment of 0")
	}
	window := &c.window
	if f.stream == stream {
		window = &c.streamWindow
	}
	*window += int64(binary.BigEndian.Uint32(b) & maxWindow)
	if *window > maxWindow {
		return broken("the server's flow control window exceeds 2^31-1 bytes")
	}
	return nil
}

// goAway handles a server that accepts no new calls. The server still finishes calls up to the stream in the frame.
func (c *call) goAway(f frame, b []byte) error {
	if f.stream != 0 || len(b) < 8 {
		return broken("the server sent GOAWAY with only %d bytes", len(b))
	}
	if last := binary.BigEndian.Uint32(b) & maxWindow; last < stream {
		e := fail(Unavailable, "the server ends")
		e.Unsent = true
		return e
	}
	return nil
}
