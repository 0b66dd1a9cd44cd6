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
	"sync"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// redacted replaces secrets.
const redacted = "REDACTED"

// names matches the end of a name whose value is a secret; headers matches HTTP headers whose value is a secret and may
// have several words. Names of references, such as secretName and tokenRef, do not match.
const (
	names = `(?:passw(?:or)?d|passphrase|passcode|pwd|secret|token|credentials?|psk|pre[-_ ]?shared[-_ ]?key|key-data|` +
		`\.dockerconfigjson|\.dockercfg|` +
		`(?:api|private|access|secret|shared|session|signing|encryption|account|master)[-_ ]?key)`
	headers = `(?:authorization|cookie)`
	// keyFile matches names of private key files. A Secret uses them as keys for the secret value, whereas the
	// value of a setting with such a name is a path.
	keyFile = `(?:\b(?:[a-z0-9_-]+\.key|(?:tls|ssl|ca|server|client)[-_]key|id_(?:rsa|dsa|ecdsa|ed25519)|auth))`
)

// compiled compiles an expression on first use, so that other commands start faster.
func compiled(expression string) func() *regexp.Regexp {
	return sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expression) })
}

var (
	// sensitive matches a name whose value is a secret.
	sensitive = compiled(`(?i)(?:` + names + `|` + headers + `)$`)
	// sensitiveFlag matches a flag whose value, the next argument, is a secret.
	sensitiveFlag = compiled(`(?i)^--?[A-Za-z0-9._-]*` + names + `$`)
	// sensitiveFile matches a name whose value is a secret unless it is a path.
	sensitiveFile = compiled(`(?i)^` + keyFile + `$`)
)

// privateKey matches an armored private key (PEM, OpenSSH, SSH2, PGP) with its headers. Newlines may be escaped, as
// in PEM within JSON.
var privateKey = compiled(`-----?[ ]?BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?[ ]?-----?(?:\s|\\+[nr])*` +
	`(?:[A-Za-z0-9-]+: [^\n\\]*(?:\s|\\+[nr])+)*[^-]*(?:-----?[ ]?END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?[ ]?-----?)?`)

