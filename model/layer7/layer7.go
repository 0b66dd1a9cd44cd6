// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package layer7 defines what rules allow within a connection: DNS queries, HTTP requests and TLS server names.
//
// Rules is the content of one rule of a policy. A Set is the union of the rules that redirect the same connection: it
// allows what at least one of them allows. Equal sets have equal digests, whatever the order of their rules.
package layer7

import (
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/policytable"
)

// Rules lists what a rule allows. If all lists are empty, it allows nothing.
type Rules struct {
	DNS         []dnsname.Pattern // names that may be asked for
	HTTP        []HTTP
	ServerNames []dnsname.Pattern // names in the ClientHello of TLS
}

// HTTP allows the requests that match all its fields. An empty field matches every request.
type HTTP struct {
	// Method, Path and Host are regular expressions (RE2) for the whole value. Path includes the query.
	Method, Path, Host string
	Headers            []Header
	Matches            []HeaderMatch
}

// Header is a header that a request must have.
type Header struct {
	Name  string
	Value string // if HasValue is set
	// HasValue is set if the header must have the value, and not only be present.
	HasValue bool
}

// HeaderMatch is a header that a request should have. Mismatch is the action if it does not.
type HeaderMatch struct {
	Name, Value string
	Mismatch    Mismatch
}

// Mismatch is the action for a request whose header has another value.
type Mismatch uint8

// The actions. All except Refuse let the request pass.
const (
	Refuse  Mismatch = iota // the rule does not allow the request
	Log                     // report it
	Add                     // add the header
	Delete                  // remove the header
	Replace                 // remove the header, and add it with the value
)

// mismatches are the names of the actions in manifests.
var mismatches = []string{"", "LOG", "ADD", "DELETE", "REPLACE"}

// ParseMismatch returns the action with a name in a manifest.
func ParseMismatch(name string) (Mismatch, bool) {
	i := slices.Index(mismatches, name)
	return Mismatch(max(i, 0)), i >= 0 //nolint:gosec // an index of a short list
}

// String returns the name of the action in a manifest.
func (m Mismatch) String() string { return mismatches[m] }

// text returns the canonical text of the rule. The order of Matches counts, because their actions follow it.
func (h *HTTP) text() string {
	var b strings.Builder
	fmt.Fprintf(&b, "http %q %q %q", h.Method, h.Path, h.Host)
	parts := make([]string, 0, len(h.Headers))
	for _, x := range h.Headers {
		parts = append(parts, fmt.Sprintf(" header %q %q %t", strings.ToLower(x.Name), x.Value, x.HasValue))
	}
	slices.Sort(parts)
	for _, p := range slices.Compact(parts) {
		b.WriteString(p)
	}
	for _, x := range h.Matches {
		fmt.Fprintf(&b, " match %q %q %d", strings.ToLower(x.Name), x.Value, x.Mismatch)
	}
	return b.String()
}

// Content returns the canonical text of the rules. Rules with equal texts allow the same.
func (r *Rules) Content() string {
	parts := make([]string, 0, len(r.DNS)+len(r.HTTP)+len(r.ServerNames))
	for _, p := range r.DNS {
		parts = append(parts, "dns "+p.String())
	}
	for i := range r.HTTP {
		parts = append(parts, r.HTTP[i].text())
	}
	for _, p := range r.ServerNames {
		parts = append(parts, "server "+p.String())
	}
	slices.Sort(parts)
	return strings.Join(slices.Compact(parts), "\n")
}

// MaxEntries limits the rules of one set, so that a set fits into a message.
const MaxEntries = 4096

// maxText limits the size of the texts of one set.
const maxText = 1 << 20

// maxCostly limits the total length of the patterns of one set that must be compared with each query one by one, such
// as "a*.example.com". With 16 KiB, a query takes a few milliseconds at most.
const maxCostly = 16 << 10

// Estimates of the memory that a set takes in addition to its texts, in bytes.
const (
	entrySize = 64
	setSize   = 256
)

// Digest identifies a set by its content.
type Digest [sha256.Size]byte

// Set is the union of the rules that redirect a connection. It is immutable.
type Set struct {
	// Proxy is the kind of proxy that evaluates the set.
	Proxy policytable.Proxy
	// All is set if a rule without layer 7 rules allows the connection. The lists are empty then.
	All bool
	// Rules lists what is allowed, without duplicates, in canonical order. It is empty if the set is TooLarge.
	Rules

	digest Digest
	size   int
	large  bool
}

// Union returns the union of rules. Set all if another rule allows the connection without layer 7 rules.
func Union(proxy policytable.Proxy, all bool, list ...*Rules) *Set {
	s := &Set{Proxy: proxy, All: all}
	content := ""
	if !all {
		for _, r := range list {
			if r != nil {
				s.DNS = append(s.DNS, r.DNS...)
				s.HTTP = append(s.HTTP, r.HTTP...)
				s.ServerNames = append(s.ServerNames, r.ServerNames...)
			}
		}
		s.DNS = ordered(s.DNS, dnsname.Pattern.String)
		s.HTTP = ordered(s.HTTP, func(h HTTP) string { return h.text() })
		s.ServerNames = ordered(s.ServerNames, dnsname.Pattern.String)
		content = s.Content()
	}
	s.digest = sha256.Sum256(fmt.Appendf(nil, "%d %t\n%s", proxy, all, content))
	entries := len(s.DNS) + len(s.HTTP) + len(s.ServerNames)
	s.size = len(content) + entries*entrySize + setSize
	if s.large = entries > MaxEntries || len(content) > maxText || costly(s.DNS) > maxCostly; s.large {
		s.Rules, s.size = Rules{}, setSize // its packets are dropped
	}
	return s
}

// costly returns the total length of the patterns that each query is compared with.
func costly(patterns []dnsname.Pattern) (bytes int) {
	for _, p := range patterns {
		if p.Costly() {
			bytes += len(p.String())
		}
	}
	return bytes
}

// ordered returns a list in the order of the texts, without duplicates.
func ordered[E any](list []E, text func(E) string) []E {
	type entry struct {
		E    E
		text string
	}
	entries := make([]entry, len(list))
	for i, x := range list {
		entries[i] = entry{x, text(x)}
	}
	slices.SortFunc(entries, func(a, b entry) int { return strings.Compare(a.text, b.text) })
	entries = slices.CompactFunc(entries, func(a, b entry) bool { return a.text == b.text })
	out := make([]E, len(entries))
	for i, x := range entries {
		out[i] = x.E
	}
	return out
}

// Digest returns the digest of the content.
func (s *Set) Digest() Digest { return s.digest }

// Size returns about how many bytes of memory the set takes.
func (s *Set) Size() int { return s.size }

// EveryName reports whether the set allows every DNS query.
func (s *Set) EveryName() bool { return s.All || slices.ContainsFunc(s.DNS, dnsname.Pattern.Every) }

// AllowsName reports whether the set allows DNS queries for a name, which is canonical.
func (s *Set) AllowsName(name string) bool {
	return s.All || slices.ContainsFunc(s.DNS, func(p dnsname.Pattern) bool { return p.Every() || p.Matches(name) })
}

// TooLarge reports whether the set has more rules or longer texts than a message can hold, or more patterns than can
// be compared with each query. Such a set gets no number, so its connections are refused.
func (s *Set) TooLarge() bool { return s.large }
