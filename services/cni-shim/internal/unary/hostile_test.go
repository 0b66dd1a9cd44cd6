// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package unary

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/services/cni-shim/internal/message"
)

// script has the frames that a server sends after it has read a request.
type script struct {
	bytes.Buffer
	*http2.Framer
	table *hpack.Encoder
	block bytes.Buffer
}

func newScript() *script {
	s := &script{}
	s.Framer = http2.NewFramer(&s.Buffer, nil)
	s.AllowIllegalWrites = true
	s.table = hpack.NewEncoder(&s.block)
	return s
}

// pairsOf encodes headers, given as name and value in turn.
func (s *script) pairsOf(all ...string) []byte {
	s.block.Reset()
	for i := 0; i < len(all); i += 2 {
		if err := s.table.WriteField(hpack.HeaderField{Name: all[i], Value: all[i+1]}); err != nil {
			panic(err)
		}
	}
	return bytes.Clone(s.block.Bytes())
}

// headers sends them in one frame.
func (s *script) headers(end bool, all ...string) *script {
	return s.frame(http2.FrameHeaders, endFlag(end)|http2.FlagHeadersEndHeaders, 1, s.pairsOf(all...))
}

func endFlag(end bool) http2.Flags {
	if end {
		return http2.FlagHeadersEndStream
	}
	return 0
}

// frame sends any frame.
func (s *script) frame(kind http2.FrameType, flags http2.Flags, stream uint32, payload []byte) *script {
	if err := s.WriteRawFrame(kind, flags, stream, payload); err != nil {
		panic(err)
	}
	return s
}

func (s *script) data(b []byte) *script { return s.frame(http2.FrameData, 0, 1, b) }

// begin is the beginning of a good answer.
func (s *script) begin() *script {
	return s.headers(false, ":status", "200", "content-type", "application/grpc")
}

// end is its end.
func (s *script) end() *script { return s.headers(true, "grpc-status", "0", "grpc-message", "") }

// answer is a message of one reclaimed owner, with its prefix.
func answer(owner string) []byte {
	m := message.Marshal(&message.ReclaimEndpointsResponse{Reclaimed: []*message.Owner{{ContainerID: owner}}})
	return append([]byte{0, byte(len(m) >> 24), byte(len(m) >> 16), byte(len(m) >> 8), byte(len(m))}, m...)
}

func good() *script { return newScript().begin().data(answer("o")).end() }

// play serves one connection after the other: settings, then, after the request, the output of say, then the end,
// unless hold is set.
func play(t testing.TB, path string, say func(io.Writer), hold bool) {
	t.Helper()
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			func() {
				defer conn.Close()
				in := http2.NewFramer(conn, conn)
				if _, err := io.CopyN(io.Discard, conn, int64(len(preface))); err != nil || in.WriteSettings() != nil {
					return
				}
				for {
					f, err := in.ReadFrame()
					if err != nil {
						return
					}
					if d, ok := f.(*http2.DataFrame); ok && d.StreamEnded() {
						break
					}
				}
				gone := make(chan struct{})
				go func() { defer close(gone); io.Copy(io.Discard, conn) }() //nolint:errcheck // until the client goes
				say(conn)
				if hold {
					<-gone
				}
				conn.Close()
				<-gone
			}()
		}
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
}

// differences are the cases in which grpc-go's client returns another code.
var differences = map[string]Code{
	"data of another stream":  Unavailable, // grpc-go skips it; HTTP/2 wants an error
	"a window opened too far": Unavailable, // grpc-go does not look
	"a call's opened too far": Unavailable, // nor here
	"no HTTP status":          Internal,    // grpc-go does without it
}

const (
	grpcType   = "application/grpc"
	endHeaders = http2.FlagHeadersEndHeaders
	endStream  = http2.FlagDataEndStream
)

func sends() *script { return newScript() }

// raw is a script that begins with that frame.
func raw(kind http2.FrameType, flags http2.Flags, stream uint32, payload []byte) *script {
	return newScript().frame(kind, flags, stream, payload)
}

// refusal is an answer of trailers alone.
func refusal(all ...string) *script {
	return newScript().headers(true, append([]string{":status", "200", "content-type", grpcType}, all...)...)
}

