// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// clientSide relays from the client to the server.
type clientSide struct {
	*relay
	in      input
	out     batch
	preface int  // bytes of the preface that have arrived
	greeted bool // the first SETTINGS have arrived
	last    uint32
	resumed bool // last is not known

	decoder *hpack.Decoder
	block   block
	request Request

	encoder *hpack.Encoder
	encoded bytes.Buffer

	refusal  refusal
	early    int // header blocks before the client has acknowledged SETTINGS
	resets   rate
	settings rate
	controls rate
}

// block is a header block that is being received.
type block struct {
	stream        uint32 // 0: none
	ends          bool   // END_STREAM
	bytes         int    // as sent
	continuations int
	size          int // as decoded
	fields        []hpack.HeaderField
	tooLarge      bool
}

// maxDecoded limits a text of a header block, as decoded. The shortest codes of Huffman have 5 bits, so no text in a
// block of MaxHeaderBytes is longer.
const maxDecoded = MaxHeaderBytes * 8 / 5

// initialTable is the size of a header table before SETTINGS.
const initialTable = 4096

func newClientSide(r *relay, first []byte) *clientSide {
	c := &clientSide{relay: r, greeted: r.Resume, resumed: r.Resume}
	c.in.open(r.client, &r.activity)
	c.in.begin(first)
	if r.Resume {
		c.preface = len(Preface)
	} else {
		c.refusal.begin()
	}
	size := uint32(initialTable)
	if r.Resume {
		size = 0
	}
	c.decoder = hpack.NewDecoder(size, c.field)
	c.decoder.SetMaxStringLength(maxDecoded)
	c.encoder = hpack.NewEncoder(&c.encoded)
	c.encoder.SetMaxDynamicTableSize(0)
	return c
}

func (c *clientSide) run() error {
	for {
		failed := c.frames()
		if err := c.toClient.flush(); err != nil {
			return err
		}
		if err := c.out.writeTo(c.server); err != nil {
			return err
		}
		if failed != nil {
			return failed
		}
		if err := c.in.fill(); err != nil {
			if errors.Is(err, io.EOF) && c.preface == len(Preface) {
				return nil
			}
			return err
		}
	}
}

// frames relays all complete frames in the buffer.
func (c *clientSide) frames() error {
	if c.preface < len(Preface) {
		b := c.in.bytes()
		n := min(len(b), len(Preface)-c.preface)
		if string(b[:n]) != Preface[c.preface:c.preface+n] {
			return ErrPreface
		}
		c.preface += n
		c.in.at += n
		if c.preface < len(Preface) {
			return nil
		}
		c.out.add([]byte(Preface))
	}
	for {
		var f frame
		ok, code := c.in.next(&f)
		if code != http2.ErrCodeNo {
			return &Error{Code: code, Reason: "frame is too large"}
		}
		if !ok {
			return nil
		}
		if err := c.frame(&f); err != nil {
			return err
		}
		// A header block can be many times larger for the server than it was from the client's table.
		if len(c.out.made) > maxMade {
			if err := c.out.writeTo(c.server); err != nil {
				return err
			}
		}
	}
}

func (c *clientSide) frame(f *frame) error {
	switch {
	case !c.greeted && (f.kind != http2.FrameSettings || f.has(http2.FlagSettingsAck)):
		return failed(http2.ErrCodeProtocol, f, "before SETTINGS")
	case c.block.stream != 0 && (f.kind != http2.FrameContinuation || f.stream != c.block.stream):
		return failed(http2.ErrCodeProtocol, f, "in a header block")
	}
	switch f.kind {
	case http2.FrameData:
		return c.data(f)
	case http2.FrameHeaders:
		return c.headers(f)
	case http2.FrameContinuation:
		return c.continuation(f)
	case http2.FrameSettings:
		return c.changeSettings(f)
	case http2.FrameRSTStream:
		return c.rst(f)
	case http2.FrameWindowUpdate:
		return c.windowUpdate(f)
	case http2.FramePing:
		if f.stream != 0 || len(f.payload()) != 8 {
			return failed(http2.ErrCodeProtocol, f, "with a wrong stream or length")
		}
		f.mask(http2.FlagPingAck)
		return c.control(f)
	case http2.FramePriority:
		if f.stream == 0 || len(f.payload()) != 5 {
			return failed(http2.ErrCodeProtocol, f, "with a wrong stream or length")
		}
		f.mask(0)
		return c.control(f)
	case http2.FrameGoAway:
		if f.stream != 0 || len(f.payload()) < 8 {
			return failed(http2.ErrCodeProtocol, f, "with a wrong stream or length")
		}
		f.mask(0)
		return c.control(f)
	case http2.FramePushPromise:
		return failed(http2.ErrCodeProtocol, f, "from a client")
	}
	return nil // an extension
}