// patterns match secrets in a line. Each expression is applied only to lines that contain one of its words (in lower
// case), because an expression takes seconds for a few MiB.
var patterns = []struct {
	words   []string
	find    func() *regexp.Regexp
	replace string
}{
	// User and password in a URL.
	{
		[]string{"://"},
		compiled(`([A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#"'\\<>@]+(?:@[^\s/?#"'\\<>@]+)*@`), "${1}" + redacted + "@",
	},
	// Signatures and API keys in URLs.
	{
		[]string{"sig", "key=", "code="},
		compiled(`(?i)([?&](?:sig|key|code|apikey|(?:[a-z0-9-]+-)?signature)=)[^\s&#"'\\]+`), "${1}" + redacted,
	},
	{
		[]string{"bearer", "basic"},
		compiled(`(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}`), "${1} " + redacted,
	},
	// JSON Web Tokens, such as tokens of service accounts.
	{[]string{"eyj"}, compiled(`\beyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*`), redacted},
	// Tokens of forges, registries and clouds, by their prefixes.
	{
		[]string{
			"glpat-", "glptt-", "gldt-", "glrt-", "glft-", "glcbt-", "glsoat-", "glimt-", "glagent-", "gloas-",
			"glffct-",
		},
		compiled(`\b(?:glpat|glptt|gldt|glrt|glft|glcbt|glsoat|glimt|glagent|gloas|glffct)-[A-Za-z0-9_.=-]{8,}`),
		redacted,
	},
	{
		[]string{
			"ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "dckr_", "npm_", "pypi-", "hvs.", "hvb.", "hvr.",
			"xox", "xapp-",
		},
		compiled(`\b(?:gh[pousr]_|github_pat_|dckr_(?:pat|oat)_|npm_|pypi-|hv[sbr]\.|xox[abeoprs]-|xapp-)` +
			`[A-Za-z0-9_-]{12,}`),
		redacted,
	},
	{
		[]string{"aiza", "ya29.", "_live_", "_test_", "atatt", "atbb", "do", "age-secret-key-"},
		compiled(`\b(?:AIza[A-Za-z0-9_-]{30,}|ya29\.[A-Za-z0-9_-]{16,}|[rs]k_(?:live|test)_[A-Za-z0-9]{12,}|` +
			`AT(?:ATT|BB)[A-Za-z0-9_=-]{16,}|do[opr]_v1_[a-f0-9]{32,}|AGE-SECRET-KEY-1[A-Z0-9]{16,})`), redacted,
	},
	// Quoted values; the quotes may be escaped, as in JSON within JSON.
	{
		secretWords,
		compiled(`(?i)((?:` + names + `|` + headers + `)\\*"\s*:\s*\\*")(?:[^"\\]|\\+[^"\\])+`),
		"${1}" + redacted,
	},
	{
		fileWords,
		compiled(`(?i)(` + keyFile + `\\*"\s*:\s*\\*")[^"\\/.~$](?:[^"\\]|\\+[^"\\])*`), "${1}" + redacted,
	},
	{
		secretWords,
		compiled(`(?i)(` + names + `=\\+")(?:[^"\\]|\\+[^"\\])+`), "${1}" + redacted,
	},
	// YAML block scalars with escaped newlines.
	{
		secretWords,
		compiled(`(?i)(` + names + `["']?\s*:\s*[|>][0-9+-]*)(?:(?:\\+[nr])+[ \t]+(?:[^\\"]|\\+[^nr"\\])*)+`),
		"${1} " + redacted,
	},
	// Headers, up to the end of the line or string.
	{
		secretWords,
		compiled(`(?i)(` + headers + `:[ \t]*)[^ \t\r\n"\\][^\r\n"\\]*`), "${1}" + redacted,
	},
	// Quoted values after an unquoted name: YAML, or key=value logs.
	{
		secretWords,
		compiled(`(?i)(` + names + `["']?[ \t]*[:=][ \t]*")(?:[^"\\\r\n]|\\.)+`), "${1}" + redacted,
	},
	{
		secretWords,
		compiled(`(?i)(` + names + `["']?[ \t]*[:=][ \t]*')[^'\r\n]+`), "${1}" + redacted,
	},
	// IPsec keys.
	{
		[]string{"psk", "eap", "xauth"},
		compiled(`(?i)(:[ \t]*(?:psk|eap|xauth)[ \t]+["'])[^"'\r\n]+`), "${1}" + redacted,
	},
	// User and password as arguments of a command.
	{
		[]string{"-u ", "--user"},
		compiled(`((?:^|\s)(?:-u|--user)[ =]['"]?[^\s:'"]+:)[^\s'"]+`), "${1}" + redacted,
	},
	// Flags; the value is one word.
	{
		secretWords,
		compiled(`(?i)((?:^|[\s"'\[])--?[a-z0-9._-]*` + names + `(?:[ \t]+|=))(?:[^\s"'&;\\]|\\[^\s"])+`),
		"${1}" + redacted,
	},
	// Values of names of key files, except paths and words of error messages about the file.
	{
		fileWords,
		compiled(`(?i)(` + keyFile + `["']?[ \t]*[:=][ \t]*["']?)` +
			`(?:[A-Za-z+/=_-]*[0-9][A-Za-z0-9+/=_-]{4,}|[A-Za-z0-9+/=_-]{40,})`), "${1}" + redacted,
	},
}

// Every name in the patterns contains one of secretWords; every name of a file contains one of fileWords.
var (
	secretWords = []string{
		"passw", "passphrase", "passcode", "pwd", "secret", "token", "credential", "key", "authorization", "cookie", "psk",
		".dockerc",
	}
	fileWords = []string{"key", "id_", "auth"}
)

var (
	// assignment matches a name and an unquoted value: an assignment, a line of YAML, an attribute.
	assignment = compiled(`(?i)([a-z0-9_./\[\]-]*` + names + `[ \t]*[:=][ \t]*)((?:[^\s"'&;\\]|\\[^\s"])+)`)
	// nextWord matches one more word of a value; nextName matches the start of the next name.
	nextWord = compiled(`^[ \t]+((?:[^\s"'&;\\]|\\[^\s"])+)`)
	nextName = compiled(`^(?:[A-Za-z0-9_./\[\]-]+[:=]|--?[A-Za-z]|[|{\[(\x00-\x1f])`)
	// yamlName matches a line of YAML, or of invalid JSON, whose value is a secret and may continue in the next lines.
	yamlName = compiled(`(?i)^([ \t]*(?:- )*)["']?[a-z0-9_./-]*` + names + `["']?[ \t]*:[ \t]*(.*)$`)
	yamlFile = compiled(`(?i)^([ \t]*(?:- )*)["']?` + keyFile + `["']?[ \t]*:[ \t]*([|>].*)$`)
)

