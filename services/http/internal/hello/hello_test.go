// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hello

import (
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
)

// ext is an extension of a test's ClientHello.
type ext struct {
	number  uint16
	content []byte
}

func u16(n int) []byte { return binary.BigEndian.AppendUint16(nil, uint16(n)) }

func with16(b []byte) []byte { return append(u16(len(b)), b...) }

func with8(b []byte) []byte { return append([]byte{byte(len(b))}, b...) }

func join(parts ...[]byte) []byte { return slices.Concat(parts...) }

// name is one entry of a list of server names.
func name(kind byte, text string) []byte { return join([]byte{kind}, with16([]byte(text))) }

func sni(names ...[]byte) ext { return ext{extServerName, with16(join(names...))} }

func host(text string) ext { return sni(name(hostName, text)) }

var (
	tls13  = ext{extVersions, with8([]byte{3, 4, 3, 3})}
	groups = ext{10, with16(u16(29))}
	shares = ext{51, with16(join(u16(29), with16(bytes.Repeat([]byte{9}, 32))))}
	sigs   = ext{13, with16(join(u16(0x0403), u16(0x0804)))}
	ech    = ext{0xfe0d, join([]byte{0}, u16(1), u16(1), []byte{7}, with16(make([]byte, 32)), with16(make([]byte, 48)))}
)

// message returns a ClientHello as a handshake message.
func message(extensions ...ext) []byte {
	var list []byte
	for _, e := range extensions {
		list = append(list, join(u16(int(e.number)), with16(e.content))...)
	}
	body := join(u16(0x0303), bytes.Repeat([]byte{5}, 32), with8(bytes.Repeat([]byte{6}, 32)),
		with16([]byte{0x13, 1, 0xc0, 0x2b}), with8([]byte{0}), with16(list))
	return handshake(clientHello, body)
}

func handshake(kind byte, body []byte) []byte {
	return join([]byte{kind, byte(len(body) >> 16), byte(len(body) >> 8), byte(len(body))}, body)
}

func rec(kind byte, content []byte) []byte { return join([]byte{kind, 3, 1}, with16(content)) }

// wire returns a ClientHello in one record.
func wire(extensions ...ext) []byte { return rec(typeHandshake, message(extensions...)) }

// modern returns an ordinary ClientHello with these extensions in addition.
func modern(more ...ext) []byte { return wire(append([]ext{tls13, groups, shares, sigs}, more...)...) }

// split puts a message into records of n bytes.
func split(m []byte, n int) (out []byte) {
	for c := range slices.Chunk(m, n) {
		out = append(out, rec(typeHandshake, c)...)
	}
	return out
}

// read passes b to a Reader in segments of n bytes.
func read(b []byte, n int) (h *Hello, r *Reader, err error) {
	r = &Reader{}
	for s := range slices.Chunk(b, n) {
		segment := slices.Clone(s)
		h, err = r.Add(segment)
		clear(segment) // as the next read overwrites it
		if h != nil || err != nil {
			return h, r, err
		}
	}
	return nil, r, nil
}

// recorder is a connection that keeps the written bytes. Reads return the end of the stream.
type recorder struct {
	net.Conn
	wrote bytes.Buffer
}

func (r *recorder) Write(b []byte) (int, error)      { return r.wrote.Write(b) }
func (r *recorder) Read([]byte) (int, error)         { return 0, io.EOF }
func (r *recorder) SetDeadline(time.Time) error      { return nil }
func (r *recorder) SetReadDeadline(time.Time) error  { return nil }
func (r *recorder) SetWriteDeadline(time.Time) error { return nil }
func (r *recorder) Close() error                     { return nil }

// genuine returns the ClientHello that crypto/tls sends.
func genuine(t testing.TB, c *tls.Config) []byte {
	t.Helper()
	r := &recorder{}
	if err := tls.Client(r, c).Handshake(); err == nil {
		t.Fatal("a handshake without a server succeeded")
	}
	b := r.wrote.Bytes()
	if len(b) < recordHeader || b[0] != typeHandshake {
		t.Fatalf("no ClientHello: %x", b)
	}
	return b[:recordHeader+int(b[3])<<8+int(b[4])]
}

// echConfigs returns a list with one ECH configuration for a public name.
func echConfigs(t testing.TB, public string) []byte {
	t.Helper()
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	const x25519, sha, aes = 0x20, 1, 1
	content := join([]byte{7}, u16(x25519), with16(key.PublicKey().Bytes()), with16(join(u16(sha), u16(aes))),
		[]byte{32}, with8([]byte(public)), u16(0))
	return with16(join(u16(0xfe0d), with16(content)))
}

