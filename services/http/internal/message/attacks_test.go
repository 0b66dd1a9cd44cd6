// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

// refusedAs returns the reason for which a request is refused.
func refusedAs(t *testing.T, text string) (reason string) {
	t.Helper()
	q, err := ReadRequest(reading(text))
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("%.80q: %+v, %v, want a refusal", text, q, err)
	}
	return e.Reason
}

// TestReasonsHaveNothingOfTheMessage: reasons are reported, and a client must not choose them.
func TestReasonsHaveNothingOfTheMessage(t *testing.T) {
	for _, text := range []string{
		"GET / HTTP/1.1\r\nHost: a\r\nConnection: Secret-Text,Host\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: a\r\nConnection: \"secret-text\"\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: a\r\nsecret-text: \x01\r\n\r\n",
		"GET /secret-text%zz HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: secret-text/\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: a\r\nExpect: secret-text\r\n\r\n",
		"secret-text\r\n\r\n",
	} {
		if reason := refusedAs(t, text); strings.Contains(strings.ToLower(reason), "secret") {
			t.Errorf("%q: reason %q", text, reason)
		}
	}
}

// TestManyOptionsAreRefused: each option of Connection is compared with each field.
func TestManyOptionsAreRefused(t *testing.T) {
	head := "GET / HTTP/1.1\r\nHost: a\r\nConnection: x"
	if _, err := ReadRequest(reading(head + strings.Repeat(",x", maxOptions-1) + "\r\n\r\n")); err != nil {
		t.Errorf("64 options: %v", err)
	}
	refusedAs(t, head+strings.Repeat(",x", maxOptions)+"\r\n\r\n")
}

// TestFramingFieldsWithUnderscores: servers with CGI variables do not tell them from the fields with hyphens.
func TestFramingFieldsWithUnderscores(t *testing.T) {
	for _, name := range []string{"Content_Length", "transfer_encoding", "Keep_Alive"} {
		refusedAs(t, "POST / HTTP/1.1\r\nHost: a\r\n"+name+": 5\r\n\r\n")
	}
	if _, err := ReadRequest(reading("GET / HTTP/1.1\r\nHost: a\r\nX_Team: a\r\n\r\n")); err != nil {
		t.Errorf("another field: %v", err)
	}
}

// TestPrefaceNeedsNoFurtherBytes: the decision about HTTP/2 waits for no byte behind the first one that differs.
func TestPrefaceNeedsNoFurtherBytes(t *testing.T) {
	for _, text := range []string{"PRI / HTTP/1.0\r\n\r\n", "P / HTTP/1.0\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r"} {
		// A read behind the text fails with another error than the end.
		blocked := errors.New("a read that blocks")
		in := bufio.NewReader(io.MultiReader(strings.NewReader(text), iotest.ErrReader(blocked)))
		_, err := ReadRequest(in)
		if errors.Is(err, blocked) && !strings.HasPrefix(text, "PRI * HTTP/2") {
			t.Errorf("%q: %v", text, err)
		}
		if errors.Is(err, ErrHTTP2) {
			t.Errorf("%q: the preface of HTTP/2", text)
		}
	}
	// In segments of one byte.
	slow := bufio.NewReader(iotest.OneByteReader(strings.NewReader(preface)))
	if _, err := ReadRequest(slow); !errors.Is(err, ErrHTTP2) {
		t.Errorf("the preface in segments of one byte: %v", err)
	}
}

func TestUpgrades(t *testing.T) {
	for text, want := range map[string][]string{
		"Connection: Upgrade\r\nUpgrade: WebSocket": {"websocket"},
		"Upgrade: websocket":                        nil, // not named by Connection
		"Connection: upgrade, http2-settings\r\nUpgrade: h2c\r\nHTTP2-Settings: A": nil,
		"Connection: upgrade\r\nUpgrade: h2c, websocket, HTTP/2.0, h2c/1, h2":      {"websocket"},
		"Connection: upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0":            {"spdy/3.1"},
		"Connection: upgrade\r\nUpgrade: a b, c/, /d, e\"f":                        nil,
	} {
		q, err := ReadRequest(reading("POST / HTTP/1.1\r\nHost: a\r\n" + text + "\r\n\r\n"))
		if err != nil || !slices.Equal(q.Upgrades, want) {
			t.Errorf("%q: %+v, %v, want %q", text, q, err, want)
			continue
		}
		var b bytes.Buffer
		w := bufio.NewWriter(&b)
		q.Write(w)
		_ = w.Flush()
		for _, part := range []string{"h2c", "http2-settings", "http/2"} {
			if strings.Contains(strings.ToLower(b.String()), part) {
				t.Errorf("%q is sent as %q", text, b.String())
			}
		}
	}
}

// TestAddedFieldsAreChecked: a value of a rule with CR LF would be a request that no rule has seen.
func TestAddedFieldsAreChecked(t *testing.T) {
	for _, f := range []Field{
		{"X", "y\r\n\r\nGET /secret HTTP/1.1\r\nHost: a"},
		{"X", "y\nZ: 1"},
		{"X", "\x00"},
		{"X y", "z"},
		{"", "z"},
		{"X:", "z"},
	} {
		if f.Valid() {
			t.Errorf("%q is valid", f)
		}
	}
	if f := (Field{"X-Team", "a, \"b\" \xe4"}); !f.Valid() {
		t.Errorf("%q is not valid", f)
	}
}

