// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package relay passes the requests of one client connection to the server, if the rules allow them.
//
// Package message reads the requests and writes them again, so the server gets what was evaluated. At most one request
// is under way: the next one is read when the response to the former has ended. While none is under way, the connection
// has no buffers. An end or a reset of one connection is passed on to the other one.
package relay

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/proxy/sockets"
	"github.com/sluice-net/sluice/services/http/internal/frames"
	"github.com/sluice-net/sluice/services/http/internal/hello"
	"github.com/sluice-net/sluice/services/http/internal/message"
)

// Times of a connection.
const (
	// HeaderTime limits the time from the first byte of a request to the end of its header.
	HeaderTime = 60 * time.Second
	// IdleTime limits the time without a request.
	IdleTime = time.Hour
	// writeTime limits each write of a buffer. An end that reads nothing would hold the memory.
	writeTime = 60 * time.Second
	// connectTime limits the connection to the server.
	connectTime = 10 * time.Second
	// lingerTime is how long a closed connection still reads, so that a reset does not overtake the last response.
	lingerTime = time.Second
)

// recordHandshake is the first byte of a TLS connection.
const recordHandshake = 22

// maxRefusedBody is the size up to which the body of a refused request is read, so that the connection can go on.
const maxRefusedBody = 64 << 10

// Outcome is the result of a request or a connection.
type Outcome string

// The outcomes.
const (
	Forwarded Outcome = "forwarded"
	Refused   Outcome = "refused" // by the rules
	Invalid   Outcome = "invalid" // not a valid message of HTTP or TLS, or not a protocol that the rules are about
	Failed    Outcome = "failed"  // the server could not be reached, or its response was not valid
)

// Event describes a request, or a TLS connection. It has nothing else of a message, and its texts are short.
type Event struct {
	Outcome            Outcome
	Method, Path, Host string // Path has "?" in place of the query, which may have secrets
	ServerName         string // of a TLS connection
	Status             int    // that the client got; 0: none
	Reason             string // unless it was forwarded as it was
	Duration           time.Duration
}

// Limits of the texts of an event.
const (
	maxMethod = 32
	maxPath   = 256
)

// eventOf returns the event of a request.
func eventOf(outcome Outcome, method, path, host string) Event {
	path, _, query := strings.Cut(path, "?")
	if query && len(path) < maxPath {
		path += "?"
	}
	return Event{
		Outcome: outcome, Method: method[:min(len(method), maxMethod)], Path: path[:min(len(path), maxPath)], Host: host,
	}
}

// Evaluator evaluates requests and server names. Its methods may be called concurrently.
type Evaluator interface {
	AllowsRequest(*layer7.Request) layer7.Verdict
	AllowsServerName(name string) bool
}

// Options describe the connection of a client.
type Options struct {
	Client *sockets.Conn
	// Connect opens the connection to the server.
	Connect func(context.Context) (*sockets.Conn, error)
	// Rules returns what evaluates the next request. It is called for each request, because rules change. An error
	// ends the connection.
	Rules func(context.Context) (Evaluator, error)
	// ServerNames reports whether the rules name TLS servers.
	ServerNames func(Evaluator) bool
	// Report is called once for each request and TLS connection. It must not block.
	Report func(Event)
}

// conn is the state of a connection.
type conn struct {
	Options
	ctx    context.Context
	server *sockets.Conn // set before the goroutine of respond begins
	in     *bufio.Reader // of the client; nil while nothing is buffered

	mu      sync.Mutex
	pending *exchange     // the request under way; guarded by mu
	over    bool          // the server's side has ended; guarded by mu
	broken  bool          // it has ended in a way that resets the client; guarded by mu
	ended   chan struct{} // closed when respond has returned
}

// exchange is a request that waits for its response.
type exchange struct {
	request *message.Request
	began   time.Time
	note    string
	done    chan struct{} // closed when the response was passed on
	last    bool          // no request may follow; set before done is closed
	tunnel  bool          // the connection has become a tunnel; set before done is closed
}

var (
	readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 4096) }}
	writers = sync.Pool{New: func() any { return bufio.NewWriterSize(nil, 4096) }}
)

// timed is a connection whose writes have a limit of time each.
type timed struct{ *sockets.Conn }

