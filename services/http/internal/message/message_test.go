// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

func reading(text string) *bufio.Reader { return bufio.NewReaderSize(strings.NewReader(text), 4096) }

// passed returns what a server would get for the requests of a text, and what was evaluated, up to the first one that
// is refused.
func passed(text string) (evaluated []seen, sent string) {
	in := reading(text)
	var all bytes.Buffer
	for {
		q, err := ReadRequest(in)
		if err != nil {
			return evaluated, all.String()
		}
		var out, body bytes.Buffer
		w := bufio.NewWriter(&out)
		q.Write(w)
		w.Flush()
		b := bufio.NewWriter(&body)
		if err := CopyBody(b, in, q.Body, q.Body); err != nil {
			return evaluated, all.String()
		}
		b.Flush()
		all.Write(out.Bytes())
		all.Write(body.Bytes())
		evaluated = append(evaluated, seen{q.Method, q.Target, q.Host, fieldsOf(q.Header), ""})
		if q.Close {
			return evaluated, all.String()
		}
	}
}

// seen is a request as a program understands it.
type seen struct{ method, target, host, fields, body string }

// fieldsOf returns the fields whose values a rule may compare.
func fieldsOf(h Header) string {
	var all []string
	for _, f := range h {
		if !IsFraming(f.Name) { // Go's server does not show them
			all = append(all, http.CanonicalHeaderKey(f.Name)+"="+f.Value)
		}
	}
	slices.Sort(all)
	return strings.Join(all, "|")
}

// receiver is Go's server. It records the requests that it gets.
type receiver struct {
	mu  sync.Mutex
	all []seen
}

func (r *receiver) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	_, err := io.Copy(io.Discard, q.Body)
	var h Header
	for name, values := range q.Header {
		for _, value := range values {
			h = append(h, Field{name, value})
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s := seen{q.Method, q.RequestURI, q.Host, fieldsOf(h), ""}
	if err != nil {
		s.body = err.Error()
	}
	r.all = append(r.all, s)
}

// received returns the requests that Go's server understands in a text.
func (r *receiver) received(t *testing.T, at, text string) []seen {
	t.Helper()
	r.mu.Lock()
	r.all = nil
	r.mu.Unlock()
	c, err := net.Dial("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(c, text); err == nil {
		_ = c.(*net.TCPConn).CloseWrite()
		_, _ = io.Copy(io.Discard, c)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.all)
}

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
		"Content-Length: 5\r\nContent-Length: 6", "Content-Length: 5\r\nContent-Length: 5",
		"Content-Length : 5", " Content-Length: 5",
		"Content-Length:\t5", "Content-Length: 5 ", "Content-Length: 5\x00", "Content-Length: 5\v",
		"content-length: 5", "Content_Length: 5",
		"Content-Length: 99999999999999999999", "Content-Length: 05", "Content-Length: \xd9\xa5",
		"Content-Length:\r\n 5",
		"Transfer-Encoding: chunked", "Transfer-Encoding:chunked", "Transfer-Encoding : chunked",
		"Transfer-Encoding: Chunked",
		"Transfer-Encoding: chunked, identity", "Transfer-Encoding: identity, chunked",
		"Transfer-Encoding: xchunked",
		"Transfer-Encoding: \"chunked\"", "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
		"Transfer-Encoding:\vchunked",
		"Transfer-Encoding:\r\n chunked", "X: y\rTransfer-Encoding: chunked",
		"X: y\nTransfer-Encoding: chunked", "X: y\x00Transfer-Encoding: chunked",
		"Transfer-Encoding: chunked;q=1", "Transfer-Encoding: ,chunked", "Transfer-Encoding: chunked,",
		"Transfer-Encoding\r\n: chunked",
		"Connection: Content-Length", "Connection: Transfer-Encoding, close", "Connection: Host",
		"Connection: X-Team",
		"Host: b", "Host : b", "hOsT: b", "X-Team: a\r\nX-Team: b", "Expect: 100-continue",
		"Upgrade: h2c\r\nConnection: Upgrade",
		"Trailer: Content-Length", "TE: chunked",
	}
	bodies := []string{
		"", "hello" + hidden, "5\r\nhello\r\n0\r\n\r\n" + hidden, "0\r\n\r\n" + hidden,
		"5\nhello\n0\n\n" + hidden,
		"5;a=\n\r\nhello\r\n0\r\n\r\n" + hidden, "05\r\nhello\r\n00\r\n\r\n" + hidden,
		"+5\r\nhello\r\n0\r\n\r\n" + hidden,
		"0x5\r\nhello\r\n0\r\n\r\n" + hidden, "5\r\nhello0\r\n\r\n" + hidden,
		"0\r\nContent-Length: 3\r\n\r\n" + hidden,
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
					all = append(all, line+"\r\nHost: a\r\n"+strings.TrimPrefix(pair,
						"\r\n")+"\r\n\r\n5\r\nhello\r\n0\r\n\r\n"+hidden)
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
		"", "a b", "a,b", "a/b", "a@b", "a:b", "a:0", "a:99999", "[::1]", "[::1", "[a]", "a:80", "\xc3\xa4",
		"a\tb", "a?b", "a#b",
	} {
		all = append(all, "GET /a HTTP/1.1\r\nHost: "+host+"\r\n\r\n"+hidden)
	}
	for _, whole := range []string{
		"GET /a HTTP/1.1\r\n\r\n", "GET  /a HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET /a  HTTP/1.1\r\nHost: a\r\n\r\n", "GET /a HTTP/1.1 \r\nHost: a\r\n\r\n",
		"GET /a\r\nHost: a\r\n\r\n", "GET /a HTTP/0.9\r\nHost: a\r\n\r\n",
		"GET /a HTTP/1.2\r\nHost: a\r\n\r\n", "GET /a HTTP/2.0\r\nHost: a\r\n\r\n",
		"G(T /a HTTP/1.1\r\nHost: a\r\n\r\n", "GET /a http/1.1\r\nHost: a\r\n\r\n",
		"\r\nGET /a HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET /a HTTP/1.1\nHost: a\n\n", "GET /a HTTP/1.1\r\nHost: a\r\n\n",
		"CONNECT a:80 HTTP/1.1\r\nHost: b:80\r\n\r\n",
		"CONNECT a:80 HTTP/1.1\r\nHost: a:80\r\nContent-Length: 5\r\n\r\nhello",
		"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	} {
		all = append(all, whole+hidden)
	}
	return all
}

