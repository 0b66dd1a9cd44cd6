// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package message reads and writes messages of HTTP/1.0 and HTTP/1.1 (RFC 9112).
//
// A proxy evaluates what it has read. So that the receiver cannot understand another message, the package writes what
// it has read, and nothing else. It refuses everything that two programs might read differently: several lengths, a
// length with a transfer coding, lines that end without CR LF, folded lines, spaces before a colon. It changes the path
// of a request to its normal form, and removes the fields that are about the connection.
package message

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
)

// Limits of the header of a message.
const (
	MaxHeader = 64 << 10 // bytes, with the first line
	MaxFields = 128
)

// maxOptions limits the options of the fields Connection and Upgrade. Each removes fields, so many of them cost time.
const maxOptions = 64

// Error is the reason why a message is refused. Status is the status code of the answer to the client. Reason is one
// of few constant texts, and contains no part of the message.
type Error struct {
	Status int
	Reason string
}

func (e *Error) Error() string { return e.Reason }

func bad(reason string) *Error { return &Error{http.StatusBadRequest, reason} }

// errTooLarge is returned for a header above MaxHeader.
var errTooLarge = &Error{http.StatusRequestHeaderFieldsTooLarge, "the header is larger than 64 KiB"}

// ErrHTTP2 is returned for the preface of HTTP/2, of which nothing was read.
var ErrHTTP2 = errors.New("the client speaks HTTP/2")

// preface is the beginning of a connection of HTTP/2.
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// Field is a field of a header.
type Field struct{ Name, Value string }

// Valid reports whether name and value are one field, and not more when they are written. Fields that were read are
// valid.
func (f Field) Valid() bool { return isToken(f.Name) && isValue(f.Value) }

// Header lists fields in the order in which they were sent.
type Header []Field

// Values returns the values of all fields of a name, whatever their case is.
func (h Header) Values(name string) (all []string) {
	for _, f := range h {
		if strings.EqualFold(f.Name, name) {
			all = append(all, f.Value)
		}
	}
	return all
}

// Without returns the header without the fields of a name.
func (h Header) Without(name string) Header {
	return slices.DeleteFunc(h, func(f Field) bool { return strings.EqualFold(f.Name, name) })
}

// Framing says how the end of a body is found.
type Framing uint8

// The framings.
const (
	NoBody Framing = iota
	Length
	Chunked
	UntilClose // responses only
)

// Body is the framing of a message's body.
type Body struct {
	Framing Framing
	Length  int64 // of a body with Length
}

// connectionFields are about the connection and not about the message: they are never passed on. Field Upgrade is
// treated separately.
var connectionFields = []string{
	"Connection", "Keep-Alive", "Proxy-Connection", "TE", "HTTP2-Settings", "Transfer-Encoding", "Content-Length",
	"Upgrade",
}

// IsFraming reports whether a field decides where a message begins or ends, or who receives it. Rules cannot change
// such fields.
func IsFraming(name string) bool {
	return strings.EqualFold(name, "Host") || strings.EqualFold(name, "Expect") ||
		strings.EqualFold(name, "Trailer") ||
		slices.ContainsFunc(connectionFields, func(f string) bool { return strings.EqualFold(f, name) })
}

// reader reads the lines of one header.
type reader struct {
	r    *bufio.Reader
	left int // bytes that the header may still have
	long []byte
}

// line returns the next line without its end. It is valid until the next call.
func (r *reader) line() ([]byte, error) {
	r.long = r.long[:0]
	for {
		b, err := r.r.ReadSlice('\n')
		if r.left -= len(b); r.left < 0 {
			return nil, errTooLarge
		}
		if err == nil {
			if len(r.long) > 0 {
				b = append(r.long, b...)
			}
			if len(b) < 2 || b[len(b)-2] != '\r' {
				return nil, bad("a line ends without CR LF")
			}
			return b[:len(b)-2], nil
		}
		if !errors.Is(err, bufio.ErrBufferFull) {
			return nil, err
		}
		r.long = append(r.long, b...)
	}
}

// fields reads the fields up to the empty line.
func (r *reader) fields() (h Header, err error) {
	for {
		b, err := r.line()
		if err != nil {
			return nil, err
		}
		if len(b) == 0 {
			return h, nil
		}
		if len(h) == MaxFields {
			return nil, &Error{http.StatusRequestHeaderFieldsTooLarge, "the header has more than 128 fields"}
		}
		f, err := parseField(b)
		if err != nil {
			return nil, err
		}
		h = append(h, f)
	}
}

func parseField(b []byte) (f Field, err error) {
	name, value, ok := bytes.Cut(b, []byte{':'})
	if b[0] == ' ' || b[0] == '\t' {
		return f, bad("a field is folded over several lines")
	}
	if !ok || !isToken(name) {
		return f, bad("a field has no valid name")
	}
	if bytes.IndexByte(name, '_') >= 0 && IsFraming(strings.ReplaceAll(string(name), "_", "-")) {
		// CGI and its successors do not tell Content_Length from Content-Length.
		return f, bad("a field about the framing is written with an underscore")
	}
	value = bytes.Trim(value, " \t")
	if !isValue(value) {
		return f, bad("the value of a field has a control character")
	}
	return Field{string(name), string(value)}, nil
}