func padded(b []byte, pad int) []byte {
	return append(append([]byte{byte(pad)}, b...), make([]byte, pad)...)
}

func bytewise(b []byte) *script {
	s := newScript().begin()
	for _, x := range b {
		s.data([]byte{x})
	}
	return s.end()
}

func paddedHeaders() *script {
	s := newScript()
	b := append(make([]byte, 5), s.pairsOf(":status", "200", "content-type", grpcType)...)
	return s.frame(http2.FrameHeaders, endHeaders|http2.FlagHeadersPadded|http2.FlagHeadersPriority, 1, padded(b, 9))
}

func manyFrames() *script {
	s := newScript()
	b := s.pairsOf(":status", "200", "content-type", grpcType, "a", strings.Repeat("x", 999))
	s.frame(http2.FrameHeaders, 0, 1, b[:1])
	for _, x := range b[1:] {
		s.frame(http2.FrameContinuation, 0, 1, []byte{x})
	}
	return s.frame(http2.FrameContinuation, http2.FlagContinuationEndHeaders, 1, nil)
}

func oddAnswers() map[string]*script {
	details := base64.RawStdEncoding.EncodeToString(message.Marshal(&message.Status{Code: 10, Message: "race"}))
	whole := answer("o")
	return map[string]*script{
		"good":                   good(),
		"a byte in each frame":   bytewise(whole),
		"padded headers":         paddedHeaders().data(whole).end(),
		"headers of many frames": manyFrames().data(whole).end(),
		"empty frames of data":   sends().begin().data(nil).data(whole).data(nil).end(),
		"padding": sends().begin().frame(http2.FrameData, http2.FlagDataPadded, 1, padded(whole,
			255)).end(),
		"padding alone": sends().begin().frame(http2.FrameData, http2.FlagDataPadded, 1, padded(nil,
			3)).data(whole).end(),
		"trailers alone":           refusal("grpc-status", "9", "grpc-message", "a%20b"),
		"trailers alone, well":     refusal("grpc-status", "0"),
		"details":                  refusal("grpc-status", "10", "grpc-status-details-bin", details),
		"details of another code":  refusal("grpc-status", "9", "grpc-status-details-bin", details),
		"details that are no text": refusal("grpc-status", "9", "grpc-status-details-bin", "!"),
		"details that are cut":     refusal("grpc-status", "9", "grpc-status-details-bin", "Cg"),
		"an odd status":            refusal("grpc-status", "x"),
		"a negative status":        refusal("grpc-status", "-1"),
		"no status":                sends().begin().data(whole).headers(true, "a", "b"),
		"no trailers":              sends().begin().frame(http2.FrameData, endStream, 1, whole),
		"an error after an answer": sends().begin().data(whole).headers(true, "grpc-status", "5"),
		"no answer":                sends().begin().end(),
		"a cut answer":             sends().begin().data(whole[:len(whole)-1]).end(),
		"a cut prefix":             sends().begin().data(whole[:3]).end(),
		"two answers":              sends().begin().data(whole).data(whole).end(),
		"an invalid answer":        sends().begin().data([]byte{0, 0, 0, 0, 1, 0xff}).end(),
		"a huge length":            sends().begin().data([]byte{0, 0xff, 0xff, 0xff, 0xff}).end(),
		"above the limit":          sends().begin().data([]byte{0, 1, 0, 0, 1}).end(),
		"compressed":               sends().begin().data(append([]byte{1}, whole[1:]...)).end(),
		"compressed by snappy": sends().headers(false, ":status", "200", "content-type", grpcType, "grpc-encoding",
			"snappy").
			data(append([]byte{1}, whole[1:]...)).end(),
		"an odd flag": sends().begin().data(append([]byte{7}, whole[1:]...)).end(),
		"content type with +proto": sends().headers(false, ":status", "200", "content-type",
			grpcType+"+proto").data(whole).end(),
		"content type with ;": sends().headers(false, ":status", "200", "content-type",
			grpcType+";x").data(whole).end(),
		"another content type": sends().headers(true, ":status", "200", "content-type", "text/html"),
		"a page": sends().headers(false, ":status", "200", "content-type", "text/html").data([]byte("<html>")).
			headers(true, "a", "b"),
		"no content type": sends().headers(true, ":status", "200"),
	}
}

