// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package rule

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/port"
)

// Conflict finds two rules of one direction that redirect the same port of the same peers to incompatible proxies:
// DNS cannot be combined with any other proxy, and HTTP cannot be combined with a listener of the user. Conflict
// compares only the text of peers. It does not find peers that are written differently and match the same pods.
func Conflict(rules []*Rule) (a, b *Rule, found bool) {
	for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
		var redirects []*Rule
		var proxies [policytable.ProxyListener + 1]bool
		for _, r := range rules {
			if r.Direction == d && r.Action == policytable.Redirect {
				redirects = append(redirects, r)
				proxies[r.Proxy] = true
			}
		}
		if !slices.ContainsFunc(redirects, func(r *Rule) bool { return anyApart(r.Proxy, proxies) }) {
			continue
		}
		byPeer := make(map[any][]*Rule)
		for _, r := range redirects {
			for _, key := range r.Peers.keys() {
				if list := byPeer[key]; len(list) == 0 || list[len(list)-1] != r {
					byPeer[key] = append(list, r)
				}
			}
		}
		for _, r := range redirects { // in the order of the manifest
			for _, key := range r.Peers.keys() {
				if list := byPeer[key]; len(list) > 1 {
					if a, b, found := overlapping(list); found {
						return a, b, true
					}
				}
				delete(byPeer, key)
			}
		}
	}
	return nil, nil, false
}

func apart(a, b policytable.Proxy) bool {
	if a > b {
		a, b = b, a
	}
	return a != b && (a == policytable.ProxyDNS || a == policytable.ProxyHTTP && b == policytable.ProxyListener)
}

func anyApart(p policytable.Proxy, proxies [policytable.ProxyListener + 1]bool) bool {
	for q, there := range proxies {
		if there && q != int(policytable.NoProxy) && apart(p, policytable.Proxy(q)) {
			return true
		}
	}
	return false
}

type (
	anybody  struct{ exceptOwn bool }
	inGroup  string
	withName string
)

// keys returns comparable forms of the parts of the peers.
func (p Peers) keys() []any {
	var keys []any
	if p.Any {
		keys = append(keys, anybody{p.ExceptOwn})
	}
	for _, s := range p.Selectors {
		keys = append(keys, s)
	}
	for _, n := range p.Networks {
		keys = append(keys, n.Prefix)
	}
	for _, g := range p.Groups {
		keys = append(keys, inGroup(g.Selector.String()))
	}
	for _, n := range p.Names {
		keys = append(keys, withName(n.Pattern.String()))
	}
	return keys
}

// overlapping finds two rules with a common port and incompatible proxies. For each proxy, it remembers only the
// range with the highest end, which is enough.
func overlapping(rules []*Rule) (a, b *Rule, found bool) {
	type claim struct {
		port.Range
		r *Rule
	}
	var claims []claim
	named := make(map[string][]claim)
	for _, r := range rules {
		for _, p := range r.Ports {
			if p.Name == "" {
				claims = append(claims, claim{p.Range, r})
				continue
			}
			reach := port.Everything // any protocol
			if p.Protocol != 0 {
				reach = port.Whole(p.Protocol)
			}
			// Names that differ only in case count as equal, because some kinds ignore case.
			name := strings.ToLower(p.Name)
			named[name] = append(named[name], claim{reach, r})
		}
	}
	sweep := func(list []claim) bool {
		slices.SortStableFunc(list, func(x, y claim) int { return cmp.Compare(x.Lo, y.Lo) })
		var furthest [policytable.ProxyListener + 1]*claim
		for i := range list {
			c := &list[i]
			for q, f := range furthest {
				if f != nil && f.Hi >= c.Lo && apart(policytable.Proxy(q), c.r.Proxy) {
					a, b = f.r, c.r
					return true
				}
			}
			if f := furthest[c.r.Proxy]; f == nil || f.Hi < c.Hi {
				furthest[c.r.Proxy] = c
			}
		}
		return false
	}
	if sweep(claims) {
		return a, b, true
	}
	for _, name := range slices.Sorted(maps.Keys(named)) {
		if sweep(named[name]) {
			return a, b, true
		}
	}
	return nil, nil, false
}
