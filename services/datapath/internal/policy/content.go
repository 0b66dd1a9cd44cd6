// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policy

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
	maxRules   = 65534
	maxClasses = 4096 + 1024
	maxNodes   = 4096
	maxPeers   = 65536
	maxBlocks  = 2 * 16384
	maxDepth   = 3

	child   = 1 << 31
	noAdmin = 0x7FFF
	noRest  = 0xFFFF
	lastTop = 0xFFFFFFFF
)

// validate says whether the programs can be led astray by the table. The error
// names the field.
func (c *Content) validate() error {
	switch {
	case c.Hash == [32]byte{}:
		return invalid("structure_hash is zero")
	case len(c.Rules) > maxRules:
		return invalid("rules: %d, at most %d", len(c.Rules), maxRules)
	case len(c.Blocks) > maxBlocks:
		return invalid("blocks: %d, at most %d", len(c.Blocks), maxBlocks)
	case len(c.Peers) > maxPeers:
		return invalid("peers: %d, at most %d", len(c.Peers), maxPeers)
	}
	for i, r := range c.Rules {
		if r.Action > ActionPass || r.Tier > 3 {
			return invalid("rules[%d]: action %d, tier %d", i, r.Action, r.Tier)
		}
	}
	if err := c.validateClasses(0); err != nil {
		return err
	}
	for i, class := range c.DefaultClasses {
		if int(class) >= len(c.Classes) {
			return invalid("default_classes[%d]: there is no class %d", i, class)
		}
	}
	for i, class := range c.AddressClasses {
		if int(class) >= len(c.Classes) {
			return invalid("address_classes[%d]: there is no class %d", i, class)
		}
	}
	for nc, class := range c.Peers {
		if int(class) >= len(c.Classes) {
			return invalid("peers[node class %d]: there is no class %d", nc, class)
		}
	}
	for p, classes := range c.Blocks {
		if err := c.validateBlock(p, classes); err != nil {
			return err
		}
	}
	return nil
}

func (c *Content) validateBlock(p netip.Prefix, classes [Scopes]uint16) error {
	if !p.IsValid() || p != p.Masked() || p.Addr().Is4In6() || p.Addr().Zone() != "" {
		return invalid("block %v is no masked prefix", p)
	}
	for i, class := range classes {
		if int(class) >= len(c.Classes) {
			return invalid("block %v: classes[%d]: there is no class %d", p, i, class)
		}
	}
	return nil
}

