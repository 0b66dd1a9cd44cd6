// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package selector

import (
	"strings"
	"testing"

	"github.com/sluice-net/sluice/services/datapath/internal/endpoint"
)

var web = []endpoint.Label{
	{Source: "k8s", Key: "app", Value: "web"},
	{Source: "cni", Key: "app", Value: "shop"},
	{Source: "k8s", Key: "tier", Value: "front"},
	{Source: "k8s", Key: "io.kubernetes.pod.namespace", Value: "default"},
	{Source: "reserved", Key: "host"},
}

func TestSelectorMatchesLikeKubectl(t *testing.T) {
	for text, want := range map[string]bool{
		"app=web":                             true,
		"app==web":                            true,
		" app = web ":                         true,
		"app=shop":                            true, // of another source
		"k8s:app=web":                         true,
		"k8s:app=shop":                        false,
		"cni:app=shop":                        true,
		"app=db":                              false,
		"app!=web":                            false,
		"app!=db":                             true,
		"cni:app!=web":                        true,
		"color!=red":                          true, // a key that is missing
		"app":                                 true,
		"color":                               false,
		"!color":                              true,
		"!app":                                false,
		"!cni:tier":                           true,
		"tier in (front,back)":                true,
		"tier in (back)":                      false,
		"tier in ( back , front )":            true,
		"tier notin (back)":                   true,
		"tier notin (front,back)":             false,
		"color notin (red)":                   true,
		"app=web,tier in (front, back),!x":    true,
		"app=web,tier=back":                   false,
		"io.kubernetes.pod.namespace=default": true,
		"reserved:host":                       true,
		"reserved:host=":                      true,
		"host":                                true,
		"tier=":                               false,
		"in in (in,notin)":                    false,
		"color in ()":                         false,
		"host in ()":                          true, // the empty value
	} {
		s, err := Parse(text)
		if err != nil {
			t.Errorf("Parse(%q): %v", text, err)
			continue
		}
		if got := s.Matches(web); got != want {
			t.Errorf("%q matches: %v, want %v", text, got, want)
		}
	}
	if !(Selector{}).Matches(nil) {
		t.Error("no requirement is not met")
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
	f.Fuzz(func(t *testing.T, text string) {
		s, err := Parse(text)
		if err != nil {
			return
		}
		again, err := Parse(s.String())
		if err != nil || again.String() != s.String() {
			t.Errorf("%q is %q, and that is %q, %v", text, s, again, err)
		}
		if s.Matches(web) != again.Matches(web) || s.Matches(nil) != again.Matches(nil) {
			t.Errorf("%q and %q match different labels", text, s)
		}
	})
}
