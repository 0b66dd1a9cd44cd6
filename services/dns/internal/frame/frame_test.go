// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frame_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-net/sluice/services/dns/internal/frame"
	"github.com/sluice-net/sluice/services/dns/internal/frame/frametest"
)

var (
	client4 = netip.MustParseAddrPort("10.244.0.7:40000")
	server4 = netip.MustParseAddrPort("10.96.0.10:53")
	client6 = netip.MustParseAddrPort("[fd00::7]:40000")
	server6 = netip.MustParseAddrPort("[fd00:96::10]:5353")
	tag     = frame.Tag{Set: 9, Endpoint: 7, Role: frame.Initiator}
)

// packets returns a query in each family.
func packets() []frametest.Packet {
	return []frametest.Packet{
		{Tag: tag, Source: client4, Destination: server4, Payload: []byte("question")},
		{Tag: tag, Source: client6, Destination: server6, Payload: []byte("question!")},
	}
}

func TestFramesAreRead(t *testing.T) {
	for _, p := range packets() {
		plain, options := p.Bytes(), p
		options.Options = 8
		atomic := p
		atomic.Atomic = true
		for what, b := range map[string][]byte{
			"plain": plain, "padded": append(slices.Clone(plain), 0, 0, 0), "with options": options.Bytes(),
			"an atomic fragment": atomic.Bytes(),
		} {
			if what == "an atomic fragment" && p.Source.Addr().Is4() {
				continue
			}
			var f frame.Frame
			if err := f.Read(b); err != nil || f.Tag != tag || f.Source != p.Source || f.Destination != p.Destination ||
				!bytes.Equal(f.Payload, p.Payload) || f.Fragmented || !f.Intact() {
				t.Errorf("%v, %s: %v, %+v", p.Source, what, err, f)
			}
		}
		var f frame.Frame
		plain[len(plain)-1] ^= 1
		if err := f.Read(plain); err != nil || f.Intact() {
			t.Errorf("%v, changed: %v, intact %t", p.Source, err, f.Intact())
		}
		p.NoChecksum = true
		if err := f.Read(p.Bytes()); err != nil || f.Intact() != p.Source.Addr().Is4() {
			t.Errorf("%v, without a checksum: %v, intact %t", p.Source, err, f.Intact())
		}
	}
}

func TestWrongFramesAreRefused(t *testing.T) {
	for what, c := range map[string]struct {
		change func(b []byte) []byte // changes the frame of an IPv4 packet
		want   error
	}{
		"empty":                      {func([]byte) []byte { return nil }, frame.ErrShort},
		"no packet":                  {func(b []byte) []byte { return b[:14] }, frame.ErrShort},
		"version 0 of the tag":       {set(1, 0), frame.ErrTag},
		"version 2 of the tag":       {set(1, 2), frame.ErrTag},
		"a real address":             {set(0, 0xaa), frame.ErrTag},
		"a real source address":      {set(6, 0x00), frame.ErrTag},
		"role 0":                     {set(7, 0), frame.ErrTag},
		"role 3":                     {set(7, 3), frame.ErrTag},
		"unknown bytes in the tag":   {set(11, 1), frame.ErrTag},
		"endpoint 0":                 {set(5, 0), frame.ErrTag},
		"a query with set 0":         {set(3, 0), frame.ErrTag},
		"a VLAN tag":                 {set(12, 0x81), frame.ErrProtocol},
		"ARP":                        {set(13, 0x06), frame.ErrProtocol},
		"IPv6 in an IPv4 frame":      {set(14, 0x65), frame.ErrHeader},
		"a header of 16 bytes":       {set(14, 0x44), frame.ErrHeader},
		"a header beyond its packet": {set(14, 0x4f), frame.ErrHeader},
		"a total length of 0":        {set(17, 0), frame.ErrHeader},
		"a length beyond the frame":  {set(16, 1), frame.ErrShort},
		"cut":                        {func(b []byte) []byte { return b[:len(b)-1] }, frame.ErrShort},
		"TCP":                        {set(23, 6), frame.ErrProtocol},
		"ICMP":                       {set(23, 1), frame.ErrProtocol},
		"a short UDP length":         {set(39, 15), frame.ErrLength},
		"a long UDP length":          {set(38, 1), frame.ErrLength},
		"a UDP length of 0":          {set(39, 0), frame.ErrLength},
		"a first fragment of 1 byte": {func(b []byte) []byte { b[20] = 0x20; b[17] = 21; return b }, frame.ErrHeader},
		"a first fragment without UDP": {func(b []byte) []byte {
			b[20], b[17] = 0x20, 28
			return b
		}, nil},
		"a fragment beyond 65,535 bytes": {func(b []byte) []byte { b[20], b[21] = 0x1f, 0xff; return b }, frame.ErrHeader},
	} {
		b := packets()[0].Bytes()
		if what == "a header beyond its packet" {
			b = b[:14+36]
			b[17] = 36
		}
		var f frame.Frame
		if err := f.Read(c.change(b)); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", what, err, c.want)
		}
	}
	for what, c := range map[string]struct {
		change func(b []byte) []byte // changes the frame of an IPv6 packet
		want   error
	}{
		"no packet":                    {func(b []byte) []byte { return b[:14] }, frame.ErrShort},
		"IPv4 in an IPv6 frame":        {set(14, 0x45), frame.ErrHeader},
		"a jumbogram":                  {set(19, 0), frame.ErrHeader},
		"a length beyond the frame":    {set(18, 1), frame.ErrShort},
		"a routing header":             {set(20, 43), frame.ErrProtocol},
		"an authentication header":     {set(20, 51), frame.ErrProtocol},
		"options beyond the packet":    {set(20, 60), frame.ErrShort},
		"hop by hop beyond the packet": {set(20, 0), frame.ErrShort},
		"a UDP length of 0":            {set(59, 0), frame.ErrLength},
		"fragments of fragments": {func([]byte) []byte {
			p := packets()[1]
			p.Atomic, p.Options = true, 8
			b := p.Bytes()
			b[62] = 44 // a second fragment header after the first
			return b
		}, frame.ErrProtocol},
	} {
		var f frame.Frame
		if err := f.Read(c.change(packets()[1].Bytes())); !errors.Is(err, c.want) {
			t.Errorf("IPv6: %s: %v, want %v", what, err, c.want)
		}
	}
}

