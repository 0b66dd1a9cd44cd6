// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package selector

import (
	"strings"
	"testing"

	"buf.build/go/protovalidate"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
)

// requirement returns a requirement.
func requirement(source, key string, operator datapathv1.LabelOperator, values ...string) *datapathv1.LabelRequirement {
	return &datapathv1.LabelRequirement{Source: source, Key: key, Operator: operator, Values: values}
}

func TestParseReadsWhatKubectlReads(t *testing.T) {
	for text, want := range map[string][]*datapathv1.LabelRequirement{
		"app=web":                  {requirement("", "app", in, "web")},
		"app==web":                 {requirement("", "app", in, "web")},
		" app = web ":              {requirement("", "app", in, "web")},
		"k8s:app=web":              {requirement("k8s", "app", in, "web")},
		"app!=web":                 {requirement("", "app", notIn, "web")},
		"cni:app!=web":             {requirement("cni", "app", notIn, "web")},
		"app":                      {requirement("", "app", exists)},
		"!color":                   {requirement("", "color", notExists)},
		"!cni:tier":                {requirement("cni", "tier", notExists)},
		"tier in (front,back)":     {requirement("", "tier", in, "front", "back")},
		"tier in ( back , front )": {requirement("", "tier", in, "back", "front")},
		"tier notin (back)":        {requirement("", "tier", notIn, "back")},
		"app=web,tier in (front, back),!x": {
			requirement("", "app", in, "web"),
			requirement("", "tier", in, "front", "back"), requirement("", "x", notExists),
		},
		"io.kubernetes.pod.namespace=default": {requirement("", "io.kubernetes.pod.namespace", in, "default")},
		"a.b/c":                               {requirement("", "a.b/c", exists)},
		"reserved:host=":                      {requirement("reserved", "host", in, "")},
		"in in (in,notin)":                    {requirement("", "in", in, "in", "notin")},
		"color in ()":                         {requirement("", "color", in, "")}, // the empty value
	} {
		got, err := Parse(text)
		if err != nil {
			t.Errorf("Parse(%q): %v", text, err)
			continue
		}
		if !proto.Equal(got, &datapathv1.LabelSelector{Requirements: want}) {
			t.Errorf("Parse(%q) = %s, want %v", text, prototext.Format(got), want)
		}
	}
}

func TestParseErrorSaysWhereAndWhat(t *testing.T) {
	for text, want := range map[string]string{
		"":                "at its end: want a key",
		",":               `at byte 0, ",": want a key`,
		"app=web,":        "at its end: want a key",
		"app web":         `at byte 4, "web": want =, ==, !=, in, notin, or a comma`,
		"app in web":      `at byte 7, "web": want (`,
		"app in (web":     "at its end: want a comma or )",
		"app in (a b)":    `at byte 10, "b)": want a comma or )`,
		"app=web tier=x":  `at byte 8, "tier=x": want a comma`,
		"app=web;drop":    `at byte 7, ";drop": want a comma`,
		"!app=web":        `at byte 4, "=web": want a comma`,
		":app":            `at byte 0, ":app": want a key, or a source, a colon and a key`,
		"a:b:c":           `at byte 0, "a:b:c": want a key, or a source, a colon and a key`,
		"a/b:c":           `at byte 0, "a/b:c": want a key, or a source, a colon and a key`,
		"k8s:":            `at byte 0, "k8s:": want a key`,
		"(app)":           `at byte 0, "(app)": want a key`,
		"app>5":           `at byte 3, ">5": want =, ==, !=, in, notin, or a comma`,
		"app=\x00":        `at byte 4, "\x00": want a comma`,
		"app=" + "ü":      `want a comma`,
		"app in (a),,b=c": `at byte 11, ",b=c": want a key`,
	} {
		if _, err := Parse(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Parse(%q): %v, want %s", text, err, want)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"", "app=web", "a in (b,c),!d,e!=f,g", "k8s:app notin ()", "a==b", "((,,!!==", "a:b:c"} {
		f.Add(s)
	}
	validator, err := protovalidate.New()
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(text)
		if err != nil {
			return
		}
		// The datapath accepts the result if it is short enough.
		if err := validator.Validate(s); err != nil && len(text) < 32 {
			t.Errorf("%q is %s, which the datapath refuses: %v", text, prototext.Format(s), err)
		}
		for _, r := range s.GetRequirements() {
			for _, word := range append(r.GetValues(), r.GetKey(), r.GetSource()) {
				if !strings.Contains(text, word) {
					t.Errorf("%q has no %q", text, word)
				}
			}
		}
	})
}