func failed(code http2.ErrCode, f *frame, text string) error {
	return &Error{Code: code, Reason: fmt.Sprintf("%s on stream %d %s", f.kind, f.stream, text)}
}

// control relays a frame that a client can send in any number.
func (c *clientSide) control(f *frame) error {
	if c.controls.over(c.Now(), MaxControls) {
		return failed(http2.ErrCodeEnhanceYourCalm, f, "too often")
	}
	c.out.pass(f.whole)
	return nil
}

// reset counts what a client can do to make the server begin work in vain.
func (c *clientSide) reset() error {
	if c.resets.over(c.Now(), MaxResets) {
		return &Error{Code: http2.ErrCodeEnhanceYourCalm, Reason: "too many resets and refused requests"}
	}
	return nil
}

// known reports whether a stream was opened before. If not, frames other than HEADERS are an error.
func (c *clientSide) known(id uint32) bool {
	return id != 0 && id%2 == 1 && (c.resumed || id <= c.last)
}

func (c *clientSide) data(f *frame) error {
	f.mask(http2.FlagDataEndStream | http2.FlagDataPadded)
	content, code := f.unpadded()
	switch {
	case code != http2.ErrCodeNo:
		return failed(code, f, "with wrong padding")
	case !c.known(f.stream):
		return failed(http2.ErrCodeProtocol, f, "that is not open")
	case len(content) == 0 && !f.has(http2.FlagDataEndStream) && c.controls.over(c.Now(), MaxControls):
		return failed(http2.ErrCodeEnhanceYourCalm, f, "too often")
	}
	pass, wrong := c.dataPasses(f.stream, int64(len(content)), f.has(http2.FlagDataEndStream))
	if pass {
		c.out.pass(f.whole)
		return nil
	}
	// The server does not see these bytes, so it will not give the client credit for them.
	if n := len(f.payload()); n > 0 {
		if err := c.toClient.addCredit(n); err != nil {
			return failed(http2.ErrCodeFlowControl, f, err.Error())
		}
	}
	if wrong {
		return c.abort(f.stream)
	}
	return nil
}

// dataPasses reports whether the server gets data of a stream. It also reports whether the stream is wrong, because the
// length of its data differs from its content-length.
func (c *clientSide) dataPasses(id uint32, n int64, ends bool) (pass, wrong bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.streams[id]
	if s == nil || s.clientEnded {
		return false, false
	}
	if s.left >= 0 {
		if s.left -= n; s.left < 0 || ends && s.left > 0 {
			c.remove(id, s)
			return false, true
		}
	}
	if ends {
		c.clientEnds(id, s)
	}
	return true, false
}

// clientEnds runs with mu held.
func (c *clientSide) clientEnds(id uint32, s *stream) {
	s.clientEnded = true
	if s.serverEnded {
		c.remove(id, s)
	}
}

// abort ends a malformed stream that the server knows.
func (c *clientSide) abort(id uint32) error {
	c.out.add(resetFrame(id, http2.ErrCodeProtocol))
	return c.refuseFrame(id, http2.ErrCodeProtocol)
}

// refuseFrame ends a stream towards the client.
func (c *clientSide) refuseFrame(id uint32, code http2.ErrCode) error {
	if err := c.toClient.add(resetFrame(id, code)); err != nil {
		return &Error{Code: http2.ErrCodeEnhanceYourCalm, Reason: err.Error()}
	}
	return c.reset()
}

func resetFrame(id uint32, code http2.ErrCode) []byte {
	b := appendHeader(make([]byte, 0, frameHeader+4), 4, http2.FrameRSTStream, 0, id)
	return binary.BigEndian.AppendUint32(b, uint32(code))
}