func (t timed) Write(b []byte) (int, error) {
	if err := t.SetWriteDeadline(time.Now().Add(writeTime)); err != nil {
		return 0, err
	}
	return t.Conn.Write(b)
}

func writerTo(c *sockets.Conn) *bufio.Writer {
	w := writers.Get().(*bufio.Writer) //nolint:forcetypeassert // of this pool
	w.Reset(timed{c})
	return w
}

func putWriter(w *bufio.Writer) {
	w.Reset(nil)
	writers.Put(w)
}

// Serve relays the connection until it ends, or ctx does. It closes both connections.
func Serve(ctx context.Context, o Options) {
	c := &conn{Options: o, ctx: ctx, ended: make(chan struct{})}
	stop := context.AfterFunc(ctx, c.interrupt)
	defer stop()
	hard := c.serve() != nil
	c.release()
	if c.server != nil {
		sockets.Wake(c.server.File)
		<-c.ended
	}
	for _, x := range []*sockets.Conn{c.Client, c.server} {
		switch {
		case x == nil:
		case hard:
			x.Reset()
		default:
			_ = x.Close()
		}
	}
}

// interrupt ends both connections.
func (c *conn) interrupt() {
	c.mu.Lock()
	defer c.mu.Unlock()
	sockets.Wake(c.Client.File)
	if c.server != nil {
		sockets.Wake(c.server.File)
	}
}

// errEnded means that the connection has to be reset: something failed in the middle of a message, or one end has sent
// a reset.
var errEnded = errors.New("reset")

// release returns the client's reader to the pool, if it has nothing.
func (c *conn) release() {
	if c.in != nil {
		c.in.Reset(nil)
		readers.Put(c.in)
		c.in = nil
	}
}

// serve handles the client's requests. The error means that the connections have to be reset.
func (c *conn) serve() error {
	for first := true; ; first = false {
		if c.in == nil || c.in.Buffered() == 0 {
			c.release()
			more, err := c.await()
			if err != nil || !more {
				return err
			}
			c.in = readers.Get().(*bufio.Reader) //nolint:forcetypeassert // of this pool
			c.in.Reset(c.Client)
		}
		if next, err := c.settle(); err != nil || !next {
			return err
		}
		if first {
			if b, err := c.in.Peek(1); err == nil && b[0] == recordHandshake {
				return c.tls()
			}
		}
		if next, err := c.request(); err != nil || !next {
			return err
		}
	}
}

// await waits for bytes of the client. more is false if the client has ended, and all that it asked for was answered.
func (c *conn) await() (more bool, err error) {
	for {
		if err := c.until(time.Now().Add(IdleTime)); err != nil {
			return false, err
		}
		more, err = c.Client.Wait()
		switch x := c.underWay(); {
		case c.isOver() && !errors.Is(err, syscall.ECONNRESET):
			if x != nil && !isDone(x) || c.isBroken() {
				return false, errEnded
			}
			c.linger() // the server has ended its connection after a response
			return false, nil
		case c.ctx.Err() != nil:
			return false, errEnded
		case errors.Is(err, os.ErrDeadlineExceeded) && x != nil:
			continue // a long response
		case errors.Is(err, os.ErrDeadlineExceeded):
			return false, nil
		case err != nil:
			return false, errEnded
		case more || x == nil:
			return more, nil
		}
		// The client waits for the last response. Its FIN is passed on, as without a proxy.
		_ = c.server.CloseWrite()
		_, err = c.settle()
		return false, err
	}
}

// until sets the deadline for reads of the client, unless the connection is ending.
func (c *conn) until(deadline time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over || c.ctx.Err() != nil {
		return nil // the deadline of the end stays
	}
	return c.Client.SetReadDeadline(deadline)
}

func (c *conn) underWay() *exchange {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.pending
}

func (c *conn) isBroken() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.broken
}

func (c *conn) isOver() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.over
}

// settle waits for the response to the request under way. next is false if no request may follow.
func (c *conn) settle() (next bool, err error) {
	x := c.underWay()
	if x == nil {
		return !c.isOver(), nil
	}
	select {
	case <-x.done:
	case <-c.ended:
		select {
		case <-x.done:
		default:
			return false, errEnded
		}
	}
	c.mu.Lock()
	c.pending = nil
	c.mu.Unlock()
	if x.tunnel {
		return false, c.upstream()
	}
	return !x.last, nil
}

