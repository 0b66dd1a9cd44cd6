// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package label

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Limits of the label set of an identity.
const (
	MaxLabels = 256       // labels in a set
	MaxSource = 63        // bytes
	MaxKey    = 348       // bytes: PrefixDerived + "namespace.labels.", a DNS prefix of 253, '/' and a name of 63
	MaxValue  = 4096      // bytes
	MaxText   = 256 << 10 // bytes of the canonical text, well below etcd's request size limit
)

// ErrInvalid is wrapped by every error about labels.
var ErrInvalid = errors.New("invalid labels")

// Error names the invalid label and the invalid part of it.
type Error struct {
	Index  int    // in the caller's list; -1 for the set as a whole
	Part   string // "source", "key", "value"; empty for the label as a whole
	Reason string
}

// Field returns the path of the invalid value in a request.
func (e *Error) Field() string {
	f := "labels"
	if e.Index >= 0 {
		f += "[" + strconv.Itoa(e.Index) + "]"
	}
	if e.Part != "" {
		f += "." + e.Part
	}
	return f
}

func (e *Error) Error() string { return e.Field() + ": " + e.Reason }

// Is reports that every Error is an ErrInvalid.
func (e *Error) Is(target error) bool { return target == ErrInvalid }

// IsSource reports whether s is a valid label source: a-z, 0-9 and "-", with no "-" at either end. It is a loop and
// not a regular expression, because the CNI plugin links this package and runs only briefly.
func IsSource(s string) bool {
	for i := range len(s) {
		c := s[i]
		if edge := i == 0 || i == len(s)-1; (c < 'a' || c > 'z') && (c < '0' || c > '9') && (edge || c != '-') {
			return false
		}
	}
	return s != "" && len(s) <= MaxSource
}

// IsText reports whether s may be a key or a value, or part of one.
func IsText(s string) bool {
	return utf8.ValidString(s) && strings.IndexFunc(s, unicode.IsControl) < 0
}

// Check returns an *Error with the given index if the label is invalid in an identity.
func (l Label) Check(index int) error {
	bad := func(part, format string, args ...any) error {
		return &Error{Index: index, Part: part, Reason: fmt.Sprintf(format, args...)}
	}
	switch {
	case !IsSource(l.Source):
		return bad("source", "%q: want 1 to %d of a-z, 0-9 and \"-\"", l.Source, MaxSource)
	case l.Key == "":
		return bad("key", "is empty")
	case len(l.Key) > MaxKey:
		return bad("key", "is %d bytes long, at most %d are allowed", len(l.Key), MaxKey)
	case len(l.Value) > MaxValue:
		return bad("value", "is %d bytes long, at most %d are allowed", len(l.Value), MaxValue)
	case !IsText(l.Key):
		return bad("key", "%q: control characters and broken UTF-8 are not allowed", l.Key)
	case !IsText(l.Value):
		return bad("value", "%q: control characters and broken UTF-8 are not allowed", l.Value)
	}
	return nil
}

// Canonical is a valid label set of an identity, together with its canonical text. It is not empty, each label is
// valid, and no source:key has two values. Two sets are equal exactly when their texts are equal. The zero value is
// no set.
type Canonical struct {
	set  Set
	text string
}

// Canonicalize sorts, validates and deduplicates labels. It rejects two values for the same source and key. The error
// is an *Error with an index into the caller's list.
func Canonicalize(labels ...Label) (Canonical, error) {
	if len(labels) == 0 {
		return Canonical{}, &Error{Index: -1, Reason: "a label set has at least one label"}
	}
	for i, l := range labels {
		if err := l.Check(i); err != nil {
			return Canonical{}, err
		}
	}
	c := Canonical{set: NewSet(labels...)}
	list := c.set.list
	for i := 1; i < len(list); i++ {
		if list[i].Name() == list[i-1].Name() {
			return Canonical{}, &Error{
				Index: slices.Index(labels, list[i]), Part: "key",
				Reason: fmt.Sprintf("%s is given twice, with the values %q and %q", list[i].Name(), list[i-1].Value, list[i].Value),
			}
		}
	}
	if len(list) > MaxLabels {
		reason := fmt.Sprintf("%d labels are left after filtering, at most %d are allowed", len(list), MaxLabels)
		return Canonical{}, &Error{Index: -1, Reason: reason}
	}
	c.text = c.set.Text()
	if len(c.text) > MaxText {
		reason := fmt.Sprintf("the set is %d bytes long, at most %d are allowed", len(c.text), MaxText)
		return Canonical{}, &Error{Index: -1, Reason: reason}
	}
	return c, nil
}

// Set returns the set without its text.
func (c Canonical) Set() Set { return c.set }

// All returns the labels in canonical order. The caller must not change them.
func (c Canonical) All() []Label { return c.set.All() }

// Text returns the canonical text, which is hashed, stored and compared.
func (c Canonical) Text() string { return c.text }

// String returns Text.
func (c Canonical) String() string { return c.text }

// IsZero reports whether c is the zero value.
func (c Canonical) IsZero() bool { return c.text == "" }

// Hash returns the SHA-256 of the canonical text. Keys in etcd contain it.
func (c Canonical) Hash() [sha256.Size]byte { return sha256.Sum256([]byte(c.text)) }

// Parse reads a canonical text. It rejects every text that Text would not have written, so that equal sets have equal
// texts in every process.
func Parse(text string) (Canonical, error) {
	if len(text) > MaxText {
		return Canonical{}, fmt.Errorf("%w: text of %d bytes, at most %d are allowed", ErrInvalid, len(text), MaxText)
	}
	var list []Label
	rest := text
	for rest != "" {
		if len(list) == MaxLabels {
			return Canonical{}, fmt.Errorf("%w: text has more than %d labels", ErrInvalid, MaxLabels)
		}
		source, after, ok := strings.Cut(rest, ":")
		if !ok {
			return Canonical{}, fmt.Errorf("%w: %q has no source", ErrInvalid, rest)
		}
		key, after, ok := cutUnescaped(after, '=')
		if !ok {
			return Canonical{}, fmt.Errorf("%w: %q has no value", ErrInvalid, rest)
		}
		value, after, ok := cutUnescaped(after, ';')
		if !ok {
			return Canonical{}, fmt.Errorf("%w: %q does not end in \";\"", ErrInvalid, rest)
		}
		list = append(list, Label{Source: source, Key: key, Value: value})
		rest = after
	}
	c, err := Canonicalize(list...)
	if err != nil {
		return Canonical{}, err
	}
	if c.text != text {
		return Canonical{}, fmt.Errorf("%w: %q is not in canonical form", ErrInvalid, text)
	}
	return c, nil
}

// cutUnescaped unescapes s up to the first stop byte that is not escaped by '\'.
func cutUnescaped(s string, stop byte) (before, after string, ok bool) {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c == stop:
			return b.String(), s[i+1:], true
		case c == '\\' && i+1 < len(s):
			i++
			b.WriteByte(s[i])
		default:
			b.WriteByte(c)
		}
	}
	return "", "", false
}
