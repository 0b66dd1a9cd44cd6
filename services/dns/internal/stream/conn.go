// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package stream

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-net/sluice/proxy/fair"
	"github.com/sluice-net/sluice/proxy/pods"
	"github.com/sluice-net/sluice/proxy/sockets"
	"github.com/sluice-net/sluice/services/dns/internal/exchange"
	"github.com/sluice-net/sluice/services/dns/internal/rules"
)

const (
	readBuffer = 1024
	// keptBuffer is the maximum size of a message whose memory a connection keeps for the next message. For a larger
	// message, memory is allocated as its bytes arrive.
	keptBuffer = 4096
)

// conn is a connection of a client, with the connection to its server.
type conn struct {
	exchange.Connection
	s      *Server
	pod    *pods.Pod
	item   *fair.Item // its entry in the limit of connections
	client *os.File
	ctx    context.Context // ends with the connection
	cancel context.CancelFunc

	server  *os.File   // nil before the first allowed query; only serve changes it
	writing sync.Mutex // held while a message is written to the client
	answers sync.WaitGroup

	mu    sync.Mutex
	ended bool // guarded by mu
	hard  bool // the connections are reset and not closed; guarded by mu
}

// newConn returns a connection for an accepted socket. If it succeeds, it takes over the descriptor.
func (s *Server) newConn(fd int, peer unix.Sockaddr) (*conn, error) {
	c := &conn{s: s}
	c.TCP = true
	ends, err := sockets.Describe(fd, peer)
	if err != nil {
		return nil, err
	}
	c.Client, c.Server = ends.Client, ends.Server
	c.Tag, c.Endpoint = rules.Tag{Egress: ends.Set}, ends.Endpoint
	c.pod = s.o.Pods.Get(c.Endpoint)
	c.Asker, c.Unknown = c.pod.Client, !s.o.Pods.Knows(c.pod)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	c.client = os.NewFile(uintptr(fd), "client")
	c.ctx, c.cancel = context.WithCancel(s.ctx)
	return c, nil
}

// end ends the connection. It counts the reason, unless the connection has ended before. If hard is set, the
// connections are reset.
func (c *conn) end(reason *atomic.Uint64, hard bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended {
		return
	}
	c.ended, c.hard = true, hard
	reason.Add(1)
	c.cancel()
}

// close closes both connections.
func (c *conn) close() {
	c.mu.Lock()
	hard := c.hard
	c.mu.Unlock()
	for _, f := range []*os.File{c.client, c.server} {
		if f == nil {
			continue
		}
		if hard {
			sockets.Control(f, sockets.Reset)
		}
		_ = f.Close()
	}
}

// serve handles the queries of the client until the connection ends.
func (c *conn) serve() {
	stop := context.AfterFunc(c.ctx, func() { sockets.Wake(c.client) })
	defer func() {
		stop()
		c.end(&c.s.Counts.Client, false)
		if c.server != nil {
			sockets.Wake(c.server)
		}
		c.answers.Wait()
		c.close()
	}()
	in := reader{ctx: c.ctx, file: c.client, buffered: bufio.NewReaderSize(c.client, readBuffer), limit: MaxQuery}
	var reply []byte
	for {
		b, err := in.next(idleTime)
		if c.stopped() {
			return
		}
		switch {
		case err == nil:
		case errors.Is(err, io.EOF):
			c.finish()
			return
		case errors.Is(err, errIdle):
			c.end(&c.s.Counts.Idle, false)
			return
		case errors.Is(err, os.ErrDeadlineExceeded):
			c.end(&c.s.Counts.Slow, true)
			return
		case errors.Is(err, errTooLong):
			c.end(&c.s.Counts.Invalid, true)
			return
		default:
			c.end(&c.s.Counts.Client, true)
			return
		}
		if reply, err = c.query(b, reply[:0]); err != nil {
			return
		}
	}
}

