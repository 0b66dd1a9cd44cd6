// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package jsonscan reads a JSON text in one pass, and passes its values to the caller without building a tree.
//
// A caller knows which values it expects. If a text contains a different value, reading fails without a reason. The
// caller then reads the text again with a complete decoder, which also reports the reason. If reading does not fail,
// the text is valid JSON.
package jsonscan

import (
	"encoding/json"
	"strconv"
)

// maxDepth is the maximum depth of nested values.
const maxDepth = 64

// Scanner reads one text. After a failure every method returns the zero value.
type Scanner struct {
	text   string
	at     int
	depth  int
	failed bool
}

// New returns a Scanner at the beginning of a text. Strings that the Scanner returns share the memory of the text.
func New(text string) Scanner { return Scanner{text: text} }

// Fail marks the text as failed.
func (s *Scanner) Fail() { s.failed, s.at = true, len(s.text) }

// Failed reports whether the text failed.
func (s *Scanner) Failed() bool { return s.failed }

// End reports whether the whole text was read without a failure.
func (s *Scanner) End() bool { return s.peek() == 0 && s.at == len(s.text) && !s.failed }

// At returns the position of the next byte.
func (s *Scanner) At() int { return s.at }

// peek returns the next byte that is not white space; 0 at the end of the text.
func (s *Scanner) peek() byte {
	for ; s.at < len(s.text); s.at++ {
		switch c := s.text[s.at]; c {
		case ' ', '\t', '\n', '\r':
		default:
			return c
		}
	}
	return 0
}

// next skips white space and consumes the byte c. It reports whether c was the next byte.
func (s *Scanner) next(c byte) bool {
	if s.peek() != c {
		return false
	}
	s.at++
	return true
}

// word consumes the word w, and reports whether w was next.
func (s *Scanner) word(w string) bool {
	if len(s.text)-s.at < len(w) || s.text[s.at:s.at+len(w)] != w {
		return false
	}
	s.at += len(w)
	return true
}

// Null consumes null, and reports whether it is the next value.
func (s *Scanner) Null() bool { return s.peek() == 'n' && s.word("null") }

// Bool reads true or false.
func (s *Scanner) Bool() bool {
	switch s.peek() {
	case 't':
		if s.word("true") {
			return true
		}
	case 'f':
		if s.word("false") {
			return false
		}
	}
	s.Fail()
	return false
}

// Int reads an integer of at most the given number of bits, without a fraction or an exponent.
func (s *Scanner) Int(bits int) int64 {
	n, err := strconv.ParseInt(s.number(), 10, bits)
	if err != nil {
		s.Fail()
		return 0
	}
	return n
}

// Uint is Int for numbers without a sign.
func (s *Scanner) Uint(bits int) uint64 {
	n, err := strconv.ParseUint(s.number(), 10, bits)
	if err != nil {
		s.Fail()
		return 0
	}
	return n
}

// number consumes a number and returns its text.
func (s *Scanner) number() string {
	s.peek()
	begin := s.at
	s.byteIs('-')
	if !s.byteIs('0') && !s.digits() {
		s.Fail()
		return ""
	}
	if s.byteIs('.') && !s.digits() {
		s.Fail()
		return ""
	}
	if s.byteIs('e') || s.byteIs('E') {
		if !s.byteIs('+') {
			s.byteIs('-')
		}
		if !s.digits() {
			s.Fail()
			return ""
		}
	}
	return s.text[begin:s.at]
}

// byteIs consumes the byte c if it is next, and reports whether it was.
func (s *Scanner) byteIs(c byte) bool {
	if s.at < len(s.text) && s.text[s.at] == c {
		s.at++
		return true
	}
	return false
}

// digits consumes digits, and reports whether there was at least one.
func (s *Scanner) digits() bool {
	begin := s.at
	for s.at < len(s.text) && s.text[s.at]-'0' <= 9 {
		s.at++
	}
	return s.at > begin
}

