// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import (
	"bufio"
	"bytes"
	"errors"
	"net/http"
	"slices"
	"strconv"
)

// Response is a response.
type Response struct {
	Status int
	Reason string
	Minor  int // HTTP/1.Minor
	// Header has all fields without those about the connection.
	Header Header
	Body   Body
	// Close is set if the server sends no further response on the connection.
	Close bool
	// Upgrades are the protocols that the server has changed to, or asks for.
	Upgrades []string
}

// Interim reports whether another response to the same request follows.
func (p *Response) Interim() bool {
	return p.Status < 200 && p.Status != http.StatusSwitchingProtocols
}

// ErrResponse is the cause of errors about what a server sends.
var ErrResponse = errors.New("the server's response is not valid")

// ReadResponse reads the header of a response to q. The body follows. The error wraps ErrResponse if the server sends
// what is not allowed; otherwise it is an error of the reader, io.EOF if the connection ended before the response.
func ReadResponse(in *bufio.Reader, q *Request) (*Response, error) {
	r, err := readResponse(in, q)
	var e *Error
	if errors.As(err, &e) {
		return nil, errors.Join(ErrResponse, err)
	}
	return r, err
}

func readResponse(in *bufio.Reader, q *Request) (*Response, error) {
	r := &reader{r: in, left: MaxHeader}
	line, err := r.line()
	if err != nil {
		return nil, err
	}
	p := &Response{}
	proto, rest, _ := bytes.Cut(line, []byte{' '})
	status, reason, _ := bytes.Cut(rest, []byte{' '})
	if p.Minor, err = version(proto); err != nil {
		return nil, err
	}
	if len(status) != 3 || status[0] == '0' || len(bytes.Trim(status, "0123456789")) > 0 {
		return nil, bad("the status is not a number of three digits")
	}
	p.Status, _ = strconv.Atoi(string(status))
	if !isValue(reason) {
		return nil, bad("a control character in the first line")
	}
	p.Reason = string(reason)
	h, err := r.fields()
	if err != nil {
		return nil, err
	}
	return p, p.interpret(h, q)
}

func (p *Response) interpret(h Header, q *Request) error {
	body, has, err := framing(h, p.Minor)
	if err != nil {
		return err
	}
	p.Body = Body{Framing: UntilClose}
	if has {
		p.Body = body
	}
	offered := h
	h, options, err := connection(slices.Clone(h))
	if err != nil {
		return err
	}
	p.Header, p.Upgrades = h, upgrades(offered, options)
	p.Close = slices.Contains(options, "close") || p.Minor == 0
	switch {
	case p.Status == http.StatusSwitchingProtocols:
		if len(q.Upgrades) == 0 || len(p.Upgrades) == 0 {
			return bad("the server changes the protocol, and was not asked to")
		}
		p.Body = Body{}
	case q.Method == http.MethodHead, p.Status < 200, p.Status == http.StatusNoContent, p.Status == http.StatusNotModified,
		q.Method == http.MethodConnect && p.Status < 300:
		if has && (q.Method == http.MethodHead || p.Status == http.StatusNotModified) && body.Framing == Length {
			// the length that the body would have
			p.Header = append(p.Header, Field{"Content-Length", strconv.FormatInt(body.Length, 10)})
		}
		p.Body = Body{}
	}
	p.Close = p.Close || p.Body.Framing == UntilClose
	return nil
}

// Write writes the header for a client of HTTP/1.minor. last is set if the connection to the client ends after it.
// The body has to be written with the framing that Write returns.
func (p *Response) Write(w *bufio.Writer, minor int, last bool) Body {
	body := p.Body
	if body.Framing == Chunked && minor == 0 {
		body = Body{Framing: UntilClose}
	}
	_, _ = w.WriteString("HTTP/1.1 " + strconv.Itoa(p.Status) + " " + p.Reason + "\r\n")
	writeFields(w, p.Header)
	writeFraming(w, body)
	writeConnection(w, p.Upgrades, last)
	_, _ = w.WriteString("\r\n")
	return body
}
