// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package bugreport

import (
	"bytes"
	"encoding/json"
	"regexp"
	"strings"
)

// redacted stands for what was taken out.
const redacted = "REDACTED"

// sensitive is a name whose value is a secret. Names of names are none: secretName, tokenRef.
var sensitive = regexp.MustCompile(
	`(?i)(passw(or)?d|passphrase|secret|token|credentials?|api[-_]?key|private[-_]?key|authorization|cookie)$`)

// patterns are those of secrets in text, with what replaces them.
var patterns = []struct {
	find    *regexp.Regexp
	replace string
}{
	{regexp.MustCompile(`-----BEGIN [A-Z ]*PRIVATE KEY-----[^-]*(-----END [A-Z ]*PRIVATE KEY-----)?`), redacted},
	// The user of a URL, with or without a password.
	{regexp.MustCompile(`([A-Za-z][A-Za-z0-9+.-]*://)[^\s/?#"'\\<>@]+(?:@[^\s/?#"'\\<>@]+)*@`), "${1}" + redacted + "@"},
	{regexp.MustCompile(`(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}`), "${1} " + redacted},
	// A token of a service account is one.
	{regexp.MustCompile(`\beyJ[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*`), redacted},
	// In quotes, which may be escaped: JSON in JSON.
	{regexp.MustCompile(`(?i)((?:passw(?:or)?d|passphrase|secret|token|credentials?|api[-_]?key|private[-_]?key|` +
		`authorization)\\*"\s*:\s*\\*")(?:[^"\\]|\\+[^"\\])+`), "${1}" + redacted},
	{regexp.MustCompile(`(?i)((?:passw(?:or)?d|passphrase|secret|token|credentials?|api[-_]?key|private[-_]?key)=)` +
		`[^\s"'&,;\\]+`), "${1}" + redacted},
}

// redactText replaces what looks like a secret in text.
func redactText(text string) string {
	for _, p := range patterns {
		text = p.find.ReplaceAllString(text, p.replace)
	}
	return text
}

// redactOutput redacts what a program printed: JSON by its structure, several values after each other, too, and
// anything else as text.
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
			return []byte(redactText(string(content)))
		}
		values++
		encoder := json.NewEncoder(&b)
		encoder.SetEscapeHTML(false)
		if indented {
			encoder.SetIndent("", "  ")
		}
		if encoder.Encode(redactValue("", v)) != nil {
			return []byte(redactText(string(content)))
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
		return redactText(v)
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
