// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package shares

import (
	"cmp"
	"slices"
)

// InTurns orders objects for a report whose size is limited, so that the objects of one tenant do not displace the
// objects of another. InTurns takes objects alternately from two groups: the system with the labelled tenants, and the
// namespaces without the label. Within a group, it takes one object from each tenant in turn, and within a tenant in
// the order of compare.
func InTurns[K comparable](keys []K, compare func(a, b K) int, tenant func(K) Tenant) []K {
	slices.SortFunc(keys, compare)
	of, turn := make(map[K]Tenant, len(keys)), make(map[K]int, len(keys))
	has := make(map[Tenant]int)
	for _, k := range keys {
		t := tenant(k)
		of[k], turn[k] = t, has[t]
		has[t]++
	}
	var members [groups][]K
	for _, k := range keys {
		g := of[k].group()
		members[g] = append(members[g], k)
	}
	out := keys[:0:0]
	for _, g := range members {
		slices.SortStableFunc(g, func(a, b K) int {
			return cmp.Or(cmp.Compare(turn[a], turn[b]), of[a].Compare(of[b]))
		})
	}
	for i := range max(len(members[groupLabelled]), len(members[groupOthers])) {
		for _, g := range members {
			if i < len(g) {
				out = append(out, g[i])
			}
		}
	}
	return out
}
