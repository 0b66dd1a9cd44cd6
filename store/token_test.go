// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package store

import (
	"encoding/base64"
	"reflect"
	"strings"
	"testing"
)

func TestTokenIsReadAsItWasWritten(t *testing.T) {
	for _, want := range []Token{
		{Addresses: []string{"192.0.2.1:23810"}, CA: [32]byte{1, 31: 2}, Secret: "s3cret"},
		{Addresses: []string{"[2001:db8::1]:23810", "192.0.2.2:1"}, Secret: "x", Member: true},
	} {
		got, err := ParseToken("  " + want.String() + "\n")
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%v, %v, want %v", got, err, want)
		}
	}
}

func TestBadTokensAreRefusedWithoutTheirText(t *testing.T) {
	good := Token{Addresses: []string{"192.0.2.1:23810"}, Secret: "s3cret"}.String()
	raw := func(json string) string { return tokenPrefix + base64.RawURLEncoding.EncodeToString([]byte(json)) }
	const ca = `"AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="`
	for what, text := range map[string]string{
		"nothing":         "",
		"another prefix":  strings.Replace(good, "-1-", "-2-", 1),
		"cut":             good[:len(good)-5],
		"changed":         good[:len(good)-1] + "!",
		"no JSON":         raw("s3cret"),
		"a short CA":      raw(`{"a":["192.0.2.1:1"],"c":"AAAA","s":"s3cret"}`),
		"no secret":       raw(`{"a":["192.0.2.1:1"],"c":` + ca + `}`),
		"no address":      raw(`{"c":` + ca + `,"s":"s3cret"}`),
		"a host name":     raw(`{"a":["example.com:1"],"c":` + ca + `,"s":"s3cret"}`),
		"no port":         raw(`{"a":["192.0.2.1"],"c":` + ca + `,"s":"s3cret"}`),
		"one bad address": raw(`{"a":["192.0.2.1:1","x"],"c":` + ca + `,"s":"s3cret"}`),
	} {
		got, err := ParseToken(text)
		if err == nil {
			t.Errorf("%s: %v", what, got)
		} else if strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%s: the error repeats the secret: %v", what, err)
		}
	}
	if _, err := ParseToken(raw(`{"a":["192.0.2.1:1"],"c":` + ca + `,"s":"s3cret"}`)); err != nil {
		t.Errorf("the form of the cases above: %v", err)
	}
}

func TestServerNameHasOneForm(t *testing.T) {
	for _, epoch := range []uint64{1, 42, 1<<64 - 1} {
		if got, ok := epochOf(ServerName(epoch)); !ok || got != epoch {
			t.Errorf("%s is epoch %d, %v", ServerName(epoch), got, ok)
		}
	}
	for _, name := range []string{
		"", "epoch-1.store.sluice.example", "epoch-01.store.sluice", "epoch-+1.store.sluice", "epoch--1.store.sluice",
		"x.epoch-1.store.sluice", "epoch-.store.sluice", "epoch-1.store.slu",
	} {
		if got, ok := epochOf(name); ok {
			t.Errorf("%q is epoch %d", name, got)
		}
	}
}