func oddHTTP() map[string]*script {
	whole, old := answer("o"), newScript()
	old.Buffer.WriteString("HTTP/1.1 400 Bad Request\r\n\r\n")
	return map[string]*script{
		"400": sends().headers(true, ":status", "400"),
		"401": sends().headers(true, ":status", "401"),
		"403": sends().headers(true, ":status", "403"),
		"404": sends().headers(true, ":status", "404", "content-type", "text/plain"),
		"404 and a text": sends().headers(false, ":status", "404").frame(http2.FrameData, endStream, 1,
			[]byte("404")),
		"429":                  sends().headers(true, ":status", "429"),
		"500":                  sends().headers(true, ":status", "500"),
		"502":                  sends().headers(true, ":status", "502"),
		"503":                  sends().headers(true, ":status", "503"),
		"504":                  sends().headers(true, ":status", "504"),
		"no HTTP status":       sends().headers(true, "content-type", grpcType, "grpc-status", "5"),
		"informational":        sends().headers(false, ":status", "103", "link", "x").begin().data(whole).end(),
		"an informational end": sends().headers(true, ":status", "103"),
		"headers twice":        sends().begin().begin().data(whole).end(),
		"upper case": sends().headers(true, ":status", "200", "Content-Type", grpcType, "grpc-status",
			"0"),
		"a pseudo header at last":  sends().headers(true, "content-type", grpcType, ":status", "200"),
		"an unknown pseudo header": sends().headers(true, ":status", "200", ":x", "y", "content-type", grpcType),
		"HTTP/1.1":                 old,
	}
}

