// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package hello reads the ClientHello at the start of a TLS connection, and evaluates rules for its server name.
//
// The caller forwards the received bytes unchanged. Therefore the reader must not accept a message that a server could
// read in another way. It refuses messages that RFC 8446, RFC 6066 or RFC 7301 forbid,
// also where common servers tolerate them.
//
// The server name is the only evidence for the server that a client wants. A client and a server that cooperate can
// agree on another server after the handshake, by the Host of a request (domain fronting) or by an encrypted
// ClientHello (ECH). Rules can refuse ECH. TLS is not terminated, so a later Host is not visible.
package hello

import (
	"errors"
	"fmt"
)

// MaxBytes limits the ClientHello, including the headers of its records.
const MaxBytes = 16 << 10

// The kinds of errors. Every error of this package wraps one of them.
var (
	ErrNotTLS    = errors.New("not TLS")
	ErrMalformed = errors.New("malformed ClientHello")
	ErrTooLarge  = errors.New("ClientHello too large")
)

// Hello contains the used fields of a ClientHello.
type Hello struct {
	// ServerName is the host name in the server_name extension, in lower case. It is empty if the client sends
	// none.
	ServerName string
	// ECH is set if an encrypted ClientHello (or its predecessor, an encrypted server name) is present. Some
	// clients always send this extension with random content (GREASE), and only the server can detect that.
	ECH bool
	// EarlyData is set if the client may send data before the server's answer.
	EarlyData bool
	// Protocols is the list of ALPN, in the client's order.
	Protocols []string
	// Versions are the offered versions of TLS, in the client's order.
	Versions []uint16
	// Length is the number of bytes of the connection that contain the ClientHello, with record headers.
	Length int
}

// Reader collects the ClientHello of a connection. Its zero value is ready for use.
type Reader struct {
	raw     []byte // everything that was added
	next    int    // start of the first record that is not complete
	message []byte // content of the records before next
	hello   *Hello
	err     error
}

const (
	recordHeader   = 5
	messageHeader  = 4
	typeChange     = 20
	typeAlert      = 21
	typeHandshake  = 22
	typeData       = 23
	clientHello    = 1
	serverHello    = 2
	sslv2Long      = 0x80
	sslv2Hello     = 1
	majorVersion   = 3
	versionTLS12   = 0x0303
	maxSessionID   = 32
	lengthOfRandom = 32
)

// Add adds the next bytes of the connection. It returns nil and no error if the ClientHello is not yet complete. Errors
// are final. Add copies b.
func (r *Reader) Add(b []byte) (*Hello, error) {
	if r.err != nil {
		return nil, r.err
	}
	r.raw = append(r.raw, b...)
	if r.hello == nil {
		r.hello, r.err = r.read()
	}
	return r.hello, r.err
}

// Bytes returns all bytes that were added. The first Hello.Length bytes contain the ClientHello.
func (r *Reader) Bytes() []byte { return r.raw }

func (r *Reader) read() (*Hello, error) {
	for {
		content, err := r.record()
		if err != nil || content == nil {
			return nil, err
		}
		r.next += recordHeader + len(content)
		r.message = append(r.message, content...)
		if r.message[0] != clientHello {
			return nil, malformed("handshake message of type %d before a ClientHello", r.message[0])
		}
		if len(r.message) < messageHeader {
			continue
		}
		length := int(r.message[1])<<16 | int(r.message[2])<<8 | int(r.message[3])
		switch body := r.message[messageHeader:]; {
		case length > MaxBytes-messageHeader-recordHeader:
			return nil, fmt.Errorf("%w: %d bytes", ErrTooLarge, length)
		case len(body) > length:
			return nil, malformed("bytes after the ClientHello in its record")
		case len(body) == length:
			h, err := parse(body)
			if err != nil {
				return nil, err
			}
			h.Length = r.next
			return h, nil
		}
	}
}

// record returns the content of the record at next, or nil if the record is not complete. It checks each byte of the
// header as soon as it has arrived, so that a client of another protocol does not wait for an answer.
func (r *Reader) record() ([]byte, error) {
	b := r.raw[r.next:]
	if r.next == 0 {
		if err := notTLS(b); err != nil {
			return nil, err
		}
	}
	if len(b) < recordHeader {
		return nil, nil
	}
	length := int(b[3])<<8 | int(b[4])
	switch {
	case b[0] != typeHandshake:
		return nil, malformed("record of type %d in place of a handshake message", b[0])
	case b[1] != majorVersion:
		return nil, malformed("record of version %d.%d", b[1], b[2])
	case length == 0:
		return nil, malformed("empty record")
	case r.next+recordHeader+length > MaxBytes:
		return nil, fmt.Errorf("%w: more than %d bytes", ErrTooLarge, MaxBytes)
	case len(b) < recordHeader+length:
		return nil, nil
	}
	return b[recordHeader : recordHeader+length], nil
}

// notTLS returns an error if the first bytes of a connection begin another protocol.
func notTLS(b []byte) error {
	switch {
	case len(b) == 0:
		return nil
	case b[0]&sslv2Long != 0: // SSLv2 has another record header
		if len(b) < recordHeader {
			return nil
		}
		if b[2] == sslv2Hello && (b[3] == majorVersion || b[3] == 0 && b[4] == 2) {
			return malformed("SSLv2 ClientHello")
		}
		return ErrNotTLS
	case b[0] < typeChange || b[0] > typeData, len(b) > 1 && b[1] != majorVersion:
		return ErrNotTLS
	}
	return nil
}

func malformed(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrMalformed, fmt.Sprintf(format, args...))
}