func set(at int, value byte) func([]byte) []byte {
	return func(b []byte) []byte { b[at] = value; return b }
}

func TestRefusedInTheServersName(t *testing.T) {
	for _, p := range packets() {
		var q, r frame.Frame
		if err := q.Read(p.Bytes()); err != nil {
			t.Fatal(err)
		}
		for _, message := range []string{"", "x", "refused", "refused!"} {
			b := append(bytes.Repeat([]byte{0xff}, q.ReplySize()), message...)
			q.CompleteReply(b)
			want := frame.Tag{Set: 9, Endpoint: 7, Role: frame.Responder}
			if err := r.Read(b); err != nil || r.Tag != want || r.Source != p.Destination || r.Destination != p.Source ||
				string(r.Payload) != message || !r.Intact() {
				t.Errorf("%v, %q: %v, %+v", p.Source, message, err, r)
			}
			if q.Source.Addr().Is4() {
				if s := frametest.Sum(b[14:34]); s != 0xffff || b[22] != 64 {
					t.Errorf("header checksum %#x, TTL %d", s, b[22])
				}
			} else if b[21] != 64 {
				t.Errorf("hop limit %d", b[21])
			}
		}
	}
}

func TestFragmentsAreJoined(t *testing.T) {
	for _, p := range packets() {
		p.Role, p.ID = frame.Responder, 77
		p.Payload = bytes.Repeat([]byte("0123456789"), 300)
		p.Options = 8
		pieces := p.Fragments(1400)
		if len(pieces) != 3 {
			t.Fatal(len(pieces))
		}
		var data []byte
		var first, f frame.Frame
		for i, b := range pieces {
			if err := f.Read(b); err != nil || !f.Fragmented || f.Payload != nil || f.Fragment.Offset != len(data) ||
				f.Fragment.ID != 77 || f.Fragment.More != (i < 2) || f.Source.Addr() != p.Source.Addr() {
				t.Fatalf("%v, fragment %d: %v, %+v", p.Source, i, err, f)
			}
			if i == 0 {
				first = f
			}
			data = append(data, f.Fragment.Data...)
		}
		if first.Source != p.Source || f.Source.Port() != 0 {
			t.Errorf("ports %v, %v", first.Source, f.Source)
		}
		if err := first.Join(data); err != nil || !bytes.Equal(first.Payload, p.Payload) || !first.Intact() ||
			first.Fragmented {
			t.Errorf("%v: %v", p.Source, err)
		}
		if err := f.Read(pieces[0]); err != nil {
			t.Fatal(err)
		}
		if err := f.Join(data[:len(data)-1]); !errors.Is(err, frame.ErrLength) {
			t.Errorf("%v, cut: %v", p.Source, err)
		}
	}
}

func TestReadingAllocatesNothing(t *testing.T) {
	var f frame.Frame
	for _, p := range packets() {
		b := p.Bytes()
		reply := make([]byte, 200)
		if n := testing.AllocsPerRun(100, func() {
			if f.Read(b) != nil || !f.Intact() {
				t.Fatal("not read")
			}
			f.CompleteReply(reply)
		}); n != 0 {
			t.Errorf("%v allocations", n)
		}
	}
}

// FuzzFrame checks that every slice of a parsed frame lies within the frame, and that a reply can be parsed.
func FuzzFrame(f *testing.F) {
	for _, p := range packets() {
		f.Add(p.Bytes())
		p.Options, p.ID = 8, 5
		p.Payload = make([]byte, 3000)
		for _, b := range p.Fragments(1000) {
			f.Add(b)
		}
		p.Atomic = true
		f.Add(p.Bytes())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var q, r frame.Frame
		if q.Read(b) != nil {
			return
		}
		if q.Fragmented {
			if len(q.Fragment.Data) == 0 || q.Fragment.Offset+len(q.Fragment.Data) > 65_535 || q.Payload != nil {
				t.Errorf("%+v", q.Fragment)
			}
			if q.Fragment.Offset == 0 {
				_ = q.Join(slices.Clone(q.Fragment.Data))
			}
			return
		}
		if int(binary.BigEndian.Uint16(b[12:])) == 0x0800 && len(q.Payload)+42 > len(b) {
			t.Errorf("payload of %d bytes in a frame of %d", len(q.Payload), len(b))
		}
		q.Intact()
		reply := append(make([]byte, q.ReplySize()), q.Payload...)
		if len(reply) > 60_000 {
			return
		}
		q.CompleteReply(reply)
		if q.Set == 0 {
			return
		}
		if err := r.Read(reply); err != nil || r.Source != q.Destination || r.Destination != q.Source || !r.Intact() ||
			!bytes.Equal(r.Payload, q.Payload) {
			t.Errorf("reply: %v, %+v to %+v", err, r, q)
		}
	})
}
