// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package allocator

import (
	"time"

	"github.com/sluice-net/sluice/model/identity"
)

// candidates chooses numbers for label sets that have none. It never chooses a number that another claim in progress
// has chosen, and it chooses the number of a short-lived label set last. assigned only contains numbers that are known
// or held: code that removes the last use of a number must therefore call end or unassign. The caller must hold the
// lock.
type candidates struct {
	assigned numbers // numbers that a search found in use
	short    numbers // free numbers of short-lived label sets
	// numbers that the store has refused, and until when they are not chosen
	occupied map[identity.Numeric]time.Time
	picked   map[identity.Numeric]struct{} // numbers that claims in progress have chosen
}

func newCandidates() candidates {
	return candidates{occupied: map[identity.Numeric]time.Time{}, picked: map[identity.Numeric]struct{}{}}
}

// shortLife is the maximum lifetime of a label set whose number is assigned again only after all others.
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

// pick chooses the first free number of the zone from start on, which is an offset from the first number, or of the
// other zones if this one has no free number. The number is not chosen again until drop. inUse reports whether a number
// is known or held. If no number is free, n is 0, and used is the number of numbers in use.
func (c *candidates) pick(
	start int, z Zone, now time.Time, inUse func(identity.Numeric) bool,
) (n identity.Numeric, used int) {
	var last identity.Numeric // free number of a short-lived label set
	for i := range c.assigned.clear(start, z) {
		if last != 0 && !z.has(i) {
			break // In the zone, even the number of a short-lived set is better than a number of another zone.
		}
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
		if i != start && c.short.has(n) { // the number at start may be the former number of this label set
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

// occupy excludes a number from being chosen for a while, because the store has refused it.
func (c *candidates) occupy(n identity.Numeric, until time.Time) { c.occupied[n] = until }

// unassign makes searches check a number again.
func (c *candidates) unassign(n identity.Numeric) { c.assigned.unset(n) }