// stepReader returns each of its parts by a read of its own. Before each read, it calls a function.
type stepReader struct {
	parts []string
	step  func(next int)
	next  int
}

func (r *stepReader) Read(b []byte) (int, error) {
	r.step(r.next)
	if r.next == len(r.parts) {
		return 0, io.EOF
	}
	r.next++
	return copy(b, r.parts[r.next-1]), nil
}

// TestChunksDoNotWaitForLaterOnes: the bytes of a chunk are passed on even if the sender ends its segments elsewhere.
func TestChunksDoNotWaitForLaterOnes(t *testing.T) {
	parts := []string{"5\r\nhello", "\r\n5\r\nworld\r\n6", "\r\nagain!\r\n", "1\r\nx\r\n0\r\nX: y", "\r\n\r\n"}
	want := []string{"", "hello", "helloworld", "helloworldagain!", "helloworldagain!x"}
	var out bytes.Buffer
	in := bufio.NewReader(&stepReader{parts: parts, step: func(next int) {
		if next < len(want) && out.String() != want[next] {
			t.Errorf("before part %d, %q was passed on, want %q", next, out.String(), want[next])
		}
	}})
	w := bufio.NewWriter(&out)
	if err := CopyBody(w, in, Body{Framing: Chunked}, Body{Framing: UntilClose}); err != nil {
		t.Fatal(err)
	}
}

// TestResponseFramings: the body of a response depends on its request, its status and its fields.
func TestResponseFramings(t *testing.T) {
	for _, x := range []struct {
		method, text string
		want         Body
		last, bad    bool
	}{
		{"GET", "200 OK\r\nContent-Length: 3\r\n", Body{Length, 3}, false, false},
		{"GET", "200 OK\r\nTransfer-Encoding: chunked\r\n", Body{Chunked, 0}, false, false},
		{"GET", "200 OK\r\n", Body{UntilClose, 0}, true, false},
		{"HEAD", "200 OK\r\nContent-Length: 3\r\n", Body{}, false, false},
		{"HEAD", "200 OK\r\nTransfer-Encoding: chunked\r\n", Body{}, false, false},
		{"HEAD", "200 OK\r\n", Body{}, false, false},
		{"GET", "204 No Content\r\n", Body{}, false, false},
		{"GET", "304 Not Modified\r\nContent-Length: 9\r\n", Body{}, false, false},
		{"GET", "100 Continue\r\n", Body{}, false, false},
		{"GET", "103 Early Hints\r\nLink: x\r\n", Body{}, false, false},
		{"CONNECT", "200 OK\r\nContent-Length: 3\r\n", Body{}, false, false},
		{"CONNECT", "407 No\r\nContent-Length: 3\r\n", Body{Length, 3}, false, false},
		{"GET", "200 OK\r\nConnection: close\r\nContent-Length: 0\r\n", Body{Length, 0}, true, false},
		{"GET", "101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n", Body{}, false, true},
		{"GET", "200 OK\r\nContent-Length: 1\r\nContent-Length: 1\r\n", Body{}, false, true},
		{"GET", "200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n", Body{}, false, true},
		{"GET", "200 OK\r\nX: a\rSet-Cookie: b\r\n", Body{}, false, true},
		{"GET", "200 OK\r\nX: a\nSet-Cookie: b\r\n", Body{}, false, true},
		{"GET", "200 OK\r\nX: a\r\n b\r\n", Body{}, false, true},
		{"GET", "200 a\x00b\r\n", Body{}, false, true},
		{"GET", "200OK\r\n", Body{}, false, true},
		{"GET", "20 OK\r\n", Body{}, false, true},
		{"GET", "+20 OK\r\n", Body{}, false, true},
	} {
		p, err := ReadResponse(reading("HTTP/1.1 "+x.text+"\r\n"), &Request{Method: x.method, Minor: 1})
		switch {
		case x.bad && !errors.Is(err, ErrResponse):
			t.Errorf("%s, %q: %+v, %v, want a refusal", x.method, x.text, p, err)
		case !x.bad && (err != nil || p.Body != x.want || p.Close != x.last):
			t.Errorf("%s, %q: %+v, %v, want %+v, last %t", x.method, x.text, p, err, x.want, x.last)
		}
	}
}

// BenchmarkRequest reads and writes a request as a client sends it.
func BenchmarkRequest(b *testing.B) {
	const text = "GET /api/v1/items?id=7 HTTP/1.1\r\nHost: shop.example\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n" +
		"Accept-Encoding: gzip\r\nTraceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n\r\n"
	source := strings.NewReader("")
	in, w := bufio.NewReader(source), bufio.NewWriter(io.Discard)
	b.ReportAllocs()
	for b.Loop() {
		source.Reset(text)
		in.Reset(source)
		q, err := ReadRequest(in)
		if err != nil {
			b.Fatal(err)
		}
		q.Write(w)
	}
}
