// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package hello

import (
	"crypto/sha256"
	"sync"
)

// Limits of what a client may send before the server's answer, or before its second ClientHello. Servers skip at most
// their limit of early data (16 KiB by default in common servers), and few records without meaning.
const (
	maxEarlyData   = 1 << 20
	maxMeaningless = 16
)

// retryRequest is the random value of a ServerHello that asks for a second ClientHello (RFC 8446, 4.1.3).
var retryRequest = sha256.Sum256([]byte("HelloRetryRequest"))

// Second checks a second ClientHello. If a server asks for one (HelloRetryRequest), some servers use its server name
// without a comparison with the first. Without this check, a client could show an allowed name first, and the name of
// another server afterwards. The client may send it before the server asks.
//
// The caller passes the bytes that follow the first ClientHello to Client, and the server's bytes to Server, before it
// forwards them. Once one of them returns done, no second ClientHello in clear text can follow. A handshake of TLS 1.2
// is done with the first bytes of the server. Both methods may run at the same time.
type Second struct {
	mu     sync.Mutex
	first  *Hello
	answer []byte // the server's first bytes
	header []byte // start of the client's current record, as far as it has arrived
	skip   int    // rest of the client's current record
	early  int    // bytes of application data
	others int    // records of no meaning
	hello  *Reader
	done   bool
	err    error
}

// NewSecond returns a Second for a connection with the given first ClientHello.
func NewSecond(first *Hello) *Second { return &Second{first: first} }

// Server examines the next bytes from the server.
func (s *Second) Server(b []byte) (done bool) {
	const randomAt = recordHeader + messageHeader + 2
	s.mu.Lock()
	defer s.mu.Unlock()
	missing := randomAt + lengthOfRandom - len(s.answer)
	if s.done || missing <= 0 {
		return s.done
	}
	s.answer = append(s.answer, b[:min(missing, len(b))]...)
	if len(s.answer) < randomAt+lengthOfRandom {
		// If the first record is not a ServerHello, the handshake fails.
		s.done = len(s.answer) > 0 && s.answer[0] != typeHandshake ||
			len(s.answer) > recordHeader && s.answer[recordHeader] != serverHello
		return s.done
	}
	// In a first record that ends before the random value, the value is not where it is expected.
	whole := int(s.answer[3])<<8|int(s.answer[4]) >= randomAt+lengthOfRandom-recordHeader
	s.done = whole && [lengthOfRandom]byte(s.answer[randomAt:]) != retryRequest
	return s.done
}

// Client examines the next bytes from the client. If it returns an error, which wraps ErrMalformed or ErrTooLarge, the
// caller must not forward b: the bytes contain a second ClientHello that shows another name than the first, or
// something else that no client sends in this place. Errors are final.
func (s *Second) Client(b []byte) (done bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for len(b) > 0 && !s.done && s.err == nil {
		b = s.step(b)
	}
	return s.done, s.err
}

// step consumes a part of b and returns the rest. It runs with mu held.
func (s *Second) step(b []byte) []byte {
	if s.hello != nil {
		s.compare(b)
		return nil
	}
	if s.skip > 0 {
		n := min(s.skip, len(b))
		s.skip -= n
		return b[n:]
	}
	n := min(recordHeader-len(s.header), len(b))
	s.header = append(s.header, b[:n]...)
	if len(s.header) == recordHeader {
		s.record()
	}
	return b[n:]
}

// record decides by the header of a record. It runs with mu held.
func (s *Second) record() {
	header := s.header
	s.header = nil
	s.skip = int(header[3])<<8 | int(header[4])
	switch header[0] {
	case typeHandshake:
		s.hello = &Reader{}
		s.compare(header)
	case typeData:
		s.early += recordHeader + s.skip
		if !s.first.EarlyData || s.early > maxEarlyData {
			s.err = malformed("%d bytes of data before the server's answer", s.early)
		}
	case typeChange, typeAlert:
		// Clients of TLS 1.3 send change_cipher_spec for the sake of middleboxes, and servers ignore some
		// alerts.
		if s.others++; s.others > maxMeaningless {
			s.err = malformed("more than %d records without meaning", maxMeaningless)
		}
	default:
		s.err = malformed("record of type %d before the server's answer", header[0])
	}
}

// compare runs with mu held.
func (s *Second) compare(b []byte) {
	h, err := s.hello.Add(b)
	switch {
	case err != nil:
		s.err = err
	case h == nil:
	case h.ServerName != s.first.ServerName:
		s.err = malformed("second ClientHello with server name %q after %q", h.ServerName, s.first.ServerName)
	case h.ECH && !s.first.ECH:
		s.err = malformed("encrypted ClientHello in the second ClientHello only")
	default:
		s.done = true
	}
}