// request handles the next request. next is false if none may follow.
func (c *conn) request() (next bool, err error) {
	began := time.Now()
	if err := c.until(began.Add(HeaderTime)); err != nil {
		return false, err
	}
	q, err := message.ReadRequest(c.in)
	var bad *message.Error
	switch {
	case errors.Is(err, message.ErrHTTP2):
		return false, c.frames()
	case errors.As(err, &bad):
		return false, c.answer(nil, bad.Status, Event{Outcome: Invalid, Reason: bad.Reason, Duration: time.Since(began)})
	case errors.Is(err, os.ErrDeadlineExceeded) && !c.isOver():
		return false, c.answer(nil, http.StatusRequestTimeout, Event{Outcome: Invalid, Reason: "the header took too long"})
	case err != nil:
		return false, errEnded // in the middle of a header
	}
	event := eventOf(Refused, q.Method, q.Path(), q.Host)
	rules, err := c.Rules(c.ctx)
	if err != nil {
		event.Outcome, event.Reason = Failed, err.Error()
		return false, c.answer(q, http.StatusServiceUnavailable, event)
	}
	v := rules.AllowsRequest(&layer7.Request{Method: q.Method, Path: q.Path(), Host: q.Host, Values: q.Header.Values})
	note, ok := edit(q, v.Mismatches)
	if !v.Allowed || !ok {
		event.Outcome, event.Reason, event.Duration = Refused, "no rule allows it", time.Since(began)
		return c.refuse(q, event)
	}
	if err := c.connect(); err != nil {
		event.Outcome, event.Reason, event.Duration = Failed, err.Error(), time.Since(began)
		c.Report(event)
		return false, errEnded // as without a proxy
	}
	x := &exchange{request: q, began: began, note: note, done: make(chan struct{})}
	c.mu.Lock()
	c.pending = x
	c.mu.Unlock()
	return true, c.forward(q)
}

// edit applies the actions for headers without the value of the rule. ok is false if the request cannot be changed so.
func edit(q *message.Request, all []layer7.HeaderMatch) (note string, ok bool) {
	for _, m := range all {
		if !editable(m) {
			return "", false
		}
		switch m.Mismatch {
		case layer7.Log:
			note = "header " + m.Name + " does not have the value of the rule"
		case layer7.Delete:
			q.Header = q.Header.Without(m.Name)
		case layer7.Replace:
			q.Header = append(q.Header.Without(m.Name), message.Field{Name: m.Name, Value: m.Value})
		case layer7.Add:
			q.Header = append(q.Header, message.Field{Name: m.Name, Value: m.Value})
		default:
			return "", false
		}
	}
	return note, true
}

// editable reports whether the action of a rule changes a field and nothing else: a value with CR LF would add a
// request that no rule has seen.
func editable(m layer7.HeaderMatch) bool {
	return m.Mismatch == layer7.Log || !message.IsFraming(m.Name) && message.Field{Name: m.Name, Value: m.Value}.Valid()
}

// forward sends a request with its body to the server.
func (c *conn) forward(q *message.Request) error {
	w := writerTo(c.server)
	defer putWriter(w)
	q.Write(w)
	if q.Body.Framing != message.NoBody {
		// the sender decides how long a body takes
		if err := c.until(time.Time{}); err != nil {
			return err
		}
	}
	err := message.CopyBody(w, c.in, q.Body, q.Body)
	if err == nil {
		err = w.Flush()
	}
	var bad *message.Error
	if errors.As(err, &bad) {
		event := eventOf(Invalid, q.Method, q.Path(), q.Host)
		event.Reason = bad.Reason
		c.Report(event)
		return errEnded
	}
	if err != nil {
		return c.unsent()
	}
	return nil
}

// unsent handles a request that could not be sent completely. The server may have answered before it ended its
// connection: then the client gets the response.
func (c *conn) unsent() error {
	x := c.underWay()
	select {
	case <-x.done:
		c.linger()
		return nil
	case <-c.ended:
	case <-time.After(lingerTime):
	}
	select {
	case <-x.done:
		c.linger()
		return nil
	default:
		return errEnded
	}
}