func TestRealClientHellos(t *testing.T) {
	for _, c := range []struct {
		about   string
		config  *tls.Config
		name    string
		ech     bool
		version uint16
	}{
		{"a name", &tls.Config{ServerName: "api.example.com"}, "api.example.com", false, tls.VersionTLS13},
		{"mixed case", &tls.Config{ServerName: "Api.Example.COM"}, "api.example.com", false, tls.VersionTLS13},
		{
			"TLS 1.2",
			&tls.Config{ServerName: "a.example", MaxVersion: tls.VersionTLS12}, //nolint:gosec // clients of TLS 1.2
			"a.example", false, tls.VersionTLS12,
		},
		{"an address", &tls.Config{ServerName: "192.0.2.1"}, "", false, tls.VersionTLS13},
		{
			"ALPN", &tls.Config{ServerName: "a.example", NextProtos: []string{"h2", "http/1.1"}},
			"a.example", false, tls.VersionTLS13,
		},
		{
			"ECH", &tls.Config{ServerName: "secret.example", EncryptedClientHelloConfigList: echConfigs(t, "public.example")},
			"public.example", true, tls.VersionTLS13,
		},
	} {
		b := genuine(t, c.config)
		for _, n := range []int{1, 2, 3, 5, 7, 100, len(b)} {
			h, r, err := read(b, n)
			if err != nil || h == nil {
				t.Fatalf("%s, segments of %d: %v, %v", c.about, n, h, err)
			}
			if h.ServerName != c.name || h.ECH != c.ech || h.Versions[0] != c.version ||
				!slices.Equal(h.Protocols, c.config.NextProtos) {
				t.Errorf("%s: %+v", c.about, h)
			}
			if h.Length != len(b) || !bytes.Equal(r.Bytes(), b) {
				t.Errorf("%s: %d bytes of %d", c.about, h.Length, len(b))
			}
		}
		// the same message, in small records
		for _, n := range []int{1, 4, 50} {
			records := split(b[recordHeader:], n)
			for _, segment := range []int{1, 6, len(records)} {
				h, _, err := read(records, segment)
				if err != nil || h == nil || h.ServerName != c.name || h.Length != len(records) {
					t.Errorf("%s, records of %d: %+v, %v", c.about, n, h, err)
				}
			}
		}
	}
}

func TestBytesAfterTheClientHelloAreNotPartOfIt(t *testing.T) {
	first := modern(host("a.example"), ext{extEarlyData, nil})
	early := join(rec(typeChange, []byte{1}), rec(typeData, make([]byte, 500)))
	for _, n := range []int{1, 100, len(first) + 10, 1 << 20} {
		h, r, err := read(join(first, early), n)
		if err != nil || h == nil || h.Length != len(first) || !h.EarlyData {
			t.Fatalf("segments of %d: %+v, %v", n, h, err)
		}
		if !bytes.Equal(r.Bytes(), join(first, early)[:len(r.Bytes())]) || len(r.Bytes()) < len(first) {
			t.Errorf("segments of %d: bytes changed", n)
		}
		again, err := r.Add(early)
		if err != nil || again != h {
			t.Errorf("segments of %d: after the ClientHello: %v, %v", n, again, err)
		}
	}
}

func TestOtherProtocolsAreFoundWithTheirFirstBytes(t *testing.T) {
	for _, c := range []struct {
		text string
		want error
		at   int // number of bytes after which the error is known
	}{
		{"GET / HTTP/1.1\r\n\r\n", ErrNotTLS, 1},
		{"SSH-2.0-OpenSSH_9.2\r\n", ErrNotTLS, 1},
		{"\x16\x00\x00", ErrNotTLS, 2},
		{"\x15\x20", ErrNotTLS, 2},
		{"\x15\x03\x01\x00\x02\x01\x00", ErrMalformed, 5},
		{"\x17\x03\x03\x00\x01\x00", ErrMalformed, 5},
		{"\x80\x2e\x01\x03\x01\x00\x15", ErrMalformed, 5},
		{"\x80\x2e\x01\x00\x02\x00\x15", ErrMalformed, 5},
		{"\xff\xff\xff\xff\xff", ErrNotTLS, 5},
		{"\x16\x03\x01\x00\x00", ErrMalformed, 5},
		{"\x16\x03\x01\x40\x01", ErrTooLarge, 5},
		{"\x16\x03\x01\x3f\xfc", ErrTooLarge, 5},
	} {
		var r Reader
		for i := range c.text {
			h, err := r.Add([]byte(c.text[i : i+1]))
			if h != nil || (err != nil) != (i+1 >= c.at) || err != nil && !errors.Is(err, c.want) {
				t.Errorf("%q: after %d bytes: %v, %v; want %v after %d", c.text, i+1, h, err, c.want, c.at)
			}
		}
	}
}

