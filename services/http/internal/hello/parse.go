// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hello

import (
	"bytes"
	"slices"
	"strings"
)

// Numbers of extensions.
const (
	extServerName   = 0
	extALPN         = 16
	extPreSharedKey = 41
	extEarlyData    = 42
	extVersions     = 43
)

// encrypted lists the extensions that hide a server name: encrypted server name (draft-ietf-tls-esni-02), and
// encrypted ClientHello as in RFC 9849 and in the drafts that changed its number.
var encrypted = []uint16{0xffce, 0xff02, 0xfe08, 0xfe09, 0xfe0a, 0xfe0b, 0xfe0c, 0xfe0d}

const hostName = 0 // the only type of a server name

// Limits of a DNS name.
const (
	maxName  = 253
	maxLabel = 63
)

// cursor reads a message. After a read beyond the end, failed is set and all reads return nothing.
type cursor struct {
	rest   []byte
	failed bool
}

func (c *cursor) take(n int) []byte {
	if n > len(c.rest) {
		c.rest, c.failed = nil, true
		return nil
	}
	b := c.rest[:n]
	c.rest = c.rest[n:]
	return b
}

func (c *cursor) uint8() int {
	if b := c.take(1); b != nil {
		return int(b[0])
	}
	return 0
}

func (c *cursor) uint16() int {
	if b := c.take(2); b != nil {
		return int(b[0])<<8 | int(b[1])
	}
	return 0
}

// parse reads the body of a ClientHello.
func parse(body []byte) (*Hello, error) {
	c := cursor{rest: body}
	version := c.uint16()
	c.take(lengthOfRandom)
	session := c.take(c.uint8())
	suites := c.take(c.uint16())
	compressions := c.take(c.uint8())
	switch {
	case c.failed:
		return nil, malformed("it ends too early")
	case version>>8 != majorVersion:
		return nil, malformed("version %#04x", version)
	case len(session) > maxSessionID:
		return nil, malformed("session ID of %d bytes", len(session))
	case len(suites) == 0 || len(suites)%2 != 0:
		return nil, malformed("cipher suites of %d bytes", len(suites))
	case len(compressions) == 0:
		return nil, malformed("no compression method")
	}
	h := &Hello{}
	if len(c.rest) > 0 {
		extensions := cursor{rest: c.take(c.uint16())}
		if c.failed || len(c.rest) > 0 {
			return nil, malformed("extensions with a wrong length")
		}
		if err := h.extensions(&extensions); err != nil {
			return nil, err
		}
	}
	if h.Versions == nil {
		h.Versions = []uint16{min(uint16(version), versionTLS12)} //nolint:gosec // two bytes
	}
	return h, nil
}

func (h *Hello) extensions(c *cursor) error {
	seen := map[int]bool{}
	for len(c.rest) > 0 {
		number := c.uint16()
		content := cursor{rest: c.take(c.uint16())}
		switch {
		case c.failed:
			return malformed("extension %d with a wrong length", number)
		case seen[number]:
			return malformed("two extensions %d", number)
		case number == extPreSharedKey && len(c.rest) > 0:
			return malformed("an extension after pre_shared_key")
		}
		seen[number] = true
		if err := h.extension(number, &content); err != nil {
			return err
		}
	}
	return nil
}

func (h *Hello) extension(number int, c *cursor) (err error) {
	switch number {
	case extServerName:
		h.ServerName, err = serverName(c)
	case extALPN:
		h.Protocols, err = protocols(c)
	case extVersions:
		h.Versions, err = versions(c)
	case extEarlyData:
		h.EarlyData = true
		if len(c.rest) > 0 {
			return malformed("early_data with content")
		}
	default:
		if slices.Contains(encrypted, uint16(number)) { //nolint:gosec // two bytes
			h.ECH = true
		}
	}
	return err
}

func serverName(c *cursor) (string, error) {
	names := cursor{rest: c.take(c.uint16())}
	if c.failed || len(c.rest) > 0 || len(names.rest) == 0 {
		return "", malformed("server_name with a wrong length")
	}
	kind := names.uint8()
	name := names.take(names.uint16())
	switch {
	case names.failed:
		return "", malformed("server name with a wrong length")
	case kind != hostName:
		return "", malformed("server name of type %d", kind)
	case len(names.rest) > 0:
		return "", malformed("more than one server name")
	}
	return canonical(name)
}

// canonical returns a DNS name in lower case, or an error if name is not a DNS name. A DNS name is in ASCII, and has no
// trailing dot here.
func canonical(name []byte) (string, error) {
	if len(name) == 0 || len(name) > maxName {
		return "", malformed("server name of %d bytes", len(name))
	}
	for _, c := range name {
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '-' || c == '_' || c == '.') {
			return "", malformed("server name %.80q", name)
		}
	}
	labels := bytes.Split(name, []byte{'.'})
	for _, l := range labels {
		if len(l) == 0 || len(l) > maxLabel {
			return "", malformed("server name %.80q has a label of %d bytes", name, len(l))
		}
	}
	text := strings.ToLower(string(name))
	if number(strings.ToLower(string(labels[len(labels)-1]))) {
		return "", malformed("server name %.80q is an IP address", name)
	}
	return text, nil
}

// number reports whether the last label of a name makes the name an IPv4 address: resolvers accept decimal, octal and
// hexadecimal numbers, and fewer than four of them. No top-level domain is a number.
func number(label string) bool {
	if hex, ok := strings.CutPrefix(label, "0x"); ok {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return strings.Trim(label, "0123456789") == ""
}

func protocols(c *cursor) (out []string, err error) {
	list := cursor{rest: c.take(c.uint16())}
	if c.failed || len(c.rest) > 0 || len(list.rest) == 0 {
		return nil, malformed("ALPN with a wrong length")
	}
	for len(list.rest) > 0 {
		p := list.take(list.uint8())
		if len(p) == 0 {
			return nil, malformed("ALPN protocol with a wrong length")
		}
		out = append(out, string(p))
	}
	return out, nil
}

func versions(c *cursor) (out []uint16, err error) {
	list := c.take(c.uint8())
	if c.failed || len(c.rest) > 0 || len(list) == 0 || len(list)%2 != 0 {
		return nil, malformed("supported_versions with a wrong length")
	}
	for ; len(list) > 0; list = list[2:] {
		out = append(out, uint16(list[0])<<8|uint16(list[1]))
	}
	return out, nil
}