// refuse answers a request that the rules do not allow. The connection goes on unless the body is long.
func (c *conn) refuse(q *message.Request, e Event) (next bool, err error) {
	if !q.Close && !q.Continue && len(q.Upgrades) == 0 && q.Method != http.MethodConnect {
		if err := c.until(time.Now().Add(HeaderTime)); err != nil {
			return false, err
		}
		if message.DiscardBody(c.in, q.Body, maxRefusedBody) {
			return true, c.respondOwn(q, http.StatusForbidden, e, false)
		}
	}
	return false, c.answer(q, http.StatusForbidden, e)
}

// answer sends an own response, after which the connection ends. q is nil if there is no valid request.
func (c *conn) answer(q *message.Request, status int, e Event) error {
	err := c.respondOwn(q, status, e, true)
	if err == nil {
		c.linger()
	}
	return err
}

// respondOwn sends a response of the proxy. No request is under way.
func (c *conn) respondOwn(q *message.Request, status int, e Event, last bool) error {
	e.Status = status
	c.Report(e)
	body, minor := http.StatusText(status)+"\r\n", 1
	if status == http.StatusForbidden {
		body = "Access denied\r\n"
	}
	if q != nil {
		minor = q.Minor
	}
	p := message.Response{
		Status: status, Reason: http.StatusText(status), Header: message.Header{{Name: "Content-Type", Value: "text/plain"}},
		Body: message.Body{Framing: message.Length, Length: int64(len(body))},
	}
	w := writerTo(c.Client)
	defer putWriter(w)
	p.Write(w, minor, last)
	if q == nil || q.Method != http.MethodHead {
		_, _ = w.WriteString(body)
	}
	if w.Flush() != nil {
		return errEnded
	}
	return nil
}

// linger sends FIN to the client, and reads what it still sends for a short time.
func (c *conn) linger() {
	if c.Client.CloseWrite() != nil || c.Client.SetReadDeadline(time.Now().Add(lingerTime)) != nil {
		return
	}
	var b [4096]byte
	for n := 0; n < 256<<10; {
		m, err := c.Client.Read(b[:])
		if n += m; err != nil {
			return
		}
	}
}

// connect opens the connection to the server, unless it is open.
func (c *conn) connect() error {
	if c.server != nil {
		return nil
	}
	if err := c.dial(); err != nil {
		return err
	}
	go c.respond()
	return nil
}

// dial opens the connection to the server.
func (c *conn) dial() error {
	ctx, cancel := context.WithTimeout(c.ctx, connectTime)
	defer cancel()
	server, err := c.Connect(ctx)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.server = server
	if c.ctx.Err() != nil {
		sockets.Wake(server.File)
	}
	return nil
}

// respond passes the responses of the server on until its connection ends.
func (c *conn) respond() {
	hard := c.responses()
	c.mu.Lock()
	c.over, c.broken = true, hard
	x := c.pending
	c.mu.Unlock()
	close(c.ended)
	if !hard && x != nil && isDone(x) && x.tunnel {
		return // the client may still send
	}
	sockets.Wake(c.Client.File)
}

// responses returns true if the connection of the client has to be reset.
func (c *conn) responses() (hard bool) {
	for {
		more, err := c.server.Wait()
		x := c.underWay()
		if err != nil || !more || x == nil {
			return err != nil || more || x != nil && !isDone(x)
		}
		if isDone(x) {
			// The server speaks without a request, or the client's side has not seen the end of the last
			// one yet, and then sends no request either.
			return true
		}
		if err := c.response(x); err != nil {
			return true
		}
		x.request = nil // an idle connection does not need it
		if x.tunnel || x.last {
			close(x.done)
			if x.tunnel {
				return c.downstream()
			}
			return false
		}
		close(x.done)
	}
}

func isDone(x *exchange) bool {
	select {
	case <-x.done:
		return true
	default:
		return false
	}
}

