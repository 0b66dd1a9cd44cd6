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

// Narrows reports whether the policies would allow less to an identity if it had the labels of next. It compares
// rules, and evaluates no packets. It returns false if it cannot decide this by comparing rules, or if the rules stay
// the same.
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

// place is a rule without its source location, which affects no verdict.
type place struct {
	tier            policytable.Tier
	priority, index int32
	digest          rule.Digest
}

// narrower reports whether the rules after allow no more than the rules before, and whether both are the same. They
// allow no more if after has no additional allow rule, all deny rules of before, and the same redirect and pass rules.
// Where an allow rule is missing in after, later rules decide, and these allow no more than the missing rule.
func narrower(before, after compile.Input) (less, same bool) {
	for _, flag := range []table.Flags{table.DefaultAllow, table.HostAllow} {
		if after.Flags&flag != 0 && before.Flags&flag == 0 {
			return false, false
		}
	}
	named := func(r *rule.Rule) bool { return len(r.Peers.Names) > 0 }
	if before.Namespace != after.Namespace && slices.ContainsFunc(after.Rules, named) {
		return false, false // the namespace changes, so other learned addresses apply
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
