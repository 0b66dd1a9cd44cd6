// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package frames relays an HTTP/2 connection between a client and a server, and evaluates each request.
//
// The relay works on frames. One connection of the client is one connection to the server, streams keep their numbers,
// and flow control stays between the two ends. From the client, header blocks are decoded, validated, evaluated and
// encoded again, so that the server gets exactly the request that was evaluated. From the server, whole frames pass as
// bytes, except SETTINGS.
//
// The relay sets the header tables of both directions to size 0 by SETTINGS_HEADER_TABLE_SIZE. Then a connection
// without an open stream has no state, and another process can continue it from its two sockets alone. It also keeps
// the default maximum frame size, and limits the number of open streams, so that the memory of a connection is bounded.
package frames

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/net/http2"
)

// Preface is the start of a connection of a client that knows that the server supports HTTP/2.
const Preface = http2.ClientPreface

// Limits of a connection. A client that exceeds the limits of a second, or a limit of queues, gets GOAWAY with
// ENHANCE_YOUR_CALM, and the connection ends. Other connections are not affected.
const (
	MaxHeaderBytes   = 64 << 10 // of a header block, as sent and decoded
	MaxFields        = 128      // of a header block
	MaxContinuations = 16       // of a header block
	MaxStreams       = 1024     // open at the same time; the server is allowed fewer
	MaxResets        = 200      // in a second: resets by the client, refusals and malformed requests
	MaxControls      = 10_000   // in a second: PING, PRIORITY and empty DATA of one end
	MaxSettings      = 100      // in a second and without an acknowledgement: SETTINGS of one end
	MaxEarly         = 2000     // header blocks before the client acknowledges the first SETTINGS of the server
	maxFrame         = 16384
	maxQueue         = 64 << 10 // frames of the relay for a client that does not read
	maxMade          = 64 << 10 // of header blocks before they are written
	maxKept          = 16 << 10 // of buffers between writes
)

// ErrPreface is the error for a client that does not begin with Preface.
var ErrPreface = errors.New("not the preface of HTTP/2")

// Options are the rules and hooks of a relay.
type Options struct {
	// Decide evaluates a request, and may change its header. It is called by one goroutine of the connection.
	Decide func(*Request) Verdict
	// Normalise returns the path, with its query, that is evaluated and sent. After an error the client gets status
	// 400. If it is nil, paths do not change.
	Normalise func(path string) (string, error)
	// Answered reports the status of a response with the token of its Verdict; the status is 0 if the stream ended
	// without one. It may be nil. The goroutines of the connection call it at the same time.
	Answered func(token any, status int)
	// Busy reports changes of the state: while it is false, no stream is open, the relay stores no bytes of the
	// connection, and another Relay can continue it with Resume. It may be nil.
	Busy func(bool)
	// Resume continues a connection that another process has relayed until it was not busy.
	Resume bool
	// Now is the clock of the limits. If it is nil, it is time.Now.
	Now func() time.Time
}

// Verdict is the result for a request.
type Verdict struct {
	Allowed bool
	Token   any // passed to Answered, if it is not nil
}

// Error is an error of HTTP/2 that ended a connection.
type Error struct {
	Code   http2.ErrCode
	Server bool // the server has caused it
	Reason string
}

func (e *Error) Error() string {
	end := "client"
	if e.Server {
		end = "server"
	}
	return fmt.Sprintf("%s: %v: %s", end, e.Code, e.Reason)
}

// relay is the state that both directions share.
type relay struct {
	Options
	client, server net.Conn
	activity       activity
	toClient       writer

	mu      sync.Mutex
	streams map[uint32]*stream // open ones that the server knows
	// Numbers of SETTINGS that wait for their acknowledgement.
	fromClient, fromServer int
	tables                 bool // the client has acknowledged the first SETTINGS, so its header table is empty
}