func (c *clientSide) rst(f *frame) error {
	f.mask(0)
	switch {
	case len(f.payload()) != 4:
		return failed(http2.ErrCodeFrameSize, f, "with a wrong length")
	case !c.known(f.stream):
		return failed(http2.ErrCodeProtocol, f, "that is not open")
	}
	c.mu.Lock()
	s := c.streams[f.stream]
	if s != nil {
		c.remove(f.stream, s)
	}
	c.mu.Unlock()
	if s != nil {
		c.out.pass(f.whole)
		return c.reset()
	}
	if c.controls.over(c.Now(), MaxControls) {
		return failed(http2.ErrCodeEnhanceYourCalm, f, "too often")
	}
	return nil
}

func (c *clientSide) windowUpdate(f *frame) error {
	f.mask(0)
	b := f.payload()
	if len(b) != 4 {
		return failed(http2.ErrCodeFrameSize, f, "with a wrong length")
	}
	increment := binary.BigEndian.Uint32(b) &^ (1 << 31)
	switch {
	case increment == 0, f.stream != 0 && !c.known(f.stream):
		return failed(http2.ErrCodeProtocol, f, "without an increment or an open stream")
	case f.stream == 0:
		if increment = c.refusal.keep(increment); increment == 0 {
			return nil
		}
		binary.BigEndian.PutUint32(b, increment)
	default:
		c.mu.Lock()
		open := c.streams[f.stream] != nil
		c.mu.Unlock()
		if !open {
			return nil
		}
	}
	c.out.pass(f.whole)
	return nil
}

func (c *clientSide) changeSettings(f *frame) error {
	if f.stream != 0 {
		return failed(http2.ErrCodeProtocol, f, "on a stream")
	}
	if f.has(http2.FlagSettingsAck) {
		f.mask(http2.FlagSettingsAck)
		if len(f.payload()) > 0 {
			return failed(http2.ErrCodeFrameSize, f, "with a wrong length")
		}
		if code := c.acknowledged(&c.fromServer); code != http2.ErrCodeNo {
			return failed(code, f, "without SETTINGS of the server")
		}
		if !c.tables {
			// From now on the client's header table has size 0, and so has every Decoder that continues.
			c.tables = true
			c.decoder.SetAllowedMaxDynamicTableSize(0)
			c.decoder.SetMaxDynamicTableSize(0)
		}
		c.out.pass(f.whole)
		return nil
	}
	if c.settings.over(c.Now(), MaxSettings) {
		return failed(http2.ErrCodeEnhanceYourCalm, f, "too often")
	}
	out, s, code := appendSettings(nil, f.payload(), !c.greeted, false)
	if code == http2.ErrCodeNo {
		code = c.pending(&c.fromClient, !c.greeted)
	}
	if code != http2.ErrCodeNo {
		return failed(code, f, "with a wrong value")
	}
	if s.hasWindow {
		c.refusal.window = s.window
	}
	c.greeted = true
	c.out.add(out)
	return nil
}

func (c *clientSide) headers(f *frame) error {
	content, code := f.unpadded()
	switch {
	case code != http2.ErrCodeNo:
		return failed(code, f, "with wrong padding")
	case f.stream%2 == 0:
		return failed(http2.ErrCodeProtocol, f, "that a client cannot open")
	}
	c.block.stream, c.block.ends = f.stream, f.has(http2.FlagHeadersEndStream)
	c.in.hold = true
	return c.fragment(f, content)
}

func (c *clientSide) continuation(f *frame) error {
	if c.block.stream == 0 {
		return failed(http2.ErrCodeProtocol, f, "outside a header block")
	}
	if c.block.continuations++; c.block.continuations > MaxContinuations {
		return failed(http2.ErrCodeEnhanceYourCalm, f, "too often")
	}
	return c.fragment(f, f.payload())
}

// fragment decodes a part of a header block.
func (c *clientSide) fragment(f *frame, b []byte) error {
	if c.block.bytes += len(b); c.block.bytes > MaxHeaderBytes {
		return failed(http2.ErrCodeEnhanceYourCalm, f, "with too many bytes in a header block")
	}
	if _, err := c.decoder.Write(b); err != nil {
		return failed(http2.ErrCodeCompression, f, err.Error())
	}
	if !f.has(http2.FlagHeadersEndHeaders) {
		return nil
	}
	if err := c.decoder.Close(); err != nil {
		return failed(http2.ErrCodeCompression, f, err.Error())
	}
	err := c.complete()
	clear(c.block.fields)
	c.block = block{fields: c.block.fields[:0]}
	c.in.hold = false
	c.decoder.SetEmitEnabled(true)
	return err
}

