// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// process relays the connection between two sockets that it shares with other processes.
type process struct {
	down, up net.Conn
	done     chan error
	busy     chan bool
}

// share returns another descriptor of a socket. Closing it does not end the connection.
func share(t *testing.T, c net.Conn) net.Conn {
	t.Helper()
	f, err := c.(*net.TCPConn).File() //nolint:forcetypeassert // pair makes no others
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// one is a listener with one connection.
type one struct {
	net.Listener
	conn net.Conn
}

func (o *one) Accept() (net.Conn, error) {
	c := o.conn
	if o.conn = nil; c == nil {
		return nil, io.EOF
	}
	return c, nil
}

func (o *one) Close() error { return nil }

func begin(t *testing.T, down, up net.Conn, resume bool) *process {
	t.Helper()
	p := &process{share(t, down), share(t, up), make(chan error, 1), make(chan bool, 1<<16)}
	go func() {
		p.done <- Relay(p.down, p.up, nil, &Options{Decide: public, Resume: resume, Busy: func(b bool) { p.busy <- b }})
	}()
	return p
}

// kill ends the process once the connection is not busy.
func (p *process) kill(t *testing.T) {
	t.Helper()
	for last := true; last; {
		select {
		case last = <-p.busy:
			for len(p.busy) > 0 {
				last = <-p.busy
			}
		case <-time.After(patience):
			t.Fatal("the connection stays busy")
		}
	}
	p.end()
}

// end ends the process without an action on the connections.
func (p *process) end() {
	past := time.Unix(1, 0)
	_ = p.down.SetReadDeadline(past)
	_ = p.up.SetReadDeadline(past)
	<-p.done
}

func TestAnotherProcessContinuesAnIdleConnection(t *testing.T) {
	down, clientEnd := pair(t)
	up, serverEnd := pair(t)
	server := &http.Server{Handler: http.HandlerFunc(echo), Protocols: clearText(), ReadHeaderTimeout: patience}
	go func() { _ = server.Serve(&one{conn: serverEnd}) }()
	tr := &http.Transport{
		Protocols: clearText(),
		DialContext: func(context.Context, string, string) (net.Conn, error) {
			c := clientEnd
			clientEnd = nil
			if c == nil {
				t.Error("the client has lost its connection")
			}
			return c, nil
		},
	}
	defer tr.CloseIdleConnections()
	c := &http.Client{Transport: tr, Timeout: patience}
	p := begin(t, down, up, false)
	for i := range 20 {
		path := fmt.Sprint("/public/", i)
		a, err := c.Post("http://a.example"+path, "text/plain", strings.NewReader(strings.Repeat("x", i*9999)))
		if err != nil {
			t.Fatal(i, err)
		}
		b, err := io.ReadAll(a.Body)
		_ = a.Body.Close()
		if err != nil || len(b) != i*9999 || a.Header.Get("X-Uri") != path || a.Trailer.Get("X-Sum") == "" {
			t.Fatalf("%d: %v, %d bytes, %v", i, err, len(b), a.Header)
		}
		if status, _ := get(t, c, "http://a.example/secret"); status != 403 {
			t.Fatalf("%d: status %d", i, status)
		}
		p.kill(t)
		p = begin(t, down, up, true)
		p.busy <- false // it has not read anything
	}
	_ = down.Close()
	_ = up.Close()
	p.end()
}

func TestAConnectionWithAnOpenStreamIsBusy(t *testing.T) {
	down, clientEnd := pair(t)
	up, serverEnd := pair(t)
	p := begin(t, down, up, false)
	_ = down.Close()
	_ = up.Close()
	client, server := http2.NewFramer(clientEnd, clientEnd), http2.NewFramer(serverEnd, serverEnd)
	next := func(f *http2.Framer, want http2.FrameType) {
		t.Helper()
		if got, err := f.ReadFrame(); err != nil || got.Header().Type != want {
			t.Fatalf("%v, %v, want %v", got, err, want)
		}
	}
	// An end without bytes is busy for a moment while it tries to read, so only the last change counts.
	busy := false
	drain := func() {
		for len(p.busy) > 0 {
			busy = <-p.busy
		}
	}
	state := func(want bool) {
		t.Helper()
		for drain(); busy != want; drain() {
			select {
			case busy = <-p.busy:
			case <-time.After(patience):
				t.Fatalf("busy does not become %v", want)
			}
		}
	}
	same := func() {
		t.Helper()
		if drain(); !busy {
			t.Fatal("the connection is not busy")
		}
	}
	state(true)
	s := newScript()
	s.WriteString(Preface)
	greet(s)
	_, _ = clientEnd.Write(s.Bytes())
	_, _ = io.ReadFull(serverEnd, make([]byte, len(Preface)))
	next(server, http2.FrameSettings)
	_ = server.WriteSettings()
	_ = server.WriteSettingsAck()
	next(client, http2.FrameSettings)
	next(client, http2.FrameSettings)
	same() // the client has not acknowledged
	_ = client.WriteSettingsAck()
	s.encoder.SetMaxDynamicTableSize(0)
	next(server, http2.FrameSettings)
	state(false)

	_ = client.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: s.block(post1...), EndHeaders: true})
	next(server, http2.FrameHeaders)
	state(true)
	ok := []byte{0x88}
	_ = server.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: ok, EndHeaders: true, EndStream: true})
	next(client, http2.FrameHeaders)
	same() // the client still sends
	_ = client.WriteData(1, true, nil)
	next(server, http2.FrameData)
	state(false)

	// half a frame, and half a header block
	_, _ = clientEnd.Write([]byte{0, 0, 0})
	state(true)
	_, _ = clientEnd.Write([]byte{0x77, 0, 0, 0, 0, 0}) // an extension, dropped
	state(false)
	block := s.block(get1...)
	_ = client.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, BlockFragment: block[:5], EndStream: true})
	state(true)
	_ = client.WriteContinuation(3, true, block[5:])
	next(server, http2.FrameHeaders)
	_ = server.WriteHeaders(http2.HeadersFrameParam{StreamID: 3, BlockFragment: ok, EndStream: true})
	next(client, http2.FrameHeaders)
	same()
	_ = server.WriteContinuation(3, true, nil)
	next(client, http2.FrameContinuation)
	state(false)

	// a header block of the server on a stream that has ended
	_ = client.WriteHeaders(http2.HeadersFrameParam{StreamID: 5, BlockFragment: block, EndHeaders: true})
	_ = client.WriteRSTStream(5, http2.ErrCodeCancel)
	next(server, http2.FrameHeaders)
	next(server, http2.FrameRSTStream)
	state(false)
	_ = server.WriteHeaders(http2.HeadersFrameParam{StreamID: 5, BlockFragment: ok})
	next(client, http2.FrameHeaders)
	state(true)
	_ = client.WriteHeaders(http2.HeadersFrameParam{
		StreamID: 7, BlockFragment: s.block(at("/secret")...), EndHeaders: true, EndStream: true,
	})
	_ = client.WritePing(false, [8]byte{})
	next(server, http2.FramePing)
	same()
	_ = server.WriteContinuation(5, true, nil)
	next(client, http2.FrameContinuation) // the refusal does not fall into the header block
	next(client, http2.FrameHeaders)
	state(false)
	p.end()
}
