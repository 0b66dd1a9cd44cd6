// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"bufio"
	"bytes"
	"errors"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
)

// Request is a request. Its fields may be changed before Write.
type Request struct {
	Method string
	// Target is the path in its normal form with the query, "*" for OPTIONS, and host and port for CONNECT.
	Target string
	// Host is the value of the field Host, "" without one, which HTTP/1.0 allows.
	Host  string
	Minor int // HTTP/1.Minor
	// Header has all other fields, without those about the connection.
	Header Header
	Body   Body
	// Close is set if the client sends no further request on the connection.
	Close bool
	// Upgrades are the protocols to which the connection may change.
	Upgrades []string
	// Continue is set if the client waits for 100 Continue before it sends the body.
	Continue bool
}

// Path returns what rules for paths compare: the target, but nothing for CONNECT.
func (q *Request) Path() string {
	if q.Method == http.MethodConnect {
		return ""
	}
	return q.Target
}

// ReadRequest reads the header of a request. The body follows. The error is an *Error if the client sends what is not
// allowed, ErrHTTP2, io.EOF if the connection ended before the request, or another error of the reader.
func ReadRequest(in *bufio.Reader) (*Request, error) {
	if hasPreface(in) {
		return nil, ErrHTTP2
	}
	r := &reader{r: in, left: MaxHeader}
	line, err := r.line()
	if errors.Is(err, errTooLarge) {
		return nil, &Error{http.StatusRequestURITooLong, "the first line is larger than 64 KiB"}
	}
	if err != nil {
		return nil, err
	}
	q := &Request{}
	method, rest, _ := bytes.Cut(line, []byte{' '})
	target, proto, ok := bytes.Cut(rest, []byte{' '})
	if !ok || !isToken(method) || len(target) == 0 {
		return nil, bad("not HTTP")
	}
	if q.Minor, err = version(proto); err != nil {
		return nil, err
	}
	if string(method) == "PRI" {
		return nil, bad("the method PRI, which is reserved for the preface of HTTP/2")
	}
	q.Method, q.Target = string(method), string(target)
	h, err := r.fields()
	if err != nil {
		return nil, err
	}
	if err := q.address(h); err != nil {
		return nil, err
	}
	return q, q.interpret(h)
}

// hasPreface reports whether the preface of HTTP/2 follows. It waits for no byte after the first one that differs.
func hasPreface(in *bufio.Reader) bool {
	for i := range len(preface) {
		if b, err := in.Peek(i + 1); err != nil || b[i] != preface[i] {
			return false
		}
	}
	return true
}

// address sets host and target.
func (q *Request) address(h Header) (err error) {
	hosts := h.Values("Host")
	switch {
	case len(hosts) > 1:
		return bad("several fields Host")
	case len(hosts) == 1:
		if q.Host = hosts[0]; !isHost(q.Host) {
			return bad("Host is not a name or an address with an optional port")
		}
	case q.Minor > 0:
		return bad("no Host")
	}
	for i := range len(q.Target) {
		if c := q.Target[i]; c <= ' ' || c >= 0x7f || c == '#' {
			return bad("a character in the target that must be encoded")
		}
	}
	switch {
	case q.Method == http.MethodConnect:
		if !isHost(q.Target) || !strings.EqualFold(q.Target, q.Host) || !strings.Contains(q.Target, ":") {
			return bad("the target of CONNECT is not the host and port of the field Host")
		}
		return nil
	case q.Target == "*":
		if q.Method != http.MethodOptions {
			return bad("the target * of a method other than OPTIONS")
		}
		return nil
	case q.Target[0] != '/':
		if q.Target, err = q.relative(); err != nil {
			return err
		}
	}
	q.Target, err = Normalise(q.Target)
	return err
}

// relative returns the path and the query of an absolute target, whose host must equal the field Host: servers
// differ in which of the two they use.
func (q *Request) relative() (string, error) {
	_, rest, ok := strings.Cut(q.Target, "://")
	scheme := q.Target[:len(q.Target)-len(rest)]
	if !ok || !strings.EqualFold(scheme, "http://") {
		return "", bad("the target is no path and no URL of http")
	}
	end := strings.IndexAny(rest, "/?")
	if end < 0 {
		end = len(rest)
	}
	if host := rest[:end]; !isHost(host) || !strings.EqualFold(host, q.Host) {
		return "", bad("the host of the target differs from the field Host")
	}
	path := rest[end:]
	if !strings.HasPrefix(path, "/") {
		path = "/" + path
	}
	return path, nil
}

// isHost reports whether s is a name, an IPv4 address, or an IPv6 address in brackets, with an optional port.
func isHost(s string) bool {
	name := s
	if i := strings.LastIndexByte(s, ':'); i >= 0 && !strings.HasSuffix(s, "]") {
		port := s[i+1:]
		name = s[:i]
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 || len(port) > 5 || port[0] == '+' {
			return false
		}
	}
	if literal, ok := strings.CutPrefix(name, "["); ok {
		literal, ok = strings.CutSuffix(literal, "]")
		a, err := netip.ParseAddr(literal)
		return ok && err == nil && a.Is6() && a.Zone() == ""
	}
	for i := range len(name) {
		c := name[i]
		if c|0x20 < 'a' || c|0x20 > 'z' {
			if (c < '0' || c > '9') && c != '-' && c != '.' && c != '_' {
				return false
			}
		}
	}
	return name != "" && len(name) <= 255
}

// interpret sets what the other fields say.
func (q *Request) interpret(h Header) (err error) {
	body, has, err := framing(h, q.Minor)
	if err != nil {
		return err
	}
	if q.Body = body; has && q.Method == http.MethodConnect {
		return bad("CONNECT with a body")
	}
	expectations := h.list("Expect")
	if len(expectations) > 1 || len(expectations) == 1 && expectations[0] != "100-continue" {
		return &Error{http.StatusExpectationFailed, "an expectation other than 100-continue"}
	}
	q.Continue = len(expectations) == 1 && q.Minor > 0
	if trailers := h.list("Trailer"); slices.ContainsFunc(trailers, IsFraming) {
		return bad("Trailer announces a field that no trailer may have")
	}
	offered := h
	h, options, err := connection(slices.Clone(h))
	if err != nil {
		return err
	}
	if q.Upgrades = upgrades(offered, options); q.Minor == 0 || q.Method == http.MethodConnect {
		q.Upgrades = nil
	}
	q.Close = q.Minor == 0 || slices.Contains(options, "close")
	q.Header = h.Without("Host")
	return nil
}

// Write writes the header.
func (q *Request) Write(w *bufio.Writer) {
	_, _ = w.WriteString(q.Method + " " + q.Target + " HTTP/1." + strconv.Itoa(q.Minor) + "\r\n")
	if q.Host != "" || q.Minor > 0 {
		_, _ = w.WriteString("Host: " + q.Host + "\r\n")
	}
	writeFields(w, q.Header)
	writeFraming(w, q.Body)
	writeConnection(w, q.Upgrades, q.Close)
	_, _ = w.WriteString("\r\n")
}
