// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package table holds compiled policy in the form in which the kernel looks it
// up, and the lookup itself, step for step as the kernel takes it.
//
// A Table evaluates one direction of one subject. A peer is classified twice: by
// who it is (identity → identity class → class) and by where it is (longest prefix
// of its address → class per scope). A class leads to a total, sorted list of
// intervals over protocol and port; an interval's value holds two rule
// numbers, the best of the Admin tier and the best of the rest. The lower
// number of the two sides wins in each slot.
package table

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/port"
)

// Limits of one table.
const (
	MaxIdentityClasses = 4096
	MaxAddressClasses  = 1024
	MaxIntervals       = 4096    // of one class
	MaxAllIntervals    = 1 << 17 // of all classes, so that a table fits into a message
	MaxRules           = 65534
	MaxAdminRules      = 32766

	// No table takes more than a quarter of what a node has room for.
	MaxNodes    = 4096
	MaxPeers    = 65536
	MaxPrefixes = 16384 // of each address family
)

// NoAdmin and NoRest are the numbers of "no rule" in the two slots.
const (
	NoAdmin = 0x7FFF
	NoRest  = 0xFFFF
)

// Value is what an interval says: bits 30..16 the Admin rule, bits 15..0 the
// rule of the other tiers.
type Value uint32

// MakeValue packs two rule numbers.
func MakeValue(admin, rest uint16) Value { return Value(admin)<<16 | Value(rest) }

// Nothing is the value without rules.
var Nothing = MakeValue(NoAdmin, NoRest)

// Admin is the number of the Admin rule, or NoAdmin.
func (v Value) Admin() uint16 { return uint16(v >> 16) }

// Rest is the number of the other rule, or NoRest.
func (v Value) Rest() uint16 { return uint16(v) }

// Better takes the lower number of each slot.
func (v Value) Better(w Value) Value {
	return MakeValue(min(v.Admin(), w.Admin()), min(v.Rest(), w.Rest()))
}

// Interval ends at Hi, and begins after the one before it.
type Interval struct {
	Hi    port.Point
	Value Value
}

// Fanout is the number of entries in a node.
const Fanout = 16

// child marks a node's value as the index of another node.
const child = 1 << 31

// Node is a node of the tree of intervals: the first entry whose Hi is not
// below the point is taken. Entries that are not used repeat the last one.
type Node struct {
	Hi    [Fanout]uint32
	Value [Fanout]uint32
}

// Flags of a table.
type Flags uint16

// The flags.
const (
	DefaultAllow Flags = 1 << iota // what no rule decides is allowed
	HostAllow                      // the subject's local node is, at least
	HasAddresses                   // the address side has to be asked
)

// Header is the fixed part of a table.
type Header struct {
	Flags   Flags
	Default [identity.Kinds]policytable.Class // peers without a row, by kind
	Address policytable.PrefixClasses         // addresses in no prefix, by scope
}

// Table is one direction of the policy of a subject.
type Table struct {
	Header
	Rules    []policytable.Rule // number 1 first
	Classes  []uint32           // class → root node
	Nodes    []Node
	Peers    map[policytable.IdentityClass]policytable.Class
	Prefixes Prefixes
	// Listed is how many intervals the lists of all classes have together.
	Listed int
}

// Entry is what the kernel's identity array holds for a number; 0 is unknown.
type Entry struct {
	IdentityClass policytable.IdentityClass
	Kind          identity.Kind
	Scope         identity.PeerScope
	Known         bool
}

// Reason says what decided.
type Reason uint8

// The reasons.
const (
	ByRule            Reason = iota // the rule of that number
	ByDefault                       // no rule did
	ByHostAllow                     // no rule did, and the peer is the local node
	ByUnknownIdentity               // the peer is unknown, and that denied it
)

// Verdict is the answer to a lookup.
type Verdict struct {
	Action policytable.Action // never Pass
	Proxy  policytable.Proxy
	Rule   uint16 // for ByRule, and ByUnknownIdentity if a rule was involved; else 0
	Reason Reason
}

