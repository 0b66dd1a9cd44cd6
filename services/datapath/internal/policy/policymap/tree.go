// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policymap

import (
	"fmt"

	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/datapath/internal/bpf"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/nodetable"
	"github.com/sluice-net/sluice/services/datapath/internal/kernel/pin"
)

// fanout is the number of entries in a portNode.
const fanout = len(bpf.MapsSlPortNode{}.Hi)

// portNode is a node of a tree of ranges over protocol << 16 | port. A lookup takes the first entry whose high is not
// below the packet's protocol and port. high ascends, unused entries repeat the last one, and the last high of a root
// is 0xFFFFFFFF.
type portNode struct {
	high [fanout]uint32
	// value of an entry: with childBit the index of another node of the same table; otherwise bits
	// 30 to 16 are the number of an Admin rule (noAdminRule: none) and bits 15 to 0 the number of a
	// rule of another tier (noOtherRule: none).
	value [fanout]uint32
}

// treeBuilder adds the trees of classes to the nodes of a table. Equal nodes are stored once.
type treeBuilder struct {
	nodes []portNode
	index map[portNode]uint32
}

// newTreeBuilder appends to nodes, without changing existing ones.
func newTreeBuilder(nodes []portNode) *treeBuilder {
	b := &treeBuilder{nodes: nodes[:len(nodes):len(nodes)], index: make(map[portNode]uint32, len(nodes))}
	for i, n := range nodes {
		b.index[n] = uint32(i)
	}
	return b
}

// add returns the index of the root for a list of at most nodetable.MaxRanges ranges, which a tree
// of depth treeDepth can hold.
func (b *treeBuilder) add(ranges policytable.Ranges) uint32 {
	var node portNode
	type entry struct{ high, value uint32 }
	var level []entry
	for r := range ranges.Total() {
		level = append(level, entry{r.Last, packRules(r)})
	}
	for {
		var up []entry
		for len(level) > 0 {
			n := min(fanout, len(level))
			for i := range node.high {
				e := level[min(i, n-1)]
				node.high[i], node.value[i] = e.high, e.value
			}
			at, ok := b.index[node]
			if !ok {
				at = uint32(len(b.nodes))
				b.nodes = append(b.nodes, node)
				b.index[node] = at
			}
			up = append(up, entry{level[n-1].high, childBit | at})
			level = level[n:]
		}
		if len(up) == 1 {
			return up[0].value &^ childBit
		}
		level = up
	}
}

func (b *treeBuilder) addAll(classes []policytable.Ranges) []uint32 {
	roots := make([]uint32, len(classes))
	for i, ranges := range classes {
		roots[i] = b.add(ranges)
	}
	return roots
}

func packRules(r policytable.PortRange) uint32 {
	admin, rest := uint32(noAdminRule), uint32(noOtherRule)
	if r.Admin != 0 {
		admin = uint32(r.Admin)
	}
	if r.Rest != 0 {
		rest = uint32(r.Rest)
	}
	return admin<<16 | rest
}

// rangesOf decodes the list of a root. The tree must have passed checkTrees.
func rangesOf(nodes []portNode, root uint32) policytable.Ranges {
	var out policytable.Ranges
	var walk func(n, first, until uint32)
	walk = func(n, first, until uint32) {
		node := &nodes[n]
		for i, high := range node.high {
			if high < first {
				continue
			}
			last := min(high, until)
			if v := node.value[i]; v&childBit != 0 {
				walk(v&^childBit, first, last)
			} else if v != noAdminRule<<16|noOtherRule {
				r := policytable.PortRange{First: first, Last: last}
				if admin := uint16(v >> 16); admin != noAdminRule {
					r.Admin = admin
				}
				if rest := uint16(v); rest != noOtherRule {
					r.Rest = rest
				}
				if n := len(out); n > 0 && packRules(out[n-1]) == v && out[n-1].Last+1 == first {
					out[n-1].Last = last
				} else {
					out = append(out, r)
				}
			}
			if last == until {
				return
			}
			first = last + 1
		}
	}
	walk(root, 0, policytable.LastPoint)
	return out
}

// checkTrees checks that from each root every point leads to a value within treeDepth steps, and
// that all values refer to existing rules: the maps may be corrupt.
func checkTrees(roots []uint32, nodes []portNode, rules int) error {
	bad := func(format string, args ...any) error {
		return fmt.Errorf("%w: "+format, append([]any{pin.ErrInvalid}, args...)...)
	}
	heights := make([]uint8, len(nodes)) // 0: not seen, 1: being seen
	var height func(i uint32) (uint8, error)
	height = func(i uint32) (uint8, error) {
		if i >= uint32(len(nodes)) {
			return 0, bad("Nodes: index %d of %d", i, len(nodes))
		}
		if heights[i] == 1 {
			return 0, bad("Nodes: node %d is its own descendant", i)
		}
		if heights[i] != 0 {
			return heights[i], nil
		}
		heights[i] = 1
		n := &nodes[i]
		top := uint8(1)
		if n.high[fanout-1] == 0 {
			return 0, bad("Nodes: node %d has no entry", i)
		}
		for j, v := range n.value {
			if j > 0 && n.high[j] < n.high[j-1] {
				return 0, bad("Nodes: the upper bounds in node %d are not in ascending order", i)
			}
			if v&childBit == 0 {
				if !names(uint16(v>>16), noAdminRule, min(rules, nodetable.MaxAdminRules)) || !names(uint16(v), noOtherRule, rules) {
					return 0, bad("Nodes: node %d refers to a missing rule: %#x of %d", i, v, rules)
				}
				continue
			}
			below, err := height(v &^ childBit)
			if err != nil {
				return 0, err
			}
			if nodes[v&^childBit].high[fanout-1] < n.high[j] {
				return 0, bad("Nodes: node %d ends before its entry in node %d", v&^childBit, i)
			}
			top = max(top, below)
		}
		heights[i] = top + 1
		if top > treeDepth {
			return 0, bad("Nodes: the tree below node %d has more than %d levels", i, treeDepth)
		}
		return heights[i], nil
	}
	for class, root := range roots {
		if _, err := height(root); err != nil {
			return fmt.Errorf("class %d: %w", class, err)
		}
		if nodes[root].high[fanout-1] != ^uint32(0) {
			return bad("Classes: the tree of class %d ends at %#x, want %#x",
				class, nodes[root].high[fanout-1], ^uint32(0))
		}
	}
	for i := range nodes {
		if _, err := height(uint32(i)); err != nil {
			return err
		}
	}
	return nil
}

// names reports whether a number is "none" or the number of a rule.
func names(number, none uint16, rules int) bool {
	return number == none || number >= 1 && int(number) <= rules
}
