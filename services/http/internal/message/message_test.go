// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
)

func reading(text string) *bufio.Reader { return bufio.NewReaderSize(strings.NewReader(text), 4096) }

// smuggling returns texts with parts that programs read in different ways, in many combinations.
func smuggling() (all []string) {
	const hidden = "GET /secret HTTP/1.1\r\nHost: a\r\n\r\n"
	lines := []string{
		"GET /a HTTP/1.1", "POST /a HTTP/1.1", "POST /a HTTP/1.0", "POST http://a/a HTTP/1.1",
		"POST /a/../b HTTP/1.1",
	}
	fields := []string{
		"", "Content-Length: 5", "Content-Length: +5", "Content-Length: -5", "Content-Length: 5, 5",
		"Content-Length: 0x5",
		"Content-Length: 5\r\nContent-Length: 6", "Content-Length: 5\r\nContent-Length: 5", "Content-Length : 5",
		" Content-Length: 5",
		"Content-Length:\t5", "Content-Length: 5 ", "Content-Length: 5\x00", "Content-Length: 5\v",
		"content-length: 5", "Content_Length: 5",
		"Content-Length: 99999999999999999999", "Content-Length: 05", "Content-Length: \xd9\xa5",
		"Content-Length:\r\n 5",
		"Transfer-Encoding: chunked", "Transfer-Encoding:chunked", "Transfer-Encoding : chunked",
		"Transfer-Encoding: Chunked",
		"Transfer-Encoding: chunked, identity", "Transfer-Encoding: identity, chunked", "Transfer-Encoding: xchunked",
		"Transfer-Encoding: \"chunked\"", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
		"Transfer-Encoding:\vchunked",
		"Transfer-Encoding:\r\n chunked", "X: y\rTransfer-Encoding: chunked", "X: y\nTransfer-Encoding: chunked",
		"X: y\x00Transfer-Encoding: chunked",
		"Transfer-Encoding: chunked;q=1", "Transfer-Encoding: ,chunked", "Transfer-Encoding: chunked,",
		"Transfer-Encoding\r\n: chunked",
		"Connection: Content-Length", "Connection: Transfer-Encoding, close", "Connection: Host", "Connection: X-Team",
		"Host: b", "Host : b", "hOsT: b", "X-Team: a\r\nX-Team: b", "Expect: 100-continue",
		"Upgrade: h2c\r\nConnection: Upgrade",
		"Trailer: Content-Length", "TE: chunked",
	}
	bodies := []string{
		"", "hello" + hidden, "5\r\nhello\r\n0\r\n\r\n" + hidden, "0\r\n\r\n" + hidden, "5\nhello\n0\n\n" + hidden,
		"5;a=\n\r\nhello\r\n0\r\n\r\n" + hidden, "05\r\nhello\r\n00\r\n\r\n" + hidden, "+5\r\nhello\r\n0\r\n\r\n" + hidden,
		"0x5\r\nhello\r\n0\r\n\r\n" + hidden, "5\r\nhello0\r\n\r\n" + hidden, "0\r\nContent-Length: 3\r\n\r\n" + hidden,
		"0\r\nHost: b\r\n\r\n" + hidden, "0\r\nX: y\r\n\r\n" + hidden, "fffffffffffffffff\r\n" + hidden,
		"5 \r\nhello\r\n0\r\n\r\n" + hidden,
	}
	for _, line := range lines {
		for _, field := range fields {
			for _, body := range bodies {
				head := line + "\r\nHost: a\r\n"
				if field != "" {
					head += field + "\r\n"
				}
				all = append(all, head+"\r\n"+body)
			}
		}
		for _, one := range fields { // two of them, in both orders
			for _, other := range []string{"Content-Length: 5", "Transfer-Encoding: chunked"} {
				for _, pair := range []string{one + "\r\n" + other, other + "\r\n" + one} {
					all = append(all, line+"\r\nHost: a\r\n"+strings.TrimPrefix(pair, "\r\n")+"\r\n\r\n5\r\nhello\r\n0\r\n\r\n"+hidden)
				}
			}
		}
	}
	for _, target := range []string{
		"/a\x00", "/a#b", "//secret", "/\\secret", "/%2e%2e/secret", "/a/%2E./secret", "/%2f", "/%5c",
		"/a/..;/secret", "/a;x=1/../secret",
		"http://b/secret", "http://a@b/secret", "https://a/secret", "a/secret", "*", "/\x80", "/ secret",
		"\t/secret", "/a?x=/../secret",
		"/.", "/..", "/a/.", "/a/..", "/./a", "/%61", "/%", "/%4", "/%zz", "/%00", "/%0d%0aX:%20y",
		"http://a:80/secret", "http://a", "http://a?x",
	} {
		all = append(all, "GET "+target+" HTTP/1.1\r\nHost: a\r\n\r\n"+hidden)
	}
	for _, host := range []string{
		"", "a b", "a,b", "a/b", "a@b", "a:b", "a:0", "a:99999", "[::1]", "[::1", "[a]",
		"a:80", "\xc3\xa4", "a\tb", "a?b", "a#b",
	} {
		all = append(all, "GET /a HTTP/1.1\r\nHost: "+host+"\r\n\r\n"+hidden)
	}
	for _, whole := range []string{
		"GET /a HTTP/1.1\r\n\r\n", "GET  /a HTTP/1.1\r\nHost: a\r\n\r\n", "GET /a  HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET /a HTTP/1.1 \r\nHost: a\r\n\r\n",
		"GET /a\r\nHost: a\r\n\r\n", "GET /a HTTP/0.9\r\nHost: a\r\n\r\n", "GET /a HTTP/1.2\r\nHost: a\r\n\r\n",
		"GET /a HTTP/2.0\r\nHost: a\r\n\r\n",
		"G(T /a HTTP/1.1\r\nHost: a\r\n\r\n", "GET /a http/1.1\r\nHost: a\r\n\r\n",
		"\r\nGET /a HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET /a HTTP/1.1\nHost: a\n\n", "GET /a HTTP/1.1\r\nHost: a\r\n\n",
		"CONNECT a:80 HTTP/1.1\r\nHost: b:80\r\n\r\n",
		"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\nContent-Length: 5\r\n\r\nhello", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	} {
		all = append(all, whole+hidden)
	}
	return all
}

