// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package frames

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/net/http2/hpack"
)

// Request is a valid request.
type Request struct {
	Method    string
	Scheme    string // empty for CONNECT without Protocol
	Authority string
	Path      string // normalised, with the query; empty for CONNECT without Protocol
	Protocol  string // of an extended CONNECT (RFC 8441)

	header  []hpack.HeaderField
	deleted []string // names of deleted fields
	length  int64    // content-length; -1: none
}

// Values returns the values of a header field. name is in lower case.
func (r *Request) Values(name string) (values []string) {
	for _, f := range r.header {
		if f.Name == name {
			values = append(values, f.Value)
		}
	}
	return values
}

// Each calls fn for each header field, in order. Names are in lower case.
func (r *Request) Each(fn func(name, value string)) {
	for _, f := range r.header {
		fn(f.Name, f.Value)
	}
}

// Add adds a header field.
func (r *Request) Add(name, value string) {
	r.header = append(r.header, hpack.HeaderField{Name: strings.ToLower(name), Value: value})
}

// Delete removes all header fields with a name. The client cannot send them behind the body either.
func (r *Request) Delete(name string) {
	name = strings.ToLower(name)
	r.deleted = append(r.deleted, name)
	kept := r.header[:0]
	for _, f := range r.header {
		if f.Name != name {
			kept = append(kept, f)
		}
	}
	r.header = kept
}

// Set replaces all header fields with a name by one.
func (r *Request) Set(name, value string) {
	r.Delete(name)
	r.Add(name, value)
}

// gRPC reports whether the client expects a status of gRPC.
func (r *Request) gRPC() bool {
	const grpc = "application/grpc"
	for _, v := range r.Values("content-type") {
		if len(v) >= len(grpc) && strings.EqualFold(v[:len(grpc)], grpc) {
			return true
		}
	}
	return false
}

// pseudo returns the field of the request for a pseudo header field.
func (r *Request) pseudo(name string) *string {
	switch name {
	case ":method":
		return &r.Method
	case ":scheme":
		return &r.Scheme
	case ":authority":
		return &r.Authority
	case ":path":
		return &r.Path
	case ":protocol":
		return &r.Protocol
	}
	return nil
}

// reset prepares the request for the fields of another one.
func (r *Request) reset() {
	header, deleted := r.header, r.deleted
	clear(header)
	*r = Request{header: header[:0], deleted: deleted[:0], length: -1}
}

// read sets the request to the fields of a header block. It returns an error if RFC 9113 (8.1 to 8.3) calls the request
// malformed, or if another server could read it in another way.
func (r *Request) read(fields []hpack.HeaderField) error {
	r.reset()
	host, hosts := "", 0
	for i, f := range fields {
		if f.IsPseudo() {
			value := r.pseudo(f.Name)
			switch {
			case value == nil:
				return fmt.Errorf("unknown field %.40q", f.Name)
			case i > 0 && !fields[i-1].IsPseudo():
				return fmt.Errorf("%s behind other fields", f.Name)
			case *value != "":
				return fmt.Errorf("two fields %s", f.Name)
			case f.Value == "":
				return fmt.Errorf("empty %s", f.Name)
			}
			*value = f.Value
			continue
		}
		if err := checkField(f); err != nil {
			return err
		}
		switch f.Name {
		case "host":
			host = f.Value
			hosts++
			continue
		case "content-length":
			if err := r.contentLength(f.Value); err != nil {
				return err
			}
		}
		r.header = append(r.header, f)
	}
	if hosts > 0 {
		switch {
		case hosts > 1:
			return errors.New("two hosts")
		case r.Authority == "":
			r.Authority = host
		case r.Authority != host:
			return fmt.Errorf("host %.80q differs from authority %.80q", host, r.Authority)
		}
	}
	return r.check()
}

func (r *Request) contentLength(text string) error {
	if r.length >= 0 {
		return errors.New("two fields content-length")
	}
	if len(text) == 0 || len(text) > 18 || strings.Trim(text, "0123456789") != "" {
		return fmt.Errorf("content-length %.40q", text)
	}
	r.length, _ = strconv.ParseInt(text, 10, 64)
	return nil
}

