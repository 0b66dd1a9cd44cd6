// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package cilium

import (
	"regexp/syntax"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/layer7"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
)

// everyName reports whether one of the DNS rules allows every query. If one does, the proxy is needed only to learn
// addresses from the answers.
func everyName(list []FQDN) bool {
	return slices.ContainsFunc(list, func(f FQDN) bool {
		return f.MatchName == nil && f.MatchPattern != nil && strings.TrimSpace(*f.MatchPattern) == "*"
	})
}

// hasDNS reports whether the port rule has rules for DNS that a proxy evaluates.
func (r *PortRule) hasDNS() bool { return r.Listener == nil && r.Rules != nil && len(r.Rules.DNS) > 0 }

// forwarded reports whether DNS queries are forwarded without a proxy: the port rule allows every name, and there is
// no DNS proxy.
func forwarded(r *PortRule, o rule.Options) bool {
	return o.WithoutDNSProxy && r.Rules != nil && everyName(r.Rules.DNS)
}

// layer7Action returns the action and the proxy for a port rule. Empty lists of requests, and DNS rules for every name
// without a proxy, are a plain allow.
func layer7Action(r *PortRule, o rule.Options) (policytable.Action, policytable.Proxy) {
	switch {
	case r.Listener != nil:
		return policytable.Redirect, policytable.ProxyListener
	case r.Rules != nil && len(r.Rules.DNS) > 0 && !forwarded(r, o):
		return policytable.Redirect, policytable.ProxyDNS
	case r.hasHTTP():
		return policytable.Redirect, policytable.ProxyHTTP
	case len(r.ServerNames) > 0 || r.TerminatingTLS != nil || r.OriginatingTLS != nil:
		return policytable.Redirect, policytable.ProxyTLS
	}
	return policytable.Allow, policytable.NoProxy
}

// hasHTTP reports whether the port rule has rules for HTTP requests.
func (r *PortRule) hasHTTP() bool { return r.Rules != nil && len(r.Rules.HTTP) > 0 }

// needsTermination reports whether the proxy would have to end the client's TLS.
func (r *PortRule) needsTermination() bool { return r.TerminatingTLS != nil || r.OriginatingTLS != nil }

// layer7Rules returns what a port rule that redirects allows within a connection. Rules that need TLS termination, or a
// proxy of the user, allow nothing.
func layer7Rules(r *PortRule) *layer7.Rules {
	out := &layer7.Rules{}
	if r.Listener != nil || r.needsTermination() {
		return out
	}
	if r.Rules != nil {
		for _, f := range r.Rules.DNS {
			out.DNS = append(out.DNS, patterns(f)...)
		}
		for i := range r.Rules.HTTP {
			if _, why := r.Rules.HTTP[i].allowsNothing(); why == "" {
				out.HTTP = append(out.HTTP, r.Rules.HTTP[i].convert())
			}
		}
	}
	for _, n := range r.ServerNames {
		if p, err := dnsname.Parse(n); err == nil {
			out.ServerNames = append(out.ServerNames, p)
		}
	}
	return out
}

// patterns returns the names that an entry matches.
func patterns(f FQDN) []dnsname.Pattern {
	var out []dnsname.Pattern
	if f.MatchName != nil {
		p, _ := dnsname.Name(*f.MatchName)
		out = append(out, p)
	}
	if f.MatchPattern != nil {
		p, _ := dnsname.Parse(*f.MatchPattern)
		out = append(out, p)
	}
	return out
}

// convert returns the rule. An entry of headers is "Name" or "Name: value", where the colon is optional.
func (h *HTTPRule) convert() layer7.HTTP {
	out := layer7.HTTP{Method: h.Method, Path: h.Path, Host: h.Host}
	for _, text := range h.Headers {
		name, value, has := strings.Cut(text, " ")
		if has {
			name = strings.TrimRight(name, ":")
		}
		out.Headers = append(out.Headers, layer7.Header{Name: name, Value: value, HasValue: has})
	}
	for _, m := range h.HeaderMatches {
		mismatch, _ := layer7.ParseMismatch(m.Mismatch)
		out.Matches = append(out.Matches, layer7.HeaderMatch{Name: m.Name, Value: m.Value, Mismatch: mismatch})
	}
	return out
}

// allowsNothing returns why a valid HTTP rule cannot match any request, and the field that is the reason; empty if it
// can. Cilium accepts such rules.
func (h *HTTPRule) allowsNothing() (field, why string) {
	if _, err := syntax.Parse(h.Host, syntax.Perl); err != nil {
		return "host", "not a regular expression: " + err.Error() + "; write dots as \\. and any text as .*"
	}
	for i, text := range h.Headers {
		name, _, has := strings.Cut(text, " ")
		if has {
			name = strings.TrimRight(name, ":")
		}
		if !isHeaderName(name) {
			return "headers[" + strconv.Itoa(i) + "]",
				"\"" + name + "\" is not a name of a header; write \"Name\" or \"Name: value\""
		}
	}
	for i, m := range h.HeaderMatches {
		at := "headerMatches[" + strconv.Itoa(i) + "]."
		switch {
		case m.Secret != nil:
			return at + "secret", "values from secrets; write the value in the policy"
		case !isHeaderName(m.Name):
			return at + "name", "\"" + m.Name + "\" is not a name of a header; write the name without a colon"
		case strings.ContainsFunc(m.Value, func(c rune) bool { return c < ' ' && c != '\t' || c == 0x7F }):
			return at + "value", "control characters, which no header has"
		}
	}
	return "", ""
}

// isHeaderName reports whether a text is a valid name of a header.
func isHeaderName(s string) bool {
	return s != "" && !strings.ContainsFunc(s, func(c rune) bool {
		return c <= ' ' || c >= 0x7F || strings.ContainsRune("\"(),/:;<=>?@[\\]{}", c)
	})
}
