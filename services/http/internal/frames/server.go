// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"encoding/binary"
	"errors"
	"io"
	"maps"
	"slices"

	"golang.org/x/net/http2"
)

// serverSide relays from the server to the client.
type serverSide struct {
	*relay
	in       input
	out      batch
	greeted  bool   // the first SETTINGS have arrived
	block    uint32 // stream of a header block that is not complete; 0: none
	ends     bool   // the stream ends with that block
	settings rate
	controls rate
}

func newServerSide(r *relay) *serverSide {
	s := &serverSide{relay: r, greeted: r.Resume}
	s.in.open(r.server, &r.activity)
	return s
}

func (s *serverSide) run() error {
	for {
		if err := s.in.fill(); err != nil {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		var f frame
		var failed error
		for {
			ok, code := s.in.next(&f)
			if code == http2.ErrCodeNo && ok {
				code = s.frame(&f)
			}
			if code != http2.ErrCodeNo {
				failed = &Error{Code: code, Server: true, Reason: "invalid frame of type " + f.kind.String()}
			}
			if failed != nil || !ok {
				break
			}
		}
		if !s.out.empty() {
			if err := s.toClient.forward(&s.out, s.block != 0); err != nil {
				return err
			}
		}
		if failed != nil {
			return failed
		}
	}
}

func (s *serverSide) frame(f *frame) http2.ErrCode {
	switch {
	case !s.greeted && (f.kind != http2.FrameSettings || f.has(http2.FlagSettingsAck)):
		return http2.ErrCodeProtocol
	case s.block != 0 && (f.kind != http2.FrameContinuation || f.stream != s.block):
		return http2.ErrCodeProtocol
	}
	switch f.kind {
	case http2.FrameSettings:
		return s.changeSettings(f)
	case http2.FrameHeaders, http2.FrameContinuation:
		return s.header(f)
	case http2.FrameData:
		if len(f.payload()) == 0 && !f.has(http2.FlagDataEndStream) && s.controls.over(s.Now(), MaxControls) {
			return http2.ErrCodeEnhanceYourCalm
		}
		if f.has(http2.FlagDataEndStream) {
			s.ended(f.stream)
		}
	case http2.FrameRSTStream:
		s.mu.Lock()
		if t := s.streams[f.stream]; t != nil {
			s.remove(f.stream, t)
		}
		s.mu.Unlock()
	case http2.FramePing:
		if s.controls.over(s.Now(), MaxControls) {
			return http2.ErrCodeEnhanceYourCalm
		}
	case http2.FrameGoAway:
		s.goAway(f)
	case http2.FrameWindowUpdate:
	case http2.FramePushPromise:
		return http2.ErrCodeProtocol // the server was told that the client accepts none
	default:
		return http2.ErrCodeNo // PRIORITY, which servers do not send, and extensions
	}
	s.out.pass(f.whole)
	return http2.ErrCodeNo
}

func (s *serverSide) changeSettings(f *frame) http2.ErrCode {
	if f.has(http2.FlagSettingsAck) {
		if code := s.acknowledged(&s.fromClient); code != http2.ErrCodeNo {
			return code
		}
		s.out.pass(f.whole)
		return http2.ErrCodeNo
	}
	if s.settings.over(s.Now(), MaxSettings) {
		return http2.ErrCodeEnhanceYourCalm
	}
	out, _, code := appendSettings(nil, f.payload(), !s.greeted, true)
	if code == http2.ErrCodeNo {
		code = s.pending(&s.fromServer, !s.greeted)
	}
	s.greeted = true
	s.out.add(out)
	return code
}

// header follows a header block to its end. Its content passes unchanged; only the status is read for events.
func (s *serverSide) header(f *frame) http2.ErrCode {
	first := f.kind == http2.FrameHeaders
	switch {
	case f.stream == 0, !first && s.block == 0:
		return http2.ErrCodeProtocol
	case first:
		content, code := f.unpadded()
		if code != http2.ErrCodeNo {
			return code
		}
		if s.Answered != nil {
			s.status(f.stream, content)
		}
		s.ends = f.has(http2.FlagHeadersEndStream)
	}
	s.block = f.stream
	if f.has(http2.FlagHeadersEndHeaders) {
		if s.ends {
			s.ended(s.block)
		}
		s.block = 0
	}
	s.in.hold = s.block != 0
	s.out.pass(f.whole)
	return http2.ErrCodeNo
}

func (s *serverSide) status(id uint32, block []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t := s.streams[id]; t != nil && !t.answered {
		if status := readStatus(block); status == 0 || status >= 200 {
			s.answered(t, status)
		}
	}
}

// ended is called if the server sends no more on a stream.
func (s *serverSide) ended(id uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.streams[id]
	if t == nil {
		return
	}
	t.serverEnded = true
	if t.clientEnded {
		s.remove(id, t)
	}
}

// goAway removes the streams that the server will not process.
func (s *serverSide) goAway(f *frame) {
	if len(f.payload()) < 8 {
		return
	}
	last := binary.BigEndian.Uint32(f.payload()) &^ (1 << 31)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, id := range slices.Collect(maps.Keys(s.streams)) {
		if id > last {
			s.remove(id, s.streams[id])
		}
	}
}
