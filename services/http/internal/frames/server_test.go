// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"bytes"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// answer sends the frames of a server to a client that has opened stream 1, and returns what the client reads until the
// connection ends or the server's PING arrives.
func answer(t *testing.T, o *Options, write func(*script)) (client []string, raw []byte, err error) {
	t.Helper()
	down, clientEnd := pair(t)
	up, serverEnd := pair(t)
	relayed := make(chan error, 1)
	go func() { relayed <- Relay(down, up, nil, o) }()

	c := newScript()
	c.WriteString(Preface)
	greet(c)
	c.request(1, true, get1...)
	if _, err := clientEnd.Write(c.Bytes()); err != nil {
		t.Fatal(err)
	}
	_, _ = io.ReadFull(serverEnd, make([]byte, len(Preface)))
	fr := reader(serverEnd, io.Discard)
	for {
		f, err := fr.ReadFrame()
		if err != nil {
			t.Fatal(err)
		}
		if f.Header().Type == http2.FrameHeaders {
			break
		}
	}
	s := newScript()
	write(s)
	last := [8]byte{'l', 'a', 's', 't'}
	_ = s.WritePing(false, last)
	go func() { _, _ = serverEnd.Write(s.Bytes()) }()

	var got bytes.Buffer
	fr = reader(io.TeeReader(clientEnd, &got), io.Discard)
	for {
		f, err := fr.ReadFrame()
		if err != nil {
			break
		}
		if p, ok := f.(*http2.PingFrame); ok && p.Data == last {
			break
		}
		text := describe(f)
		if s, ok := f.(*http2.SettingsFrame); ok {
			text = "SETTINGS"
			_ = s.ForeachSetting(func(v http2.Setting) error {
				text += " " + v.String()
				return nil
			})
			if s.IsAck() {
				text += " ACK"
			}
		}
		client = append(client, text)
	}
	_ = clientEnd.Close()
	_ = serverEnd.Close()
	return client, got.Bytes(), <-relayed
}

func TestFramesOfTheServerPassAsBytes(t *testing.T) {
	frames := func(s *script) {
		block := s.block(":status", "200", "content-type", "text/plain", "x", strings.Repeat("y", 100))
		_ = s.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block[:9], PadLength: 7})
		_ = s.WriteContinuation(1, false, block[9:50])
		_ = s.WriteContinuation(1, true, block[50:])
		_ = s.WriteDataPadded(1, false, []byte("hello"), make([]byte, 3))
		_ = s.WriteWindowUpdate(0, 77)
		_ = s.WriteWindowUpdate(1, 78)
		_ = s.WriteData(1, false, make([]byte, maxFrame))
		s.request(1, true, "grpc-status", "0")
		_ = s.WriteRSTStream(1, http2.ErrCodeNo)
		_ = s.WriteGoAway(1, http2.ErrCodeNo, []byte("bye"))
	}
	client, raw, _ := answer(t, &Options{Decide: public}, func(s *script) {
		_ = s.WriteSettings()
		frames(s)
	})
	want := newScript()
	_ = want.WriteSettings(http2.Setting{ID: http2.SettingHeaderTableSize, Val: 0},
		http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: MaxStreams})
	frames(want)
	if !bytes.HasPrefix(raw, want.Bytes()) {
		t.Errorf("the client reads %q", client)
	}
	if last := client[len(client)-1]; last != "GOAWAY NO_ERROR" {
		t.Errorf("the last frame is %s", last)
	}
}

func TestSettingsOfTheServer(t *testing.T) {
	set := func(id http2.SettingID, value uint32) http2.Setting { return http2.Setting{ID: id, Val: value} }
	for _, c := range []struct {
		first []http2.Setting
		want  string
	}{
		{nil, "SETTINGS [HEADER_TABLE_SIZE = 0] [MAX_CONCURRENT_STREAMS = 1024]"},
		{
			[]http2.Setting{set(http2.SettingHeaderTableSize, 65536), set(http2.SettingMaxFrameSize, 1<<20)},
			"SETTINGS [HEADER_TABLE_SIZE = 0] [MAX_CONCURRENT_STREAMS = 1024]",
		},
		{
			[]http2.Setting{set(http2.SettingMaxConcurrentStreams, 7), set(http2.SettingEnablePush, 0)},
			"SETTINGS [MAX_CONCURRENT_STREAMS = 7] [HEADER_TABLE_SIZE = 0]",
		},
		{
			[]http2.Setting{set(http2.SettingMaxConcurrentStreams, 1<<31), set(http2.SettingInitialWindowSize, 5), set(8, 1)},
			"SETTINGS [MAX_CONCURRENT_STREAMS = 1024] [INITIAL_WINDOW_SIZE = 5] [ENABLE_CONNECT_PROTOCOL = 1]" +
				" [HEADER_TABLE_SIZE = 0]",
		},
	} {
		client, _, _ := answer(t, &Options{Decide: public}, func(s *script) { _ = s.WriteSettings(c.first...) })
		if !slices.Equal(client, []string{c.want}) {
			t.Errorf("%v: %q, want %q", c.first, client, c.want)
		}
	}
}

