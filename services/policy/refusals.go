// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"context"
	"maps"
	"slices"
	"time"

	identities "github.com/sluice-net/sluice/services/policy/internal/client"
	"github.com/sluice-net/sluice/services/policy/internal/owner"
	"github.com/sluice-net/sluice/services/policy/internal/policy"
)

// unenforced returns a function that lists a disk that cannot be written, and the policies that this node does not
// enforce as written, sorted.
func unenforced(r *owner.Reader, dir string) func(context.Context) ([]identities.Refused, error) {
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
		for _, k := range slices.SortedFunc(maps.Keys(all), policy.Key.Compare) {
			out = append(out, identities.Refused{Key: k, Reason: all[k]})
		}
		return out, nil
	}
}