// Lookup evaluates a connection with a peer: its entry, its address, and the point
// of the connection.
func (t *Table) Lookup(w Entry, addr netip.Addr, q port.Point) Verdict {
	ac := t.Address
	if t.Flags&HasAddresses != 0 {
		if found, ok := t.Prefixes.Lookup(addr); ok {
			ac = found
		}
	}
	return t.LookupIn(w, ac, q)
}

// ClassOf is the class of a peer on the identity side.
func (t *Table) ClassOf(w Entry) policytable.Class {
	if !w.Known {
		return t.Default[identity.KindUnknown]
	}
	if class, ok := t.Peers[w.IdentityClass]; ok {
		return class
	}
	return t.Default[w.Kind]
}

// LookupIn is Lookup for an address whose classes are known.
func (t *Table) LookupIn(w Entry, ac policytable.PrefixClasses, q port.Point) Verdict {
	if !w.Known {
		w = Entry{Kind: identity.KindUnknown, Scope: identity.PeerScopeCluster}
	}
	v := t.search(t.ClassOf(w), q)
	byIdentity := v
	if t.Flags&HasAddresses != 0 {
		v = v.Better(t.search(ac[w.Scope], q))
	}
	if n := v.Admin(); n != NoAdmin {
		if r := t.Rules[n-1]; r.Action != policytable.Pass {
			return t.decided(r, n, w, byIdentity.Admin() == n)
		}
	}
	if n := v.Rest(); n != NoRest {
		if r := t.Rules[n-1]; r.Action != policytable.Pass {
			return t.decided(r, n, w, byIdentity.Rest() == n)
		}
	}
	switch {
	case t.Flags&DefaultAllow != 0:
		return Verdict{Action: policytable.Allow, Reason: ByDefault}
	case t.Flags&HostAllow != 0 && w.Kind == identity.KindHost:
		return Verdict{Action: policytable.Allow, Reason: ByHostAllow}
	case w.Kind == identity.KindUnknown:
		return Verdict{Action: policytable.Deny, Reason: ByUnknownIdentity}
	}
	return Verdict{Action: policytable.Deny, Reason: ByDefault}
}

func (t *Table) decided(r policytable.Rule, number uint16, w Entry, byIdentity bool) Verdict {
	v := Verdict{Action: r.Action, Proxy: r.Proxy, Rule: number}
	if r.Action == policytable.Deny && byIdentity && w.Kind == identity.KindUnknown {
		v.Reason = ByUnknownIdentity
	}
	return v
}

// search walks the tree of a class.
func (t *Table) search(class policytable.Class, q port.Point) Value {
	n := &t.Nodes[t.Classes[class]]
	for {
		i := 0
		for i < Fanout-1 && q > n.Hi[i] {
			i++
		}
		v := n.Value[i]
		if v&child == 0 {
			return Value(v)
		}
		n = &t.Nodes[v&^child]
	}
}

// Definition returns the table as its readers get it. It shares the rules with the table.
func (t *Table) Definition(id policytable.ID, hash [32]byte) policytable.DefineTable {
	out := policytable.DefineTable{Table: id, Content: policytable.Table{
		Hash:         hash,
		DefaultAllow: t.Flags&DefaultAllow != 0, HostAllow: t.Flags&HostAllow != 0, HasAddresses: t.Flags&HasAddresses != 0,
		DefaultClasses: t.Default, AddressClasses: t.Address,
		Rules: t.Rules, Classes: t.Ranges(0),
		Prefixes: make(map[netip.Prefix]policytable.PrefixClasses, t.Prefixes.Len()),
	}, Peers: make([]policytable.Row, 0, len(t.Peers))}
	t.Prefixes.All(func(p netip.Prefix, c policytable.PrefixClasses) { out.Content.Prefixes[p] = c })
	for ic, class := range t.Peers {
		out.Peers = append(out.Peers, policytable.Row{IdentityClass: ic, Class: class})
	}
	slices.SortFunc(out.Peers, func(a, b policytable.Row) int { return cmp.Compare(a.IdentityClass, b.IdentityClass) })
	return out
}

