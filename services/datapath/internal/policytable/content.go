// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policytable

import (
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
)

// Limits of one table: what the programs can walk, and what the numbers in
// their entries can say.
const (
	MaxRules    = 65534
	MaxClasses  = 4096 + 1024
	MaxNodes    = 4096
	MaxPeers    = 65536
	MaxPrefixes = 2 * 16384
	maxDepth    = 3

	child   = 1 << 31
	noAdmin = 0x7FFF
	noRest  = 0xFFFF
	lastTop = 0xFFFFFFFF
)

// Validate says whether the programs can be led astray by the table. The error
// names the field.
func (c *Content) Validate() error {
	switch {
	case c.Hash == [32]byte{}:
		return Invalid("structure_hash is zero")
	case len(c.Rules) > MaxRules:
		return Invalid("rules: %d, at most %d", len(c.Rules), MaxRules)
	case len(c.Prefixes) > MaxPrefixes:
		return Invalid("prefixes: %d, at most %d", len(c.Prefixes), MaxPrefixes)
	case len(c.Peers) > MaxPeers:
		return Invalid("peers: %d, at most %d", len(c.Peers), MaxPeers)
	}
	for i, r := range c.Rules {
		if r.Action > ActionPass || r.Tier > 3 {
			return Invalid("rules[%d]: action %d, tier %d", i, r.Action, r.Tier)
		}
	}
	if err := c.ValidateClasses(0); err != nil {
		return err
	}
	for i, class := range c.DefaultClasses {
		if int(class) >= len(c.Classes) {
			return Invalid("default_classes[%d]: there is no class %d", i, class)
		}
	}
	for i, class := range c.AddressClasses {
		if int(class) >= len(c.Classes) {
			return Invalid("address_classes[%d]: there is no class %d", i, class)
		}
	}
	for nc, class := range c.Peers {
		if int(class) >= len(c.Classes) {
			return Invalid("peers[identity class %d]: there is no class %d", nc, class)
		}
	}
	for p, classes := range c.Prefixes {
		if err := c.ValidatePrefix(p, classes); err != nil {
			return err
		}
	}
	return nil
}

// ValidatePrefix looks at a prefix and its classes.
func (c *Content) ValidatePrefix(p netip.Prefix, classes PrefixClasses) error {
	if !p.IsValid() || p != p.Masked() || p.Addr().Is4In6() || p.Addr().Zone() != "" {
		return Invalid("prefix %v is no masked prefix", p)
	}
	for i, class := range classes {
		if int(class) >= len(c.Classes) {
			return Invalid("prefix %v: classes[%d]: there is no class %d", p, i, class)
		}
	}
	return nil
}

// ValidateClasses looks at the classes from a number on, and the trees that
// they lead to.
func (c *Content) ValidateClasses(from int) error {
	switch {
	case len(c.Classes) == 0:
		return Invalid("classes: there is none")
	case len(c.Classes) > MaxClasses:
		return Invalid("classes: %d, at most %d", len(c.Classes), MaxClasses)
	case len(c.Nodes) > MaxNodes:
		return Invalid("nodes: %d, at most %d", len(c.Nodes), MaxNodes)
	}
	// A node may be shared; how deep it lies decides what may be below it.
	seen := map[[2]uint32]bool{}
	for class := from; class < len(c.Classes); class++ {
		root := c.Classes[class]
		if int64(root) >= int64(len(c.Nodes)) {
			return Invalid("classes[%d]: there is no node %d", class, root)
		}
		if err := c.validateNode(root, 1, lastTop, seen); err != nil {
			return err
		}
	}
	return nil
}

func (c *Content) validateNode(n uint32, depth int, until uint32, seen map[[2]uint32]bool) error {
	node := &c.Nodes[n]
	if node.High[Fanout-1] < until {
		return Invalid("nodes[%d]: ends at %#x, before %#x", n, node.High[Fanout-1], until)
	}
	key := [2]uint32{n, uint32(depth)} //nolint:gosec // 1 to maxDepth
	if seen[key] {
		return nil
	}
	seen[key] = true
	for i := range Fanout {
		if i > 0 && node.High[i] < node.High[i-1] {
			return Invalid("nodes[%d]: high[%d] is below the one before it", n, i)
		}
		v := node.Value[i]
		if v&child != 0 {
			next := v &^ child
			switch {
			case depth == maxDepth:
				return Invalid("nodes[%d]: value[%d] leads deeper than %d levels", n, i, maxDepth)
			case int64(next) >= int64(len(c.Nodes)):
				return Invalid("nodes[%d]: value[%d]: there is no node %d", n, i, next)
			}
			if err := c.validateNode(next, depth+1, node.High[i], seen); err != nil {
				return err
			}
			continue
		}
		admin, rest := v>>16, v&0xFFFF
		if admin != noAdmin && (admin == 0 || int(admin) > len(c.Rules)) {
			return Invalid("nodes[%d]: value[%d]: there is no rule %d", n, i, admin)
		}
		if rest != noRest && (rest == 0 || int(rest) > len(c.Rules)) {
			return Invalid("nodes[%d]: value[%d]: there is no rule %d", n, i, rest)
		}
	}
	return nil
}