func TestFramesOfTheServerThatEndAConnection(t *testing.T) {
	start := time.Unix(1_000_000, 0)
	now := func() time.Time { return start }
	for _, c := range []struct {
		about string
		write func(*script)
		want  http2.ErrCode
	}{
		{"no SETTINGS", func(s *script) { s.request(1, true, ":status", "200") }, http2.ErrCodeProtocol},
		{"an acknowledgement first", func(s *script) { _ = s.WriteSettingsAck() }, http2.ErrCodeProtocol},
		{"two acknowledgements", func(s *script) {
			_ = s.WriteSettings()
			_ = s.WriteSettingsAck()
			_ = s.WriteSettingsAck()
		}, http2.ErrCodeProtocol},
		{"ENABLE_PUSH", func(s *script) {
			_ = s.WriteSettings(http2.Setting{ID: http2.SettingEnablePush, Val: 1})
		}, http2.ErrCodeProtocol},
		{"PUSH_PROMISE", func(s *script) {
			_ = s.WriteSettings()
			_ = s.WritePushPromise(http2.PushPromiseParam{StreamID: 1, PromiseID: 2, EndHeaders: true})
		}, http2.ErrCodeProtocol},
		{"a large frame", func(s *script) {
			_ = s.WriteSettings()
			_ = s.WriteRawFrame(http2.FrameData, 0, 1, make([]byte, maxFrame+1))
		}, http2.ErrCodeFrameSize},
		{"CONTINUATION outside a header block", func(s *script) {
			_ = s.WriteSettings()
			_ = s.WriteContinuation(1, true, nil)
		}, http2.ErrCodeProtocol},
		{"HEADERS with too much padding", func(s *script) {
			_ = s.WriteSettings()
			_ = s.WriteRawFrame(http2.FrameHeaders, http2.FlagHeadersPadded, 1, []byte{9})
		}, http2.ErrCodeProtocol},
		{"PINGs", func(s *script) {
			_ = s.WriteSettings()
			for range MaxControls + 1 {
				_ = s.WritePing(false, [8]byte{})
			}
		}, http2.ErrCodeEnhanceYourCalm},
		{"SETTINGS", func(s *script) {
			for range MaxSettings + 1 {
				_ = s.WriteSettings()
			}
		}, http2.ErrCodeEnhanceYourCalm},
	} {
		t.Run(c.about, func(t *testing.T) {
			client, _, err := answer(t, &Options{Decide: public, Now: now}, c.write)
			var e *Error
			if !errors.As(err, &e) || e.Code != c.want || !e.Server {
				t.Errorf("%v, want %v", err, c.want)
			}
			if len(client) == 0 || client[len(client)-1] != "GOAWAY "+c.want.String() {
				t.Errorf("the client reads %.300q", client)
			}
		})
	}
}

func TestAFrameInAHeaderBlockOfTheServerEndsTheConnection(t *testing.T) {
	_, _, err := answer(t, &Options{Decide: public}, func(s *script) {
		_ = s.WriteSettings()
		_ = s.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: s.block(":status", "200")})
		_ = s.WritePing(false, [8]byte{})
	})
	var e *Error
	if !errors.As(err, &e) || e.Code != http2.ErrCodeProtocol || !e.Server {
		t.Errorf("%v", err)
	}
}