// TestTheServerGetsWhatWasEvaluated: no text reaches Go's server as another request than the package has read, nor as
// more requests.
func TestTheServerGetsWhatWasEvaluated(t *testing.T) {
	r := &receiver{}
	s := &http.Server{Handler: r, ReadHeaderTimeout: time.Minute}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	defer func() {
		s.Close()
		<-done
	}()
	texts := smuggling()
	if len(texts) < 500 {
		t.Fatalf("%d texts", len(texts))
	}
	sentSome := 0
	for _, text := range texts {
		evaluated, sent := passed(text)
		if sent == "" {
			continue
		}
		sentSome++
		got := r.received(t, l.Addr().String(), sent)
		if fmt.Sprint(got) != fmt.Sprint(evaluated) {
			t.Errorf("%q was sent as %q:\nevaluated %q\nreceived  %q", text, sent, evaluated, got)
		}
	}
	t.Logf("%d texts, of which %d sent something on", len(texts), sentSome)
	if sentSome < 100 {
		t.Errorf("only %d of %d texts sent something on", sentSome, len(texts))
	}
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
		"GET /" + strings.Repeat("y", MaxHeader) + " HTTP/1.1\r\nHost: a\r\n\r\n":              431,
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
		err := CopyBody(bufio.NewWriter(io.Discard), reading(body), Body{Framing: Chunked},
			Body{Framing: Chunked})
		if !errors.As(err, &e) {
			t.Errorf("body %.40q: %v, want a refusal", body, err)
		}
	}
	if err := CopyBody(bufio.NewWriter(io.Discard), reading("5\r\nhe"), Body{Framing: Chunked},
		Body{}); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("half a chunk: %v", err)
	}
}

func TestPathsAreNormalised(t *testing.T) {
	for target, want := range map[string]string{
		"/": "/", "/a": "/a", "/a/": "/a/", "//a///b": "/a/b", "/./a": "/a", "/a/.": "/a/", "/a/..": "/",
		"/..": "/", "/../../a": "/a",
		"/a/../b": "/b", "/a/./b": "/a/b", "/%61": "/a", "/%2e%2E/a": "/a", "/a/%2e": "/a/", "/%7E": "/~",
		"/%e4": "/%E4", "/a%20b": "/a%20b",
		"/%252e%252e/a": "/%252e%252e/a", "/...": "/...", "/.a": "/.a", "/a?b/../c": "/a?b/../c",
		"/a?": "/a?", "//?x": "/?x", "/a;b/c": "/a;b/c",
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
		"", "a", "/%", "/%4", "/%zz", "/%2f", "/%2F", "/%5C", "/\\", "/%00", "/%1f", "/%7f", "/a/..;/b",
		"/a/%2e.;x/b", "/.;a",
	} {
		if got, err := Normalise(target); err == nil {
			t.Errorf("%q: %q, want a refusal", target, got)
		}
	}
}

// FuzzRequest: what was read and written is read again as the same.
func FuzzRequest(f *testing.F) {
	for _, text := range smuggling()[:200] {
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
				t.Errorf("%q: Go reads %s %s of %s, want %q", sent, q.Method, q.RequestURI, q.Host,
					evaluated[i])
			}
			if _, err := io.Copy(io.Discard, q.Body); err != nil {
				return
			}
		}
		if _, err := http.ReadRequest(in); err == nil {
			t.Errorf("%q: Go reads more than %q", sent, evaluated)
		}
	})
}
