// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package message holds the protobuf messages that the plugin sends and
// receives, as plain structs, and their encoding.
//
// The generated code of proto/ is not linked: it needs protobuf's reflection and the validation rules, whose package
// variables alone take longer to initialise than a call takes. The command in generate/ generates the messages from
// the descriptors of the API, each with a list of its fields for both directions.
//
// Requests have every field of the API. Answers have only the fields that the plugin reads.
package message

//go:generate go run ./generate messages_gen.go

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unicode/utf8"
)

// ErrMalformed is returned for bytes that are not the encoding of a message.
var ErrMalformed = errors.New("malformed message")

// Message is a struct that lists its fields, in the order of their numbers.
type Message interface{ fields(f *Fields) }

// Marshal encodes m. It omits fields with their default value, as proto3 requires.
func Marshal(m Message) []byte {
	f := &Fields{encoding: true}
	m.fields(f)
	return f.out
}

// Unmarshal merges the encoding of a message into m, and retains no part of b. It skips fields that m does not list.
// Its error is ErrMalformed.
func Unmarshal(b []byte, m Message) error {
	f := &Fields{}
	for len(b) > 0 {
		n, err := f.next(b)
		if err != nil {
			return err
		}
		b = b[n:]
		if f.number != 0 {
			m.fields(f)
		}
		if f.err != nil {
			return f.err
		}
	}
	return nil
}

// Wire types.
const (
	wireVarint  = 0
	wireFixed64 = 1
	wireBytes   = 2
	wireStart   = 3 // start of a group: proto3 does not use groups, but an unknown field may be one
	wireEnd     = 4
	wireFixed32 = 5
)

const (
	maxNumber = 1<<29 - 1
	maxGroups = 100 // maximum nesting of groups
)

// Fields encodes or decodes a message, which calls a function for each of its fields. When it encodes, the function
// appends the field. When it decodes, the function stores the value that was read last, if it belongs to the field.
type Fields struct {
	encoding bool
	out      []byte

	// The field that was read last; number is 0 if no message can have it.
	number int
	wire   int
	value  uint64
	bytes  []byte
	err    error
}

// next reads one field and returns its length in bytes.
func (f *Fields) next(b []byte) (int, error) {
	n, err := f.one(b)
	if err != nil || f.wire != wireStart {
		if err == nil && f.wire == wireEnd {
			err = fmt.Errorf("%w: a group ends that has not begun", ErrMalformed)
		}
		return n, err
	}
	// Skip the group with all groups inside it.
	open := []int{f.number}
	for len(open) > 0 {
		m, err := f.one(b[n:])
		if err != nil {
			return 0, err
		}
		n += m
		switch {
		case f.wire == wireStart && len(open) == maxGroups:
			return 0, fmt.Errorf("%w: %d groups inside each other", ErrMalformed, maxGroups)
		case f.wire == wireStart:
			open = append(open, f.number)
		case f.wire == wireEnd && f.number != open[len(open)-1]:
			return 0, fmt.Errorf("%w: group %d ends in group %d", ErrMalformed, f.number, open[len(open)-1])
		case f.wire == wireEnd:
			open = open[:len(open)-1]
		}
	}
	f.number = 0
	return n, nil
}

// one reads a tag and the value after it, if the tag does not begin or end a group.
func (f *Fields) one(b []byte) (int, error) {
	tag, n := binary.Uvarint(b)
	if n <= 0 || tag>>3 == 0 || tag>>3 > maxNumber {
		return 0, fmt.Errorf("%w: no tag of a field", ErrMalformed)
	}
	f.number, f.wire = int(tag>>3), int(tag&7) //nolint:gosec // at most maxNumber
	rest := b[n:]
	size := -1
	switch f.wire {
	case wireVarint:
		f.value, size = binary.Uvarint(rest)
		if size == 0 {
			size = -1
		}
	case wireFixed64:
		size = 8
	case wireFixed32:
		size = 4
	case wireStart, wireEnd:
		size = 0
	case wireBytes:
		length, m := binary.Uvarint(rest)
		if m > 0 && length <= uint64(len(rest)-m) {
			size = m + int(length) //nolint:gosec // at most len(rest)
			f.bytes = rest[m:size]
		}
	}
	if size < 0 || size > len(rest) {
		return 0, fmt.Errorf("%w: field %d of type %d is truncated", ErrMalformed, f.number, f.wire)
	}
	return n + size, nil
}

// is reports whether the last field read has this number and type.
func (f *Fields) is(number, wire int) bool { return f.number == number && f.wire == wire }

func (f *Fields) tag(number, wire int) {
	f.out = binary.AppendUvarint(f.out, uint64(number)<<3|uint64(wire)) //nolint:gosec // neither is negative
}

func (f *Fields) putBytes(number int, b string) {
	f.tag(number, wireBytes)
	f.out = binary.AppendUvarint(f.out, uint64(len(b)))
	f.out = append(f.out, b...)
}

