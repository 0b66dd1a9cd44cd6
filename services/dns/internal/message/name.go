// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

const (
	maxName  = 255 // bytes of a name in a message, including the final root label
	maxLabel = 63
	// maxPointers limits the pointers of one name. Servers use about one pointer per label; other parsers often allow
	// ten. The limit bounds the work for a message in which every record has a name with as many pointers as
	// possible.
	maxPointers = 16
)

// labels iterates over the labels of a name and follows pointers.
type labels struct {
	b        []byte
	at       int // position of the next label
	end      int // end of the name at its first position; 0 until it is known
	start    int // start of the current run of labels; pointers must point to a position before it
	size     int // size of the labels so far
	pointers int
}

func newLabels(b []byte, at int) labels { return labels{b: b, at: at, start: at} }

// next returns the next label. The last label is the root label, which is empty.
func (l *labels) next() (label []byte, err error) {
	for {
		if l.at >= len(l.b) {
			return nil, ErrShort
		}
		n := int(l.b[l.at])
		switch n & 0xc0 {
		case 0x00:
			if len(l.b)-l.at-1 < n {
				return nil, ErrShort
			}
			if l.size += n + 1; l.size > maxName {
				return nil, ErrName
			}
			label = l.b[l.at+1 : l.at+1+n]
			l.at += 1 + n
			if n == 0 && l.end == 0 {
				l.end = l.at
			}
			return label, nil
		case 0xc0:
			if len(l.b)-l.at < 2 {
				return nil, ErrShort
			}
			to := pointer(l.b, l.at)
			if l.end == 0 {
				l.end = l.at + 2
			}
			// Pointers must point backwards, each further than the previous one, so that a name cannot contain
			// itself.
			if l.pointers++; to >= l.start || to < headerSize || l.pointers > maxPointers {
				return nil, ErrName
			}
			l.at, l.start = to, to
		default:
			return nil, ErrName
		}
	}
}

// checkName checks the name at a position, and returns the position after it.
func checkName(b []byte, at int) (end int, err error) {
	l := newLabels(b, at)
	err = l.check()
	return l.end, err
}

// check iterates over all labels.
func (l *labels) check() error {
	for {
		label, err := l.next()
		if err != nil || len(label) == 0 {
			return err
		}
	}
}

// pointer returns the target of the pointer at a position.
func pointer(b []byte, at int) int { return int(b[at]&0x3f)<<8 | int(b[at+1]) }

// lower returns an ASCII letter in lower case, and every other byte unchanged.
func lower(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c + 'a' - 'A'
	}
	return c
}

// plain reports whether a byte is written unchanged in the text of a name.
func plain(c byte) bool { return c > ' ' && c < 0x7f && c != '.' && c != '\\' }

// appendName appends the text of a valid name: in lower case, with a final dot. A byte of a label that is not
// printable, or that could be mistaken for a separator, is written as \DDD. So different names have different texts.
func appendName(dst, b []byte, at int) []byte {
	l := newLabels(b, at)
	for first := true; ; first = false {
		label, err := l.next()
		if err != nil {
			return dst // not reached, because the name was checked before
		}
		if len(label) == 0 {
			if first {
				return append(dst, '.')
			}
			return dst
		}
		for _, c := range label {
			if plain(c) {
				dst = append(dst, lower(c))
				continue
			}
			dst = append(dst, '\\', '0'+c/100, '0'+c/10%10, '0'+c%10)
		}
		dst = append(dst, '.')
	}
}

// packName appends a name in the encoding of DNS messages. text must be in the form that appendName writes; otherwise
// ok is false.
func packName(dst []byte, text string) (out []byte, ok bool) {
	if text == "." {
		return append(dst, 0), true
	}
	begin := len(dst)
	length := len(dst) // position of the length byte of the current label
	dst = append(dst, 0)
	for i := 0; i < len(text); i++ {
		c := text[i]
		switch {
		case c == '.':
			n := len(dst) - length - 1
			if n == 0 || n > maxLabel {
				return nil, false
			}
			dst[length] = byte(n)
			length = len(dst)
			dst = append(dst, 0)
			continue
		case c == '\\':
			if len(text)-i < 4 {
				return nil, false
			}
			n := 0
			for _, d := range []byte(text[i+1 : i+4]) {
				if d < '0' || d > '9' {
					return nil, false
				}
				n = 10*n + int(d-'0')
			}
			if n > 255 {
				return nil, false
			}
			c, i = byte(n), i+3
		}
		dst = append(dst, c)
	}
	// The text must end with a dot, so that the last length byte is the root label.
	return dst, length == len(dst)-1 && len(dst)-begin > 1 && len(dst)-begin <= maxName
}

// sameName reports whether two valid names are equal, ignoring the case of letters.
func sameName(b []byte, x, y int) bool {
	if x == y {
		return true
	}
	lx, ly := newLabels(b, x), newLabels(b, y)
	for {
		p, err := lx.next()
		q, err2 := ly.next()
		if err != nil || err2 != nil || len(p) != len(q) {
			return false
		}
		if len(p) == 0 {
			return true
		}
		// From the same position on, both names have the same rest.
		if lx.at == ly.at {
			return equalFold(p, q)
		}
		if !equalFold(p, q) {
			return false
		}
	}
}

func equalFold(p, q []byte) bool {
	for i := range p {
		if p[i] != q[i] && lower(p[i]) != lower(q[i]) {
			return false
		}
	}
	return true
}

// hashName returns a hash (FNV-1a) of a valid name that ignores the case of letters.
func hashName(b []byte, at int) uint64 {
	h := uint64(14695981039346656037)
	l := newLabels(b, at)
	for {
		label, err := l.next()
		if err != nil || len(label) == 0 {
			return h
		}
		h = (h ^ uint64(len(label))) * 1099511628211
		for _, c := range label {
			h = (h ^ uint64(lower(c))) * 1099511628211
		}
	}
}