// stopped reports whether the connection has ended, or the process is stopping.
func (c *conn) stopped() bool {
	if c.ctx.Err() == nil {
		return false
	}
	c.end(&c.s.Counts.Stopped, true)
	return true
}

// finish forwards the end of the client's queries to the server, and waits for the remaining answers.
func (c *conn) finish() {
	if c.server == nil {
		return
	}
	sockets.Control(c.server, func(fd int) { _ = unix.Shutdown(fd, unix.SHUT_WR) })
	done := make(chan struct{})
	go func() {
		c.answers.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(idleTime):
	}
}

// errEnded is returned for a connection that has ended.
var errEnded = errors.New("the connection has ended")

// identify waits for the pod of the connection before the first allowed query. After a start of this process,
// sluice-datapath may not have reported the pod yet, and no addresses are learned from answers to an unknown pod.
func (c *conn) identify() {
	if !c.Unknown || c.server != nil {
		return
	}
	ctx, cancel := context.WithTimeout(c.ctx, waitTime)
	defer cancel()
	if pod, known := c.s.o.Pods.Wait(ctx, c.Endpoint); known {
		c.pod, c.Asker, c.Unknown = pod, pod.Client, false
	}
}

// query handles a query. It returns the memory of the reply for reuse.
func (c *conn) query(b, dst []byte) (reply []byte, err error) {
	action, reply := c.s.o.Exchange.Query(c.Connection, b, append(dst, 0, 0))
	if action == exchange.Wait {
		ctx, cancel := context.WithTimeout(c.ctx, waitTime)
		began := time.Now()
		known := c.s.o.Rules.Wait(ctx, c.Tag)
		cancel()
		c.s.o.Held(time.Since(began))
		if known {
			action, reply = c.s.o.Exchange.Query(c.Connection, b, append(dst, 0, 0))
		}
	}
	if c.pod.Gone() { // the ID may belong to another pod now
		c.end(&c.s.Counts.PodGone, true)
		return nil, errEnded
	}
	switch action {
	case exchange.Release:
		c.identify()
		return reply, c.forward(b)
	case exchange.Reply:
		return reply, c.send(reply)
	case exchange.Wait:
		c.end(&c.s.Counts.NoRuleSet, true)
	default:
		c.end(&c.s.Counts.Invalid, true)
	}
	return nil, errEnded
}

// send writes a message to the client. Its first two bytes are reserved for the length.
func (c *conn) send(b []byte) error {
	binary.BigEndian.PutUint16(b, uint16(len(b)-2)) //nolint:gosec // a DNS message
	c.writing.Lock()
	defer c.writing.Unlock()
	if err := c.write(c.client, b); err != nil {
		return c.failed(err, &c.s.Counts.Client)
	}
	return nil
}

// write writes a message within messageTime.
func (c *conn) write(f *os.File, b []byte) error {
	if err := f.SetWriteDeadline(time.Now().Add(messageTime)); err != nil {
		return err
	}
	if c.ctx.Err() != nil { // this write replaced the deadline of wake
		return errEnded
	}
	_, err := f.Write(b)
	return err
}

// failed ends the connection after a failed write.
func (c *conn) failed(err error, reason *atomic.Uint64) error {
	if c.stopped() {
		return errEnded
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		reason = &c.s.Counts.Slow
	}
	c.end(reason, true)
	return errEnded
}

// forward sends a query to the server.
func (c *conn) forward(b []byte) error {
	if c.server == nil {
		f, err := c.connect()
		if err != nil {
			if !c.stopped() {
				c.end(&c.s.Counts.Connect, true)
			}
			return errEnded
		}
		c.server = f
		c.answers.Go(c.readAnswers)
	}
	message := binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(b)), uint16(len(b))) //nolint:gosec // at most MaxQuery
	if err := c.write(c.server, append(message, b...)); err != nil {
		return c.failed(err, &c.s.Counts.Server)
	}
	return nil
}

