// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package policytable

import (
	"crypto/sha256"
	"encoding/binary"
	"iter"
	"slices"
)

// LastPoint is the largest protocol << 16 | port.
const LastPoint = 0xFFFFFFFF

// PortRange is a range of points, protocol << 16 | port, and the rules that apply to them: Admin is the number of the
// rule in the Admin tier, and Rest the number of the rule in the other tiers. 0 means no rule. For ICMP, type << 8 |
// code takes the place of the port.
type PortRange struct {
	First, Last uint32
	Admin, Rest uint16
}

// SameRules reports whether two ranges have the same rules.
func (r PortRange) SameRules(o PortRange) bool { return r.Admin == o.Admin && r.Rest == o.Rest }

// Ranges is a peer class: ranges in ascending order that do not overlap. No rule applies to a point outside of all
// ranges.
type Ranges []PortRange

// At returns the range that contains a point, or a range of this point alone without rules.
func (r Ranges) At(point uint32) PortRange {
	i, _ := slices.BinarySearchFunc(r, point, func(x PortRange, p uint32) int {
		if x.Last < p {
			return -1
		}
		return 1
	})
	if i < len(r) && r[i].First <= point {
		return r[i]
	}
	return PortRange{First: point, Last: point}
}

// Total covers all points, including points without a rule, with as few ranges as possible.
func (r Ranges) Total() iter.Seq[PortRange] {
	return func(yield func(PortRange) bool) {
		var run PortRange // the pending range, which may still grow
		next := uint64(0) // the first point after run
		// add appends a range. It returns false when the iteration is to stop.
		add := func(x PortRange) bool {
			switch {
			case next == 0:
				run = x
			case run.SameRules(x):
				run.Last = x.Last
			case !yield(run):
				return false
			default:
				run = x
			}
			next = uint64(x.Last) + 1
			return true
		}
		for _, x := range r {
			if uint64(x.First) > next && !add(PortRange{First: uint32(next), Last: x.First - 1}) { //nolint:gosec // below First
				return
			}
			if !add(x) {
				return
			}
		}
		if next <= LastPoint && !add(PortRange{First: uint32(next), Last: LastPoint}) {
			return
		}
		yield(run)
	}
}

// Meaning identifies the verdicts of a class: classes with equal meanings evaluate alike.
type Meaning [sha256.Size]byte

// Meaning returns a hash of Total.
func (r Ranges) Meaning() Meaning {
	var b []byte
	for x := range r.Total() {
		b = binary.LittleEndian.AppendUint32(b, x.Last)
		b = binary.LittleEndian.AppendUint16(b, x.Admin)
		b = binary.LittleEndian.AppendUint16(b, x.Rest)
	}
	return sha256.Sum256(b)
}