// check validates the pseudo header fields.
func (r *Request) check() error {
	switch {
	case !token(r.Method, true):
		return fmt.Errorf("method %.40q", r.Method)
	case !authority(r.Authority):
		return fmt.Errorf("authority %.80q", r.Authority)
	case r.Protocol != "" && (r.Method != "CONNECT" || !token(r.Protocol, true)):
		return fmt.Errorf("protocol %.40q with method %.40q", r.Protocol, r.Method)
	case r.Method == "CONNECT" && r.Protocol == "":
		if r.Scheme != "" || r.Path != "" {
			return errors.New("CONNECT with a scheme or a path")
		}
		if r.length >= 0 {
			return errors.New("CONNECT with content-length")
		}
		return nil
	case r.Scheme != "http" && r.Scheme != "https":
		return fmt.Errorf("scheme %.40q", r.Scheme)
	case !path(r.Path) && (r.Path != "*" || r.Method != "OPTIONS"):
		return fmt.Errorf("path %.80q", r.Path)
	}
	return nil
}

// checkTrailers validates the fields behind a body. Fields that say how to read a request, and deleted fields, are not
// allowed: some servers add trailers to the header.
func checkTrailers(fields []hpack.HeaderField, deleted []string) error {
	for _, f := range fields {
		if f.IsPseudo() {
			return fmt.Errorf("%s behind the body", f.Name)
		}
		if err := checkField(f); err != nil {
			return err
		}
		switch f.Name {
		case "content-length", "host", "te", "trailer", "content-encoding", "content-type", "content-range":
			return fmt.Errorf("%s behind the body", f.Name)
		}
		if slices.Contains(deleted, f.Name) {
			return fmt.Errorf("deleted field %s behind the body", f.Name)
		}
	}
	return nil
}

// checkField validates a field that is not a pseudo header field.
func checkField(f hpack.HeaderField) error {
	if !token(f.Name, false) {
		return fmt.Errorf("field name %.40q", f.Name)
	}
	switch f.Name {
	case "connection", "proxy-connection", "keep-alive", "transfer-encoding", "upgrade":
		return fmt.Errorf("field %s", f.Name)
	case "te":
		if f.Value != "trailers" {
			return fmt.Errorf("te %.40q", f.Value)
		}
	}
	v := f.Value
	if v != "" && (blank(v[0]) || blank(v[len(v)-1])) {
		return fmt.Errorf("blank at the start or end of %s", f.Name)
	}
	for i := range len(v) {
		if c := v[i]; c < ' ' && c != '\t' || c == 0x7f {
			return fmt.Errorf("control character in %s", f.Name)
		}
	}
	return nil
}

func blank(c byte) bool { return c == ' ' || c == '\t' }

// token reports whether s is a token of RFC 9110, with or without letters in upper case.
func token(s string, upper bool) bool {
	for i := range len(s) {
		c := s[i]
		ok := 'a' <= c && c <= 'z' || '0' <= c && c <= '9' || upper && 'A' <= c && c <= 'Z' ||
			strings.IndexByte("!#$%&'*+-.^_`|~", c) >= 0
		if !ok {
			return false
		}
	}
	return s != ""
}

// authority reports whether s is a host with or without a port. A user is not allowed.
func authority(s string) bool {
	for i := range len(s) {
		c := s[i]
		ok := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' ||
			strings.IndexByte("-._~%!$&'()*+;=:[]", c) >= 0
		if !ok {
			return false
		}
	}
	return s != ""
}

// path reports whether s is an absolute path with or without a query, in visible ASCII and without a fragment.
func path(s string) bool {
	for i := range len(s) {
		if c := s[i]; c <= ' ' || c >= 0x7f || c == '#' {
			return false
		}
	}
	return strings.HasPrefix(s, "/")
}

// changedBadly reports whether changes of the header have made the request malformed.
func (r *Request) changedBadly() bool {
	lengths := 0
	for _, f := range r.header {
		if checkField(f) != nil || f.Name == "host" {
			return true
		}
		if f.Name == "content-length" {
			lengths++
		}
	}
	return lengths > 1
}
