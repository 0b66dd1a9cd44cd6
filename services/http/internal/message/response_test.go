// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"strings"
	"testing"
)

// answered returns the responses of a text to requests of a method as a client gets them, and what was read, up to the
// first one that is refused or the last one.
func answered(method, text string) (read []seen, sent string) {
	in := reading(text)
	var all bytes.Buffer
	for {
		p, err := ReadResponse(in, &Request{Method: method, Minor: 1})
		if err != nil {
			return read, all.String()
		}
		rest, _ := io.ReadAll(in)
		var head, coded, plain bytes.Buffer
		w := bufio.NewWriter(&head)
		body := p.Write(w, 1, p.Close)
		_ = w.Flush()
		in = reading(string(rest))
		if copyTo(&plain, in, p.Body, Body{}) != nil {
			return read, all.String()
		}
		in = reading(string(rest))
		if copyTo(&coded, in, p.Body, body) != nil {
			return read, all.String()
		}
		all.Write(head.Bytes())
		all.Write(coded.Bytes())
		fields := make([]string, len(p.Header))
		for i, f := range p.Header {
			fields[i] = f.Name + "=" + f.Value
		}
		read = append(read, seen{method, http.StatusText(p.Status), "", plain.String(), ordered(fields)})
		if p.Close || method == http.MethodConnect {
			return read, all.String()
		}
	}
}

// FuzzResponse: a client gets the responses that were read, and not more.
func FuzzResponse(f *testing.F) {
	for _, text := range []string{
		"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
		"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n2;a=b\r\nok\r\n0\r\nX: y\r\n\r\n",
		"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nX: a\r\nX: b\r\n\r\nuntil the end",
		"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\n\r\nold", "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
		"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n",
		"HTTP/1.1 426 \r\nConnection: upgrade\r\nUpgrade: a\r\n\r\n",
		"HTTP/1.1 200 OK\r\nConnection: X\r\nX: y\r\nContent-Length: 0\r\n\r\n",
	} {
		for _, method := range []string{"GET", "HEAD", "CONNECT"} {
			f.Add(method, text)
		}
	}
	f.Fuzz(func(t *testing.T, method, text string) {
		if method != http.MethodHead && method != http.MethodConnect {
			method = http.MethodGet
		}
		read, sent := answered(method, text)
		again, resent := answered(method, sent)
		if len(read) != len(again) || sent != resent {
			t.Fatalf("%q is sent as %q, and that as %q", text, sent, resent)
		}
		in := bufio.NewReader(strings.NewReader(sent))
		for i := range read {
			if read[i] != again[i] {
				t.Errorf("%q: %q, and again %q", text, read[i], again[i])
			}
			r, err := http.ReadResponse(in, &http.Request{Method: method})
			if err != nil {
				return // Go refuses more
			}
			if method == http.MethodConnect && r.StatusCode/100 == 2 {
				return // a tunnel, whose bytes net/http reads as a body
			}
			b, err := io.ReadAll(r.Body)
			if err != nil {
				return
			}
			if string(b) != read[i].body || http.StatusText(r.StatusCode) != read[i].target {
				t.Errorf("%q, sent as %q: Go reads %d with %q, want %q", text, sent, r.StatusCode, b, read[i])
			}
		}
		if r, err := http.ReadResponse(in, &http.Request{Method: method}); err == nil && method != http.MethodConnect {
			t.Errorf("%q, sent as %q: Go reads one more response: %+v", text, sent, r)
		}
	})
}
