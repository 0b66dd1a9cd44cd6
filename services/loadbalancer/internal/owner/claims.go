// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package owner

import (
	"cmp"
	"maps"
	"slices"

	"github.com/sluice-net/sluice/model/frontend"
)

// claims records which services claim a frontend. The oldest of these services gets it.
type claims struct {
	winners   map[frontend.Key]*joined   // which service has a frontend
	contested map[frontend.Key][]*joined // all services that claim a frontend, if there are several
}

func newClaims() claims {
	return claims{winners: make(map[frontend.Key]*joined), contested: make(map[frontend.Key][]*joined)}
}

// older orders services that claim the same frontend: the first one gets it. A shadow gets no frontend that another
// service claims.
func older(a, b *joined) int {
	return cmp.Or(shadowsLast(a.name, b.name), cmp.Compare(a.object.created, b.object.created), a.name.Compare(b.name))
}

// add adds a service that claims a frontend.
func (c *claims) add(k frontend.Key, j *joined) {
	first := c.winners[k]
	if first == nil {
		c.winners[k] = j
		return
	}
	all := c.contested[k]
	if all == nil {
		all = []*joined{first}
	}
	all = append(all, j)
	slices.SortFunc(all, older)
	c.contested[k], c.winners[k] = all, all[0]
}

// remove is the inverse of add.
func (c *claims) remove(k frontend.Key, j *joined) {
	all := c.contested[k]
	if all == nil {
		delete(c.winners, k)
		return
	}
	all = slices.DeleteFunc(slices.Clone(all), func(x *joined) bool { return x == j })
	c.winners[k], c.contested[k] = all[0], all
	if len(all) == 1 {
		delete(c.contested, k)
	}
}

// winner returns the service that has a frontend, or nil.
func (c *claims) winner(k frontend.Key) *joined { return c.winners[k] }

// wanted returns how many services claim a frontend.
func (c *claims) wanted(k frontend.Key) int {
	if n := len(c.contested[k]); n > 0 {
		return n
	}
	if c.winners[k] != nil {
		return 1
	}
	return 0
}

// frontends returns the keys of all frontends.
func (c *claims) frontends() []frontend.Key { return slices.Collect(maps.Keys(c.winners)) }
