// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package report

import (
	"bytes"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// redacted stands for what was taken out.
const redacted = "REDACTED"

// secretName is how the name of a secret ends.
const secretName = `passw(?:or)?d|passphrase|secret|token|credentials?|(?:api|private|access|secret)[-_ ]?key`

// sensitive is a name whose value is a secret. Names of names are none: secretName, tokenRef.
var sensitive = regexp.MustCompile(`(?i)(` + secretName + `|authorization|cookie)$`)

// privateKey is one that is written as PEM, of several lines.
var privateKey = regexp.MustCompile(`-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(-----END [A-Z ]*PRIVATE KEY-----)?`)

// patterns are those of secrets in a line of text, with what replaces them. A line that has none of the words, in lower
// case, is not searched: the search takes a second for a MiB.
var patterns = []struct {
	words   []string
	find    *regexp.Regexp
	replace string
}{
	// The user of a URL, with or without a password.
	{
		[]string{"://"},
		regexp.MustCompile(`([A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#"'\\<>@]+(?:@[^\s/?#"'\\<>@]+)*@`), "${1}" + redacted + "@",
	},
	{
		[]string{"bearer", "basic"},
		regexp.MustCompile(`(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}`), "${1} " + redacted,
	},
	// A token of a service account is one.
	{[]string{"eyj"}, regexp.MustCompile(`\beyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*`), redacted},
	// In quotes, which may be escaped: JSON in JSON.
	{
		secretWords,
		regexp.MustCompile(`(?i)((?:` + secretName + `|authorization|cookie)\\*"\s*:\s*\\*")(?:[^"\\]|\\+[^"\\])+`),
		"${1}" + redacted,
	},
	// A header, which may have several words, to the end of its line or string.
	{
		secretWords,
		regexp.MustCompile(`(?i)((?:authorization|cookie):[ \t]*)[^ \t\r\n"\\][^\r\n"\\]*`), "${1}" + redacted,
	},
	// A value in quotes behind the name: YAML, or a log of key=value.
	{
		secretWords,
		regexp.MustCompile(`(?i)((?:` + secretName + `)[ \t]*[:=][ \t]*(?:"|'))(?:[^"'\\\r\n]|\\.)+`), "${1}" + redacted,
	},
	// One word: an assignment, a line of YAML, an argument. A value with blanks and without quotes has no end.
	{
		secretWords,
		regexp.MustCompile(`(?i)((?:` + secretName + `)[ \t]*[:=][ \t]*|--?[a-z-]*(?:` + secretName + `)[ \t]+)` +
			`(?:[^\s"'&;\\]|\\[^\s"])+`), "${1}" + redacted,
	},
}

// secretWords are in every name of a secret that the patterns know.
var secretWords = []string{"passw", "passphrase", "secret", "token", "credential", "key", "authorization", "cookie"}

// Text replaces what looks like a secret in text.
func Text(text string) string {
	if strings.Contains(text, "-----BEGIN ") {
		text = privateKey.ReplaceAllString(text, redacted)
	}
	var b strings.Builder
	kept := 0 // how much of text is in b
	at := 0
	for line := range strings.Lines(text) {
		if clean := textLine(line); clean != line {
			b.WriteString(text[kept:at])
			b.WriteString(clean)
			kept = at + len(line)
		}
		at += len(line)
	}
	if kept == 0 {
		return text
	}
	b.WriteString(text[kept:])
	return b.String()
}

func textLine(line string) string {
	lower := strings.ToLower(line)
	for _, p := range patterns {
		if slices.ContainsFunc(p.words, func(word string) bool { return strings.Contains(lower, word) }) {
			line = p.find.ReplaceAllString(line, p.replace)
		}
	}
	return line
}

// Output redacts what a program printed: JSON by its structure, several values after each other, too, and
// anything else as text. What a terminal would not print is escaped: a label or a log line may have any characters.
func Output(content []byte) []byte { return escape(redactOutput(content)) }

func redactOutput(content []byte) []byte {
	var b bytes.Buffer
	decoder := json.NewDecoder(bytes.NewReader(content))
	decoder.UseNumber()
	values := 0
	indented := bytes.HasPrefix(content, []byte("{\n")) || bytes.HasPrefix(content, []byte("[\n"))
	for {
		var v any
		err := decoder.Decode(&v)
		if err != nil {
			if values > 0 && decoder.InputOffset() >= int64(len(bytes.TrimRight(content, " \t\r\n"))) {
				return b.Bytes()
			}
			return []byte(Text(string(content)))
		}
		values++
		encoder := json.NewEncoder(&b)
		encoder.SetEscapeHTML(false)
		if indented {
			encoder.SetIndent("", "  ")
		}
		if encoder.Encode(redactValue("", v)) != nil {
			return []byte(Text(string(content)))
		}
	}
}

// redactValue redacts a value of JSON, which has a name in an object.
func redactValue(name string, v any) any {
	switch v := v.(type) {
	case string:
		if v != "" && sensitive.MatchString(name) {
			return redacted
		}
		return Text(v)
	case []any:
		for i := range v {
			v[i] = redactValue(name, v[i])
		}
	case map[string]any:
		// An environment variable: {"name": "ETCD_PASSWORD", "value": "…"}.
		variable, _ := v["name"].(string)
		for key, value := range v {
			switch {
			case key == "managedFields":
				delete(v, key)
			case key == "value" && sensitive.MatchString(variable):
				v[key] = redactValue(variable, value)
			case key == "name":
				v[key] = redactValue("", value)
			default:
				v[key] = redactValue(strings.TrimSpace(key), value)
			}
		}
	}
	return v
}

// escape replaces characters that do not print, as JSON escapes them in a string, and bytes that are no characters.
func escape(content []byte) []byte {
	special := func(r rune) bool { return r == utf8.RuneError || r != '\n' && r != '\t' && !unicode.IsPrint(r) }
	if bytes.IndexFunc(content, special) < 0 {
		return content
	}
	b := make([]byte, 0, len(content)+64)
	for len(content) > 0 {
		r, size := utf8.DecodeRune(content)
		switch {
		case r == utf8.RuneError && size == 1:
			b = fmt.Appendf(b, `\x%02x`, content[0])
		case !special(r) || r == utf8.RuneError:
			b = append(b, content[:size]...)
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			b = fmt.Appendf(b, `\u%04x\u%04x`, high, low)
		default:
			b = fmt.Appendf(b, `\u%04x`, r)
		}
		content = content[size:]
	}
	return b
}
