// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package wiretest converts messages of the table stream to tables of the engine, for tests that compare both ends.
// It does not use package wire, so that the tests also find mistakes in package wire.
package wiretest

import (
	"github.com/sluice-net/sluice/model/policytable"
	policyv1 "github.com/sluice-net/sluice/proto/gen/sluice/policy/v1"
	"github.com/sluice-net/sluice/services/policy/internal/port"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// PrefixClasses converts the classes of a prefix, by scope.
func PrefixClasses(in []*policyv1.ScopeClass) (out policytable.PrefixClasses) {
	for _, c := range in {
		out[c.GetScope()-1] = policytable.Class(c.GetClass())
	}
	return out
}

// Grow adds classes to a table, each with its own list. It panics if a list is not valid in a table.
func Grow(t *table.Table, classes []*policyv1.PeerClass) {
	for _, c := range classes {
		list, next := []table.Interval(nil), uint64(0)
		gap := func(until uint64) {
			if until > next {
				list = append(list, table.Interval{Hi: port.Point(until - 1), Value: table.Nothing})
			}
		}
		for _, r := range c.GetRanges() {
			gap(uint64(r.GetFirst()))
			admin, rest := uint16(table.NoAdmin), uint16(table.NoRest)
			if r.GetAdmin() != 0 {
				admin = uint16(r.GetAdmin())
			}
			if r.GetRest() != 0 {
				rest = uint16(r.GetRest())
			}
			list = append(list, table.Interval{Hi: r.GetLast(), Value: table.MakeValue(admin, rest)})
			next = uint64(r.GetLast()) + 1
		}
		gap(1 << 32)
		if _, err := table.NewBuilder().Class(t, list); err != nil {
			panic(err)
		}
	}
}