// stream is an open stream.
type stream struct {
	left                     int64    // bytes of data that content-length announces; -1: unknown
	deleted                  []string // header fields that Decide has deleted
	clientEnded, serverEnded bool
	answered                 bool
	token                    any
}

// MaxFirst limits the bytes that the caller of Relay has already read.
const MaxFirst = bufferSize

// Relay relays a connection until it ends, and closes both ends. first are the bytes that were already read from the
// client, at most MaxFirst. The error is nil if both ends have closed the connection in order.
func Relay(client, server net.Conn, first []byte, o *Options) error {
	if len(first) > MaxFirst {
		_ = client.Close()
		_ = server.Close()
		return fmt.Errorf("%d bytes have been read, more than %d", len(first), MaxFirst)
	}
	r := &relay{Options: *o, client: client, server: server, streams: map[uint32]*stream{}}
	if r.Now == nil {
		r.Now = time.Now
	}
	r.activity.hook = o.Busy
	r.toClient.conn = client
	r.toClient.ready = o.Resume
	r.tables = o.Resume
	if !o.Resume {
		// until the first SETTINGS of both ends have passed
		r.activity.add(2)
	}
	ended := make(chan error, 1)
	go func() {
		err := newServerSide(r).run()
		r.end(client, server, err)
		ended <- err
	}()
	err := newClientSide(r, first).run()
	r.end(server, client, err)
	err = cause(err, <-ended)
	_ = client.Close()
	_ = server.Close()
	r.forget()
	return err
}

// end passes the end of one direction on: the end of a stream of bytes to its receiver, an error to both ends.
func (r *relay) end(to, from net.Conn, err error) {
	var protocol *Error
	switch half, ok := to.(interface{ CloseWrite() error }); {
	case err == nil && ok:
		_ = half.CloseWrite()
		return
	case errors.As(err, &protocol):
		r.toClient.goAway(protocol.Code)
	case errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE):
		reset(to)
		reset(from)
	}
	_ = to.Close()
	_ = from.Close()
}

// reset makes Close send RST.
func reset(c net.Conn) {
	if c, ok := c.(interface{ SetLinger(int) error }); ok {
		_ = c.SetLinger(0)
	}
}

// cause returns the error that was first, of the errors of both directions: closing an end makes the other one fail.
func cause(a, b error) error {
	for _, err := range []error{a, b} {
		if err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, io.ErrClosedPipe) {
			return err
		}
	}
	return errors.Join(a, b)
}

// forget reports the streams that are open at the end of the connection.
func (r *relay) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, s := range r.streams {
		r.remove(id, s)
	}
}

// open adds a stream. It returns false if too many are open.
func (r *relay) open(id uint32, s *stream) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.streams) >= MaxStreams {
		return false
	}
	r.streams[id] = s
	r.activity.add(1)
	return true
}

// remove removes a stream. It runs with mu held.
func (r *relay) remove(id uint32, s *stream) {
	delete(r.streams, id)
	r.activity.add(-1)
	r.answered(s, 0)
}

// answered reports the status of a stream once. It runs with mu held.
func (r *relay) answered(s *stream, status int) {
	if !s.answered {
		s.answered = true
		r.report(s.token, status)
	}
}

func (r *relay) report(token any, status int) {
	if r.Answered != nil && token != nil {
		r.Answered(token, status)
	}
}

// activity counts what keeps a connection busy.
type activity struct {
	hook func(bool)
	mu   sync.Mutex
	n    int
}

func (a *activity) add(n int) {
	if a.hook == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	before := a.n
	a.n += n
	if (before == 0) != (a.n == 0) {
		a.hook(a.n > 0)
	}
}

// rate counts events in seconds.
type rate struct {
	start time.Time
	n     int
}

// over counts an event, and reports whether there were more than limit in the current second.
func (r *rate) over(now time.Time, limit int) bool {
	if now.Sub(r.start) >= time.Second || now.Before(r.start) {
		r.start, r.n = now, 0
	}
	r.n++
	return r.n > limit
}