// isValue reports whether s has no control characters except tabs. CR and LF would begin another field.
func isValue[T string | []byte](s T) bool {
	for i := range len(s) {
		if c := s[i]; c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return true
}

// tokens are the characters of tokens (RFC 9110, section 5.6.2).
var tokens = func() (is [256]bool) {
	for _, c := range "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" {
		is[c] = true
	}
	return is
}()

func isToken[T string | []byte](s T) bool {
	for i := range len(s) {
		if !tokens[s[i]] {
			return false
		}
	}
	return len(s) > 0
}

// list returns the elements of all fields of a name, which are separated by commas, in lower case.
func (h Header) list(name string) (all []string) {
	for _, value := range h.Values(name) {
		for element := range strings.SplitSeq(value, ",") {
			if element = strings.ToLower(strings.Trim(element, " \t")); element != "" {
				all = append(all, element)
			}
		}
	}
	return all
}

// framing returns the body that Transfer-Encoding and Content-Length announce. ok is false without both.
func framing(h Header, minor int) (b Body, ok bool, err error) {
	codings, lengths := h.Values("Transfer-Encoding"), h.Values("Content-Length")
	switch {
	case len(codings) > 0 && len(lengths) > 0:
		return b, false, bad("both Transfer-Encoding and Content-Length")
	case len(codings) > 0 && minor == 0:
		return b, false, bad("Transfer-Encoding in HTTP/1.0")
	case len(codings) > 1:
		return b, false, bad("several fields Transfer-Encoding")
	case len(codings) == 1:
		if !strings.EqualFold(codings[0], "chunked") {
			return b, false, &Error{http.StatusNotImplemented, "a Transfer-Encoding other than chunked"}
		}
		return Body{Framing: Chunked}, true, nil
	case len(lengths) > 1:
		return b, false, bad("several fields Content-Length")
	case len(lengths) == 1:
		n, err := decimal(lengths[0])
		if err != nil {
			return b, false, err
		}
		return Body{Framing: Length, Length: n}, true, nil
	}
	return b, false, nil
}

// decimal parses digits. strconv accepts a sign, too.
func decimal(s string) (int64, error) {
	if s == "" || len(s) > 18 || strings.Trim(s, "0123456789") != "" {
		return 0, bad("Content-Length is not a number of at most 18 digits")
	}
	return strconv.ParseInt(s, 10, 64)
}

// connection removes the fields about the connection. It returns the options of Connection.
func connection(h Header) (Header, []string, error) {
	options := h.list("Connection")
	if len(options) > maxOptions {
		return nil, nil, bad("Connection has more than 64 options")
	}
	for _, option := range options {
		switch option {
		case "close", "keep-alive", "upgrade", "te", "http2-settings":
		default:
			// Removed below, as the field asks. Without these the message would be another one.
			if IsFraming(option) || !isToken(option) {
				return nil, nil, bad("Connection names a field about the framing, or no field")
			}
			h = h.Without(option)
		}
	}
	return slices.DeleteFunc(h, func(f Field) bool {
		return slices.ContainsFunc(connectionFields, func(name string) bool { return strings.EqualFold(name, f.Name) })
	}), options, nil
}

// upgrades returns the protocols that a message offers to change to. The change to HTTP/2 is left out: the proxy could
// not read what follows.
func upgrades(h Header, options []string) (all []string) {
	if !slices.Contains(options, "upgrade") {
		return nil
	}
	for _, name := range h.list("Upgrade") {
		protocol, version, has := strings.Cut(name, "/")
		if !isToken(protocol) || has && !isToken(version) || len(all) == maxOptions {
			continue
		}
		switch protocol {
		case "h2c", "h2", "http":
		default:
			all = append(all, name)
		}
	}
	return all
}

// version returns the minor version of "HTTP/1.0" or "HTTP/1.1".
func version(b []byte) (int, error) {
	switch string(b) {
	case "HTTP/1.1":
		return 1, nil
	case "HTTP/1.0":
		return 0, nil
	}
	if bytes.HasPrefix(b, []byte("HTTP/")) {
		return 0, &Error{http.StatusHTTPVersionNotSupported, "a version other than HTTP/1.0 and HTTP/1.1"}
	}
	return 0, bad("not HTTP")
}

func writeFields(w *bufio.Writer, h Header) {
	for _, f := range h {
		_, _ = w.WriteString(f.Name) // the writer keeps its error
		_, _ = w.WriteString(": ")
		_, _ = w.WriteString(f.Value)
		_, _ = w.WriteString("\r\n")
	}
}

// writeConnection writes what the message says about the connection.
func writeConnection(w *bufio.Writer, upgrades []string, last bool) {
	switch {
	case len(upgrades) > 0 && last:
		_, _ = w.WriteString("Connection: close, upgrade\r\n")
	case len(upgrades) > 0:
		_, _ = w.WriteString("Connection: upgrade\r\n")
	case last:
		_, _ = w.WriteString("Connection: close\r\n")
	}
	if len(upgrades) > 0 {
		_, _ = w.WriteString("Upgrade: " + strings.Join(upgrades, ", ") + "\r\n")
	}
}

func writeFraming(w *bufio.Writer, b Body) {
	switch b.Framing {
	case Length:
		_, _ = fmt.Fprintf(w, "Content-Length: %d\r\n", b.Length)
	case Chunked:
		_, _ = w.WriteString("Transfer-Encoding: chunked\r\n")
	}
}
