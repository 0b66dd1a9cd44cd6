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

// PortRange is a run of points, protocol << 16 | port, with the rules that the
// best ones of its tiers are: Admin the number of the rule of the Admin tier,
// Rest that of the other tiers, 0: none.
type PortRange struct {
	First, Last uint32
	Admin, Rest uint16
}

// alike says whether two ranges name the same rules.
func (r PortRange) alike(o PortRange) bool { return r.Admin == o.Admin && r.Rest == o.Rest }

// Ranges is what a class says: ranges in ascending order that do not overlap.
// Points in no range have no rule.
type Ranges []PortRange

// At is the range of a point. Without one its rules are 0.
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

// Total lists all points in the fewest ranges, those without a rule too.
func (r Ranges) Total() iter.Seq[PortRange] {
	return func(yield func(PortRange) bool) {
		var run PortRange // that may go on
		next := uint64(0) // the point behind it
		// add takes the range that follows; it says whether to go on.
		add := func(x PortRange) bool {
			switch {
			case next == 0:
				run = x
			case run.alike(x):
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

// Meaning is a class by what it says: equal meanings evaluate alike.
type Meaning [sha256.Size]byte

// Meaning is the same for all lists that say the same.
func (r Ranges) Meaning() Meaning {
	var b []byte
	for x := range r.Total() {
		b = binary.LittleEndian.AppendUint32(b, x.Last)
		b = binary.LittleEndian.AppendUint16(b, x.Admin)
		b = binary.LittleEndian.AppendUint16(b, x.Rest)
	}
	return sha256.Sum256(b)
}

// validate says whether the list can be looked up in, and names rules that
// there are.
func (r Ranges) validate(rules int) error {
	for i, x := range r {
		switch {
		case x.First > x.Last:
			return Invalid("ranges[%d]: begins at %#x behind its end %#x", i, x.First, x.Last)
		case i > 0 && x.First <= r[i-1].Last:
			return Invalid("ranges[%d]: begins at %#x, not behind the one before it", i, x.First)
		case int(x.Admin) > min(rules, MaxAdminRules):
			return Invalid("ranges[%d].admin: there is no rule %d", i, x.Admin)
		case int(x.Rest) > min(rules, MaxRules):
			return Invalid("ranges[%d].rest: there is no rule %d", i, x.Rest)
		}
	}
	n := 0
	for range r.Total() {
		n++
	}
	if n > MaxRanges {
		return Invalid("ranges: %d with those between them, at most %d", n, MaxRanges)
	}
	return nil
}
