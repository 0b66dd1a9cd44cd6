// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	identities "github.com/sluice-net/sluice/services/policy/internal/client"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
	"github.com/sluice-net/sluice/services/policy/internal/statuswriter"
)

// unenforced lists a disk that takes no writes, and the policies that this node does not
// enforce as written, sorted.
func unenforced(o *owner.Owner, dir string) func(context.Context) ([]identities.Refused, error) {
	disk := &storage{dirs: stateDirs(dir), failure: o.StorageFailure, full: isFull, now: time.Now}
	return func(ctx context.Context) ([]identities.Refused, error) {
		all, err := o.Unenforced(ctx)
		if err != nil {
			return nil, err
		}
		out, err := disk.report(ctx)
		if err != nil {
			return nil, err
		}
		for _, k := range slices.SortedFunc(maps.Keys(all), policy.Key.Compare) {
			out = append(out, identities.Refused{Key: k, Reason: all[k]})
		}
		return out, nil
	}
}

// refusedEvery is the shortest time between two changes of what the status says of nodes.
const refusedEvery = 10 * time.Second

// maxNamedNodes is how many nodes a status names.
const maxNamedNodes = 10

// byPolicy are the nodes that do not enforce each policy as written, of so many nodes.
func byPolicy(reports identities.Reports, nodes int) map[policy.Key]statuswriter.Nodes {
	names := make(map[policy.Key][]string)
	out := make(map[policy.Key]statuswriter.Nodes)
	for _, node := range slices.Sorted(maps.Keys(reports)) {
		for _, r := range reports[node] {
			if r.Key == nodeStorage {
				continue
			}
			x := out[r.Key]
			if x.Count++; x.Count == 1 {
				x.All, x.Reason = nodes, r.Reason
			}
			if x.Count <= maxNamedNodes {
				names[r.Key] = append(names[r.Key], node)
			}
			out[r.Key] = x
		}
	}
	for k, x := range out {
		x.Names = strings.Join(names[k], ", ")
		if x.Count > maxNamedNodes {
			x.Names += ", …"
		}
		out[k] = x
	}
	return out
}

// disks are the reasons of nodes whose disks take no writes, by node.
func disks(reports identities.Reports) map[string]string {
	out := make(map[string]string)
	for node, all := range reports {
		for _, r := range all {
			if r.Key == nodeStorage {
				out[node] = r.Reason
			}
		}
	}
	return out
}

// followRefusals keeps the writer up to date about the nodes that do not enforce policies
// as written, and tells which nodes have a disk that takes no writes, until ctx ends.
func followRefusals(
	ctx context.Context, r *identities.Refusals, nodes func() int, set func(map[policy.Key]statuswriter.Nodes),
	full func(map[string]string),
) error {
	var mu sync.Mutex
	var latest identities.Reports
	changed := make(chan struct{}, 1)
	var following sync.WaitGroup
	defer following.Wait()
	following.Go(func() {
		_ = r.Follow(ctx, func(all identities.Reports) { // it returns nothing but nil
			mu.Lock()
			defer mu.Unlock()
			latest = maps.Clone(all)
			select {
			case changed <- struct{}{}:
			default:
			}
		})
	})
	for {
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
		mu.Lock()
		reports := latest
		mu.Unlock()
		set(byPolicy(reports, nodes()))
		full(disks(reports))
		select {
		case <-time.After(refusedEvery):
		case <-ctx.Done():
			return nil
		}
	}
}