// response passes one response on, with the interim ones before it.
func (c *conn) response(x *exchange) (err error) {
	in := readers.Get().(*bufio.Reader) //nolint:forcetypeassert // of this pool
	in.Reset(c.server)
	w := writerTo(c.Client)
	event := eventOf(Forwarded, x.request.Method, x.request.Path(), x.request.Host)
	event.Reason = x.note
	defer func() {
		in.Reset(nil)
		readers.Put(in)
		putWriter(w)
		if event.Duration = time.Since(x.began); err != nil {
			event.Outcome, event.Reason = Failed, err.Error()
		}
		c.Report(event)
	}()
	for {
		p, err := message.ReadResponse(in, x.request)
		if err != nil {
			if errors.Is(err, message.ErrResponse) && event.Status == 0 {
				event.Status = http.StatusBadGateway
				own := message.Response{
					Status: http.StatusBadGateway, Reason: http.StatusText(http.StatusBadGateway),
					Body: message.Body{Framing: message.Length},
				}
				own.Write(w, x.request.Minor, true)
				if w.Flush() == nil {
					_ = c.Client.CloseWrite()
				}
			}
			return err
		}
		x.tunnel = p.Status == http.StatusSwitchingProtocols ||
			x.request.Method == http.MethodConnect && p.Status >= 200 && p.Status < 300
		x.last = x.request.Close || p.Close
		body := p.Write(w, x.request.Minor, x.last && !p.Interim() && !x.tunnel)
		if p.Interim() {
			if err := w.Flush(); err != nil {
				return err
			}
			continue
		}
		event.Status = p.Status
		if err := message.CopyBody(w, in, p.Body, body); err != nil {
			return err
		}
		if x.tunnel && in.Buffered() > 0 { // the first bytes of the tunnel
			b, _ := in.Peek(in.Buffered())
			_, _ = w.Write(b)
			_, _ = in.Discard(len(b))
		}
		if err := w.Flush(); err != nil {
			return err
		}
		if in.Buffered() > 0 {
			return errors.New("the server sends more than the response")
		}
		return nil
	}
}

// upstream passes the bytes of a tunnel to the server.
func (c *conn) upstream() error {
	if err := c.until(time.Time{}); err != nil {
		return err
	}
	if c.in == nil {
		c.in = readers.Get().(*bufio.Reader) //nolint:forcetypeassert // of this pool
		c.in.Reset(c.Client)
	}
	if n := c.in.Buffered(); n > 0 {
		b, _ := c.in.Peek(n)
		if _, err := (timed{c.server}).Write(b); err != nil {
			return errEnded
		}
	}
	c.release()
	if err := copyBytes(c.server, c.Client, nil); err != nil {
		return errEnded
	}
	_ = c.server.CloseWrite()
	<-c.ended
	return nil
}

// downstream passes the bytes of a tunnel to the client. hard is true if the connection has to be reset.
func (c *conn) downstream() (hard bool) {
	if err := copyBytes(c.Client, c.server, nil); err != nil {
		return true
	}
	_ = c.Client.CloseWrite()
	return false
}

var blocks = sync.Pool{New: func() any { return new([32 << 10]byte) }}