// connect opens the connection to the server, with the client's address and port.
func (c *conn) connect() (*os.File, error) {
	ctx, cancel := context.WithTimeout(c.ctx, connectTime)
	defer cancel()
	fd, err := c.s.o.Take(ctx, c.Client.Addr().Is6())
	if err != nil {
		return nil, err
	}
	return sockets.Connect(ctx, fd, c.client, sockets.Ends{Client: c.Client, Server: c.Server})
}

// readAnswers reads and releases the answers of the server until one of the two connections ends.
func (c *conn) readAnswers() {
	stop := context.AfterFunc(c.ctx, func() { sockets.Wake(c.server) })
	defer stop()
	in := reader{ctx: c.ctx, file: c.server, buffered: bufio.NewReaderSize(c.server, readBuffer), limit: 1<<16 - 1}
	for {
		b, err := in.next(0)
		if c.stopped() {
			return
		}
		if err != nil {
			// The client's connection ends in the same way as the server's.
			c.end(&c.s.Counts.Server, !errors.Is(err, io.EOF))
			return
		}
		if c.answer(b) != nil {
			return
		}
	}
}

// answer releases an answer once its addresses are enforced.
func (c *conn) answer(b []byte) error {
	action, held := c.s.o.Exchange.Answer(c.Connection, b)
	switch action {
	case exchange.Release:
	case exchange.Hold:
		began := time.Now()
		settled := make(chan struct{})
		c.s.o.Later(c.Endpoint, len(b), func(ctx context.Context) {
			defer close(settled)
			c.s.o.Exchange.Settle(ctx, held)
		}, func() {
			defer close(settled)
			c.s.o.Exchange.Abandon(held)
		})
		<-settled
		c.s.o.Held(time.Since(began))
	default:
		return nil
	}
	if c.pod.Gone() {
		c.end(&c.s.Counts.PodGone, true)
		return errEnded
	}
	return c.send(append(make([]byte, 2, 2+len(b)), b...))
}

// reader reads messages with a length prefix.
type reader struct {
	ctx      context.Context // context of the connection
	file     *os.File
	buffered *bufio.Reader
	limit    int
	memory   []byte
}

var (
	errIdle    = errors.New("no message")
	errTooLong = errors.New("the message is too long")
)

// next returns the next message, which is valid until the following call. idle limits the wait for the first byte; 0:
// no limit. The error is io.EOF if the connection ended between two messages.
func (r *reader) next(idle time.Duration) ([]byte, error) {
	if r.buffered.Buffered() == 0 && idle > 0 {
		if err := r.until(time.Now().Add(idle)); err != nil {
			return nil, err
		}
	}
	if _, err := r.buffered.Peek(1); err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) {
			err = errIdle
		}
		return nil, err
	}
	if err := r.until(time.Now().Add(messageTime)); err != nil {
		return nil, err
	}
	var header [2]byte
	if _, err := io.ReadFull(r.buffered, header[:]); err != nil {
		return nil, unexpected(err)
	}
	size := int(binary.BigEndian.Uint16(header[:]))
	if size > r.limit {
		return nil, errTooLong
	}
	if cap(r.memory) > keptBuffer {
		r.memory = nil
	}
	b := r.memory[:0]
	for len(b) < size {
		more := min(size-len(b), max(keptBuffer, len(b)))
		b = append(b, make([]byte, more)...)
		if _, err := io.ReadFull(r.buffered, b[len(b)-more:]); err != nil {
			return nil, unexpected(err)
		}
	}
	r.memory = b
	if idle == 0 {
		return b, r.until(time.Time{})
	}
	return b, nil
}

// until sets the deadline, unless the connection has ended.
func (r *reader) until(deadline time.Time) error {
	if err := r.file.SetReadDeadline(deadline); err != nil {
		return err
	}
	if r.ctx.Err() != nil { // this call replaced the deadline of wake
		return errEnded
	}
	return nil
}

// unexpected returns the error for a message that is not complete.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