func TestSizeIsLimited(t *testing.T) {
	fit := MaxBytes - len(modern(host("a.example"), ext{21, nil}))
	b := modern(host("a.example"), ext{21, make([]byte, fit)})
	if h, _, err := read(b, 1000); err != nil || h == nil || h.Length != MaxBytes {
		t.Errorf("%d bytes: %+v, %v", len(b), h, err)
	}
	for _, b := range [][]byte{
		modern(host("a.example"), ext{21, make([]byte, fit+1)}),
		split(message(tls13, host("a.example"), ext{21, make([]byte, fit-100)}), 100), // by the headers of the records
		rec(typeHandshake, []byte{clientHello, 0xff, 0xff, 0xff}),
		rec(typeHandshake, []byte{clientHello, 0, 0x40, 0}),
	} {
		for _, n := range []int{1, 1000, len(b)} {
			if h, r, err := read(b, n); h != nil || !errors.Is(err, ErrTooLarge) || len(r.Bytes()) > MaxBytes+n {
				t.Errorf("%d bytes in segments of %d: %+v, %v, %d stored", len(b), n, h, err, len(r.Bytes()))
			}
		}
	}
}

func TestAnIncompleteClientHelloIsNone(t *testing.T) {
	b := split(message(tls13, host("a.example")), 30)
	for n := range len(b) {
		var r Reader
		if h, err := r.Add(b[:n]); h != nil || err != nil {
			t.Fatalf("%d of %d bytes: %v, %v", n, len(b), h, err)
		}
	}
}

// seen is what a server of crypto/tls reads in a ClientHello.
type seen struct {
	called    bool
	name      string
	protocols []string
	versions  []uint16
}

var errStop = errors.New("stop")

// input is a connection from which the server reads bytes and the end.
type input struct {
	recorder
	rest []byte
}

func (i *input) Read(b []byte) (int, error) {
	if len(i.rest) == 0 {
		return 0, io.EOF
	}
	n := copy(b, i.rest)
	i.rest = i.rest[n:]
	return n, nil
}

func serverSees(b []byte) (out seen) {
	_ = tls.Server(&input{rest: b}, &tls.Config{GetConfigForClient: func(c *tls.ClientHelloInfo) (*tls.Config, error) {
		out = seen{true, c.ServerName, c.SupportedProtos, c.SupportedVersions}
		return nil, errStop
	}}).Handshake()
	return out
}

func compareWithServer(h *Hello, b []byte) error {
	s := serverSees(b)
	switch {
	case !s.called: // the server refuses it
	case !strings.EqualFold(s.name, h.ServerName):
		return fmt.Errorf("server name %q, the server sees %q", h.ServerName, s.name)
	case !slices.Equal(s.protocols, h.Protocols):
		return fmt.Errorf("protocols %q, the server sees %q", h.Protocols, s.protocols)
	}
	return nil
}

func FuzzHello(f *testing.F) {
	f.Add(genuine(f, &tls.Config{ServerName: "a.example", NextProtos: []string{"h2"}}), uint8(3))
	f.Add(genuine(f, &tls.Config{
		ServerName: "secret.example", EncryptedClientHelloConfigList: echConfigs(f, "public.example"),
	}), uint8(200))
	f.Add(split(message(tls13, host("a.example")), 20), uint8(1))
	for _, a := range attempts() {
		f.Add(a.bytes, uint8(0))
	}
	f.Fuzz(func(t *testing.T, b []byte, n uint8) {
		h, r, err := read(b, len(b)+1)
		again, _, errAgain := read(b, int(n)+1)
		if (h == nil) != (again == nil) || (err == nil) != (errAgain == nil) {
			t.Fatalf("in one segment %+v, %v; in segments of %d %+v, %v", h, err, n+1, again, errAgain)
		}
		if h == nil {
			if err != nil && !errors.Is(err, ErrNotTLS) && !errors.Is(err, ErrMalformed) && !errors.Is(err, ErrTooLarge) {
				t.Fatalf("an error of no kind: %v", err)
			}
			return
		}
		if h.ServerName != again.ServerName || h.ECH != again.ECH || h.Length != again.Length {
			t.Fatalf("in one segment %+v, in segments %+v", h, again)
		}
		if !bytes.Equal(r.Bytes(), b) || h.Length > len(b) {
			t.Fatal("bytes changed")
		}
		for _, part := range [][]byte{b, b[:h.Length]} {
			if err := compareWithServer(h, part); err != nil {
				t.Fatal(err)
			}
		}
		_, _ = NewSecond(h).Client(b[h.Length:])
	})
}

func BenchmarkReader(b *testing.B) {
	wire := genuine(b, &tls.Config{ServerName: "api.example.com", NextProtos: []string{"h2", "http/1.1"}})
	b.ReportAllocs()
	for b.Loop() {
		var r Reader
		if h, err := r.Add(wire); err != nil || h == nil {
			b.Fatal(err)
		}
	}
}