// copyBytes copies until the source sends FIN. It has memory only while there are bytes.
func copyBytes(to, from *sockets.Conn, see func([]byte) error) error {
	for {
		if more, err := from.Wait(); err != nil || !more {
			return err
		}
		b := blocks.Get().(*[32 << 10]byte) //nolint:forcetypeassert // of this pool
		n, err := from.Read(b[:])
		if err == nil && see != nil {
			err = see(b[:n])
		}
		if err == nil {
			_, err = timed{to}.Write(b[:n])
		}
		blocks.Put(b)
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// frames relays a connection of HTTP/2.
func (c *conn) frames() error {
	first, _ := c.in.Peek(c.in.Buffered())
	first = append([]byte(nil), first...)
	c.release()
	if c.server != nil {
		return errEnded // not after a request of HTTP/1
	}
	if err := c.until(time.Time{}); err != nil {
		return err
	}
	if err := c.dial(); err != nil {
		c.Report(Event{Outcome: Failed, Reason: err.Error()})
		close(c.ended)
		return errEnded
	}
	defer close(c.ended)
	err := frames.Relay(c.Client, c.server, first, &frames.Options{
		Decide: c.decide, Normalise: message.Normalise, Answered: c.answered,
	})
	var bad *frames.Error
	switch {
	case errors.As(err, &bad):
		c.Report(Event{Outcome: Invalid, Reason: bad.Error()})
		return nil // GOAWAY was sent
	case err != nil:
		return errEnded
	}
	return nil
}

// token is what answered needs to know about a request of HTTP/2.
type token struct {
	event Event
	began time.Time
}

func (c *conn) decide(q *frames.Request) frames.Verdict {
	t := &token{eventOf(Forwarded, q.Method, q.Path, q.Authority), time.Now()}
	rules, err := c.Rules(c.ctx)
	if err != nil {
		t.event.Outcome, t.event.Reason = Failed, err.Error()
		return frames.Verdict{Token: t}
	}
	v := rules.AllowsRequest(&layer7.Request{Method: q.Method, Path: q.Path, Host: q.Authority, Values: q.Values})
	if !v.Allowed {
		t.event.Outcome, t.event.Reason = Refused, "no rule allows it"
		return frames.Verdict{Token: t}
	}
	for _, m := range v.Mismatches {
		if !editable(m) {
			t.event.Outcome, t.event.Reason = Refused, "no rule allows it"
			return frames.Verdict{Token: t}
		}
		switch m.Mismatch {
		case layer7.Log:
			t.event.Reason = "header " + m.Name + " does not have the value of the rule"
		case layer7.Delete:
			q.Delete(m.Name)
		case layer7.Replace:
			q.Set(m.Name, m.Value)
		case layer7.Add:
			q.Add(m.Name, m.Value)
		}
	}
	return frames.Verdict{Allowed: true, Token: t}
}

func (c *conn) answered(x any, status int) {
	t := x.(*token) //nolint:forcetypeassert // of decide
	t.event.Status, t.event.Duration = status, time.Since(t.began)
	c.Report(t.event)
}

// tls relays a TLS connection, if the rules allow the server name of its ClientHello. It is never ended here.
func (c *conn) tls() error {
	began := time.Now()
	event := Event{Outcome: Invalid}
	rules, err := c.Rules(c.ctx)
	if err == nil && !c.ServerNames(rules) {
		err = errors.New("TLS, but the rules name no servers")
	}
	var h *hello.Hello
	var reader hello.Reader
	if err == nil {
		err = c.until(began.Add(HeaderTime))
	}
	for err == nil && h == nil {
		if _, err = c.in.Peek(1); err == nil {
			b, _ := c.in.Peek(c.in.Buffered())
			h, err = reader.Add(b)
			_, _ = c.in.Discard(len(b))
		}
	}
	if err == nil {
		if event.ServerName = h.ServerName; !rules.AllowsServerName(h.ServerName) {
			event.Outcome, err = Refused, errors.New("no rule allows the server name")
		}
	}
	if err == nil {
		if err = c.dial(); err != nil {
			event.Outcome = Failed
			close(c.ended)
		}
	}
	if event.Duration = time.Since(began); err != nil {
		event.Reason = err.Error()
		c.Report(event)
		return errEnded
	}
	event.Outcome = Forwarded
	c.Report(event)
	return c.passTLS(h, reader.Bytes())
}

// passTLS passes a TLS connection on. A second ClientHello must name the same server.
func (c *conn) passTLS(h *hello.Hello, first []byte) error {
	c.release()
	second := hello.NewSecond(h)
	checked := second.Server(nil)
	if done, err := second.Client(first[h.Length:]); err != nil {
		close(c.ended)
		return errEnded
	} else if done {
		checked = true
	}
	if _, err := (timed{c.server}).Write(first); err != nil {
		close(c.ended)
		return errEnded
	}
	go func() {
		defer close(c.ended)
		watched := checked
		err := copyBytes(c.Client, c.server, func(b []byte) error {
			if !watched {
				watched = second.Server(b)
			}
			return nil
		})
		if err != nil {
			sockets.Wake(c.Client.File)
			return
		}
		_ = c.Client.CloseWrite()
	}()
	if err := c.until(time.Time{}); err != nil {
		return err
	}
	watched := checked
	if err := copyBytes(c.server, c.Client, func(b []byte) (err error) {
		if !watched {
			watched, err = second.Client(b)
		}
		return err
	}); err != nil {
		return errEnded
	}
	_ = c.server.CloseWrite()
	<-c.ended
	return nil
}
