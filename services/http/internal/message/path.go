// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package message

import "strings"

// Normalise returns the normal form of a path with an optional query: encoded characters that need no encoding are
// decoded, slashes are merged, and dot segments are removed (RFC 3986, section 6.2.2). Without that, a rule for
// /public/.* would allow /public/%2e%2e/secret. The query does not change. Paths that servers read in different ways
// are refused: with a backslash, an encoded slash or backslash, an encoded control character, or a parameter of a dot
// segment such as "..;x".
func Normalise(target string) (string, error) {
	path, query, has := strings.Cut(target, "?")
	if !strings.HasPrefix(path, "/") {
		return "", bad("the path does not begin with a slash")
	}
	path, err := decode(path)
	if err != nil {
		return "", err
	}
	if strings.Contains(path, "//") || strings.Contains(path, "/.") {
		if path, err = withoutDots(path); err != nil {
			return "", err
		}
	}
	if has {
		path += "?" + query
	}
	return path, nil
}

// decode decodes the characters that need no encoding, and writes the others with upper-case digits.
func decode(path string) (string, error) {
	if !strings.ContainsAny(path, `%\`) {
		return path, nil
	}
	var b strings.Builder
	for i := 0; i < len(path); i++ {
		c := path[i]
		if c == '\\' {
			return "", bad("a backslash in the path")
		}
		if c != '%' {
			b.WriteByte(c)
			continue
		}
		if i+2 >= len(path) || unhex(path[i+1]) < 0 || unhex(path[i+2]) < 0 {
			return "", bad("a percent sign in the path without two hexadecimal digits")
		}
		switch c = byte(unhex(path[i+1])<<4 | unhex(path[i+2])); { //nolint:gosec // two digits
		case c == '/' || c == '\\':
			return "", bad("an encoded slash or backslash in the path")
		case c < ' ' || c == 0x7f:
			return "", bad("an encoded control character in the path")
		case isUnreserved(c):
			b.WriteByte(c)
		default:
			b.WriteString(strings.ToUpper(path[i : i+3]))
		}
		i += 2
	}
	return b.String(), nil
}

// unhex returns the value of a hexadecimal digit; -1 for another character.
func unhex(c byte) int {
	switch {
	case c >= '0' && c <= '9':
		return int(c - '0')
	case c|0x20 >= 'a' && c|0x20 <= 'f':
		return int(c|0x20-'a') + 10
	}
	return -1
}

func isUnreserved(c byte) bool {
	return c >= '0' && c <= '9' || c|0x20 >= 'a' && c|0x20 <= 'z' || c == '-' || c == '.' || c == '_' || c == '~'
}

// withoutDots merges slashes and removes dot segments.
func withoutDots(path string) (string, error) {
	var out []string
	segments := strings.Split(path[1:], "/")
	for i, s := range segments {
		last := i == len(segments)-1
		name, _, parameter := strings.Cut(s, ";")
		switch {
		case parameter && (name == "." || name == ".."):
			return "", bad("a parameter of a dot segment in the path")
		case s == "" || s == ".":
		case s == "..":
			out = out[:max(len(out)-1, 0)]
		default:
			out = append(out, s)
			continue
		}
		if last { // a directory
			out = append(out, "")
		}
	}
	return "/" + strings.Join(out, "/"), nil
}