// validateClasses looks at the classes from a number on, and the trees that
// they lead to.
func (c *Content) validateClasses(from int) error {
	switch {
	case len(c.Classes) == 0:
		return invalid("classes: there is none")
	case len(c.Classes) > maxClasses:
		return invalid("classes: %d, at most %d", len(c.Classes), maxClasses)
	case len(c.Nodes) > maxNodes:
		return invalid("nodes: %d, at most %d", len(c.Nodes), maxNodes)
	}
	// A node may be shared; how deep it lies decides what may be below it.
	seen := map[[2]uint32]bool{}
	for class := from; class < len(c.Classes); class++ {
		root := c.Classes[class]
		if int64(root) >= int64(len(c.Nodes)) {
			return invalid("classes[%d]: there is no node %d", class, root)
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
		return invalid("nodes[%d]: ends at %#x, before %#x", n, node.High[Fanout-1], until)
	}
	key := [2]uint32{n, uint32(depth)} //nolint:gosec // 1 to maxDepth
	if seen[key] {
		return nil
	}
	seen[key] = true
	for i := range Fanout {
		if i > 0 && node.High[i] < node.High[i-1] {
			return invalid("nodes[%d]: high[%d] is below the one before it", n, i)
		}
		v := node.Value[i]
		if v&child != 0 {
			next := v &^ child
			switch {
			case depth == maxDepth:
				return invalid("nodes[%d]: value[%d] leads deeper than %d levels", n, i, maxDepth)
			case int64(next) >= int64(len(c.Nodes)):
				return invalid("nodes[%d]: value[%d]: there is no node %d", n, i, next)
			}
			if err := c.validateNode(next, depth+1, node.High[i], seen); err != nil {
				return err
			}
			continue
		}
		admin, rest := v>>16, v&0xFFFF
		if admin != noAdmin && (admin == 0 || int(admin) > len(c.Rules)) {
			return invalid("nodes[%d]: value[%d]: there is no rule %d", n, i, admin)
		}
		if rest != noRest && (rest == 0 || int(rest) > len(c.Rules)) {
			return invalid("nodes[%d]: value[%d]: there is no rule %d", n, i, rest)
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

// meaning is a class by what it says: equal meanings judge alike.
type meaning [sha256.Size]byte

func (c *Content) meaning(class uint16) meaning {
	var b []byte
	for _, i := range c.intervals(class) {
		b = binary.LittleEndian.AppendUint32(b, i.high)
		b = binary.LittleEndian.AppendUint32(b, i.value)
	}
	return sha256.Sum256(b)
}

// at is the value of a class at a point.
func (c *Content) at(class uint16, point uint32) uint32 {
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
func (c *Content) only(a, b uint16, action uint8) bool {
	if c.Classes[a] == c.Classes[b] {
		return true
	}
	for _, list := range [][]interval{c.intervals(a), c.intervals(b)} {
		for _, i := range list {
			x, y := c.at(a, i.high), c.at(b, i.high)
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

// grants says whether a new block only lets more pass than what held its
// addresses before. The tree needs both families apart, so it is asked by the
// longest prefix around.
func (c *Content) grants(p netip.Prefix, classes [Scopes]uint16) bool {
	before, ok := c.Blocks[p]
	if !ok {
		before = c.AddressClasses
		for bits := p.Bits() - 1; bits >= 0; bits-- {
			if around, err := p.Addr().Prefix(bits); err == nil {
				if v, ok := c.Blocks[around]; ok {
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

// classOf is the class of whoever has the word, on the identity side.
func (c *Content) classOf(w Word) uint16 {
	if !w.Known {
		return c.DefaultClasses[KindUnknown]
	}
	if class, ok := c.Peers[w.Class]; ok {
		return class
	}
	return c.DefaultClasses[w.Kind]
}

// judgesAlike says whether two words mean the same to the table.
func (c *Content) judgesAlike(a, b Word) bool {
	x, y := c.classOf(a), c.classOf(b)
	if x != y && c.Classes[x] != c.Classes[y] {
		return false
	}
	return (!c.HasAddresses || a.Scope == b.Scope) && (!c.HostAllow || (a.Known && a.Kind == KindHost) == (b.Known && b.Kind == KindHost))
}

// copied shares what is immutable.
func (c *Content) copied() Content {
	d := *c
	d.Classes, d.Nodes = slices.Clip(c.Classes), slices.Clip(c.Nodes)
	d.Peers, d.Blocks = maps.Clone(c.Peers), maps.Clone(c.Blocks)
	if d.Peers == nil {
		d.Peers = map[NodeClass]uint16{}
	}
	if d.Blocks == nil {
		d.Blocks = map[netip.Prefix][Scopes]uint16{}
	}
	return d
}

// takeTree copies the tree of a class behind nodes, whose first has the index
// base, and returns the root's index.
func (c *Content) takeTree(n uint32, base int, nodes *[]Node, taken map[uint32]uint32) uint32 {
	if at, ok := taken[n]; ok {
		return at
	}
	node := c.Nodes[n]
	for i, v := range node.Value {
		if v&child != 0 {
			node.Value[i] = child | c.takeTree(v&^child, base, nodes, taken)
		}
	}
	at := uint32(base + len(*nodes)) //nolint:gosec // at most 2 * maxNodes
	*nodes = append(*nodes, node)
	taken[n] = at
	return at
}