// Ranges returns the classes from a number on, without the points that no rule decides.
func (t *Table) Ranges(from int) []policytable.Ranges {
	out := make([]policytable.Ranges, 0, len(t.Classes)-from)
	for class := from; class < len(t.Classes); class++ {
		ranges, first := policytable.Ranges{}, port.Point(0)
		for _, in := range t.Intervals(policytable.Class(class)) {
			r := policytable.PortRange{First: first, Last: in.Hi}
			first = in.Hi + 1
			if admin := in.Value.Admin(); admin != NoAdmin {
				r.Admin = admin
			}
			if rest := in.Value.Rest(); rest != NoRest {
				r.Rest = rest
			}
			if in.Value != Nothing {
				ranges = append(ranges, r)
			}
		}
		out = append(out, ranges)
	}
	return out
}

// Intervals returns the list that a class stands for.
func (t *Table) Intervals(class policytable.Class) []Interval {
	var out []Interval
	var walk func(n uint32)
	walk = func(n uint32) {
		node := &t.Nodes[n]
		for i := range Fanout {
			if i > 0 && node.Hi[i] == node.Hi[i-1] {
				return
			}
			if v := node.Value[i]; v&child != 0 {
				walk(v &^ child)
			} else {
				out = append(out, Interval{Hi: node.Hi[i], Value: Value(v)})
			}
		}
	}
	walk(t.Classes[class])
	return out
}

// Prefixes maps prefixes to the classes of the addresses in them, per scope. The
// longest prefix counts.
type Prefixes struct {
	byLen [2][]length // IPv4, IPv6; longest first
	n     [2]int
}

type length struct {
	bits   int
	values map[netip.Addr]policytable.PrefixClasses
}

func family(a netip.Addr) int {
	if a.Is4() {
		return 0
	}
	return 1
}

// Len is the number of prefixes.
func (b *Prefixes) Len() int { return b.n[0] + b.n[1] }

// Full reports whether the family of an address has no room for another
// prefix.
func (b *Prefixes) Full(a netip.Addr) bool { return b.n[family(a)] >= MaxPrefixes }

// Set stores the classes of a prefix.
func (b *Prefixes) Set(p netip.Prefix, v policytable.PrefixClasses) {
	ls := &b.byLen[family(p.Addr())]
	i, ok := slices.BinarySearchFunc(*ls, p.Bits(), func(l length, bits int) int { return bits - l.bits })
	if !ok {
		*ls = slices.Insert(*ls, i, length{bits: p.Bits(), values: make(map[netip.Addr]policytable.PrefixClasses)})
	}
	if _, ok := (*ls)[i].values[p.Addr()]; !ok {
		b.n[family(p.Addr())]++
	}
	(*ls)[i].values[p.Addr()] = v
}

// Delete removes a prefix.
func (b *Prefixes) Delete(p netip.Prefix) {
	for _, l := range b.byLen[family(p.Addr())] {
		if _, ok := l.values[p.Addr()]; ok && l.bits == p.Bits() {
			delete(l.values, p.Addr())
			b.n[family(p.Addr())]--
		}
	}
}

// Exact returns the classes stored for a prefix itself.
func (b *Prefixes) Exact(p netip.Prefix) (v policytable.PrefixClasses, ok bool) {
	for _, l := range b.byLen[family(p.Addr())] {
		if l.bits == p.Bits() {
			v, ok = l.values[p.Addr()]
		}
	}
	return v, ok
}

// Around finds the longest prefix with the address that holds others too.
func (b *Prefixes) Around(a netip.Addr) (policytable.PrefixClasses, bool) {
	return b.longest(a, a.BitLen()-1)
}

