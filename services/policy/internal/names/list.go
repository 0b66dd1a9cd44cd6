// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package names

import (
	"cmp"
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/dnsname"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/engine"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// Filter selects learned names; its zero value selects all.
type Filter struct {
	Pattern string     // as for dnsname.Parse; empty: every name
	Address netip.Addr // an address of the name; invalid: any
	// Namespace selects the names that are only for the pods of a namespace; nil: all names.
	Namespace *string
}

// Match returns a function that matches names with the filter's pattern and namespace.
func (f Filter) Match() (func(key dnsname.Learned) bool, error) {
	matches := func(string) bool { return true }
	if f.Pattern != "" {
		p, err := dnsname.Parse(f.Pattern)
		if err != nil {
			return nil, err
		}
		matches = p.Matches
	}
	return func(key dnsname.Learned) bool {
		if f.Namespace != nil {
			if namespace, limited := key.Namespace(); !limited || namespace != *f.Namespace {
				return false
			}
		}
		return matches(key.Name())
	}, nil
}

// Learned is a name and its addresses.
type Learned struct {
	Key       dnsname.Learned
	Addresses []Address // sorted
}

// Address is an address of a name.
type Address struct {
	Addr    netip.Addr
	Expires time.Time // end of its TTL
	Forget  time.Time // when the address is removed, unless a connection to it is reported before
}

// List returns copies of the matching names with all their addresses, in no particular order. If has is valid, only
// names with this address are returned.
func (t *Table) List(match func(key dnsname.Learned) bool, has netip.Addr) []Learned {
	var out []Learned
	for name, addrs := range t.names {
		key := dnsname.Learned(name)
		if _, ok := addrs[has]; has.IsValid() && !ok || !match(key) {
			continue
		}
		l := Learned{Key: key, Addresses: make([]Address, 0, len(addrs))}
		for a, until := range addrs {
			l.Addresses = append(l.Addresses, Address{Addr: a, Expires: until, Forget: t.end(a, until).Add(t.grace())})
		}
		out = append(out, l)
	}
	return out
}

// Forget removes an address of a name, or all its addresses if addr is invalid, and returns what was removed.
func (t *Table) Forget(key dnsname.Learned, addr netip.Addr) (gone []engine.Name) {
	name := string(key)
	var addrs []netip.Addr
	for a := range t.names[name] {
		if !addr.IsValid() || a == addr {
			addrs = append(addrs, a)
		}
	}
	if len(addrs) == 0 {
		return nil
	}
	gone = append(gone, t.forget(name, addrs))
	t.noteTimes(name)
	return gone
}

// Would returns the result that Forget would have, given the names that List returned for the same address.
func Would(list []Learned, addr netip.Addr) []engine.Name {
	out := make([]engine.Name, 0, len(list))
	for _, l := range list {
		n := engine.Name{Name: l.Key}
		for _, a := range l.Addresses {
			if !addr.IsValid() || a.Addr == addr {
				n.Addrs = append(n.Addrs, a.Addr)
			}
		}
		out = append(out, n)
	}
	return out
}

// Used is a learned name with the rules that select it.
type Used struct {
	Learned
	By      []policytable.Source // the first rules, ordered by policy
	Omitted int                  // number of further rules
}

// maxUses limits the number of rules that are listed for one name.
const maxUses = 16

// WithUses sorts the names and adds to each the rules that select it. With many names and rules this takes long, so it
// stops when ctx ends.
func WithUses(ctx context.Context, list []Learned, policies []policy.Object) ([]Used, error) {
	slices.SortFunc(list, func(a, b Learned) int { return cmp.Compare(a.Key, b.Key) })
	slices.SortFunc(policies, func(a, b policy.Object) int { return a.Key.Compare(b.Key) })
	uses := usesOf(policies)
	out := make([]Used, 0, len(list))
	for _, l := range list {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		slices.SortFunc(l.Addresses, func(a, b Address) int { return a.Addr.Compare(b.Addr) })
		one := Used{Learned: l}
		for _, u := range uses {
			switch {
			case !u.pattern.Matches(l.Key.Name()):
			case len(one.By) < maxUses:
				one.By = append(one.By, u.source)
			default:
				one.Omitted++
			}
		}
		out = append(out, one)
	}
	return out, nil
}

// use is a rule that selects names.
type use struct {
	pattern dnsname.Pattern
	source  policytable.Source
}

// usesOf returns the source locations of rules that select names, each once for each of its patterns. The engine has
// several rules for a rule with several sets of ports, so duplicates are removed.
func usesOf(policies []policy.Object) (out []use) {
	seen := make(map[use]bool)
	for _, ob := range policies {
		for _, spec := range ob.Specs {
			for _, r := range spec.Rules {
				for _, n := range r.Peers.Names {
					if u := (use{n.Pattern, r.Source}); !seen[u] {
						seen[u] = true
						out = append(out, u)
					}
				}
			}
		}
	}
	return out
}
