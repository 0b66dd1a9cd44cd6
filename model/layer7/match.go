// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package layer7

import (
	"regexp"
	"strings"

	"github.com/sluice-net/sluice/model/dnsname"
)

// Matcher evaluates DNS queries, server names and HTTP requests by a set. It is immutable, and safe for concurrent
// use.
type Matcher struct {
	set              *Set
	dns, serverNames *dnsname.Set
	http             []matcher // rules whose expressions can be compiled
}

type matcher struct {
	*HTTP
	method, path, host *regexp.Regexp // nil matches every value
}

// NewMatcher compiles a set.
func NewMatcher(s *Set) *Matcher {
	m := &Matcher{set: s, dns: dnsname.NewSet(s.DNS), serverNames: dnsname.NewSet(s.ServerNames)}
	for i := range s.HTTP {
		h := matcher{HTTP: &s.HTTP[i]}
		ok := true
		for _, e := range []struct {
			text string
			into **regexp.Regexp
		}{{h.Method, &h.method}, {h.Path, &h.path}, {h.Host, &h.host}} {
			if e.text == "" {
				continue
			}
			// If an expression cannot be compiled, leave out its rule, so that the rule matches nothing.
			var err error
			if _, err = regexp.Compile(e.text); err != nil { // such as "a)|(b", which the next line would accept
				ok = false
			} else if *e.into, err = regexp.Compile("^(?:" + e.text + ")$"); err != nil {
				ok = false
			}
		}
		if ok {
			m.http = append(m.http, h)
		}
	}
	return m
}

// AllowsQuery reports whether the set allows a DNS query for a name. A pattern that consists only of stars allows
// every name, even one with unusual characters.
func (m *Matcher) AllowsQuery(name string) bool {
	return m.set.All || m.dns.Every() || m.dns.Matches(name)
}

// AllowsServerName reports whether the set allows a TLS connection to the server name of a ClientHello. For a
// ClientHello without a server name, name is empty, and no rule allows it.
func (m *Matcher) AllowsServerName(name string) bool {
	return m.set.All || name != "" && m.serverNames.Matches(name)
}

// Request is the part of an HTTP request that rules match.
type Request struct {
	Method string
	Path   string // normalised, with the query
	Host   string // with the port if the request has one
	// Values returns the values of a header, whose name it compares without regard to case.
	Values func(name string) []string
}

// Verdict is the result for an HTTP request.
type Verdict struct {
	Allowed bool
	// Mismatches lists the headers that lack the value of the rule and have an action other than Refuse. The proxy
	// applies these actions before it forwards the request.
	Mismatches []HeaderMatch
}

// AllowsRequest evaluates a request in clear text. Of several matching rules, it takes a rule without a mismatch, or
// else the first rule in the order of the set. Server names allow the requests to these hosts.
func (m *Matcher) AllowsRequest(r *Request) Verdict {
	if m.set.All {
		return Verdict{Allowed: true}
	}
	if m.AllowsServerName(serverName(r.Host)) {
		return Verdict{Allowed: true}
	}
	var out Verdict
	for i := range m.http {
		v := m.http[i].allows(r)
		if v.Allowed && len(v.Mismatches) == 0 {
			return v
		}
		if v.Allowed && !out.Allowed {
			out = v
		}
	}
	return out
}

// serverName returns the name of a host without its port.
func serverName(host string) string {
	if name, port, has := strings.Cut(host, ":"); has && strings.Trim(port, "0123456789") == "" {
		return name
	}
	return host
}

func (m *matcher) allows(r *Request) Verdict {
	for _, e := range []struct {
		*regexp.Regexp
		value string
	}{{m.method, r.Method}, {m.path, r.Path}, {m.host, r.Host}} {
		if e.Regexp != nil && !e.MatchString(e.value) {
			return Verdict{}
		}
	}
	for _, h := range m.Headers {
		value, present := header(r, h.Name)
		if !present || h.HasValue && value != h.Value {
			return Verdict{}
		}
	}
	out := Verdict{Allowed: true}
	for _, h := range m.Matches {
		value, present := header(r, h.Name)
		if present && value == h.Value {
			continue
		}
		if h.Mismatch == Refuse {
			return Verdict{}
		}
		out.Mismatches = append(out.Mismatches, h)
	}
	return out
}

// header returns the values of a header, joined by commas. A server may use any of the values, so a rule must match
// all of them together.
func header(r *Request, name string) (value string, present bool) {
	all := r.Values(name)
	return strings.Join(all, ","), len(all) > 0
}