func oddFrames() map[string]*script {
	whole, b8, huge := answer("o"), make([]byte, 8), []byte{0x7f, 0xff, 0xff, 0xff}
	windows := []byte{0, 5, 0, 0, 0x40, 0, 0, 4, 0, 0, 0, 0, 0xf0, 0, 1, 2, 3, 4}
	all := map[string]*script{
		"data before headers":       sends().data(whole),
		"data of no stream":         sends().begin().frame(http2.FrameData, 0, 0, whole),
		"data of another stream":    sends().begin().frame(http2.FrameData, 0, 3, whole).data(whole).end(),
		"padding beyond the frame":  sends().begin().frame(http2.FrameData, http2.FlagDataPadded, 1, []byte{9, 1, 2}),
		"padding without a length":  sends().begin().frame(http2.FrameData, http2.FlagDataPadded, 1, nil),
		"priority that is cut":      raw(http2.FrameHeaders, endHeaders|http2.FlagHeadersPriority, 1, []byte{1}),
		"a frame too long":          sends().begin().data(make([]byte, 16<<10+1)),
		"bad HPACK":                 raw(http2.FrameHeaders, endHeaders, 1, []byte{0x80}),
		"HPACK that is cut":         raw(http2.FrameHeaders, endHeaders, 1, []byte{0x40, 0x05, 'a'}),
		"a larger table":            raw(http2.FrameHeaders, endHeaders, 1, []byte{0x3f, 0xff, 0xff, 0x03}),
		"a continuation of nothing": raw(http2.FrameContinuation, http2.FlagContinuationEndHeaders, 1, nil),
		"a ping inside headers":     raw(http2.FrameHeaders, 0, 1, []byte{0x88}).frame(http2.FramePing, 0, 0, b8),
		"a promise": raw(http2.FramePushPromise, http2.FlagPushPromiseEndHeaders, 1, []byte{
			0, 0, 0,
			2,
		}),
		"pings": raw(http2.FramePing, 0, 0, b8).begin().frame(http2.FramePing, 0, 0,
			b8).data(whole).end(),
		"the answer to no ping":     raw(http2.FramePing, http2.FlagPingAck, 0, b8).begin().data(whole).end(),
		"a ping that is short":      raw(http2.FramePing, 0, 0, make([]byte, 7)),
		"a ping of a stream":        raw(http2.FramePing, 0, 1, b8),
		"settings":                  raw(http2.FrameSettings, 0, 0, windows).begin().data(whole).end(),
		"settings that are cut":     raw(http2.FrameSettings, 0, 0, []byte{0, 5, 0}),
		"settings of a stream":      raw(http2.FrameSettings, 0, 1, nil),
		"settings in an answer":     raw(http2.FrameSettings, http2.FlagSettingsAck, 0, make([]byte, 6)),
		"a window too large":        raw(http2.FrameSettings, 0, 0, []byte{0, 4, 0xff, 0xff, 0xff, 0xff}),
		"a window opened too far":   raw(http2.FrameWindowUpdate, 0, 0, huge).begin().data(whole).end(),
		"a call's opened too far":   raw(http2.FrameWindowUpdate, 0, 1, huge).begin().data(whole).end(),
		"a window opened by 0":      raw(http2.FrameWindowUpdate, 0, 0, make([]byte, 4)),
		"a window's opening is cut": raw(http2.FrameWindowUpdate, 0, 0, make([]byte, 3)),
		"a frame of no known type":  raw(99, 0xff, 1, []byte("x")).frame(99, 0, 0, nil).begin().data(whole).end(),
		"a priority":                raw(http2.FramePriority, 0, 1, make([]byte, 5)).begin().data(whole).end(),
		"a reset that is cut":       raw(http2.FrameRSTStream, 0, 1, make([]byte, 3)),
		"a reset of no stream":      raw(http2.FrameRSTStream, 0, 0, make([]byte, 4)),
		"a goodbye before the call": raw(http2.FrameGoAway, 0, 0, b8),
		"a goodbye after the call": raw(http2.FrameGoAway, 0, 0, []byte{
			0, 0, 0, 1, 0, 0, 0, 0,
			'b',
		}).begin().data(whole).end(),
		"a goodbye that is cut": raw(http2.FrameGoAway, 0, 0, make([]byte, 7)),
		"a goodbye of a stream": raw(http2.FrameGoAway, 0, 1, b8),
		"nothing":               sends(),
	}
	for code := range byte(15) {
		all[fmt.Sprint("reset ", code)] = newScript().begin().frame(http2.FrameRSTStream, 0, 1, []byte{0, 0, 0, code})
	}
	return all
}

// TestOddServersAreReadAsGRPCReadsThem: whatever bytes a server sends, and however they are split, the call ends with
// the code of grpc-go's client.
func TestOddServersAreReadAsGRPCReadsThem(t *testing.T) {
	for _, scripts := range []map[string]*script{oddAnswers(), oddHTTP(), oddFrames()} {
		for name, s := range scripts {
			t.Run(name, func(t *testing.T) {
				want, differs := differences[name]
				compare(t, s.Bytes(), want, differs)
			})
		}
	}
}

func compare(t *testing.T, sent []byte, want Code, differs bool) {
	t.Helper()
	path := socket(t)
	var size atomic.Int64
	size.Store(int64(len(sent) + 1))
	play(t, path, func(w io.Writer) {
		chunk := int(size.Load())
		for b := sent; len(b) > 0; b = b[min(chunk, len(b)):] {
			if _, err := w.Write(b[:min(chunk, len(b))]); err != nil {
				return
			}
		}
	}, false)
	if !differs {
		want = Code(status.Code(reference(patience(t), t, path)))
	}
	for _, chunk := range []int{1, 7, 100, len(sent) + 1} {
		size.Store(int64(chunk))
		owners, err := reclaim(patience(t), client(t, path))
		if CodeOf(err) != want {
			t.Errorf("in pieces of %d: %v, want %s", chunk, err, want)
		}
		if want == OK && (len(owners) != 1 || owners[0] != "o") {
			t.Errorf("in pieces of %d: answer %q", chunk, owners)
		}
	}
}