// Within finds the longest prefix that holds all of p, p itself included.
func (b *Prefixes) Within(p netip.Prefix) (policytable.PrefixClasses, bool) {
	return b.longest(p.Addr(), p.Bits())
}

// Lookup finds the longest prefix with the address.
func (b *Prefixes) Lookup(a netip.Addr) (policytable.PrefixClasses, bool) {
	return b.longest(a, a.BitLen())
}

func (b *Prefixes) longest(a netip.Addr, bits int) (policytable.PrefixClasses, bool) {
	for _, l := range b.byLen[family(a)] {
		if l.bits > bits {
			continue
		}
		p, err := a.Prefix(l.bits)
		if err != nil {
			continue
		}
		if v, ok := l.values[p.Addr()]; ok {
			return v, true
		}
	}
	return policytable.PrefixClasses{}, false
}

// All calls f for every prefix.
func (b *Prefixes) All(f func(netip.Prefix, policytable.PrefixClasses)) {
	for _, ls := range b.byLen {
		for _, l := range ls {
			for a, v := range l.values {
				f(netip.PrefixFrom(a, l.bits), v)
			}
		}
	}
}

// Builder adds classes to a table; equal nodes and equal lists are stored
// once. A table may keep its builder to grow.
//
// The stream carries lists alone, and the datapath builds its trees from them.
// The engine builds the same trees for two reasons: Lookup, which Explain and
// Diff ask, searches them as the programs do, and a policy is refused when it
// is applied if its tables have more nodes than a kernel has room for.
type Builder struct {
	nodes map[Node]uint32
	class map[uint32]policytable.Class
}

// NewBuilder returns an empty builder.
func NewBuilder() *Builder {
	return &Builder{nodes: make(map[Node]uint32), class: make(map[uint32]policytable.Class)}
}

// ErrTooLarge says which limit a table exceeds.
type ErrTooLarge struct {
	What       string
	Got, Limit int
}

// Error names the figures.
func (e *ErrTooLarge) Error() string {
	return fmt.Sprintf("table needs %d %s, the limit is %d", e.Got, e.What, e.Limit)
}

// Class returns the class of a total list of intervals, adding it if the table
// has none like it.
func (b *Builder) Class(t *Table, list []Interval) (policytable.Class, error) {
	if len(list) > MaxIntervals {
		return 0, &ErrTooLarge{"intervals in one class", len(list), MaxIntervals}
	}
	level := make([]Interval, len(list))
	copy(level, list)
	for leaf := true; ; leaf = false {
		var up []Interval
		for len(level) > 0 {
			n := min(Fanout, len(level))
			var node Node
			for i := range Fanout {
				e := level[min(i, n-1)]
				node.Hi[i], node.Value[i] = e.Hi, uint32(e.Value)
				if !leaf {
					node.Value[i] |= child
				}
			}
			id, ok := b.nodes[node]
			if !ok {
				if len(t.Nodes) >= MaxNodes {
					return 0, &ErrTooLarge{"nodes of intervals", len(t.Nodes) + 1, MaxNodes}
				}
				id = uint32(len(t.Nodes))
				t.Nodes = append(t.Nodes, node)
				b.nodes[node] = id
			}
			up = append(up, Interval{Hi: level[n-1].Hi, Value: Value(id)})
			level = level[n:]
		}
		level = up
		if len(level) == 1 {
			break
		}
	}
	root := uint32(level[0].Value)
	if c, ok := b.class[root]; ok {
		return c, nil
	}
	if n := len(t.Classes); n >= MaxIdentityClasses+MaxAddressClasses {
		return 0, &ErrTooLarge{"classes", n + 1, MaxIdentityClasses + MaxAddressClasses}
	}
	if n := t.Listed + len(list); n > MaxAllIntervals {
		return 0, &ErrTooLarge{"intervals in all classes", n, MaxAllIntervals}
	}
	t.Listed += len(list)
	c := policytable.Class(len(t.Classes))
	t.Classes = append(t.Classes, root)
	b.class[root] = c
	return c, nil
}
