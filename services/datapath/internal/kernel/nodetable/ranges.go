// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package nodetable

import "github.com/sluice-net/sluice/model/policytable"

// validateRanges checks a class of a table with the given number of rules.
func validateRanges(r policytable.Ranges, rules int) error {
	for i, x := range r {
		switch {
		case x.First > x.Last:
			return policytable.Invalid("ranges[%d]: begins at %#x, after its end %#x", i, x.First, x.Last)
		case i > 0 && x.First <= r[i-1].Last:
			return policytable.Invalid("ranges[%d]: begins at %#x, before the previous one ends", i, x.First)
		case int(x.Admin) > min(rules, MaxAdminRules):
			return policytable.Invalid("ranges[%d].admin: there is no rule %d", i, x.Admin)
		case int(x.Rest) > min(rules, MaxRules):
			return policytable.Invalid("ranges[%d].rest: there is no rule %d", i, x.Rest)
		}
	}
	n := 0
	for range r.Total() {
		n++
	}
	if n > MaxRanges {
		return policytable.Invalid("ranges: %d including the gaps, at most %d", n, MaxRanges)
	}
	return nil
}
