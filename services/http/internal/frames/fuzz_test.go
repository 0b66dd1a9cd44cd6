// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// memory is a connection that gives its input in parts, and keeps what is written.
type memory struct {
	net.Conn
	input []byte
	part  int
	wrote bytes.Buffer

	written func([]byte) // in place of wrote
}

func (m *memory) Read(b []byte) (int, error) {
	if len(m.input) == 0 {
		return 0, io.EOF
	}
	n := copy(b, m.input[:min(m.part, len(m.input))])
	m.input = m.input[n:]
	return n, nil
}

func (m *memory) Write(b []byte) (int, error) {
	if m.written != nil {
		m.written(b)
		return len(b), nil
	}
	return m.wrote.Write(b)
}

func (m *memory) Close() error { return nil }

// relayBytes relays what a client sends to a server that has sent SETTINGS and nothing else.
func relayBytes(b []byte, part int, decide func(*Request) Verdict) (toServer, toClient []byte, err error) {
	start := time.Unix(1_000_000, 0)
	client, server := &memory{input: b, part: part}, &memory{}
	r := &relay{
		Options: Options{Decide: decide, Normalise: normalise, Now: func() time.Time { return start }},
		client:  client, server: server, streams: map[uint32]*stream{}, fromServer: 1,
	}
	r.toClient.conn, r.toClient.ready = client, true
	err = newClientSide(r, nil).run()
	return server.wrote.Bytes(), client.wrote.Bytes(), err
}

// checkServer returns an error if the server got something that no client may send, or a request that was not allowed.
func checkServer(b []byte, allowed map[string]bool) error {
	if len(b) == 0 {
		return nil
	}
	b, ok := bytes.CutPrefix(b, []byte(Preface))
	if !ok {
		return errors.New("no preface")
	}
	fr := http2.NewFramer(io.Discard, bytes.NewReader(b))
	fr.ReadMetaHeaders = hpack.NewDecoder(0, nil)
	last, ended := uint32(0), map[uint32]bool{}
	for first := true; ; first = false {
		f, err := fr.ReadFrame()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("the server cannot read: %w", err)
		}
		id := f.Header().StreamID
		if _, settings := f.(*http2.SettingsFrame); first && !settings {
			return fmt.Errorf("%v before SETTINGS", f)
		}
		switch f := f.(type) {
		case *http2.MetaHeadersFrame:
			if f.Truncated {
				return errors.New("a header block is too large")
			}
			if id <= last {
				if ended[id] || !f.StreamEnded() || len(f.PseudoFields()) > 0 {
					return fmt.Errorf("trailers on stream %d", id)
				}
			} else if last = id; !allowed[key(f)] {
				return fmt.Errorf("request %q was not evaluated", key(f))
			}
			if slices.ContainsFunc(f.Fields, func(h hpack.HeaderField) bool { return h.Name == "x-deleted" }) {
				return errors.New("a deleted field")
			}
			ended[id] = f.StreamEnded()
		case *http2.DataFrame:
			if id > last || ended[id] {
				return fmt.Errorf("data on stream %d", id)
			}
			ended[id] = f.StreamEnded()
		case *http2.RSTStreamFrame:
			if id > last {
				return fmt.Errorf("reset of stream %d", id)
			}
			ended[id] = true
		case *http2.WindowUpdateFrame:
			if id > last {
				return fmt.Errorf("window of stream %d", id)
			}
		case *http2.SettingsFrame, *http2.PingFrame, *http2.PriorityFrame, *http2.GoAwayFrame:
		default:
			return fmt.Errorf("the server gets %v", f)
		}
	}
}

// key is a request as text.
func key(f *http2.MetaHeadersFrame) string {
	var out []string
	for _, h := range f.RegularFields() {
		out = append(out, h.Name+"="+h.Value)
	}
	return fmt.Sprintf("%q %q %q %q %q %q", f.PseudoValue("method"), f.PseudoValue("scheme"), f.PseudoValue("authority"),
		f.PseudoValue("path"), f.PseudoValue("protocol"), out)
}

func FuzzFrames(f *testing.F) {
	for _, write := range []func(*script){
		func(s *script) { s.request(1, true, get1...) },
		func(s *script) {
			s.request(1, false, with(post1, "content-length", "3", "x-deleted", "1")...)
			_ = s.WriteDataPadded(1, true, []byte("abc"), make([]byte, 20))
			_ = s.WriteSettingsAck()
			s.encoder.SetMaxDynamicTableSize(0)
			s.request(3, true, with(get1[:6], ":path", "/secret")...)
			_ = s.WriteWindowUpdate(0, 9999)
			_ = s.WritePing(false, [8]byte{1})
			_ = s.WritePriority(5, http2.PriorityParam{Weight: 3})
		},
		func(s *script) {
			block := s.block(with(post1, "te", "trailers")...)
			_ = s.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block[:3], PadLength: 3})
			_ = s.WriteContinuation(1, true, block[3:])
			_ = s.WriteData(1, false, []byte("abc"))
			s.request(1, true, "checksum", "17")
			s.request(3, false, with(get1[2:], ":method", "CONNECT", ":protocol", "websocket")...)
			_ = s.WriteRSTStream(3, http2.ErrCodeCancel)
			_ = s.WriteGoAway(0, http2.ErrCodeNo, nil)
		},
	} {
		s := newScript()
		greet(s, http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
		write(s)
		f.Add(s.Bytes(), uint16(7))
	}
	f.Fuzz(func(t *testing.T, b []byte, part uint16) {
		b = append([]byte(Preface), b...)
		decisions := 0
		allowed := map[string]bool{}
		decide := func(r *Request) Verdict {
			decisions++
			r.Delete("x-deleted")
			v := public(r)
			if v.Allowed {
				var out []string
				r.Each(func(name, value string) { out = append(out, name+"="+value) })
				allowed[fmt.Sprintf("%q %q %q %q %q %q", r.Method, r.Scheme, r.Authority, r.Path, r.Protocol, out)] = true
			}
			return v
		}
		server, client, err := relayBytes(slices.Clone(b), len(b), decide)
		if err := checkServer(server, allowed); err != nil {
			t.Fatal(err)
		}
		fr := http2.NewFramer(io.Discard, bytes.NewReader(client))
		fr.ReadMetaHeaders = hpack.NewDecoder(0, nil)
		for {
			if _, err := fr.ReadFrame(); errors.Is(err, io.EOF) {
				break
			} else if err != nil {
				t.Fatalf("the client cannot read: %v", err)
			}
		}
		again, _, errAgain := relayBytes(slices.Clone(b), int(part)+1, decide)
		if !bytes.Equal(server, again) || (err == nil) != (errAgain == nil) {
			t.Fatalf("in one segment %q, %v; in segments of %d %q, %v", server, err, int(part)+1, again, errAgain)
		}
	})
}
