// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package table implements policy tables in the form that the kernel uses, and a lookup with the same steps as in the
// kernel.
//
// A Table evaluates one direction of one subject. A peer is classified twice: by identity (identity → identity class
// → class) and by address (longest prefix → class per scope). A class is a total, sorted list of intervals of
// protocol and port. The value of an interval holds two rule numbers: the best rule of the Admin tier and the best
// rule of the other tiers. Of the values of the two classes, the lower Admin number and the lower other number apply.
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
	MaxIntervals       = 4096    // per class
	MaxAllIntervals    = 1 << 17 // for all classes, so that a table fits into a message
	MaxRules           = 65534
	MaxAdminRules      = 32766

	// No single table may use more than a quarter of a node's capacity.
	MaxNodes    = 4096
	MaxPeers    = 65536
	MaxPrefixes = 16384 // per address family
)

// NoAdmin and NoRest mean that a slot contains no rule.
const (
	NoAdmin = 0x7FFF
	NoRest  = 0xFFFF
)

// Value is the value of an interval: the number of the Admin rule in bits 30..16, and of the rule of the other tiers in
// bits 15..0.
type Value uint32

// MakeValue packs two rule numbers.
func MakeValue(admin, rest uint16) Value { return Value(admin)<<16 | Value(rest) }

// Nothing contains no rule.
var Nothing = MakeValue(NoAdmin, NoRest)

// Admin returns the number of the Admin rule, or NoAdmin.
func (v Value) Admin() uint16 { return uint16(v >> 16) }

// Rest returns the number of the rule of the other tiers, or NoRest.
func (v Value) Rest() uint16 { return uint16(v) }

// Better returns the lower of the two Admin numbers and the lower of the two other numbers.
func (v Value) Better(w Value) Value {
	return MakeValue(min(v.Admin(), w.Admin()), min(v.Rest(), w.Rest()))
}

// Interval is an interval of points that starts after the previous interval and ends at Hi.
type Interval struct {
	Hi    port.Point
	Value Value
}

// Fanout is the number of entries of a node.
const Fanout = 16

// child marks a node's value as the index of another node.
const child = 1 << 31

// Node is a node of the tree of intervals. The first entry with a Hi not below the point applies. Unused entries
// repeat the last used entry.
type Node struct {
	Hi    [Fanout]uint32
	Value [Fanout]uint32
}

// Flags of a table.
type Flags uint16

// The flags.
const (
	DefaultAllow Flags = 1 << iota // allow if no rule decides
	HostAllow                      // allow the subject's local node if no rule decides
	HasAddresses                   // the address side must be evaluated
)

// Header is the fixed part of a table.
type Header struct {
	Flags   Flags
	Default [identity.Kinds]policytable.Class // peers without a row, by kind
	Address policytable.PrefixClasses         // addresses in no prefix, by scope
}

// Table is the policy of a subject in one direction.
type Table struct {
	Header
	Rules    []policytable.Rule // starting with number 1
	Classes  []uint32           // root node by class
	Nodes    []Node
	Peers    map[policytable.IdentityClass]policytable.Class
	Prefixes Prefixes
	// Listed is the number of intervals in the lists of all classes.
	Listed int
}

// Entry is the value of an identity in the kernel's array of identities; 0 means unknown.
type Entry struct {
	IdentityClass policytable.IdentityClass
	Kind          identity.Kind
	Scope         identity.PeerScope
	Known         bool
}

// Reason is the reason for a verdict.
type Reason uint8

// The reasons.
const (
	ByRule            Reason = iota // a rule decided
	ByDefault                       // no rule matched
	ByHostAllow                     // no rule matched, and the peer is the local node
	ByUnknownIdentity               // denied because the peer is unknown
)

// Verdict is the result of a lookup.
type Verdict struct {
	Action policytable.Action // never Pass
	Proxy  policytable.Proxy
	Rule   uint16 // for ByRule, and for ByUnknownIdentity if a rule was involved; otherwise 0
	Reason Reason
}

// Lookup evaluates a connection, given the peer's entry and address, and the point of the connection.
func (t *Table) Lookup(w Entry, addr netip.Addr, q port.Point) Verdict {
	ac := t.Address
	if t.Flags&HasAddresses != 0 {
		if found, ok := t.Prefixes.Lookup(addr); ok {
			ac = found
		}
	}
	return t.LookupIn(w, ac, q)
}

// ClassOf returns the class of a peer on the identity side.
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

// search searches the tree of a class.
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

// Definition returns the step that defines the table for subscribers. It shares the rules with the table.
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

// Ranges returns the classes with number from and above, without the points that no rule matches.
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

// Intervals returns the intervals of a class, in ascending order.
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

// Prefixes maps prefixes to the classes of their addresses, per scope. The longest prefix applies.
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

// Len returns the number of prefixes.
func (b *Prefixes) Len() int { return b.n[0] + b.n[1] }

// Full reports whether there is no capacity for another prefix in the family of an address.
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

// Exact returns the classes that are stored for exactly this prefix.
func (b *Prefixes) Exact(p netip.Prefix) (v policytable.PrefixClasses, ok bool) {
	for _, l := range b.byLen[family(p.Addr())] {
		if l.bits == p.Bits() {
			v, ok = l.values[p.Addr()]
		}
	}
	return v, ok
}

// Around finds the longest prefix that contains the address and is shorter than the full length.
func (b *Prefixes) Around(a netip.Addr) (policytable.PrefixClasses, bool) {
	return b.longest(a, a.BitLen()-1)
}

// Within finds the longest prefix that contains all of p, including p itself.
func (b *Prefixes) Within(p netip.Prefix) (policytable.PrefixClasses, bool) {
	return b.longest(p.Addr(), p.Bits())
}

// Lookup finds the longest prefix that contains the address.
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

// Builder adds classes to a table; equal nodes and equal lists are stored once. A table may keep its builder to grow.
//
// The stream contains only lists, from which the datapath builds trees. The engine builds the same trees for two
// reasons. Lookup, which Explain and Diff use, must search trees in the same way as the eBPF programs. And a policy
// must be rejected when it is applied if its tables have more nodes than the kernel's capacity.
type Builder struct {
	nodes map[Node]uint32
	class map[uint32]policytable.Class
}

// NewBuilder returns a Builder that has no nodes.
func NewBuilder() *Builder {
	return &Builder{nodes: make(map[Node]uint32), class: make(map[uint32]policytable.Class)}
}

// ErrTooLarge reports that a table exceeds a limit.
type ErrTooLarge struct {
	What       string
	Got, Limit int
}

// Error returns the limit and the needed number.
func (e *ErrTooLarge) Error() string {
	return fmt.Sprintf("table needs %d %s, the limit is %d", e.Got, e.What, e.Limit)
}

// Class returns the class with the given intervals, which must cover all points. If the table does not have the class,
// Class adds it.
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
