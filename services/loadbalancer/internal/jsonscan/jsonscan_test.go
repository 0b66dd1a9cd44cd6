// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package jsonscan

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// value reads any value as encoding/json does; numbers are texts.
func (s *Scanner) value() any {
	switch s.peek() {
	case '{':
		out := map[string]any{}
		s.Object(func(key string) { out[key] = s.value() })
		return out
	case '[':
		out := []any{}
		s.Array(func() { out = append(out, s.value()) })
		return out
	case '"':
		return s.Text()
	case 't', 'f':
		return s.Bool()
	case 'n':
		if !s.Null() {
			s.Fail()
		}
		return nil
	}
	return json.Number(s.number())
}

var texts = []string{
	``, ` `, `{}`, ` { } `, `[]`, `[ ]`, `null`, `nul`, `true`, `truefalse`, `false`, `"`, `""`, `"a"`,
	`"a\n\"\\\/\u00e9é"`, `"\u12"`, `"\x"`, `"\`, "\"\n\"", "\"\xff\"", `"\ud800"`, `0`, `-0`, `01`, `-`,
	`1.5`, `1.`, `.5`, `1e5`, `1E+5`, `1e`, `+1`, `[1,2]`, `[1,]`, `[,1]`, `[1 2]`, `[1`, `{"a":1}`,
	`{"a":1,"b":[{}]}`, `{"a":1,}`, `{,"a":1}`, `{"a"}`, `{"a":}`, `{a:1}`, `{"a":1 "b":2}`, `{"a":1`, `{} {}`,
	`[[[[]]]]`, `{"a":{"b":{"c":"d"}}}`, `{"a":1]`, `[1}`, "[\t1\r,\n2 ]", "[\f1]", `"a" x`, "\x00",
	"{\"a\":1}\x00", "[1,\x00]",
}

// agree compares a Scanner with encoding/json.
func agree(t *testing.T, text string) {
	t.Helper()
	valid := json.Valid([]byte(text))
	skip := New(text)
	skip.Skip()
	if got := skip.End(); got != valid {
		t.Errorf("%q is skipped: %t, is valid: %t", text, got, valid)
	}
	read := New(text)
	got := read.value()
	if ok := read.End(); ok != valid {
		t.Errorf("%q is read: %t, is valid: %t", text, ok, valid)
	}
	if !valid {
		return
	}
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	var want any
	if err := d.Decode(&want); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("%q is read as %#v, want %#v", text, got, want)
	}
}

func TestScannerReadsWhatEncodingJSONReads(t *testing.T) {
	for _, text := range texts {
		agree(t, text)
	}
}

func FuzzScanner(f *testing.F) {
	for _, text := range texts {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if strings.Count(text, "[")+strings.Count(text, "{") <= maxDepth {
			agree(t, text)
		}
	})
}

func TestNestedTooDeepFails(t *testing.T) {
	for depth, want := range map[int]bool{maxDepth: true, maxDepth + 1: false} {
		s := New(strings.Repeat("[", depth) + strings.Repeat("]", depth))
		if s.Skip(); s.End() != want {
			t.Errorf("%d levels are read: %t, want %t", depth, s.End(), want)
		}
	}
}

func TestWholeNumbersAreOfTheirSize(t *testing.T) {
	for text, want := range map[string]bool{
		"0": true, "-2147483648": true, "2147483647": true, "2147483648": false, "1.0": false, "1e3": false, `"1"`: false,
	} {
		s := New(text)
		if s.Int(32); s.End() != want {
			t.Errorf("%s is read: %t, want %t", text, s.End(), want)
		}
	}
	for text, want := range map[string]bool{"65535": true, "65536": false, "-1": false} {
		s := New(text)
		if s.Uint(16); s.End() != want {
			t.Errorf("%s is read: %t, want %t", text, s.End(), want)
		}
	}
}