// interval ends at high and begins after the one before it.
type interval struct{ high, value uint32 }

// intervals are what a class says, in the shortest form.
func (c *Content) intervals(class uint16) []interval {
	var out []interval
	var walk func(n uint32, from, until uint32)
	walk = func(n uint32, from, until uint32) {
		node := &c.Nodes[n]
		for i := range Fanout {
			if node.High[i] < from {
				continue
			}
			high := min(node.High[i], until)
			if v := node.Value[i]; v&child != 0 {
				walk(v&^child, from, high)
			} else if last := len(out) - 1; last >= 0 && out[last].value == v {
				out[last].high = high
			} else {
				out = append(out, interval{high, v})
			}
			if high == until {
				return
			}
			from = high + 1
		}
	}
	walk(c.Classes[class], 0, lastTop)
	return out
}

// Meaning is a class by what it says: equal meanings evaluate alike.
type Meaning [sha256.Size]byte

// Meaning is that of a class.
func (c *Content) Meaning(class uint16) Meaning {
	var b []byte
	for _, i := range c.intervals(class) {
		b = binary.LittleEndian.AppendUint32(b, i.high)
		b = binary.LittleEndian.AppendUint32(b, i.value)
	}
	return sha256.Sum256(b)
}

// At is the value of a class at a point.
func (c *Content) At(class uint16, point uint32) uint32 {
	n := c.Classes[class]
	for {
		node := &c.Nodes[n]
		i := 0
		for node.High[i] < point {
			i++
		}
		v := node.Value[i]
		if v&child == 0 {
			return v
		}
		n = v &^ child
	}
}

// only says whether wherever class b says something else than class a, it names
// a rule with that action in what differs.
func (c *Content) only(a, b uint16, action Action) bool {
	if c.Classes[a] == c.Classes[b] {
		return true
	}
	for _, list := range [][]interval{c.intervals(a), c.intervals(b)} {
		for _, i := range list {
			x, y := c.At(a, i.high), c.At(b, i.high)
			if x>>16 != y>>16 && (y>>16 == noAdmin || c.Rules[y>>16-1].Action != action) {
				return false
			}
			if x&0xFFFF != y&0xFFFF && (y&0xFFFF == noRest || c.Rules[y&0xFFFF-1].Action != action) {
				return false
			}
		}
	}
	return true
}

// Grants says whether a new prefix only lets more pass than what held its
// addresses before. The tree needs both families apart, so it is asked by the
// longest prefix around.
func (c *Content) Grants(p netip.Prefix, classes PrefixClasses) bool {
	before, ok := c.Prefixes[p]
	if !ok {
		before = c.AddressClasses
		for bits := p.Bits() - 1; bits >= 0; bits-- {
			if around, err := p.Addr().Prefix(bits); err == nil {
				if v, ok := c.Prefixes[around]; ok {
					before = v
					break
				}
			}
		}
	}
	for s := range Scopes {
		if !c.only(before[s], classes[s], ActionAllow) {
			return false
		}
	}
	return true
}

// ClassOf is the class of an identity, on the identity side.
func (c *Content) ClassOf(w Identity) uint16 {
	if !w.Known {
		return c.DefaultClasses[KindUnknown]
	}
	if class, ok := c.Peers[w.Class]; ok {
		return class
	}
	return c.DefaultClasses[w.Kind]
}

// EvaluatesAlike says whether two identities mean the same to the table.
func (c *Content) EvaluatesAlike(a, b Identity) bool {
	x, y := c.ClassOf(a), c.ClassOf(b)
	if x != y && c.Classes[x] != c.Classes[y] {
		return false
	}
	return (!c.HasAddresses || a.Scope == b.Scope) && (!c.HostAllow || (a.Known && a.Kind == KindHost) == (b.Known && b.Kind == KindHost))
}

// Clone copies what changes in place and shares the rest.
func (c *Content) Clone() Content {
	d := *c
	d.Classes, d.Nodes = slices.Clip(c.Classes), slices.Clip(c.Nodes)
	d.Peers, d.Prefixes = maps.Clone(c.Peers), maps.Clone(c.Prefixes)
	if d.Peers == nil {
		d.Peers = map[IdentityClass]uint16{}
	}
	if d.Prefixes == nil {
		d.Prefixes = map[netip.Prefix]PrefixClasses{}
	}
	return d
}

// TakeTree copies the tree of a class behind nodes, whose first has the index
// base, and returns the root's index.
func (c *Content) TakeTree(n uint32, base int, nodes *[]PortNode, taken map[uint32]uint32) uint32 {
	if at, ok := taken[n]; ok {
		return at
	}
	node := c.Nodes[n]
	for i, v := range node.Value {
		if v&child != 0 {
			node.Value[i] = child | c.TakeTree(v&^child, base, nodes, taken)
		}
	}
	at := uint32(base + len(*nodes)) //nolint:gosec // at most 2 * maxNodes
	*nodes = append(*nodes, node)
	taken[n] = at
	return at
}
