// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/sluice-net/sluice/model/shares"
	identities "github.com/sluice-net/sluice/services/policy/internal/client"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// unenforced returns a function for the report of this node. The report contains the disk if it cannot be written,
// and the policies that this node does not enforce as written, in the order of inTurns.
func unenforced(
	r *owner.Reader, dir string, tenant func(namespace string) shares.Tenant,
) func(context.Context) ([]identities.Refused, error) {
	disk := &storage{dirs: stateDirs(dir), failure: r.StorageFailure, full: isFull, now: time.Now}
	return func(ctx context.Context) ([]identities.Refused, error) {
		all, err := r.Unenforced(ctx)
		if err != nil {
			return nil, err
		}
		out, err := disk.report(ctx)
		if err != nil {
			return nil, err
		}
		for _, k := range inTurns(slices.Collect(maps.Keys(all)), tenant) {
			out = append(out, identities.Refused{Key: k, Reason: all[k].Why, Code: all[k].Code})
		}
		return out, nil
	}
}

// inTurns orders policies for a report, whose size is limited, so that the policies of one tenant do not displace the
// policies of another. The report takes policies alternately from two groups: the system with the labelled tenants,
// and the namespaces without the label. Within a group, it takes one policy from each tenant in turn.
func inTurns(keys []policy.Key, tenant func(namespace string) shares.Tenant) []policy.Key {
	slices.SortFunc(keys, policy.Key.Compare)
	of, turn := make(map[policy.Key]shares.Tenant, len(keys)), make(map[policy.Key]int, len(keys))
	has := make(map[shares.Tenant]int)
	for _, k := range keys {
		t := tenant(k.Namespace)
		of[k], turn[k] = t, has[t]
		has[t]++
	}
	var groups [2][]policy.Key
	for _, k := range keys {
		group := 1
		if of[k].HasLabel() || of[k] == shares.System {
			group = 0
		}
		groups[group] = append(groups[group], k)
	}
	out := keys[:0:0]
	for _, g := range groups {
		slices.SortStableFunc(g, func(a, b policy.Key) int {
			return cmp.Or(cmp.Compare(turn[a], turn[b]), of[a].Compare(of[b]))
		})
	}
	for i := range max(len(groups[0]), len(groups[1])) {
		for _, g := range groups {
			if i < len(g) {
				out = append(out, g[i])
			}
		}
	}
	return out
}
