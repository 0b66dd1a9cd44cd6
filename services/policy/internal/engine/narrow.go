// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package engine

import (
	"slices"

	"github.com/sluice-net/sluice/model/identity"
	"github.com/sluice-net/sluice/model/policytable"
	"github.com/sluice-net/sluice/services/policy/internal/compile"
	"github.com/sluice-net/sluice/services/policy/internal/peer"
	"github.com/sluice-net/sluice/services/policy/internal/rule"
	"github.com/sluice-net/sluice/services/policy/internal/table"
)

// Narrows reports whether the policies would allow an identity with other labels less than now. It compares rules,
// not packets. If the result is uncertain, or the rules stay the same, it returns false.
func (e *Engine) Narrows(n identity.Numeric, next peer.Identity) bool {
	now := e.peers[n]
	if now == nil || !slices.Equal(now.id.Ports, next.Ports) {
		return false
	}
	differs := false
	for _, d := range []policytable.Direction{policytable.Ingress, policytable.Egress} {
		before, enforced := e.inputOf(now.id, d, e.groups, e.specsOf(now.id))
		after, still := e.inputOf(next, d, e.groups, e.specsOf(next))
		if !enforced { // everything would be allowed
			differs = differs || still
			continue
		}
		less, same := narrower(before, after)
		if !still || !less {
			return false
		}
		differs = differs || !same
	}
	return differs
}

// place is a rule without its source, which affects no verdict.
type place struct {
	tier            policytable.Tier
	priority, index int32
	digest          rule.Digest
}

// narrower reports whether the second set of rules allows a part of what the first set allows, and whether the sets
// are the same. It allows a part if it has no additional allow rule, all deny rules, and the same redirect and pass
// rules. Without an allow rule, later rules decide, and they cannot allow more.
func narrower(before, after compile.Input) (less, same bool) {
	for _, flag := range []table.Flags{table.DefaultAllow, table.HostAllow} {
		if after.Flags&flag != 0 && before.Flags&flag == 0 {
			return false, false
		}
	}
	was, is := placesOf(before.Rules), placesOf(after.Rules)
	same = before.Flags == after.Flags
	for p, action := range is {
		if _, ok := was[p]; ok {
			continue
		}
		if action != policytable.Deny {
			return false, false
		}
		same = false
	}
	for p, action := range was {
		if _, ok := is[p]; ok {
			continue
		}
		if action != policytable.Allow {
			return false, false
		}
		same = false
	}
	return true, same
}

func placesOf(rules []*rule.Rule) map[place]policytable.Action {
	out := make(map[place]policytable.Action, len(rules))
	for _, r := range rules {
		out[place{r.Tier, r.Priority, r.Index, r.Digest()}] = r.Action
	}
	return out
}