// field adds a decoded field to the header block.
func (c *clientSide) field(f hpack.HeaderField) {
	c.block.size += int(f.Size())
	if c.block.size > MaxHeaderBytes || len(c.block.fields) >= MaxFields {
		// The rest is decoded for the sake of the table only.
		c.block.tooLarge = true
		c.decoder.SetEmitEnabled(false)
		return
	}
	c.block.fields = append(c.block.fields, f)
}

// complete relays a complete header block.
func (c *clientSide) complete() error {
	id := c.block.stream
	if !c.tables {
		if c.early++; c.early > MaxEarly {
			return &Error{Code: http2.ErrCodeSettingsTimeout, Reason: "SETTINGS are not acknowledged"}
		}
	}
	if c.resumed || id > c.last {
		c.last, c.resumed = id, false
		return c.begin(id)
	}
	return c.trailers(id)
}

// begin evaluates a request.
func (c *clientSide) begin(id uint32) error {
	r := &c.request
	if c.block.tooLarge {
		r.reset()
		return c.refuse(id, statusTooLarge)
	}
	if err := r.read(c.block.fields); err != nil || c.block.ends && r.length > 0 {
		return c.refuseFrame(id, http2.ErrCodeProtocol)
	}
	if r.Path != "" && r.Path != "*" && c.Normalise != nil {
		normal, err := c.Normalise(r.Path)
		if err != nil || !path(normal) {
			return c.refuse(id, statusBadRequest)
		}
		r.Path = normal
	}
	verdict := c.Decide(r)
	if !verdict.Allowed || r.changedBadly() {
		c.report(verdict.Token, statusForbidden)
		return c.refuse(id, statusForbidden)
	}
	s := &stream{left: r.length, deleted: slices.Clone(r.deleted), token: verdict.Token, clientEnded: c.block.ends}
	if !c.open(id, s) {
		c.report(verdict.Token, 0)
		return c.refuseFrame(id, http2.ErrCodeRefusedStream)
	}
	for _, f := range [...]hpack.HeaderField{
		{Name: ":method", Value: r.Method},
		{Name: ":protocol", Value: r.Protocol},
		{Name: ":scheme", Value: r.Scheme},
		{Name: ":authority", Value: r.Authority},
		{Name: ":path", Value: r.Path},
	} {
		if f.Value != "" {
			_ = c.encoder.WriteField(f) // to a buffer
		}
	}
	c.write(id, r.header)
	return nil
}

// trailers relays the fields behind a body.
func (c *clientSide) trailers(id uint32) error {
	c.mu.Lock()
	s := c.streams[id]
	open := s != nil && !s.clientEnded
	wrong := open && (!c.block.ends || c.block.tooLarge || s.left > 0 ||
		checkTrailers(c.block.fields, s.deleted) != nil)
	switch {
	case wrong:
		c.remove(id, s)
	case open:
		c.clientEnds(id, s)
	}
	c.mu.Unlock()
	switch {
	case wrong:
		return c.abort(id)
	case !open:
		return nil // in flight when the stream ended
	}
	c.write(id, c.block.fields)
	return nil
}

// write sends the encoded fields and the fields of header as one header block.
func (c *clientSide) write(id uint32, header []hpack.HeaderField) {
	for _, f := range header {
		_ = c.encoder.WriteField(f) // to a buffer
	}
	var flags http2.Flags
	if c.block.ends {
		flags = http2.FlagHeadersEndStream
	}
	kind := http2.FrameHeaders
	for b := c.encoded.Bytes(); ; {
		part := b[:min(len(b), maxFrame)]
		if b = b[len(part):]; len(b) == 0 {
			flags |= http2.FlagHeadersEndHeaders
		}
		c.out.addFrame(kind, flags, id, part)
		if len(b) == 0 {
			break
		}
		kind, flags = http2.FrameContinuation, 0
	}
	if c.encoded.Reset(); c.encoded.Cap() > maxKept {
		c.encoded = bytes.Buffer{}
	}
}