// TestServerThatDiesIsUnavailable: the call fails with UNAVAILABLE if the server dies after any byte of its answer.
func TestServerThatDiesIsUnavailable(t *testing.T) {
	sent := good().Bytes()
	path := socket(t)
	var cut atomic.Int64
	play(t, path, func(w io.Writer) { w.Write(sent[:cut.Load()]) }, false) //nolint:errcheck // the client looks
	for ; cut.Load() < int64(len(sent)); cut.Add(1) {
		_, err := reclaim(patience(t), client(t, path))
		if e := asError(t, err); e.Code != Unavailable || e.Unsent || e.Cause != nil {
			t.Errorf("after %d bytes of %d: %v, unsent %v", cut.Load(), len(sent), err, e.Unsent)
		}
	}
	if _, err := reclaim(patience(t), client(t, path)); err != nil {
		t.Errorf("all of it: %v", err)
	}
}

// TestRefusedCallIsUnsent: if the server reports that a call has not begun, the client reports that the call was not
// executed.
func TestRefusedCallIsUnsent(t *testing.T) {
	for name, s := range map[string]*script{
		"goodbye": newScript().frame(http2.FrameGoAway, 0, 0, make([]byte, 8)),
		"refused": newScript().frame(http2.FrameRSTStream, 0, 1, []byte{0, 0, 0, 7}),
	} {
		path := socket(t)
		play(t, path, func(w io.Writer) { w.Write(s.Bytes()) }, true) //nolint:errcheck // the client looks
		_, err := reclaim(patience(t), client(t, path))
		if e := asError(t, err); e.Code != Unavailable || !e.Unsent {
			t.Errorf("%s: %v, unsent %v", name, err, e.Unsent)
		}
	}
	// A reset with another code does not tell what the server has done.
	for _, code := range []byte{0, 2, 8} {
		path := socket(t)
		reset := newScript().frame(http2.FrameRSTStream, 0, 1, []byte{0, 0, 0, code})
		play(t, path, func(w io.Writer) { w.Write(reset.Bytes()) }, true) //nolint:errcheck // the client looks
		_, err := reclaim(patience(t), client(t, path))
		if e := asError(t, err); e.Unsent {
			t.Errorf("reset with code %d: %v is taken for a call that was not sent", code, err)
		}
	}
	// One that closes each connection at once has read nothing, or may have.
	path := socket(t)
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	for range 20 {
		if _, err := reclaim(patience(t), client(t, path)); CodeOf(err) != Unavailable {
			t.Errorf("%v", err)
		}
	}
}

// TestEndlessServersAreGivenUp: the client gives up long before the deadline, and the server's data does not fill the
// memory.
func TestEndlessServersAreGivenUp(t *testing.T) {
	forever := func(first, then []byte) func(io.Writer) {
		return func(w io.Writer) {
			_, err := w.Write(first)
			for err == nil {
				_, err = w.Write(then)
			}
		}
	}
	open := newScript().frame(http2.FrameHeaders, 0, 1, []byte{0x88})
	one := func(kind http2.FrameType, flags http2.Flags, stream uint32, payload []byte) []byte {
		return newScript().frame(kind, flags, stream, payload).Bytes()
	}
	// An entry of 4 KB in the table, and then its number again and again.
	bomb := append(append([]byte{0x40, 1, 'a', 0x7f, 0x81, 0x1e}, bytes.Repeat([]byte{'x'}, 4096-256)...), 0)
	bomb = append([]byte{0x88}, bomb[:len(bomb)-1]...)
	begin := newScript().begin()
	for name, c := range map[string]struct {
		say  func(io.Writer)
		want Code
	}{
		"continuations": {
			forever(open.Bytes(), one(http2.FrameContinuation, 0, 1, make([]byte, 1000))),
			ResourceExhausted,
		},
		"empty continuations": {forever(open.Bytes(), one(http2.FrameContinuation, 0, 1, nil)), ResourceExhausted},
		"pings":               {forever(nil, one(http2.FramePing, 0, 0, make([]byte, 8))), ResourceExhausted},
		"settings":            {forever(nil, one(http2.FrameSettings, 0, 0, nil)), ResourceExhausted},
		"unknown frames":      {forever(nil, one(77, 0, 0, make([]byte, 100))), ResourceExhausted},
		"empty data":          {forever(begin.Bytes(), one(http2.FrameData, 0, 1, nil)), ResourceExhausted},
		"padding": {forever(begin.Bytes(), one(http2.FrameData, http2.FlagDataPadded, 1, make([]byte,
			1))), ResourceExhausted},
		"first words": {forever(nil, newScript().headers(false, ":status", "103").Bytes()), ResourceExhausted},
		"a refusal's text": {
			forever(newScript().headers(false, ":status", "500").Bytes(), one(http2.FrameData, 0, 1, make([]byte,
				1000))),
			ResourceExhausted,
		},
		"data": {forever(newScript().begin().data([]byte{0, 0, 0, 0, 1}).Bytes(), one(http2.FrameData,
			0, 1, make([]byte, 1000))), Internal},
		"a bomb in the table": {forever(one(http2.FrameHeaders, 0, 1, bomb), one(http2.FrameContinuation,
			http2.FlagContinuationEndHeaders, 1, bytes.Repeat([]byte{0xbe}, 10_000))), ResourceExhausted},
		"a long value": {
			forever(one(http2.FrameHeaders, 0, 1, []byte{0x40, 1, 'a', 0x7f, 0xff, 0xff, 0xff, 0x7f}),
				one(http2.FrameContinuation, 0, 1, make([]byte, 16000))),
			ResourceExhausted,
		},
	} {
		t.Run(name, func(t *testing.T) {
			path := socket(t)
			play(t, path, c.say, true)
			_, err := reclaim(patience(t), client(t, path))
			if CodeOf(err) != c.want {
				t.Errorf("%v, want %s", err, c.want)
			}
		})
	}
}

