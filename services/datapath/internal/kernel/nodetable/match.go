// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetable

import (
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
)

// Absent marks a class that a table does not have.
const Absent = 0xFFFF

// Match describes how one table can be changed into another in place.
type Match struct {
	Classes []uint16 // for each class of want, the class of the table; or Absent
	Same    bool     // the classes have the same numbers in both
	InUse   bool     // set by the caller: the table is in use
	Rows    int      // number of entries to be written
}

// Better reports whether m is preferable to o.
func (m *Match) Better(o *Match) bool {
	switch {
	case m.InUse != o.InUse:
		return m.InUse
	case m.Same != o.Same:
		return m.Same
	}
	return m.Rows < o.Rows
}

// Meanings maps the meanings of the classes to class numbers; for equal classes to the first one.
func (c *Content) Meanings() map[policytable.Meaning]uint16 {
	meanings := make(map[policytable.Meaning]uint16, len(c.Classes))
	for i, ranges := range c.Classes {
		what := ranges.Meaning()
		if _, ok := meanings[what]; !ok {
			meanings[what] = uint16(i) //nolint:gosec // at most twice MaxClasses
		}
	}
	return meanings
}

// Alike reports whether two classes have the same ranges.
func (c *Content) Alike(a, b uint16) bool {
	return a == b || c.Classes[a].Meaning() == c.Classes[b].Meaning()
}

// Match returns how c can be changed into want, step by step, without a wrong verdict in between; nil if it cannot.
// known returns the Meanings of c.
func (c *Content) Match(want *Content, known func() map[policytable.Meaning]uint16) *Match {
	if c.DefaultAllow != want.DefaultAllow || c.HostAllow != want.HostAllow ||
		c.HasAddresses != want.HasAddresses || !slices.Equal(c.Rules, want.Rules) {
		return nil
	}
	m := &Match{Classes: make([]uint16, len(want.Classes))}
	m.Same = len(c.Classes) <= len(want.Classes) &&
		slices.EqualFunc(c.Classes, want.Classes[:len(c.Classes)], func(x, y policytable.Ranges) bool { return slices.Equal(x, y) })
	for i := range m.Classes {
		class := uint16(i) //nolint:gosec // at most MaxClasses
		switch {
		case m.Same && i < len(c.Classes):
			m.Classes[i] = class
		case m.Same:
			m.Classes[i] = Absent
		default:
			at, ok := known()[want.Classes[i].Meaning()]
			if !ok {
				at = Absent
			}
			m.Classes[i] = at
		}
	}
	agree := func(have, wanted uint16) bool {
		at := m.Classes[wanted]
		return at != Absent && c.Alike(have, at)
	}
	unknown := want.DefaultClasses[identity.KindUnknown]
	for i, class := range want.DefaultClasses {
		// A table without capacity for some peers treats peers without an entry as unknown.
		if m.Classes[class] == Absent || !agree(c.DefaultClasses[i], class) && !agree(c.DefaultClasses[i], unknown) {
			return nil
		}
	}
	for i, class := range want.AddressClasses {
		if want.HasAddresses && !agree(c.AddressClasses[i], class) {
			return nil
		}
	}
	for nc, class := range want.Peers {
		have, ok := c.Peers[nc]
		if !ok {
			m.Rows++
		} else if !agree(have, class) {
			return nil
		}
	}
	for p := range want.Prefixes {
		if _, ok := c.Prefixes[p]; !ok {
			m.Rows++
		}
	}
	return m
}
