// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package layer7

import (
	"fmt"
	"testing"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/policytable"
)

func dns(t *testing.T, patterns ...string) *Rules {
	t.Helper()
	r := &Rules{}
	for _, text := range patterns {
		p, err := dnsname.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		r.DNS = append(r.DNS, p)
	}
	return r
}

func TestDigestDependsOnContentOnly(t *testing.T) {
	want := Union(policytable.ProxyDNS, false, dns(t, "a.example", "*.b.example"))
	for _, same := range []*Set{
		Union(policytable.ProxyDNS, false, dns(t, "*.b.example"), dns(t, "A.example.")),
		Union(policytable.ProxyDNS, false, dns(t, "a.example", "*.b.example", "a.example"), nil, &Rules{}),
	} {
		if same.Digest() != want.Digest() || len(same.DNS) != 2 {
			t.Errorf("%v differs from %v", same.DNS, want.DNS)
		}
	}
	for _, other := range []*Set{
		Union(policytable.ProxyDNS, false, dns(t, "a.example")),
		Union(policytable.ProxyHTTP, false, dns(t, "a.example", "*.b.example")),
		Union(policytable.ProxyDNS, true, dns(t, "a.example", "*.b.example")),
		Union(policytable.ProxyDNS, false),
	} {
		if other.Digest() == want.Digest() {
			t.Errorf("%+v has the digest of %+v", other, want)
		}
	}
	if Union(policytable.ProxyDNS, true, dns(t, "a.example")).Digest() != Union(policytable.ProxyDNS, true).Digest() {
		t.Error("sets that allow everything differ")
	}
}

// TestFieldsAreSeparate: the text of a field must not be mistaken for another field.
func TestFieldsAreSeparate(t *testing.T) {
	seen := make(map[Digest]HTTP)
	for _, h := range []HTTP{
		{},
		{Method: "a"},
		{Path: "a"},
		{Host: "a"},
		{Method: `a" "b`},
		{Method: "a", Path: "b"},
		{Headers: []Header{{Name: "a"}}},
		{Headers: []Header{{Name: "a", HasValue: true}}},
		{Headers: []Header{{Name: "a", Value: "b", HasValue: true}}},
		{Matches: []HeaderMatch{{Name: "a", Value: "b"}}},
		{Matches: []HeaderMatch{{Name: "a", Value: "b", Mismatch: Add}}},
		{Matches: []HeaderMatch{{Name: "a", Value: "b", Mismatch: Add}, {Name: "a", Value: "c", Mismatch: Delete}}},
		{Matches: []HeaderMatch{{Name: "a", Value: "c", Mismatch: Delete}, {Name: "a", Value: "b", Mismatch: Add}}},
	} {
		d := Union(policytable.ProxyHTTP, false, &Rules{HTTP: []HTTP{h}}).Digest()
		if old, ok := seen[d]; ok {
			t.Errorf("%+v has the digest of %+v", h, old)
		}
		seen[d] = h
	}
}

// TestPatternsThatAreComparedOneByOneAreLimited: a set may have only a limited number of patterns that must be
// compared with each DNS query one by one.
func TestPatternsThatAreComparedOneByOneAreLimited(t *testing.T) {
	set := func(n int, text string) *Set {
		r := &Rules{}
		for i := range n {
			p, err := dnsname.Parse(fmt.Sprintf(text, i))
			if err != nil {
				t.Fatal(err)
			}
			r.DNS = append(r.DNS, p)
		}
		return Union(policytable.ProxyDNS, false, r)
	}
	for text, limit := range map[string]int{"**.*x%07d": maxCostly / 13, "a*.%08d.example": maxCostly / 20} {
		if set(limit, text).TooLarge() || !set(limit+1, text).TooLarge() {
			t.Errorf("%s: %d patterns are too large: %t, and %d: %t", text, limit, set(limit, text).TooLarge(), limit+1,
				set(limit+1, text).TooLarge())
		}
	}
	if set(MaxEntries, "*.%d.example").TooLarge() {
		t.Error("names below a domain count as patterns that are compared one by one")
	}
}