// quoted consumes a string and returns it with its quotes. plain reports that it contains only ASCII without escapes.
func (s *Scanner) quoted() (text string, plain bool) {
	if s.peek() != '"' {
		s.Fail()
		return "", false
	}
	plain = true
	for i := s.at + 1; i < len(s.text); i++ {
		switch c := s.text[i]; {
		case c == '"':
			text, s.at = s.text[s.at:i+1], i+1
			return text, plain
		case c == '\\':
			plain = false
			if i++; i == len(s.text) {
				break
			}
			switch s.text[i] {
			case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
			case 'u':
				for range 4 {
					if i++; i == len(s.text) || !hex(s.text[i]) {
						s.Fail()
						return "", false
					}
				}
			default:
				s.Fail()
				return "", false
			}
		case c < ' ':
			s.Fail()
			return "", false
		case c >= 0x80:
			plain = false
		}
	}
	s.Fail()
	return "", false
}

func hex(c byte) bool { return c-'0' <= 9 || c-'a' <= 5 || c-'A' <= 5 }

// Text reads a string.
func (s *Scanner) Text() string {
	quoted, plain := s.quoted()
	switch {
	case s.failed:
		return ""
	case plain:
		return quoted[1 : len(quoted)-1]
	}
	var out string
	if json.Unmarshal([]byte(quoted), &out) != nil {
		s.Fail()
	}
	return out
}

// Object reads an object. field must consume the value of each key.
func (s *Scanner) Object(field func(key string)) {
	s.values('{', '}', func() {
		key := s.Text()
		if !s.next(':') {
			s.Fail()
			return
		}
		field(key)
	})
}

// Array reads an array. element must consume each value.
func (s *Scanner) Array(element func()) { s.values('[', ']', element) }

// values reads values between two brackets.
func (s *Scanner) values(begin, end byte, value func()) {
	if s.depth++; s.depth > maxDepth || !s.next(begin) {
		s.Fail()
		return
	}
	for more := !s.next(end); more && !s.failed; more = !s.next(end) && !s.failed {
		if value(); s.peek() == end {
			continue
		}
		if !s.next(',') || s.peek() == end {
			s.Fail()
		}
	}
	s.depth--
}

// Halve splits the array that is the next value. The returned Scanner reads the elements before the position mid, by
// calling Rest. s continues with the element at mid, by calling RestOfArray. If no element begins at mid, one of the
// two fails.
func (s *Scanner) Halve(mid int) (first Scanner, ok bool) {
	if s.peek() != '[' || mid <= s.at+1 || mid >= len(s.text) || s.text[mid-1] != ',' {
		return Scanner{}, false
	}
	first = Scanner{text: s.text[:mid-1], at: s.at + 1, depth: s.depth + 1}
	s.at, s.depth = mid, s.depth+1
	return first, true
}

// Rest reads elements until the end of the text.
func (s *Scanner) Rest(element func()) {
	for !s.failed {
		element()
		if s.peek() == 0 && s.at == len(s.text) {
			return
		}
		if !s.next(',') {
			s.Fail()
		}
	}
}

// RestOfArray reads the remaining elements of an array after Halve.
func (s *Scanner) RestOfArray(element func()) {
	for !s.failed {
		if element(); s.next(']') {
			s.depth--
			return
		}
		if !s.next(',') {
			s.Fail()
		}
	}
}

// Skip reads any value.
func (s *Scanner) Skip() {
	switch s.peek() {
	case '{':
		s.skipAll('{', '}', true)
	case '[':
		s.skipAll('[', ']', false)
	case '"':
		s.quoted()
	case 't', 'f':
		s.Bool()
	case 'n':
		if !s.Null() {
			s.Fail()
		}
	default:
		s.number()
	}
}

// skipAll does the same as values, but skips all values. It is faster, because it calls no function for each value.
func (s *Scanner) skipAll(begin, end byte, keys bool) {
	if s.depth++; s.depth > maxDepth || !s.next(begin) {
		s.Fail()
		return
	}
	for more := !s.next(end); more && !s.failed; more = !s.next(end) && !s.failed {
		if keys {
			if s.quoted(); !s.next(':') {
				s.Fail()
				return
			}
		}
		if s.Skip(); s.peek() == end {
			continue
		}
		if !s.next(',') || s.peek() == end {
			s.Fail()
		}
	}
	s.depth--
}