// pipe is a connection whose other end has sent all of b and sends no more.
func pipe(t testing.TB, b []byte) *os.File {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	other := os.NewFile(uintptr(fds[1]), "server")
	t.Cleanup(func() { other.Close() })
	if _, err := other.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := unix.Shutdown(fds[1], unix.SHUT_WR); err != nil {
		t.Fatal(err)
	}
	return os.NewFile(uintptr(fds[0]), "client")
}

// FuzzAnswer: for any response, a call neither panics nor hangs, and returns only data that was sent.
func FuzzAnswer(f *testing.F) {
	f.Add(good().Bytes(), 10)
	f.Add(newScript().headers(true, ":status", "200", "content-type", "application/grpc", "grpc-status", "9",
		"grpc-message", "%41"+"%", "grpc-status-details-bin", "CAk").Bytes(), 0)
	f.Add(newScript().frame(http2.FrameSettings, 0, 0, []byte{
		0, 4, 0, 0, 0, 1, 0, 5, 0, 0, 0x50,
		0,
	}).frame(http2.FrameWindowUpdate, 0, 1, []byte{0, 0, 0, 9}).Bytes(), 70_000)
	f.Add(newScript().begin().frame(http2.FrameData, http2.FlagDataPadded, 1, []byte{1, 0, 0}).frame(http2.FramePing,
		0, 0, make([]byte, 8)).end().Bytes(), 5)
	f.Add(newScript().frame(http2.FrameHeaders, 0, 1, []byte{0x88}).frame(http2.FrameContinuation, 4, 1, []byte{
		0x5f,
		0x10,
	}).Bytes(), 5)
	f.Add(newScript().frame(http2.FrameGoAway, 0, 0, make([]byte, 9)).Bytes(), 0)
	f.Fuzz(func(t *testing.T, sent []byte, size int) {
		if len(sent) > 100<<10 || size < 0 || size > 100<<10 {
			return // more than the socket's buffer holds
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		file := pipe(t, sent)
		defer file.Close()
		got, err := exchange(ctx, file, "/s/m", make([]byte, size))
		if err == nil {
			if !bytes.Contains(sent, []byte{
				0, byte(len(got) >> 24), byte(len(got) >> 16), byte(len(got) >> 8),
				byte(len(got)),
			}) && len(got) > 0 {
				t.Errorf("an answer of %d bytes that was not sent", len(got))
			}
			return
		}
		e, ok := errors.AsType[*Error](err)
		if !ok || e.Code == OK || ctx.Err() != nil {
			t.Errorf("%v", err)
		}
	})
}