func TestStatusOfResponses(t *testing.T) {
	for _, c := range []struct {
		about string
		write func(*script)
		want  int
	}{
		{"a static entry", func(s *script) { s.request(1, true, ":status", "204") }, 204},
		{"a literal", func(s *script) { s.request(1, true, ":status", "418") }, 418},
		{"behind an interim response", func(s *script) {
			s.request(1, false, ":status", "103")
			s.request(1, false, ":status", "100")
			s.request(1, true, ":status", "500")
		}, 500},
		{"trailers do not count", func(s *script) {
			s.request(1, false, ":status", "200")
			s.request(1, true, "grpc-status", "5")
		}, 200},
		{"a reset", func(s *script) { _ = s.WriteRSTStream(1, http2.ErrCodeRefusedStream) }, 0},
		{"GOAWAY", func(s *script) { _ = s.WriteGoAway(0, http2.ErrCodeNo, nil) }, 0},
		{"the end of the connection", func(*script) {}, 0},
		{"with padding and priority", func(s *script) {
			_ = s.WriteHeaders(http2.HeadersFrameParam{
				StreamID: 1, BlockFragment: s.block(":status", "404"), EndHeaders: true, EndStream: true, PadLength: 9,
				Priority: http2.PriorityParam{StreamDep: 9},
			})
		}, 404},
	} {
		t.Run(c.about, func(t *testing.T) {
			var mu sync.Mutex
			var got []int
			o := &Options{
				Decide: func(*Request) Verdict { return Verdict{Allowed: true, Token: "one"} },
				Answered: func(token any, status int) {
					mu.Lock()
					defer mu.Unlock()
					if token != "one" {
						t.Errorf("token %v", token)
					}
					got = append(got, status)
				},
			}
			_, _, _ = answer(t, o, func(s *script) {
				_ = s.WriteSettings()
				c.write(s)
			})
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(got, []int{c.want}) {
				t.Errorf("%v, want %d", got, c.want)
			}
		})
	}
}

func TestFormsOfAStatus(t *testing.T) {
	huffman := hpack.AppendHuffmanString(nil, "307")
	name := hpack.AppendHuffmanString(nil, ":status")
	for _, c := range []struct {
		block []byte
		want  int
	}{
		{[]byte{0x88}, 200},
		{[]byte{0x8e, 0x8f}, 500},
		{[]byte{0x20, 0x8d}, 404},
		{[]byte{0x3f, 0xe1, 0x1f, 0x20, 0x8d}, 404},
		{[]byte{0x48, 3, '3', '0', '2'}, 302},
		{[]byte{0x08, 3, '3', '0', '2'}, 302},
		{[]byte{0x1e, 3, '3', '0', '2'}, 302},
		{slices.Concat([]byte{0x08, 0x80 | byte(len(huffman))}, huffman), 307},
		{slices.Concat([]byte{0, 0x80 | byte(len(name))}, name, []byte{3, '2', '0', '1'}), 201},
		{nil, 0},
		{[]byte{0x3f, 0xff}, 0},
		{[]byte{0x87}, 0},
		{[]byte{0xbe}, 0},
		{[]byte{0x08, 9, '3'}, 0},
		{[]byte{0x08, 3, '3', '0', 'x'}, 0},
		{[]byte{0x08, 4, '2', '0', '0', '0'}, 0},
		{[]byte{0x08, 3, '0', '9', '9'}, 0},
		{[]byte{0, 1, 'x', 3, '2', '0', '0'}, 0},
	} {
		if got := readStatus(c.block); got != c.want {
			t.Errorf("%x: %d, want %d", c.block, got, c.want)
		}
	}
}

// TestResetAndFINPassOn on connections without a stream.
func TestResetAndFINPassOn(t *testing.T) {
	for _, c := range []struct {
		about    string
		end      func(client, server *net.TCPConn)
		reset    bool
		atServer bool // the server's end sees it
	}{
		{"FIN of the client", func(c, _ *net.TCPConn) { _ = c.CloseWrite() }, false, true},
		{"FIN of the server", func(_, s *net.TCPConn) { _ = s.CloseWrite() }, false, false},
		{"RST of the client", func(c, _ *net.TCPConn) {
			_ = c.SetLinger(0)
			_ = c.Close()
		}, true, true},
		{"RST of the server", func(_, s *net.TCPConn) {
			_ = s.SetLinger(0)
			_ = s.Close()
		}, true, false},
	} {
		t.Run(c.about, func(t *testing.T) {
			down, clientEnd := pair(t)
			up, serverEnd := pair(t)
			relayed := make(chan error, 1)
			go func() { relayed <- Relay(down, up, nil, &Options{Decide: public}) }()
			s := newScript()
			s.WriteString(Preface)
			greet(s)
			_, _ = clientEnd.Write(s.Bytes())
			_, _ = io.ReadFull(serverEnd, make([]byte, len(Preface)))
			// The connection is established at both ends.
			c.end(clientEnd.(*net.TCPConn), serverEnd.(*net.TCPConn)) //nolint:forcetypeassert // pair makes no others
			other := clientEnd
			if c.atServer {
				other = serverEnd
			}
			_, err := io.Copy(io.Discard, other)
			if c.reset != errors.Is(err, syscall.ECONNRESET) || !c.reset && err != nil {
				t.Errorf("the other end sees %v", err)
			}
			_ = clientEnd.Close()
			_ = serverEnd.Close()
			if err := <-relayed; c.reset != (err != nil) {
				t.Errorf("the relay ends with %v", err)
			}
		})
	}
}
