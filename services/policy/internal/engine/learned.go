// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/dnsname"
)

// learned holds the learned DNS names and their addresses, by keys of type dnsname.Learned, for lookups in both
// directions. A node may have hundreds of thousands of addresses. Therefore each direction uses slices: small maps
// would take four times the memory.
type learned struct {
	byName map[dnsname.Learned]*learnedName
	// first contains one name of each address. further contains the other names of the few addresses that have
	// several.
	first   map[netip.Addr]*learnedName
	further map[netip.Addr][]*learnedName
}

type learnedName struct {
	text  dnsname.Learned
	addrs []netip.Addr // sorted
}

func newLearned() learned {
	return learned{
		byName: make(map[dnsname.Learned]*learnedName), first: make(map[netip.Addr]*learnedName),
		further: make(map[netip.Addr][]*learnedName),
	}
}

// add adds an address to a name. It returns false if the name had the address already.
func (l *learned) add(name dnsname.Learned, a netip.Addr) bool {
	n := l.byName[name]
	if n == nil {
		n = &learnedName{text: name}
		l.byName[name] = n
	}
	i, known := slices.BinarySearchFunc(n.addrs, a, netip.Addr.Compare)
	if known {
		return false
	}
	n.addrs = slices.Insert(n.addrs, i, a)
	if l.first[a] == nil {
		l.first[a] = n
	} else {
		l.further[a] = append(l.further[a], n)
	}
	return true
}

// remove removes an address from a name, and the name with its last address. It reports whether the name had the
// address.
func (l *learned) remove(name dnsname.Learned, a netip.Addr) bool {
	n := l.byName[name]
	if n == nil {
		return false
	}
	i, known := slices.BinarySearchFunc(n.addrs, a, netip.Addr.Compare)
	if !known {
		return false
	}
	if n.addrs = without(n.addrs, i); n.addrs == nil {
		delete(l.byName, name)
	}
	further := l.further[a]
	switch {
	case l.first[a] != n:
		further = without(further, slices.Index(further, n))
	case further == nil:
		delete(l.first, a)
		return true
	default:
		last := len(further) - 1
		l.first[a] = further[last]
		further = without(further, last)
	}
	if further == nil {
		delete(l.further, a)
	} else {
		l.further[a] = further
	}
	return true
}

// without returns a slice without one of its elements, or nil if no element is left. It shrinks the slice when few
// elements are left. Otherwise each name would keep the memory for the largest number of addresses that it ever had.
func without[E any](s []E, i int) []E {
	switch s = slices.Delete(s, i, i+1); {
	case len(s) == 0:
		return nil
	case len(s) <= cap(s)/4:
		return append(make([]E, 0, 2*len(s)), s...)
	}
	return s
}

// names returns the names of an address that apply to the pods of a namespace.
func (l *learned) names(a netip.Addr, namespace string) []string {
	n := l.first[a]
	if n == nil {
		return nil
	}
	further := l.further[a]
	out := make([]string, 0, 1+len(further))
	if n.text.For(namespace) {
		out = append(out, n.text.Name())
	}
	for _, n := range further {
		if n.text.For(namespace) {
			out = append(out, n.text.Name())
		}
	}
	return out
}
