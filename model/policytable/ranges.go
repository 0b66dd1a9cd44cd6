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

// PortRange is a run of points, protocol << 16 | port, with the rules that decide about them:
// Admin is the number of the rule of the Admin tier, Rest that of the other tiers. 0 is none.
// For ICMP, type << 8 | code stands in the place of the port.
type PortRange struct {
	First, Last uint32
	Admin, Rest uint16
}

// SameRules reports whether two ranges name the same rules.
func (r PortRange) SameRules(o PortRange) bool { return r.Admin == o.Admin && r.Rest == o.Rest }

// Ranges is a class of peers: ranges in ascending order that do not overlap. Points in no
// range have no rule.
type Ranges []PortRange

// At returns the range of a point. The rules of a point in no range are 0.
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

// Total lists all points in the fewest ranges, also those without a rule.
func (r Ranges) Total() iter.Seq[PortRange] {
	return func(yield func(PortRange) bool) {
		var run PortRange // that may go on
		next := uint64(0) // the point behind it
		// add takes the range that follows; it says whether to go on.
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

// Meaning stands for the verdicts of a class: classes with equal meanings evaluate alike.
type Meaning [sha256.Size]byte

// Meaning returns the meaning of the class, which depends on Total only.
func (r Ranges) Meaning() Meaning {
	var b []byte
	for x := range r.Total() {
		b = binary.LittleEndian.AppendUint32(b, x.Last)
		b = binary.LittleEndian.AppendUint16(b, x.Admin)
		b = binary.LittleEndian.AppendUint16(b, x.Rest)
	}
	return sha256.Sum256(b)
}