// Text redacts secrets in text.
func Text(text string) string {
	if strings.Contains(text, "BEGIN ") {
		text = privateKey().ReplaceAllString(text, redacted)
	}
	text = encodedKeys(text)
	var b strings.Builder
	value := secretLines{}
	for line := range strings.Lines(text) {
		if value.has(line) {
			if !value.said {
				end := line[len(strings.TrimRight(line, "\r\n")):]
				b.WriteString(line[:indentOf(line)] + redacted + end)
			}
			value.said = true
			continue
		}
		lower := strings.ToLower(line)
		for _, p := range patterns {
			if slices.ContainsFunc(p.words, func(word string) bool { return strings.Contains(lower, word) }) {
				line = p.find().ReplaceAllString(line, p.replace)
			}
		}
		if slices.ContainsFunc(secretWords, func(word string) bool { return strings.Contains(lower, word) }) {
			value = followerOf(line)
			line = assignments(line)
		} else if slices.ContainsFunc(fileWords, func(word string) bool { return strings.Contains(lower, word) }) {
			value = followerOf(line)
		}
		b.WriteString(line)
	}
	return b.String()
}

// assignments redacts unquoted values. The value of a flag is one word; other values end at the next name.
func assignments(line string) string {
	var b strings.Builder
	for {
		m := assignment().FindStringSubmatchIndex(line)
		if m == nil {
			b.WriteString(line)
			return b.String()
		}
		name, end := line[m[2]:m[3]], m[1]
		if !strings.HasPrefix(name, "-") && !strings.HasPrefix(name, "/") {
			for {
				next := nextWord().FindStringSubmatchIndex(line[end:])
				if next == nil || nextName().MatchString(line[end+next[2]:end+next[3]]) {
					break
				}
				end += next[1]
			}
		}
		b.WriteString(line[:m[3]])
		value, yaml := line[m[4]:m[5]], strings.HasSuffix(strings.TrimRight(name, " \t"), ":")
		if yaml && strings.Trim(value, "|>+-0123456789") == "" {
			b.WriteString(line[m[4]:end]) // a number, or a YAML block scalar follows
		} else {
			b.WriteString(redacted)
		}
		line = line[end:]
	}
}

// secretLines finds the lines that belong to a secret value of several lines.
type secretLines struct {
	active bool
	indent int  // column of the name
	begun  bool // the value starts on the line of the name
	quoted bool // the name is in quotes, as in JSON
	said   bool
}

// followerOf returns the state that tells which lines after this one continue a secret value.
func followerOf(line string) secretLines {
	line = strings.TrimRight(line, " \t\r\n")
	m := yamlName().FindStringSubmatch(line)
	if m == nil {
		m = yamlFile().FindStringSubmatch(line)
	}
	if m == nil {
		return secretLines{}
	}
	rest := m[2]
	block := rest != "" && (rest[0] == '|' || rest[0] == '>')
	if rest != "" && !block && strings.ContainsAny(rest[:1], `"'{[&*`) {
		return secretLines{} // a quoted value, or a structure
	}
	indent := indentOf(line)
	quoted := strings.ContainsAny(line[indent:indent+1], `"'`)
	return secretLines{active: true, indent: indent, begun: rest != "", quoted: quoted}
}

// indentOf returns the column of the first character that is not a blank.
func indentOf(line string) int {
	return len(line) - len(strings.TrimLeft(line, " \t"))
}

// has reports whether a line belongs to the secret value.
func (f *secretLines) has(line string) bool {
	if !f.active {
		return false
	}
	text := strings.TrimSpace(line)
	switch {
	case text == "" && f.begun:
		return true
	case f.begun && indentOf(line) > f.indent:
		return true
	case !f.begun && text != "" && f.first(text, indentOf(line)):
		f.begun = true
		return true
	}
	f.active = false
	return false
}

// first reports whether the line after a name is its value, and not a nested mapping.
func (f *secretLines) first(text string, indent int) bool {
	item := strings.HasPrefix(text, "- ")
	if indent < f.indent || indent == f.indent && !item {
		return false
	}
	if f.quoted && strings.ContainsAny(text[:1], `"'`) {
		return true // a string of JSON
	}
	text = strings.TrimPrefix(text, "- ")
	return !strings.Contains(text, ": ") && !strings.HasSuffix(text, ":") &&
		!strings.ContainsAny(text[:min(len(text), 1)], "{}[],")
}

// armors are the beginnings of "-----BEGIN" in base64 at the three possible offsets. They are strings, not an
// expression, because an expression takes a second for 16 MiB.
var armors = [...]string{"LS0tLS1CRUdJTi", "tLS0tLUJFR0lO", "0tLS0tQkVHSU4"}