func TestInvalidRequestsAreRefused(t *testing.T) {
	for text, status := range map[string]int{
		"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n": 400,
		"GET / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n":                                 400,
		"GET / HTTP/1.1\r\nHost : a\r\n\r\n":                                                   400,
		"GET / HTTP/1.1\r\n\r\n":                                                               400,
		"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n":                                         400,
		"GET / HTTP/1.2\r\nHost: a\r\n\r\n":                                                    505,
		"GET / HTTP/1.1\r\nHost: a\r\nX: a\r\n b\r\n\r\n":                                      400,
		"GET / HTTP/1.1\nHost: a\n\n":                                                          400,
		"GET http://b/ HTTP/1.1\r\nHost: a\r\n\r\n":                                            400,
		"GET /#b HTTP/1.1\r\nHost: a\r\n\r\n":                                                  400,
		"GET /%2F HTTP/1.1\r\nHost: a\r\n\r\n":                                                 400,
		"GET /%5c HTTP/1.1\r\nHost: a\r\n\r\n":                                                 400,
		"GET / HTTP/1.1\r\nHost: a\r\nExpect: more\r\n\r\n":                                    417,
		"GET / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n":                501,
		"GET / HTTP/1.1\r\nHost: a\r\n" + strings.Repeat("X: y\r\n", 128) + "\r\n":             431,
		"GET / HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("y", MaxHeader) + "\r\n\r\n":       431,
		"GET /" + strings.Repeat("y", MaxHeader) + " HTTP/1.1\r\nHost: a\r\n\r\n":              414,
	} {
		_, err := ReadRequest(reading(text))
		var e *Error
		if !errors.As(err, &e) || e.Status != status {
			t.Errorf("%.60q: %v, want status %d", text, err, status)
		}
	}
	if _, err := ReadRequest(reading("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00")); !errors.Is(err, ErrHTTP2) {
		t.Errorf("the preface of HTTP/2: %v", err)
	}
	for _, body := range []string{
		"5\nhello\r\n0\r\n\r\n", "0x5\r\nhello\r\n0\r\n\r\n", "-5\r\n", "\r\n", "5\r\nhello!0\r\n\r\n",
		"0\r\nContent-Length: 1\r\n\r\n",
		"0\r\n X: y\r\n\r\n", "1000000000000000\r\n", "1;" + strings.Repeat("x", 300) + "\r\n",
		"1;\x01\r\na\r\n0\r\n\r\n",
	} {
		var e *Error
		err := CopyBody(bufio.NewWriter(io.Discard), reading(body), Body{Framing: Chunked}, Body{Framing: Chunked})
		if !errors.As(err, &e) {
			t.Errorf("body %.40q: %v, want a refusal", body, err)
		}
	}
	err := CopyBody(bufio.NewWriter(io.Discard), reading("5\r\nhe"), Body{Framing: Chunked}, Body{})
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("half a chunk: %v", err)
	}
}