// varint encodes or decodes a field of an integer type: bool, uint32, uint64, int32, int64, enum. Negative values have
// 64 bits, even if the type is int32.
func varint[T ~uint32 | ~uint64 | ~int32 | ~int64](f *Fields, number int, p *T) {
	switch {
	case f.encoding:
		if *p != 0 {
			f.tag(number, wireVarint)
			f.out = binary.AppendUvarint(f.out, uint64(*p)) //nolint:gosec // encode as two's complement
		}
	case f.is(number, wireVarint):
		*p = T(f.value)
	}
}

// varints encodes or decodes a repeated field of an integer type. It writes the packed form and reads both forms.
func varints[T ~uint32 | ~int32](f *Fields, number int, p *[]T) {
	switch {
	case f.encoding:
		if len(*p) > 0 {
			var packed []byte
			for _, v := range *p {
				packed = binary.AppendUvarint(packed, uint64(v)) //nolint:gosec // two's complement is meant
			}
			f.putBytes(number, string(packed))
		}
	case f.is(number, wireVarint):
		*p = append(*p, T(f.value)) //nolint:gosec // truncate like protobuf does
	case f.is(number, wireBytes):
		for b := f.bytes; len(b) > 0; {
			v, n := binary.Uvarint(b)
			if n <= 0 {
				f.err = fmt.Errorf("%w: field %d is truncated", ErrMalformed, number)
				return
			}
			*p = append(*p, T(v)) //nolint:gosec // truncate like protobuf does
			b = b[n:]
		}
	}
}

func boolean(f *Fields, number int, p *bool) {
	v := uint32(0)
	if *p {
		v = 1
	}
	varint(f, number, &v)
	if f.is(number, wireVarint) {
		*p = f.value != 0
	}
}

// text encodes or decodes a field of type string.
func text(f *Fields, number int, p *string) {
	switch {
	case f.encoding:
		if *p != "" {
			f.putBytes(number, *p)
		}
	case f.is(number, wireBytes):
		*p = f.utf8()
	}
}

func texts(f *Fields, number int, p *[]string) {
	switch {
	case f.encoding:
		for _, s := range *p {
			f.putBytes(number, s)
		}
	case f.is(number, wireBytes):
		*p = append(*p, f.utf8())
	}
}

// utf8 returns the last field read as a string.
func (f *Fields) utf8() string {
	if !utf8.Valid(f.bytes) {
		f.err = fmt.Errorf("%w: field %d is not UTF-8", ErrMalformed, f.number)
		return ""
	}
	return string(f.bytes)
}

// raw encodes or decodes a field of type bytes.
func raw(f *Fields, number int, p *[]byte) {
	switch {
	case f.encoding:
		if len(*p) > 0 {
			f.putBytes(number, string(*p))
		}
	case f.is(number, wireBytes):
		*p = append([]byte{}, f.bytes...)
	}
}

// structs is the constraint of a message type *T, so that a decoder can allocate it with new(T).
type structs[T any] interface {
	*T
	Message
}

// one encodes or decodes a field that is a message; nil if it is absent.
func one[T any, M structs[T]](f *Fields, number int, p *M) {
	switch {
	case f.encoding:
		if *p != nil {
			f.putBytes(number, string(Marshal(*p)))
		}
	case f.is(number, wireBytes):
		if *p == nil {
			*p = new(T)
		}
		f.err = Unmarshal(f.bytes, *p)
	}
}

// part encodes or decodes a field that is a message. An absent message means the same as one with default values.
func part[T any, M structs[T]](f *Fields, number int, p M) {
	switch {
	case f.encoding:
		if b := Marshal(p); len(b) > 0 {
			f.putBytes(number, string(b))
		}
	case f.is(number, wireBytes):
		f.err = Unmarshal(f.bytes, p)
	}
}

// many encodes or decodes a repeated field of messages.
func many[T any, M structs[T]](f *Fields, number int, p *[]M) {
	switch {
	case f.encoding:
		for _, m := range *p {
			f.putBytes(number, string(Marshal(m)))
		}
	case f.is(number, wireBytes):
		m := M(new(T))
		f.err = Unmarshal(f.bytes, m)
		*p = append(*p, m)
	}
}

// textMap decodes a field of type map<string, string>. It encodes none, because no request has such a field.
func textMap(f *Fields, number int, p *map[string]string) {
	if f.encoding || !f.is(number, wireBytes) {
		return
	}
	var e entry
	if f.err = Unmarshal(f.bytes, &e); f.err == nil {
		if *p == nil {
			*p = map[string]string{}
		}
		(*p)[e.key] = e.value
	}
}

// entry is the encoded form of a map entry.
type entry struct{ key, value string }

func (e *entry) fields(f *Fields) {
	text(f, 1, &e.key)
	text(f, 2, &e.value)
}