// encodedKeys redacts base64 of PEM and PGP, on one or several lines. This includes certificates, because a key may
// follow them in the same text.
func encodedKeys(text string) string {
	var b strings.Builder
	written := 0
	next := [len(armors)]int{-1, -1, -1} // next position of each armor
	for {
		start := len(text)
		for i, armor := range armors {
			if next[i] < written {
				next[i] = len(text)
				if at := strings.Index(text[written:], armor); at >= 0 {
					next[i] = written + at
				}
			}
			start = min(start, next[i])
		}
		if start == len(text) {
			break
		}
		for start > written && isBase64(text[start-1]) {
			start--
		}
		b.WriteString(text[written:start] + redacted)
		written = encodedEnd(text, start)
	}
	if written == 0 {
		return text
	}
	b.WriteString(text[written:])
	return b.String()
}

// encodedEnd returns the end of base64 that may be wrapped. A line of at least 40 characters may be followed by more
// lines. A shorter line is the last one, unless it is the name of another value.
func encodedEnd(text string, start int) int {
	word := func(from int) (end int) {
		for end = from; end < len(text) && isBase64(text[end]); end++ {
		}
		return end
	}
	end := word(start)
	for length := end - start; length >= 40; {
		next := end
		for next < len(text) && (strings.IndexByte(" \t\r\n", text[next]) >= 0 || isEscapedEnd(text[next:])) {
			if next++; text[next-1] == '\\' {
				next++
			}
		}
		last := word(next)
		if last == next || next == end || last < len(text) && strings.IndexByte(":.-({[", text[last]) >= 0 {
			break
		}
		end, length = last, last-next
	}
	return end
}

func isEscapedEnd(text string) bool {
	return strings.HasPrefix(text, `\n`) || strings.HasPrefix(text, `\r`)
}

func isBase64(c byte) bool {
	return c >= 'A' && c <= 'Z' || c >= 'a' && c <= 'z' || c >= '0' && c <= '9' || c == '+' || c == '/' || c == '=' ||
		c == '_'
}

// Output redacts the output of a program: JSON values by their structure, anything else as text. It escapes
// unprintable characters, because labels and log lines may have any characters.
func Output(content []byte) []byte { return escape(redactOutput(content)) }

// maxBroken limits the number of lines that look like JSON but cannot be parsed, because each attempt takes time. All
// later lines are treated as text.
const maxBroken = 100

func redactOutput(content []byte) []byte {
	var b, text bytes.Buffer // text: lines before the next JSON value
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
				broken = maxBroken // truncated JSON
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

// redactJSON redacts the JSON value at the start of content. size is its length in content.
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

// redactValue redacts a JSON value. name is its key in an object.
func redactValue(name string, v any) any {
	switch v := v.(type) {
	case string:
		if v != "" && (sensitive().MatchString(name) || sensitiveFile().MatchString(name) && !isPath(v)) {
			return redacted
		}
		return Text(v)
	case json.Number:
		if sensitive().MatchString(name) {
			return redacted
		}
	case []any:
		flag := "" // the previous argument, if it is a flag with a secret value: ["--password", "…"]
		for i := range v {
			argument, _ := v[i].(string)
			v[i] = redactValue(cmp.Or(flag, name), v[i])
			if flag = ""; sensitiveFlag().MatchString(argument) {
				flag = argument
			}
		}
	case map[string]any:
		// The key "value" gets its meaning from an environment variable's name, {"name": "ETCD_PASSWORD",
		// "value": "…"}, or from a setting's key, {"etcd.password": {"value": "…"}}.
		variable, _ := v["name"].(string)
		kind, _ := v["kind"].(string)
		for key, value := range v {
			switch {
			case kind == "Secret" && (key == "data" || key == "stringData"):
				v[key] = redactAll(value)
			case key == "value" && sensitive().MatchString(name):
				v[key] = redactValue(name, value)
			case key == "managedFields":
				delete(v, key)
			case key == "value" && sensitive().MatchString(variable):
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

// redactAll redacts all strings of a JSON value.
func redactAll(v any) any {
	switch v := v.(type) {
	case string:
		if v != "" {
			return redacted
		}
	case map[string]any:
		for key, value := range v {
			v[key] = redactAll(value)
		}
	case []any:
		for i := range v {
			v[i] = redactAll(v[i])
		}
	}
	return v
}

// isPath reports whether a value is the path of a file.
func isPath(v string) bool {
	return strings.ContainsAny(v[:1], "/.~$") && !strings.ContainsAny(v, "\n")
}

// escape escapes unprintable characters as JSON does, and invalid UTF-8 as \x.
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
