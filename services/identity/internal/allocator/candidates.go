// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"time"

	"github.com/sluice-net/sluice/model/identity"
)

// candidates chooses numbers for label sets that have none. It never chooses a number of another claim under way, and
// prefers numbers whose last label set did not have a short life. assigned contains only numbers that are known or
// held: code that removes the last use of a number calls end or unassign. The caller locks.
type candidates struct {
	assigned numbers                        // numbers that a search found in use
	short    numbers                        // free numbers of short-lived label sets
	occupied map[identity.Numeric]time.Time // refused by the store, until then
	picked   map[identity.Numeric]struct{}  // of claims under way
}

func newCandidates() candidates {
	return candidates{occupied: map[identity.Numeric]time.Time{}, picked: map[identity.Numeric]struct{}{}}
}

// shortLife is the longest life of a label set after which its number is assigned last.
const shortLife = time.Minute

// end frees the number of a label set that was collected. After a short life, the number is assigned to another set
// only when no other number is free, so that labels which change continuously use up their own numbers. since is the
// time at which the set was created; zero: unknown. delay is the longest time that the collection may have taken.
func (c *candidates) end(n identity.Numeric, since, now time.Time, delay time.Duration) {
	c.assigned.unset(n)
	if !since.IsZero() && now.Sub(since) < shortLife+delay {
		c.short.set(n)
	}
}

// begin records that the number belongs to a label set again.
func (c *candidates) begin(n identity.Numeric) { c.short.unset(n) }

// pick chooses a free number and keeps it from others until drop: the first one from
// start, an offset from the first number. inUse reports whether a number is known or
// held. used is how many numbers are in use if n is 0, because none is free.
func (c *candidates) pick(start int, now time.Time, inUse func(identity.Numeric) bool) (n identity.Numeric, used int) {
	var last identity.Numeric // free, after a label set with a short life
	for i := range c.assigned.clear(start) {
		n := identity.MinCluster + identity.Numeric(i)
		if inUse(n) {
			c.assigned.set(n)
			continue
		}
		if until, ok := c.occupied[n]; ok {
			if now.Before(until) {
				continue
			}
			delete(c.occupied, n)
		}
		if _, picked := c.picked[n]; picked {
			continue
		}
		if i != start && c.short.has(n) { // the first one may be that of this very set
			if last == 0 {
				last = n
			}
			continue
		}
		last = n
		break
	}
	if last == 0 {
		return 0, identity.ClusterSize - len(c.picked)
	}
	c.picked[last] = struct{}{}
	return last, 0
}

// drop ends the claim of a picked number.
func (c *candidates) drop(n identity.Numeric) { delete(c.picked, n) }

// occupy keeps a number from being chosen for a while: the store refused it.
func (c *candidates) occupy(n identity.Numeric, until time.Time) { c.occupied[n] = until }

// unassign lets a search look at a number again.
func (c *candidates) unassign(n identity.Numeric) { c.assigned.unset(n) }
