// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package report

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// redacted stands for what was taken out.
const redacted = "REDACTED"

// names are the ends of names whose values are secrets, headers are those of headers, whose values may have several
// words. Names of names have none of them: secretName, tokenRef.
const (
	names   = `(?:passw(?:or)?d|passphrase|pwd|secret|token|credentials?|(?:api|private|access|secret)[-_ ]?key)`
	headers = `(?:authorization|cookie)`
)

var (
	// sensitive is a name whose value is a secret.
	sensitive = regexp.MustCompile(`(?i)(?:` + names + `|` + headers + `)$`)
	// sensitiveFlag is a flag whose value is the next argument.
	sensitiveFlag = regexp.MustCompile(`(?i)^--?[A-Za-z0-9._-]*` + names + `$`)
)

// privateKey is one in PEM, with the lines before it that say how it is encrypted. The ends of lines may be escaped:
// PEM in JSON.
var privateKey = regexp.MustCompile(`-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----(?:\s|\\+[nr])*` +
	`(?:[A-Za-z0-9-]+: [^\n\\]*(?:\s|\\+[nr])+)*[^-]*(?:-----END [A-Z0-9 ]*PRIVATE KEY-----)?`)

// patterns are those of secrets in a line, with what replaces them. A line that has none of the words, in lower case,
// is not searched: that costs seconds for a few MiB.
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
		regexp.MustCompile(`(?i)((?:` + names + `|` + headers + `)\\*"\s*:\s*\\*")(?:[^"\\]|\\+[^"\\])+`),
		"${1}" + redacted,
	},
	{
		secretWords,
		regexp.MustCompile(`(?i)(` + names + `=\\+")(?:[^"\\]|\\+[^"\\])+`), "${1}" + redacted,
	},
	// A header, to the end of its line or string.
	{
		secretWords,
		regexp.MustCompile(`(?i)(` + headers + `:[ \t]*)[^ \t\r\n"\\][^\r\n"\\]*`), "${1}" + redacted,
	},
	// A value in quotes behind the name: YAML, or a log of key=value.
	{
		secretWords,
		regexp.MustCompile(`(?i)(` + names + `["']?[ \t]*[:=][ \t]*")(?:[^"\\\r\n]|\\.)+`), "${1}" + redacted,
	},
	{
		secretWords,
		regexp.MustCompile(`(?i)(` + names + `["']?[ \t]*[:=][ \t]*')[^'\r\n]+`), "${1}" + redacted,
	},
	// One word: an assignment, a line of YAML, an argument. A value with blanks and without quotes has no end.
	{
		secretWords,
		regexp.MustCompile(`(?i)(` + names + `[ \t]*[:=][ \t]*|--?[a-z0-9._-]*` + names + `[ \t]+)` +
			`(?:[^\s"'&;\\]|\\[^\s"])+`), "${1}" + redacted,
	},
}

// secretWords are in every name of a secret that the patterns know.
var secretWords = []string{
	"passw", "passphrase", "pwd", "secret", "token", "credential", "key", "authorization", "cookie",
}

// Text replaces what looks like a secret in text.
func Text(text string) string {
	if strings.Contains(text, "-----BEGIN ") {
		text = privateKey.ReplaceAllString(text, redacted)
	}
	var b strings.Builder
	for line := range strings.Lines(text) {
		lower := strings.ToLower(line)
		for _, p := range patterns {
			if slices.ContainsFunc(p.words, func(word string) bool { return strings.Contains(lower, word) }) {
				line = p.find.ReplaceAllString(line, p.replace)
			}
		}
		b.WriteString(line)
	}
	return b.String()
}

// Output redacts what a program printed: JSON by its structure, several values after each other, too, and
// anything else as text. What a terminal would not print is escaped: a label or a log line may have any characters.
func Output(content []byte) []byte { return escape(redactOutput(content)) }

// maxBroken is how many lines may begin as JSON and be none before the rest is text: each costs a look at what follows.
const maxBroken = 100

func redactOutput(content []byte) []byte {
	var b, text bytes.Buffer // text: lines that are no JSON, until the next value
	indented := bytes.HasPrefix(content, []byte("{\n")) || bytes.HasPrefix(content, []byte("[\n"))
	for broken := 0; len(content) > 0; {
		if broken < maxBroken && (content[0] == '{' || content[0] == '[') {
			if value, size, err := redactJSON(content, indented); err == nil {
				b.WriteString(Text(text.String()))
				text.Reset()
				b.Write(value)
				content = bytes.TrimLeft(content[size:], " \t\r\n")
				continue
			} else if errors.Is(err, io.ErrUnexpectedEOF) {
				broken = maxBroken // the end is cut off
			}
			broken++
		}
		end := bytes.IndexByte(content, '\n') + 1
		if end == 0 {
			end = len(content)
		}
		text.Write(content[:end])
		content = content[end:]
	}
	b.WriteString(Text(text.String()))
	return b.Bytes()
}

// redactJSON redacts the value that content begins with, and gives its size there.
func redactJSON(content []byte, indented bool) (value []byte, size int64, err error) {
	decoder := json.NewDecoder(bytes.NewReader(content))
	decoder.UseNumber()
	var v any
	if err := decoder.Decode(&v); err != nil {
		return nil, 0, err
	}
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	if indented {
		encoder.SetIndent("", "  ")
	}
	err = encoder.Encode(redactValue("", v))
	return b.Bytes(), decoder.InputOffset(), err
}

// redactValue redacts a value of JSON, which has a name in an object.
func redactValue(name string, v any) any {
	switch v := v.(type) {
	case string:
		if v != "" && sensitive.MatchString(name) {
			return redacted
		}
		return Text(v)
	case json.Number:
		if sensitive.MatchString(name) {
			return redacted
		}
	case []any:
		flag := "" // an argument before the value: ["--password", "…"]
		for i := range v {
			argument, _ := v[i].(string)
			v[i] = redactValue(cmp.Or(flag, name), v[i])
			if flag = ""; sensitiveFlag.MatchString(argument) {
				flag = argument
			}
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