func TestPathsAreNormalised(t *testing.T) {
	for target, want := range map[string]string{
		"/": "/", "/a": "/a", "/a/": "/a/", "//a///b": "/a/b", "/./a": "/a", "/a/.": "/a/", "/a/..": "/", "/..": "/",
		"/../../a": "/a",
		"/a/../b":  "/b", "/a/./b": "/a/b", "/%61": "/a", "/%2e%2E/a": "/a", "/a/%2e": "/a/", "/%7E": "/~",
		"/%e4": "/%E4", "/a%20b": "/a%20b",
		"/%252e%252e/a": "/%252e%252e/a", "/...": "/...", "/.a": "/.a", "/a?b/../c": "/a?b/../c", "/a?": "/a?",
		"//?x": "/?x", "/a;b/c": "/a;b/c",
		"/a/..b": "/a/..b",
	} {
		got, err := Normalise(target)
		if err != nil || got != want {
			t.Errorf("%q: %q, %v, want %q", target, got, err, want)
		}
		if again, err := Normalise(got); err != nil || again != got {
			t.Errorf("%q is not normal: %q, %v", got, again, err)
		}
	}
	for _, target := range []string{
		"", "a", "/%", "/%4", "/%zz", "/%2f", "/%2F", "/%5C", "/\\", "/%00", "/%1f",
		"/%7f", "/a/..;/b", "/a/%2e.;x/b", "/.;a",
	} {
		if got, err := Normalise(target); err == nil {
			t.Errorf("%q: %q, want a refusal", target, got)
		}
	}
}

// FuzzRequest: what was read and written is read again as the same.
func FuzzRequest(f *testing.F) {
	for _, text := range slices.Concat(smuggling()[:200], combinations(200)) {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		evaluated, sent := passed(text)
		again, resent := passed(sent)
		if fmt.Sprint(again) != fmt.Sprint(evaluated) || resent != sent {
			t.Errorf("%q is sent as %q, and that as %q:\n%q\n%q", text, sent, resent, evaluated, again)
		}
		in := bufio.NewReader(strings.NewReader(sent))
		for i := range evaluated { // Go reads the same
			q, err := http.ReadRequest(in)
			if err != nil {
				return // Go refuses more
			}
			if q.Method != evaluated[i].method || q.RequestURI != evaluated[i].target || q.Host != evaluated[i].host {
				t.Errorf("%q: Go reads %s %s of %s, want %q", sent, q.Method, q.RequestURI, q.Host, evaluated[i])
			}
			b, err := io.ReadAll(q.Body)
			if err != nil || string(b) != evaluated[i].body {
				t.Errorf("%q: Go reads the body %q, %v, want %q", sent, b, err, evaluated[i].body)
			}
			var fields []string
			for name, values := range q.Header {
				for _, value := range values {
					fields = append(fields, name+"="+value)
				}
			}
			if got := ordered(fields); got != evaluated[i].fields {
				t.Errorf("%q: Go reads the fields %q, want %q", sent, got, evaluated[i].fields)
			}
		}
		if _, err := http.ReadRequest(in); err == nil {
			t.Errorf("%q: Go reads more than %q", sent, evaluated)
		}
	})
}
