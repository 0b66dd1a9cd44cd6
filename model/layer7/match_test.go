// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package layer7

import (
	_ "embed" // for the vectors
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/policytable"
)

//go:embed testdata/vectors.json
var vectors []byte

// fields are the header of a request.
type fields map[string][]string

func (h fields) Values(name string) (all []string) {
	for key, values := range h {
		if strings.EqualFold(key, name) {
			all = append(all, values...)
		}
	}
	return all
}

// vector is a test case: a set, with requests that it allows or refuses.
type vector struct {
	Name  string
	Proxy string
	Rules []struct { // one for each policy
		DNS  []string
		HTTP []struct {
			Method, Path, Host string
			Headers            []struct {
				Name  string
				Value *string
			}
			Matches []struct{ Name, Value, Mismatch string }
		}
		ServerNames []string
	}
	All         bool
	Queries     map[string]bool
	ServerNames map[string]bool
	Requests    []struct {
		Method, Path, Host string
		Header             fields
		Allowed            bool
		Mismatches         []string
	}
}

func (v *vector) rules(t *testing.T) []*Rules {
	names := func(list []string) (out []dnsname.Pattern) {
		for _, text := range list {
			p, err := dnsname.Parse(text)
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, p)
		}
		return out
	}
	var all []*Rules
	for _, in := range v.Rules {
		r := &Rules{DNS: names(in.DNS), ServerNames: names(in.ServerNames)}
		for _, h := range in.HTTP {
			one := HTTP{Method: h.Method, Path: h.Path, Host: h.Host}
			for _, x := range h.Headers {
				header := Header{Name: x.Name, HasValue: x.Value != nil}
				if x.Value != nil {
					header.Value = *x.Value
				}
				one.Headers = append(one.Headers, header)
			}
			for _, x := range h.Matches {
				action, ok := ParseMismatch(x.Mismatch)
				if !ok {
					t.Fatalf("%s: action %q", v.Name, x.Mismatch)
				}
				one.Matches = append(one.Matches, HeaderMatch{Name: x.Name, Value: x.Value, Mismatch: action})
			}
			r.HTTP = append(r.HTTP, one)
		}
		all = append(all, r)
	}
	return all
}

// TestVectors evaluates the vectors twice, the second time with the policies in reverse order.
func TestVectors(t *testing.T) {
	var all []vector
	if err := json.Unmarshal(vectors, &all); err != nil {
		t.Fatal(err)
	}
	proxies := map[string]policytable.Proxy{
		"dns": policytable.ProxyDNS, "http": policytable.ProxyHTTP, "tls": policytable.ProxyTLS,
	}
	checks := 0
	for i := range all {
		v := &all[i]
		rules := v.rules(t)
		set := Union(proxies[v.Proxy], v.All, rules...)
		slices.Reverse(rules)
		reversed := Union(proxies[v.Proxy], v.All, rules...)
		if proxies[v.Proxy] == 0 || set.Digest() != reversed.Digest() {
			t.Errorf("%s: the set depends on the order of the policies, or has no proxy", v.Name)
		}
		for _, s := range []*Set{set, reversed} {
			m := NewMatcher(s)
			for name, want := range v.Queries {
				if got := m.AllowsQuery(name); got != want {
					t.Errorf("%s: query for %q: %t, want %t", v.Name, name, got, want)
				}
				checks++
			}
			for name, want := range v.ServerNames {
				if got := m.AllowsServerName(name); got != want {
					t.Errorf("%s: server name %q: %t, want %t", v.Name, name, got, want)
				}
				checks++
			}
			for _, r := range v.Requests {
				got := m.AllowsRequest(&Request{Method: r.Method, Path: r.Path, Host: r.Host, Values: r.Header.Values})
				var mismatches []string
				for _, x := range got.Mismatches {
					mismatches = append(mismatches, x.Mismatch.String()+" "+x.Name)
				}
				if got.Allowed != r.Allowed || !slices.Equal(mismatches, r.Mismatches) {
					t.Errorf("%s: %s %s of %s with %v: %t, %q; want %t, %q", v.Name, r.Method, r.Path, r.Host, r.Header,
						got.Allowed, mismatches, r.Allowed, r.Mismatches)
				}
				checks++
			}
		}
	}
	if checks < 100 {
		t.Errorf("%d checks, fewer than 100", checks)
	}
}

// TestUnionAllowsWhatAMemberAllows compares the union of two policies with the sets of the single policies, for all
// requests of all vectors.
func TestUnionAllowsWhatAMemberAllows(t *testing.T) {
	var all []vector
	if err := json.Unmarshal(vectors, &all); err != nil {
		t.Fatal(err)
	}
	var members []*Rules
	var requests []Request
	for i := range all {
		members = append(members, all[i].rules(t)...)
		for _, r := range all[i].Requests {
			requests = append(requests, Request{Method: r.Method, Path: r.Path, Host: r.Host, Values: r.Header.Values})
		}
	}
	single := make([]*Matcher, len(members))
	for i, r := range members {
		single[i] = NewMatcher(Union(policytable.ProxyHTTP, false, r))
	}
	for i, a := range members {
		for k, b := range members {
			both := NewMatcher(Union(policytable.ProxyHTTP, false, a, b))
			for _, r := range requests {
				want := single[i].AllowsRequest(&r).Allowed || single[k].AllowsRequest(&r).Allowed
				if got := both.AllowsRequest(&r).Allowed; got != want {
					t.Fatalf("%+v: %t by the union of %+v and %+v, want %t", r, got, a, b, want)
				}
			}
		}
	}
}
